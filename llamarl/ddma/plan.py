"""Which box of which parameter goes from which trainer rank to which generator rank. Pure.

    plan = make_plan(config, parameters, Source(fsdp=4), Destination(tp=2, replicas=2))
    plan.regions(source=0, part=1)  # what trainer rank 0 holds of what rank 1 of a replica needs
    plan.feeders(d)             # who sends it to generator rank d: trainer ranks, or the replica
                                # before it

Each destination byte has one sender. Trainer ranks that hold the same bytes (HSDP replicas,
tensor-parallel copies) share the work: each serves some replicas of the generator, or part of each
box.

Replicas pull from the trainer (`direct`), or the first few pull and forward to the next, bucket by
bucket (`chain`). A trainer rank sends roots/num_sources of the model, and a generator rank receives
1/tp of it. With more roots than sources/tp the trainer's links are the bottleneck. A chain puts one
shard on every link, so it is as fast as a single replica. In a tree inner ranks would send twice as
much.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from llamarl.ddma.layout import Destination, Parameter, Region, Source
from llamarl.models.config import ModelConfig
from llamarl.models.sharding import Box, aligned, overlap, span

_Boxes = dict[tuple[int, int], Box]  # by (trainer rank, rank in a replica)


@dataclass(frozen=True)
class TransferPlan:
    """Which regions travel between which ranks. The module's docstring has an example.

    roots: replicas that the trainer feeds. Replica i >= roots is fed by replica i - roots.
    """

    config: ModelConfig
    parameters: list[Parameter]
    source: Source
    destination: Destination
    roots: int
    _cache: dict = field(default_factory=dict, repr=False, compare=False)

    def regions(self, source: int, part: int, start: int = 0) -> list[Region]:
        """Return what trainer rank `source` sends to rank `part` of each replica that it feeds, in
        parameter order. In its slot they lie from byte `start` on, each on a cache line.
        """
        out = []
        for p in self.parameters:
            boxes, num_bytes = self._crossing(p)
            if num_bytes[source, part]:
                region = Region(p, boxes[source, part], start)
                start = aligned(region.end)
                out.append(region)
        return out

    def feeds(self, source: int) -> list[int]:
        """Return the replicas that trainer rank `source` sends to."""
        if not self._dealt:
            return list(range(self.roots))
        replica = source // (self.source.fsdp * self.source.tp)  # the trainer's
        return list(range(replica, self.roots, self.source.replicate))

    def feeders(self, d: int) -> tuple[list[int], int | None]:
        """Return who sends to generator rank d: (trainer ranks, None), or ([], a generator
        rank).
        """
        replica, part = divmod(d, self.destination.parts)
        if replica >= self.roots:
            return [], d - self.roots * self.destination.parts
        feeders = []
        for source in range(self.source.num_ranks):
            if self.bytes_to[source, part] and replica in self.feeds(source):
                feeders.append(source)
        return feeders, None

    def follower(self, d: int) -> int | None:
        """Return the generator rank that d forwards its weights to, or None."""
        after = d + self.roots * self.destination.parts
        return after if after < self.destination.num_ranks else None

    @cached_property
    def bytes_to(self) -> np.ndarray:
        """[sources, parts] int64: bytes that a trainer rank sends to each replica that it feeds."""
        total = np.zeros((self.source.num_ranks, self.destination.parts), np.int64)
        for p in self.parameters:
            _, num_bytes = self._crossing(p)
            total += num_bytes
        return total

    @cached_property
    def shard_bytes(self) -> np.ndarray:
        """[parts]: bytes of a generator rank's shard."""
        total = np.zeros(self.destination.parts, np.int64)
        for part in range(self.destination.parts):
            for p in self.parameters:
                box = self.destination.box(self.config, p, part)
                total[part] += box.numel * p.dtype.itemsize
        return total

    @property
    def num_bytes(self) -> int:
        """Bytes of one sync over all links: each generator rank's shard, once."""
        return int(self.shard_bytes.sum()) * self.destination.replicas

    @property
    def _dealt(self) -> bool:
        """Whether the generator's replicas are dealt to the trainer's, so that boxes need no
        cutting between these.
        """
        return self.roots % self.source.replicate == 0

    def _crossing(self, p: Parameter) -> tuple[_Boxes, np.ndarray]:
        """Return what crosses of a parameter: the box from each trainer rank to each rank of a
        replica, and its bytes [sources, parts], 0 where nothing is sent.
        """
        _, _, in_layers = p.name.partition("layers.")
        _, _, part = in_layers.partition(".")  # layers are alike
        key = (p.shape, p.dtype, part or p.name)
        if key not in self._cache:
            self._cache[key] = self._cut(p)
        return self._cache[key]

    def _cut(self, p: Parameter) -> tuple[_Boxes, np.ndarray]:
        """Return what crosses of a parameter and its like: ranks that hold the same bytes cut them
        by rows.
        """
        boxes: _Boxes = {}
        parts = self.destination.parts
        num_bytes = np.zeros((self.source.num_ranks, parts), np.int64)
        for held, ranks in self._holders(p):
            for part in range(parts):
                common = overlap(held, self.destination.box(self.config, p, part))
                rows = common.lengths[0]
                for place, rank in enumerate(ranks):
                    box = common.cut(0, *span(rows, place, len(ranks)))
                    boxes[rank, part] = box
                    num_bytes[rank, part] = box.numel * p.dtype.itemsize
        return boxes, num_bytes

    def _holders(self, p: Parameter) -> list[tuple[Box, list[int]]]:
        """Return each box that trainer ranks hold of a parameter, with those that share its
        sending.
        """
        num_shards = self.source.fsdp * self.source.tp
        sharing: dict[tuple[Box, int], list[int]] = {}
        for rank in range(self.source.num_ranks):
            box = self.source.box(self.config, p, rank)
            replica = rank // num_shards if self._dealt else 0
            sharing.setdefault((box, replica), []).append(rank)
        return [(box, ranks) for (box, _), ranks in sharing.items()]


def make_plan(
    config: ModelConfig,
    parameters: list[Parameter],
    source: Source,
    destination: Destination,
    *,
    feed: str = "auto",
) -> TransferPlan:
    """Plan which box goes from which trainer rank to which generator rank.

    feed: direct | chain | auto (chain where the trainer's links would be the narrow place).
    ValueError if the trainer's ranks together do not hold what a generator rank needs.
    """
    # Roots at which a trainer rank sends what a generator rank takes.
    enough = max(1, source.num_ranks // destination.parts)
    wanted_roots = {"direct": destination.replicas, "chain": 1, "auto": enough}
    roots = min(destination.replicas, wanted_roots[feed])
    plan = TransferPlan(config, parameters, source, destination, roots=roots)
    senders = [s for s in range(source.num_ranks) if 0 in plan.feeds(s)]
    missing = plan.shard_bytes - plan.bytes_to[senders].sum(0)
    if missing.any():
        raise ValueError(
            f"the trainer's ranks hold {missing.tolist()} bytes less than generator ranks "
            f"0..{destination.parts - 1} need"
        )
    return plan
