"""The optimizer, values that change by step (its learning rate, options of a loss), and gradient
clipping that knows about shards.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llamarl.learning.segments import wide_dtype
from llamarl.models.fsdp import is_dtensor, local
from llamarl.models.sharded_state import MOMENTS, moment

SCHEDULES: dict[str, Callable[[float], float]] = {  # progress 0..1 after the warm-up -> factor 0..1
    "constant": lambda x: 1.0,
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
    "wsd": lambda x: min(1.0, (1.0 - x) / 0.2),  # warm-up, stable, decay over the last fifth
}


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """AdamW's own knobs; see build_optimizer."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    kind: str = "adamw"


class AdamW(torch.optim.AdamW):
    """PyTorch's AdamW, to the bit, which does not load PyTorch's compiler.

    These methods of PyTorch's come with a wrapper around them, which tells torch._dynamo not to
    compile them, and loads it for that: half a CPU second of every trainer rank. No optimizer is
    compiled here, so what is wrapped is called by itself.
    """

    @torch.no_grad()
    def step(self, closure=None):
        return inspect.unwrap(torch.optim.AdamW.step)(self, closure)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        inspect.unwrap(torch.optim.AdamW.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        inspect.unwrap(torch.optim.AdamW.zero_grad)(self, set_to_none)


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    kind: str = "adamw",
) -> torch.optim.Optimizer:
    """Build AdamW over plain or sharded (DTensor) parameters. Norm scales and biases (one dim) are
    not decayed.

    kind: adamw, fused; adamw8bit, torchao's, whose moments take a byte each, in blocks of 256
    (Dettmers et al. 2022). Parameters that do not require gradients are left out; ValueError if
    none do.
    """
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        raise ValueError("no parameter requires a gradient: nothing to optimize")
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if kind == "adamw8bit":
        # It warns, at import, of kernels that nothing here uses.
        logging.getLogger("torchao").setLevel(logging.ERROR)
        from torchao.optim import AdamW8bit

        optimizer = AdamW8bit(groups, lr=lr, betas=betas, eps=eps)
        if trained[0].device.type == "cpu":
            # torchao compiles the arithmetic for every shape, half a minute each on a CPU; the same
            # operations run as they are.
            optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)
        return optimizer
    # A tensor learning rate would need its own device copy; fused takes the float that lr_at gives.
    return AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


@torch.no_grad()
def settle_moments(optimizer: torch.optim.Optimizer) -> None:
    """Bring plain moments, which were put into the optimizer's state, into the form that it keeps.

    8-bit ones with KEY_scale beside KEY, as `moment` and `moment_scale` gave them, are the same
    bits again; without it (they were cut in other blocks) they are rounded once more.
    """
    if not hasattr(optimizer, "_new_buffer"):
        return
    from torchao.optim.quant_utils import quantize_8bit_with_qmap
    from torchao.optim.subclass_8bit import OptimState8bit

    for p, state in optimizer.state.items():
        for key in MOMENTS:
            kept = optimizer._new_buffer(p, signed=key == "exp_avg")
            scale = state.pop(f"{key}_scale", None)
            own = local(kept)
            values = moment(state[key])
            if scale is not None:
                # In units of their blocks, where the largest code is 1 in every block: no scale is
                # chosen anew.
                assert isinstance(own, OptimState8bit), "what has a scale is kept in 8 bits"
                largest = scale.clamp(min=1e-12).view(-1, 1)
                unit = values.view(len(scale), -1) / largest
                own.codes.copy_(quantize_8bit_with_qmap(unit, own.qmap).view_as(own.codes))
                own.scale.copy_(scale)
            else:
                own.copy_(values)
            state[key] = kept


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` from the next step on."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def lr_at(
    step: int,
    *,
    lr: float,
    schedule: str = "constant",
    warmup_steps: int = 0,
    max_steps: int,
    decay_steps: int | None = None,
) -> float:
    """Return the learning rate of optimizer step `step`, from 0: up a line to `lr` in warmup_steps,
    then by `schedule` until max_steps.

    constant; linear and cosine, to 0; wsd: lr, then a line to 0 over the last decay_steps, or the
    last fifth. No step below max_steps has rate 0. ValueError for a warm-up that leaves no steps.
    """
    if not 0 <= warmup_steps < max_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} must be at least 0 and below max_steps={max_steps}"
        )
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    progress = min((step - warmup_steps) / (max_steps - warmup_steps), 1.0)
    if schedule == "wsd" and decay_steps is not None:
        steps_left = (1.0 - progress) * (max_steps - warmup_steps)
        return lr * min(1.0, steps_left / decay_steps)
    return lr * SCHEDULES[schedule](progress)


def value_at(
    step: int,
    first: float,
    *,
    kind: str,
    final: float,
    end_step: int,
    cut_step: int | None = None,
) -> float:
    """Return an option's value at step `step`, from 0, in all of its updates, if it began as
    `first`.

    Source: beta of TBA, arXiv 2503.18929, tables 2 and 3; the temperatures of the log reward and of
    the language model, B.3.

    linear     first + (final - first) * step / end_step, then final from end_step on
    cut        the same line, but final from cut_step on: table 3 has end_step at half of the steps
               and cut_step at an eighth
    """
    is_cut = kind == "cut" and cut_step is not None and step >= cut_step
    if step >= end_step or is_cut:
        return final
    return first + (final - first) * step / end_step


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    *,
    tensor_groups: Sequence[dist.ProcessGroup | None] | None = None,
) -> Tensor:
    """Collective over the parameters' meshes: scale all gradients to a 2-norm of at most max_norm,
    and return their norm [] before that.

    Each shard of a DTensor counts once, a replica not again, whatever meshes they are on (FSDP2,
    HSDP); plain tensors count as they are. tensor_groups: of each parameter, the ranks that hold
    its other tensor-parallel parts, or None where each holds it whole. float32 at least, also for
    bfloat16 gradients. max_norm None measures only. A norm that is not finite makes the gradients
    so: check it before the step.
    """
    # One reduction a kind of sharding, in parameter order, which is the same on all ranks.
    kinds: dict[tuple, list[Tensor]] = {}
    for p, group in zip(parameters, tensor_groups or itertools.repeat(None)):
        if p.grad is None:
            continue
        kind: tuple = (group, None, ())
        if is_dtensor(p.grad):
            kind = (group, p.grad.device_mesh, p.grad.placements)
        kinds.setdefault(kind, []).append(local(p.grad))
    total = torch.zeros(())
    for (group, mesh, placements), own in kinds.items():
        dtype = wide_dtype(own[0])
        squares = torch.stack(torch._foreach_norm(own, 2, dtype=dtype)).square().sum()
        if group is not None:
            dist.all_reduce(squares, group=group)
        for axis, placement in enumerate(placements):
            assert not placement.is_partial(), "a gradient that is not reduced; clip after backward"
            if placement.is_shard():
                dist.all_reduce(squares, group=mesh.get_group(axis))
        total = total + squares
    norm = total.sqrt()
    if max_norm is not None:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for own in kinds.values():
            torch._foreach_mul_(own, factor)
    return norm


@torch.no_grad()
def share_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Collective: replace the gradients of parameters that every rank of `group` holds by the first
    rank's.

    They differ by rounding alone, where a device adds in no fixed order; copies of a parameter must
    not drift apart by it.
    """
    for p in parameters:
        if p.grad is not None:
            dist.broadcast(local(p.grad), group=group, group_src=0)
