"""A decoder that is asked and never trained: whole on each rank, in FSDP2's shards, or split."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from llamarl.executor import ExecutorGroup
from llamarl.models.build import Decoder, build_decoder, read_config
from llamarl.models.config import Lora
from llamarl.models.fsdp import wrap
from llamarl.models.hf import absent_rows, load_weights
from llamarl.models.lora import reset_lora
from llamarl.models.tp import TensorParallel


def frozen_decoder(
    path: str | Path,
    *,
    mesh: DeviceMesh | None,
    device: torch.device,
    dtype: torch.dtype,
    tensor_parallel: TensorParallel | None = None,
    cpu_offload: bool = False,
    lora: Lora | None = None,
) -> Decoder:
    """Load the decoder of a Hugging Face directory in dtype, with frozen weights.

    mesh: [shard], or [replicate, shard]: the ranks that hold the same tensor-parallel part, over
    which FSDP2 shards it; each reads its own rows alone. Collective over both from the first use
    on. A rank that holds it whole needs no mesh. cpu_offload: weights are in host memory, a layer's
    on the device while it computes. lora: adapters beside them, whose products are 0 until others
    are copied there. FileNotFoundError or ValueError naming the file when the
    directory is not whole.
    """
    config = dataclasses.replace(read_config(path), lora=lora)
    decoder = build_decoder(config, dtype=dtype, tensor_parallel=tensor_parallel)
    if not config.labels:
        decoder.absent_rows = absent_rows(path, config.vocab_size, device)
    decoder.requires_grad_(False)
    if cpu_offload or (mesh is not None and mesh.shape[-1] > 1):
        pin_memory = device.type == "cuda"
        wrap(decoder, mesh, dtype, cpu_offload=cpu_offload, pin_memory=pin_memory)
    holder = torch.device("cpu") if cpu_offload else device
    load_weights(decoder, path, device=holder)
    if lora is not None:
        reset_lora(decoder, lora.seed)
    return decoder.eval()


def decoder_over(
    group: ExecutorGroup, path: str | Path, *, dtype: torch.dtype, lora: Lora | None = None
) -> Decoder:
    """Return the frozen decoder of a directory, which the ranks of an executor hold together. Where
    they share layers, each rank holds the whole embedding and head, for a token's logprob.
    """
    return frozen_decoder(
        path,
        mesh=group.data_mesh() if group.size > 1 else None,
        device=group.device,
        dtype=dtype,
        tensor_parallel=TensorParallel.of(group, split_vocabulary=False),
        lora=lora,
    )
