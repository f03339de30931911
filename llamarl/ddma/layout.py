"""Which rank holds which box of which global parameter. Pure: shapes and topology determine it, so
ranks gather no metadata.

    trainer    rank = (replica * fsdp + shard) * tp + t
               HSDP replicas of FSDP2 shards of tensor-parallel parts
    generator  rank = replica * tp + t
               replicas of tensor-parallel parts
    reference  rank = (replica * fsdp + shard) * tp + t
               replicas of FSDP2 shards of tensor-parallel parts

Parameters have their Hugging Face names and travel in the generator's dtype. A quantised weight
travels as one byte per element, and its float32 scales, one per row, are a parameter of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llamarl.models.config import ModelConfig
from llamarl.models.sharding import (
    HEAD,
    SCALE,
    Box,
    Shape,
    adapter_shapes,
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
    """A global tensor that travels, with its Hugging Face name, its shape and the dtype in which it
    travels.
    """

    name: str
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Region:
    """A box (global indices) of a parameter, and where it lies in a slot or a buffer."""

    parameter: Parameter
    box: Box
    start: int  # bytes

    @property
    def name(self) -> str:
        """The parameter's Hugging Face name."""
        return self.parameter.name

    @property
    def num_bytes(self) -> int:
        """The bytes of the box."""
        return self.box.numel * self.parameter.dtype.itemsize

    @property
    def end(self) -> int:
        """The byte behind the last one."""
        return self.start + self.num_bytes

    def view_in(self, flat: Tensor) -> Tensor:
        """Return the box, in its own shape and dtype, as a view of the memory flat [bytes]
        uint8.
        """
        run = flat[self.start : self.end]
        return run.view(self.parameter.dtype).view(self.box.lengths)


@dataclass(frozen=True, slots=True)
class Source:
    """The topology of the trainer: how its ranks hold the model."""

    fsdp: int = 1
    replicate: int = 1
    tp: int = 1

    @property
    def num_ranks(self) -> int:
        """The number of trainer ranks."""
        return self.fsdp * self.replicate * self.tp

    def box(self, config: ModelConfig, p: Parameter, rank: int) -> Box:
        """Return what a rank holds of a parameter.

        FSDP2 cuts dim 0 of a tensor-parallel part into ceil-sized chunks; the last ranks may hold
        less, or nothing.
        """
        num_shards = self.fsdp * self.tp
        shard, t = divmod(rank % num_shards, self.tp)
        name = p.name.removesuffix(SCALE)
        part = tensor_parallel_box(config, name, p.shape, t, self.tp, split_vocabulary=False)
        return _shard_of(part, shard, self.fsdp)


@dataclass(frozen=True, slots=True)
class Destination:
    """The topology of the ranks that compute with the model: generators in tensor-parallel parts, a
    reference in FSDP2's shards of such parts. split_vocabulary: tensor-parallel ranks share
    embedding and head.
    """

    tp: int = 1
    replicas: int = 1
    fsdp: int = 1
    split_vocabulary: bool = True

    @property
    def parts(self) -> int:
        """The number of ranks that hold a replica together."""
        return self.fsdp * self.tp

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all replicas."""
        return self.parts * self.replicas

    def box(self, config: ModelConfig, p: Parameter, part: int) -> Box:
        """Return what rank `part` of a replica holds of a parameter."""
        shard, t = divmod(part, self.tp)
        name = p.name.removesuffix(SCALE)
        whole = tensor_parallel_box(
            config, name, p.shape, t, self.tp, split_vocabulary=self.split_vocabulary
        )
        return _shard_of(whole, shard, self.fsdp)


def _shard_of(box: Box, shard: int, num_shards: int) -> Box:
    """Return the rows of a box that FSDP2 gives to a shard: a ceil-sized chunk, less or none on the
    last.
    """
    rows = box.lengths[0]
    chunk = -(-rows // num_shards)
    first = min(shard * chunk, rows)
    return box.cut(0, first, min(chunk, rows - first))


def parameters_to_send(
    config: ModelConfig,
    dtype: torch.dtype,
    quantized: torch.dtype | None = None,
    exclude: tuple[str, ...] = (HEAD,),
) -> list[Parameter]:
    """Return the tensors that a model's weights travel as, in parameter_shapes' order. Beside
    adapters the weights are frozen, and only the adapters travel.

    dtype: of all that is_quantized(name, shape, exclude) does not name. quantized: of what it does
    name, or None where nothing is.
    """
    if config.lora is not None:
        return [Parameter(name, shape, dtype) for name, shape in adapter_shapes(config).items()]
    out = []
    for name, shape in parameter_shapes(config).items():
        if quantized is not None and is_quantized(name, shape, exclude):
            out.append(Parameter(name, shape, quantized))
            out.append(Parameter(name + SCALE, shape[:1], torch.float32))
        else:
            out.append(Parameter(name, shape, dtype))
    return out


@dataclass(frozen=True, slots=True)
class Buffer:
    """One destination rank's buffer: its regions by name, in the order in which they lie, and
    tensors that are several of them end to end.
    """

    held: dict[str, Region]
    fused: dict[str, tuple[str, ...]]
    num_bytes: int


def buffer_of(
    config: ModelConfig,
    parameters: list[Parameter],
    destination: Destination,
    part: int,
    *,
    fuse: bool = False,
) -> Buffer:
    """Return the buffer of rank `part` of a replica.

    fuse: the members of FUSED lie end to end, so that each group is one tensor too.
    """
    by_name = {p.name: p for p in parameters}
    fused = _fused(by_name) if fuse else {}
    # What lies end to end, by its first name.
    runs: dict[str, tuple[str, ...]] = {name: (name,) for name in by_name}
    for members in fused.values():
        for name in members:
            del runs[name]
        runs[members[0]] = members
    held: dict[str, Region] = {}
    start = 0
    for p in parameters:
        for name in runs.get(p.name, ()):
            member = by_name[name]
            held[name] = Region(member, destination.box(config, member, part), start)
            start = held[name].end
        start = aligned(start)
    return Buffer(held, fused, start)


def _fused(by_name: dict[str, Parameter]) -> dict[str, tuple[str, ...]]:
    """Return fused tensor's name -> names of its members, which have one dtype."""
    fused = {}
    for name in by_name:
        for group, parts in FUSED.items():
            if parts[0] not in name:
                continue
            members = tuple(name.replace(parts[0], part) for part in parts)
            dtypes = {by_name[n].dtype if n in by_name else None for n in members}
            if len(dtypes) == 1:
                fused[name.replace(parts[0], group)] = members
    return fused
