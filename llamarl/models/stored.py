"""Where a model directory keeps a parameter: under which name, inside which tensor, turned or not.

Here every model's parameters have Llama's names and lie apart, [out, in]; each family's directories
have names of their own, and some hold the projections to queries, keys and values as one tensor:

    by heads    q0 k0 v0 q1 k1 v1 ...    rows of head 0's queries, keys, values, then head 1's
    by kinds    q0 q1 ... k0 k1 ... v0 v1 ...

GPT-2's matrices are [in, out]. What is read is put back where it was, bit for bit.

Shapes: H heads, K head dim, D model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from llamarl.models.config import ModelConfig
from llamarl.models.families import Family
from llamarl.models.sharding import Box, Shape, parameter_shapes

_KINDS = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter's place in a directory. name, shape: of the tensor that holds it. kind: queries,
    keys or values, if that tensor holds all three; else None. turned: it is stored as [in, out].
    """

    name: str
    shape: Shape
    kind: int | None = None
    turned: bool = False


def stored_parameters(config: ModelConfig) -> dict[str, Stored]:
    """Return where every parameter is stored, by our name for it."""
    shapes = parameter_shapes(config)
    return {name: _stored(config.traits, name, shape) for name, shape in shapes.items()}


def stored_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every tensor of a directory, by its name there."""
    return {place.name: place.shape for place in stored_parameters(config).values()}


def _stored(family: Family, name: str, shape: Shape) -> Stored:
    kind = None
    if family.fused:
        *_, module, _ = name.split(".")
        if module in _KINDS:
            kind = _KINDS.index(module)
            shape = (len(_KINDS) * shape[0], *shape[1:])
    turned = family.turned and name.endswith("_proj.weight")
    if turned:
        shape = (shape[1], shape[0])
    return Stored(name=_name_in(family, name), shape=shape, kind=kind, turned=turned)


def _name_in(family: Family, name: str) -> str:
    """Return a directory's name for the parameter that Llama's call `name`."""
    for ours, theirs in family.names:
        if ours in name:
            name = name.replace(ours, theirs)
    return name


def read_box(tensor, place: Stored, box: Box, config: ModelConfig) -> Tensor:
    """Read the box of a parameter from the tensor that holds it, which is sliced as it lies on
    disk.
    """
    first = box.offsets[0]
    rows = torch.arange(first, first + box.lengths[0])
    if place.kind is not None:
        rows = _fused_rows(rows, place.kind, config)
    if not rows.numel():
        return torch.empty(box.lengths)
    low = int(rows[0])
    high = int(rows[-1]) + 1
    span: tuple[slice, ...] = (slice(low, high),)
    for offset, length in zip(box.offsets[1:], box.lengths[1:]):
        span += (slice(offset, offset + length),)
    if place.turned:
        part = tensor[span[::-1]].T
    else:
        part = tensor[span]
    if high - low == rows.numel():
        return part
    return part.index_select(0, rows - low)


def _fused_rows(rows: Tensor, kind: int, config: ModelConfig) -> Tensor:
    """Return the places of these rows of queries, keys or values (`kind`) in the fused tensor."""
    if config.traits.fused == "kinds":
        whole = config.num_attention_heads * config.head_dim
        return rows + kind * whole
    head_dim = config.head_dim
    head = rows // head_dim
    return (len(_KINDS) * head + kind) * head_dim + rows % head_dim


def to_stored(
    named_tensors: Iterable[tuple[str, Tensor]], config: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a directory keeps, from whole parameters under our names, as they
    come.

    Queries, keys and values wait for each other.
    """
    places = stored_parameters(config)
    waiting: dict[str, dict[int, Tensor]] = {}
    for name, tensor in named_tensors:
        place = places.get(name)
        if place is None:  # not of this architecture: a head that replaces another
            yield name, tensor
            continue
        if place.kind is not None:
            parts = waiting.setdefault(place.name, {})
            parts[place.kind] = tensor
            if len(parts) < len(_KINDS):
                continue
            del waiting[place.name]
            tensor = _joined([parts[kind] for kind in range(len(_KINDS))], config)
        yield place.name, tensor.T if place.turned else tensor
    assert not waiting, f"{list(waiting)} without some of queries, keys and values"


def _joined(parts: list[Tensor], config: ModelConfig) -> Tensor:
    """Join rows of queries, keys and values into one tensor."""
    if config.traits.fused == "kinds":
        return torch.cat(parts)
    by_head = [part.unflatten(0, (-1, config.head_dim)) for part in parts]
    return torch.stack(by_head, dim=1).flatten(0, 2)
