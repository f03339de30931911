"""Which box of which parameter goes from which trainer rank to which generator rank. Pure.

    plan = make_plan(config, parameters, Source(fsdp=4), Destination(tp=2, replicas=2))
    plan.pieces(source=0, t=1)  # what trainer rank 0 holds of what tensor-parallel rank 1 needs
    plan.feeders(d)             # who sends it to generator rank d: trainer ranks, or the replica
                                # before it

A destination byte comes from one sender. Where several trainer ranks hold the same bytes (HSDP
replicas, tensor-parallel copies), they share the work: replicas of the generator are dealt to
replicas of the trainer, or else each box is cut.

Replicas: all pull from the trainer (`direct`), or the first few do and forward to the next, block
by block (`chain`). A trainer rank sends roots/num_sources of the model, a generator rank takes 1/tp
of it: with more roots than sources/tp the trainer's links are the narrow place, and a chain, which
keeps every link at one shard, is as fast as one replica alone. A tree would have its inner ranks
send twice as much.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from llamarl.ddma.layout import Destination, Parameter, Piece, Source
from llamarl.models.config import ModelConfig
from llamarl.models.sharding import Box, aligned

SMALL_BYTES = 1 << 16  # a box that is not worth cutting


@dataclass(frozen=True)
class Plan:
    """See the module. `roots`: replicas that the trainer feeds; the others get their weights from
    the replica `roots` before them.
    """

    config: ModelConfig
    parameters: list[Parameter]
    source: Source
    destination: Destination
    roots: int
    _cache: dict = field(default_factory=dict, repr=False, compare=False)

    def pieces(self, source: int, t: int, start: int = 0) -> list[Piece]:
        """What trainer rank `source` sends to tensor-parallel rank t of each replica that it feeds,
        in parameter order. In its slot they lie from byte `start` on, each on a cache line.
        """
        out = []
        for index, p in enumerate(self.parameters):
            low, high = self._parts(index, p)
            offsets = low[source, t]
            lengths = high[source, t] - offsets
            if (lengths > 0).all():
                piece = Piece(p, Box(tuple(offsets.tolist()), tuple(lengths.tolist())), start)
                start = aligned(piece.end)
                out.append(piece)
        return out

    def feeds(self, source: int) -> list[int]:
        """Replicas that trainer rank `source` sends to."""
        if not self._dealt:
            return list(range(self.roots))
        replica = source // (self.source.fsdp * self.source.tp)  # the trainer's
        return list(range(replica, self.roots, self.source.replicate))

    def feeders(self, d: int) -> tuple[list[int], int | None]:
        """Who sends to generator rank d: (trainer ranks, None), or ([], a generator rank)."""
        replica, t = divmod(d, self.destination.tp)
        if replica >= self.roots:
            return [], d - self.roots * self.destination.tp
        sending = np.flatnonzero(self.bytes_to[:, t]).tolist()
        return [source for source in sending if replica in self.feeds(source)], None

    def follower(self, d: int) -> int | None:
        """The generator rank that d forwards its weights to."""
        after = d + self.roots * self.destination.tp
        return after if after < self.destination.num_ranks else None

    @cached_property
    def bytes_to(self) -> np.ndarray:
        """[sources, tp] int64: bytes that a trainer rank sends to each replica that it feeds."""
        total = np.zeros((self.source.num_ranks, self.destination.tp), np.int64)
        for index, p in enumerate(self.parameters):
            low, high = self._parts(index, p)
            total += (high - low).clip(min=0).prod(-1) * p.dtype.itemsize
        return total

    @cached_property
    def shard_bytes(self) -> np.ndarray:
        """[tp]: bytes of a generator rank's shard."""
        total = np.zeros(self.destination.tp, np.int64)
        for t in range(self.destination.tp):
            for p in self.parameters:
                total[t] += self.destination.box(self.config, p, t).numel * p.dtype.itemsize
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

    def _parts(self, index: int, p: Parameter) -> tuple[np.ndarray, np.ndarray]:
        """(low, high) [sources, tp, dims]: the box that goes from each trainer rank to each
        tensor-parallel rank; empty if high <= low.
        """
        bounds, num_copies, place = self._holders(p)
        boxes = [self.destination.box(self.config, p, t) for t in range(self.destination.tp)]
        wanted = _bounds(boxes)
        low = np.maximum(bounds[:, None, 0], wanted[None, :, 0])
        high = np.minimum(bounds[:, None, 1], wanted[None, :, 1])
        # Holders of the same bytes cut them by rows; what is too small for that, one of them sends.
        lengths = (high - low).clip(min=0)
        first = low[..., 0].copy()
        count = lengths[..., 0]
        num_bytes = lengths.prod(-1) * p.dtype.itemsize
        is_small = (num_bytes < SMALL_BYTES) | (count < num_copies)
        end_if_small = np.where(index % num_copies == place, first + count, first)
        low[..., 0] = np.where(is_small, first, first + count * place // num_copies)
        high_if_cut = first + count * (place + 1) // num_copies
        high[..., 0] = np.where(is_small, end_if_small, high_if_cut)
        return low, high

    def _holders(self, p: Parameter) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What each trainer rank holds of a parameter, and who shares it with whom.

        bounds [sources, 2, dims]: first index of the rank's box, and behind its last; num_copies
        [sources, 1]: ranks that hold this box and share the work; place [sources, 1]: which of
        these the rank is.
        """
        part = p.name.split("layers.")[-1].partition(".")[2]  # layers are alike
        key = (p.shape, part or p.name)
        if key not in self._cache:
            num_ranks = self.source.num_ranks
            num_shards = self.source.fsdp * self.source.tp
            boxes = [self.source.box(self.config, p, rank) for rank in range(num_ranks)]
            sharing: dict[tuple[int, Box], list[int]] = {}
            for rank, box in enumerate(boxes):
                replica = rank // num_shards if self._dealt else 0
                sharing.setdefault((replica, box), []).append(rank)
            num_copies = np.ones((num_ranks, 1), np.int64)
            place = np.zeros((num_ranks, 1), np.int64)
            for ranks in sharing.values():
                num_copies[ranks, 0] = len(ranks)
                place[ranks, 0] = range(len(ranks))
            self._cache[key] = (_bounds(boxes), num_copies, place)
        return self._cache[key]


def _bounds(boxes: list[Box]) -> np.ndarray:
    """[boxes, 2, dims]: first index of each box, and the one behind its last."""
    low = np.array([box.offsets for box in boxes])
    return np.stack([low, low + np.array([box.lengths for box in boxes])], axis=1)


def make_plan(
    config: ModelConfig,
    parameters: list[Parameter],
    source: Source,
    destination: Destination,
    *,
    feed: str = "auto",
) -> Plan:
    """feed: direct | chain | auto (chain where the trainer's links would be the narrow place).

    ValueError if the trainer's ranks together do not hold what a generator rank needs.
    """
    # Roots at which a trainer rank sends what a generator rank takes.
    enough = max(1, source.num_ranks // destination.tp)
    wanted_roots = {"direct": destination.replicas, "chain": 1, "auto": enough}
    roots = min(destination.replicas, wanted_roots[feed])
    plan = Plan(config, parameters, source, destination, roots)
    senders = [s for s in range(source.num_ranks) if 0 in plan.feeds(s)]
    missing = plan.shard_bytes - plan.bytes_to[senders].sum(0)
    if missing.any():
        raise ValueError(
            f"the trainer's ranks hold {missing.tolist()} bytes less than generator ranks "
            f"0..{destination.tp - 1} need"
        )
    return plan
