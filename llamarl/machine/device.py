"""Chooses the device that a rank computes on: a GPU, an Apple GPU or the CPU.

device = choose_device("auto", local_rank=1)    # cuda:1 where there are GPUs, else cpu
"""

from __future__ import annotations

import logging
import os
import platform

import torch
from torch import Tensor

from llamarl.errors import BadInput
from llamarl.words.choices import DeviceName

CPU = torch.device("cpu")

log = logging.getLogger(__name__)


def choose_device(wanted: DeviceName = "auto", *, local_rank: int = 0) -> torch.device:
    """Return the device of a host's rank. auto: a GPU where there is one, else the CPU; an Apple
    GPU only if it is named, because nothing was tried on one. BadInput for a device that is not
    there.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda":
        if not torch.cuda.is_available():
            raise BadInput(f"device=cuda: {_why_no_gpu()}, or device=cpu")
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    if wanted == "mps":
        if not torch.backends.mps.is_available():
            raise BadInput(f"device=mps: {_why_no_apple_gpu()}; device=cpu")
        if local_rank == 0:
            log.warning(
                "device=mps was tried on no Mac. PYTORCH_ENABLE_MPS_FALLBACK=1 computes on the CPU "
                "what PyTorch has no Metal kernel for"
            )
        return torch.device("mps", 0)
    return CPU


def _why_no_gpu() -> str:
    """Return why PyTorch sees no GPU, and what to do about it."""
    if torch.version.cuda is None and torch.version.hip is None:
        remedy = "install a build for CUDA (docs/quickstart.md)"
        return f"torch {torch.__version__} is built for CPUs alone; {remedy}"
    return "torch sees no GPU on this machine; look at nvidia-smi and CUDA_VISIBLE_DEVICES"


def _why_no_apple_gpu() -> str:
    """Return why PyTorch sees no Apple GPU."""
    if platform.system() != "Darwin":
        return f"an Apple GPU is in a Mac, and this is {platform.system()}"
    return f"torch {torch.__version__} sees no Apple GPU on this Mac"


def has_float64(device: torch.device) -> bool:
    """Whether tensors on a device may be float64: not those of an Apple GPU."""
    return device.type != "mps"


def in_float64(tensor: Tensor) -> Tensor:
    """Return a tensor in float64: where it is, or on the CPU if its device has none."""
    return (tensor if has_float64(tensor.device) else tensor.cpu()).double()


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
