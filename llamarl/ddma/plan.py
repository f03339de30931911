"""Which box of which parameter goes from which trainer rank to which generator rank. Pure.

    plan = make_plan(config, parameters, Source(fsdp=4), Destination(tp=2, replicas=2))
    plan.pieces(source=0, t=1)         # what trainer rank 0 holds of what tensor-parallel rank 1 needs
    plan.feeders(d)                    # who sends it to generator rank d: trainer ranks, or the replica before it

A destination byte comes from one sender. Where several trainer ranks hold the same bytes (HSDP
replicas, tensor-parallel copies), they share the work: replicas of the generator are dealt to
replicas of the trainer, or else each box is cut.

Replicas: all pull from the trainer (`direct`), or the first few do and hand on to the next, block
by block (`chain`). A trainer rank sends roots/num_sources of the model, a generator rank takes 1/tp
of it: with more roots than sources/tp the trainer's links are the narrow place, and a chain, which
keeps every link at one shard, is as fast as one replica alone. A tree would have its inner ranks
send twice as much.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from llamarl.ddma.layout import Destination, Parameter, Source
from llamarl.models.config import ModelConfig
from llamarl.models.sharding import Box

SMALL_BYTES = 1 << 16  # a box that is not worth cutting


@dataclass(frozen=True, slots=True)
class Piece:
    """A box (global indices) of a parameter that crosses from one rank to another as one copy."""

    parameter: Parameter
    box: Box

    @property
    def num_bytes(self) -> int:
        return self.box.numel * self.parameter.dtype.itemsize


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

    def pieces(self, source: int, t: int) -> list[Piece]:
        """What trainer rank `source` sends to tensor-parallel rank t of each replica that it feeds,
        in parameter order.
        """
        out = []
        for index, p in enumerate(self.parameters):
            low, high = self._parts(index, p)
            offsets, lengths = low[source, t], high[source, t] - low[source, t]
            if (lengths > 0).all():
                out.append(Piece(p, Box(tuple(offsets.tolist()), tuple(lengths.tolist()))))
        return out

    def feeds(self, source: int) -> list[int]:
        """Replicas that trainer rank `source` sends to."""
        if self._dealt:
            return list(
                range(
                    source // (self.source.fsdp * self.source.tp), self.roots, self.source.replicate
                )
            )
        return list(range(self.roots))

    def feeders(self, d: int) -> tuple[list[int], int | None]:
        """(trainer ranks that may send to generator rank d, the generator rank that does instead or
        None).
        """
        replica, t = divmod(d, self.destination.tp)
        if replica >= self.roots:
            return [], (replica - self.roots) * self.destination.tp + t
        return [
            s
            for s in range(self.source.num_ranks)
            if replica in self.feeds(s) and self.bytes_to[s, t]
        ], None

    def follower(self, d: int) -> int | None:
        """The generator rank that d hands its weights on to."""
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
        return np.array(
            [
                sum(
                    self.destination.box(self.config, p, t).numel * p.dtype.itemsize
                    for p in self.parameters
                )
                for t in range(self.destination.tp)
            ]
        )

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
        held, copies, place = self._holders(index, p)
        wanted = [
            self._bounds(self.destination.box(self.config, p, t))
            for t in range(self.destination.tp)
        ]
        low = np.maximum(held[:, None, 0], np.array(wanted)[None, :, 0])
        high = np.minimum(held[:, None, 1], np.array(wanted)[None, :, 1])
        if copies > 1:
            first, count = low[..., 0], (high - low)[..., 0].clip(min=0)
            num_bytes = (high - low).clip(min=0).prod(-1) * p.dtype.itemsize
            small = (num_bytes < SMALL_BYTES) | (count < copies)
            mine = place[:, None]
            cut = np.stack([first + count * mine // copies, first + count * (mine + 1) // copies])
            whole = np.stack([first, np.where(index % copies == mine, first + count, first)])
            low, high = low.copy(), high.copy()
            low[..., 0], high[..., 0] = np.where(small, whole, cut)
        return low, high

    def _holders(self, index: int, p: Parameter) -> tuple[np.ndarray, int, np.ndarray]:
        """(bounds [sources, 2, dims] of what each trainer rank holds, how many share it, [sources]
        which of them a rank is).
        """
        key = (p.shape, p.name.split("layers.")[-1].partition(".")[2] or p.name)  # layers are alike
        if key not in self._cache:
            s = self.source
            ranks = np.arange(s.num_ranks)
            unique = [self.source.box(self.config, p, rank) for rank in range(s.fsdp * s.tp)]
            held = np.array([self._bounds(box) for box in unique])[ranks % len(unique)]
            # Tensor-parallel ranks either hold different boxes or all the same one.
            tp_copies = s.tp if s.tp > 1 and unique[0] == unique[1] else 1
            replicas = 1 if self._dealt else s.replicate
            place = (ranks // (s.fsdp * s.tp) % replicas) * tp_copies + ranks % s.tp % tp_copies
            self._cache[key] = held, tp_copies * replicas, place
        return self._cache[key]

    @staticmethod
    def _bounds(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return box.offsets, tuple(o + n for o, n in zip(box.offsets, box.lengths))


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
    enough = max(
        1, source.num_ranks // destination.tp
    )  # roots at which a trainer rank sends what a generator rank takes
    roots = (
        destination.replicas
        if feed == "direct"
        else min(destination.replicas, 1 if feed == "chain" else enough)
    )
    plan = Plan(config, parameters, source, destination, roots)
    senders = [s for s in range(source.num_ranks) if 0 in plan.feeds(s)]
    missing = plan.shard_bytes - plan.bytes_to[senders].sum(0)
    if missing.any():
        raise ValueError(
            f"the trainer's ranks hold {missing.tolist()} bytes less than generator ranks 0..{destination.tp - 1} need"
        )
    return plan
