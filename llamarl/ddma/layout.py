"""Who holds which slice of which global parameter. Pure.

A side's layout is, for each of its ranks, the slices it holds by Hugging Face name, packed one after another into a flat
buffer. Both sides compute both layouts from shapes and topology alone; no metadata is gathered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ALIGN_BYTES = 64  # every slice starts on a cache line


@dataclass(frozen=True, slots=True)
class Parameter:
    """A global parameter. Its name is Hugging Face's."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a global parameter, and where it starts in its holder's flat buffer."""

    name: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start_bytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.lengths)


@dataclass(frozen=True, slots=True)
class RankLayout:
    """One rank's slices and the size of the buffer they lie in."""

    slices: tuple[Slice, ...]
    size_bytes: int


def padded(size_bytes: int) -> int:
    """Bytes that a slice takes up in a buffer."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def pack(boxes: list[tuple[str, tuple[int, ...], tuple[int, ...]]], itemsize: int) -> RankLayout:
    """Lay (name, offsets, lengths) boxes end to end, each aligned."""
    slices, at = [], 0
    for name, offsets, lengths in boxes:
        slices.append(Slice(name, offsets, lengths, at))
        at += padded(math.prod(lengths) * itemsize)
    return RankLayout(tuple(slices), at)


def fsdp(parameters: list[Parameter], num_shards: int, itemsize: int) -> list[RankLayout]:
    """FSDP2 (`fully_shard`): dim 0 in ceil-sized chunks; the last ranks may hold less, or nothing."""
    ranks = []
    for rank in range(num_shards):
        boxes = []
        for p in parameters:
            rows = -(-p.shape[0] // num_shards)
            first = min(rank * rows, p.shape[0])
            count = min(rows, p.shape[0] - first)
            boxes.append((p.name, (first,) + (0,) * (len(p.shape) - 1), (count, *p.shape[1:])))
        ranks.append(pack(boxes, itemsize))
    return ranks


def replicated(parameters: list[Parameter], num_replicas: int, itemsize: int) -> list[RankLayout]:
    """Every rank holds everything: generators that are not tensor-parallel."""
    whole = pack([(p.name, (0,) * len(p.shape), p.shape) for p in parameters], itemsize)
    return [whole] * num_replicas
