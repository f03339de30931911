"""Which bytes go where: the intersection of the source's slices with the destination's. Pure.

plan = make_plan(fsdp(parameters, 4, 2), replicated(parameters, 2, 2), itemsize=2)
plan.link(source=0, destination=1)     # byte ranges (source start, destination start, size)
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from llamarl.ddma.layout import RankLayout, Slice, padded


@dataclass(frozen=True, slots=True)
class Range:
    """Contiguous bytes from a source rank's buffer into a destination rank's."""

    source_start: int
    destination_start: int
    size: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Ranges by (source index, destination index), in buffer order."""

    links: dict[tuple[int, int], tuple[Range, ...]]

    def link(self, source: int, destination: int) -> tuple[Range, ...]:
        return self.links.get((source, destination), ())

    @property
    def bytes_per_link(self) -> dict[tuple[int, int], int]:
        return {link: sum(r.size for r in ranges) for link, ranges in self.links.items()}

    def __str__(self) -> str:
        rows = [f"  trainer {s} -> generator {d}  {size:>14,} bytes" for (s, d), size in sorted(self.bytes_per_link.items())]
        return "\n".join([f"weights: {sum(self.bytes_per_link.values()):,} bytes a sync", *rows])


def make_plan(sources: list[RankLayout], destinations: list[RankLayout], itemsize: int) -> Plan:
    """Every destination byte once. ValueError if the sources do not cover a destination's slice."""
    holders: dict[str, list[tuple[int, Slice]]] = defaultdict(list)
    for rank, layout in enumerate(sources):
        for piece in layout.slices:
            if piece.numel:
                holders[piece.name].append((rank, piece))
    links: dict[tuple[int, int], list[Range]] = defaultdict(list)
    for rank, layout in enumerate(destinations):
        for wanted in layout.slices:
            covered = 0
            for source, held in holders[wanted.name]:
                ranges, count = _intersect(held, wanted, itemsize)
                covered += count
                links[source, rank] += ranges
            if covered != wanted.numel:
                raise ValueError(
                    f"{wanted.name}: destination {rank} needs {wanted.numel} elements, the sources hold {covered}; "
                    "is the trainer's model the generator's?"
                )
    return Plan({link: tuple(_merge(ranges)) for link, ranges in links.items() if ranges})


def _intersect(held: Slice, wanted: Slice, itemsize: int) -> tuple[list[Range], int]:
    """Byte ranges of the common box, one a run that is contiguous on both sides, and its element count."""
    if held.offsets == wanted.offsets and held.lengths == wanted.lengths:
        # The padding behind a whole slice travels too, so that it joins with the next one.
        return [Range(held.start_bytes, wanted.start_bytes, padded(held.numel * itemsize))], held.numel
    low = [max(a, b) for a, b in zip(held.offsets, wanted.offsets)]
    high = [min(a + n, b + m) for a, n, b, m in zip(held.offsets, held.lengths, wanted.offsets, wanted.lengths)]
    box = [h - l for l, h in zip(low, high)]
    if any(n <= 0 for n in box):
        return [], 0
    # A run spans trailing dims that are whole on both sides, and one dim before them.
    inner = len(box) - 1
    while inner > 0 and box[inner] == held.lengths[inner] == wanted.lengths[inner]:
        inner -= 1
    run = math.prod(box[inner:])
    ranges = []
    for outer in range(math.prod(box[:inner])):
        index = []
        for n in reversed(box[:inner]):
            outer, i = divmod(outer, n)
            index.append(i)
        at = [l + i for l, i in zip(low, [*reversed(index), *[0] * (len(box) - inner)])]
        starts = [s.start_bytes + _flat([a - o for a, o in zip(at, s.offsets)], s.lengths) * itemsize for s in (held, wanted)]
        ranges.append(Range(starts[0], starts[1], run * itemsize))
    return ranges, math.prod(box)


def _flat(index: list[int], lengths: tuple[int, ...]) -> int:
    at = 0
    for i, n in zip(index, lengths):
        at = at * n + i
    return at


def _merge(ranges: list[Range]) -> list[Range]:
    """Join ranges that follow each other on both sides."""
    out: list[Range] = []
    for r in ranges:
        last = out[-1] if out else None
        if last and last.source_start + last.size == r.source_start and last.destination_start + last.size == r.destination_start:
            out[-1] = Range(last.source_start, last.destination_start, last.size + r.size)
        else:
            out.append(r)
    return out
