"""Who holds which box of which global parameter. Pure: shapes and topology say everything, no
metadata is gathered.

    trainer    rank = (replica * fsdp + shard) * tp + t
               HSDP replicas of FSDP2 shards of tensor-parallel parts
    generator  rank = replica * tp + t
               replicas of tensor-parallel parts

Parameters go by their Hugging Face names. What travels has the generator's dtype; a quantised
weight travels as one byte an element and a float32 scale a row, which is a parameter of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from llamarl.models.config import ModelConfig
from llamarl.models.sharding import (
    HEAD,
    SCALE,
    Box,
    aligned,
    is_quantized,
    parameter_shapes,
    tensor_parallel_box,
)

# Tensors that engines keep as one -> the parameters in it, one after another.
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A global tensor that travels: its Hugging Face name, shape and dtype on its way."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Source:
    """How the trainer holds the model."""

    fsdp: int = 1
    replicate: int = 1
    tp: int = 1

    @property
    def num_ranks(self) -> int:
        return self.fsdp * self.replicate * self.tp

    def box(self, config: ModelConfig, p: Parameter, rank: int) -> Box:
        """What a rank holds of a parameter.

        FSDP2 cuts dim 0 of a tensor-parallel part into ceil-sized chunks; the last ranks may hold
        less, or nothing.
        """
        shard, t = divmod(rank % (self.fsdp * self.tp), self.tp)
        part = self._tensor_parallel_box(config, p.name.removesuffix(SCALE), p.shape, t)
        rows = -(-part.lengths[0] // self.fsdp)
        first = min(shard * rows, part.lengths[0])
        return part.cut(0, first, min(rows, part.lengths[0] - first))

    def splits_columns(self, config: ModelConfig, name: str, shape: tuple[int, ...]) -> bool:
        """Whether tensor-parallel ranks hold parts of this parameter's rows."""
        if len(shape) == 1:
            return False
        return self._tensor_parallel_box(config, name, shape, 0).lengths[1] < shape[1]

    def _tensor_parallel_box(
        self, config: ModelConfig, name: str, shape: tuple[int, ...], t: int
    ) -> Box:
        return tensor_parallel_box(config, name, shape, t, self.tp, split_vocabulary=False)


@dataclass(frozen=True, slots=True)
class Destination:
    """How the generators hold it."""

    tp: int = 1
    replicas: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tp * self.replicas

    def box(self, config: ModelConfig, p: Parameter, t: int) -> Box:
        """What tensor-parallel rank t of a replica holds of a parameter."""
        return tensor_parallel_box(config, p.name.removesuffix(SCALE), p.shape, t, self.tp)


def parameters_to_send(
    config: ModelConfig,
    dtype: torch.dtype,
    quantized: torch.dtype | None = None,
    exclude: tuple[str, ...] = (HEAD,),
) -> list[Parameter]:
    """What a model's weights are on their way, in parameter_shapes' order.

    dtype: of all that is_quantized(name, shape, exclude) does not name. quantized: of what it does
    name, or None where nothing is.
    """
    out = []
    for name, shape in parameter_shapes(config).items():
        if quantized is not None and is_quantized(name, shape, exclude):
            out.append(Parameter(name, shape, quantized))
            out.append(Parameter(name + SCALE, shape[:1], torch.float32))
        else:
            out.append(Parameter(name, shape, dtype))
    return out


@dataclass(frozen=True, slots=True)
class Held:
    """Where one rank keeps its box of a parameter in its flat buffer."""

    parameter: Parameter
    box: Box
    start: int  # bytes

    @property
    def num_bytes(self) -> int:
        return self.box.numel * self.parameter.dtype.itemsize

    def view_in(self, flat: Tensor) -> Tensor:
        """The box, in its own shape and dtype, as a view of the buffer flat [bytes] uint8."""
        run = flat[self.start : self.start + self.num_bytes]
        return run.view(self.parameter.dtype).view(self.box.lengths)


@dataclass(frozen=True, slots=True)
class Buffer:
    """One destination rank's buffer: its boxes by name, and tensors that are several of them end to
    end.
    """

    held: dict[str, Held]
    fused: dict[str, tuple[str, ...]]
    num_bytes: int = field(default=0)


def buffer_of(
    config: ModelConfig,
    parameters: list[Parameter],
    destination: Destination,
    t: int,
    *,
    fuse: bool = False,
) -> Buffer:
    """The buffer of tensor-parallel rank t.

    fuse: the members of FUSED lie end to end, so that each group is one tensor too.
    """
    by_name = {p.name: p for p in parameters}
    held: dict[str, Held] = {}
    fused: dict[str, tuple[str, ...]] = {}
    start = 0
    for p in parameters:
        if p.name in held:
            continue
        group = _fused_name(p.name) if fuse else None
        members = _members(p.name, by_name) if group else ()
        if members:
            fused[group] = members
        for name in members or (p.name,):
            box = destination.box(config, by_name[name], t)
            held[name] = Held(by_name[name], box, start)
            start += held[name].num_bytes
        start = aligned(start)
    return Buffer(held, fused, start)


def _fused_name(name: str) -> str | None:
    """The name of the tensor whose first part has this name; None if it is the first of none."""
    for group, (first, *_) in FUSED.items():
        if first in name:
            return name.replace(first, group)
    return None


def _members(name: str, by_name: dict[str, Parameter]) -> tuple[str, ...]:
    """The names that are fused with this one, which is the first; none if their dtypes differ."""
    for first, *others in FUSED.values():
        if first in name:
            names = (name, *(name.replace(first, other) for other in others))
            dtypes = {by_name[n].dtype if n in by_name else None for n in names}
            return names if len(dtypes) == 1 else ()
    return ()
