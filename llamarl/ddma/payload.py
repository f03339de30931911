"""What links carry: pieces in buckets, laid end to end by the sender and put in place by the
receiver. No threads of its own.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from llamarl.ddma.copies import Copier, Parts, fold
from llamarl.ddma.layout import Buffer
from llamarl.ddma.plan import Piece
from llamarl.models.sharding import Box, aligned

BUCKET_BYTES = {
    "cpu": 4 << 20,
    "cuda": 16 << 20,
}  # on a CPU a bucket stays in the cache between its arrival and its place


@dataclass(frozen=True, slots=True)
class Move:
    """A piece, and where it lies in its link's bytes."""

    piece: Piece
    start: int

    @property
    def end(self) -> int:
        return self.start + self.piece.num_bytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """Moves that go, are digested and are acknowledged together: bytes [start, end) of the link's."""

    moves: tuple[Move, ...]

    @property
    def start(self) -> int:
        return self.moves[0].start

    @property
    def end(self) -> int:
        return self.moves[-1].end

    def digest(self, flat: Tensor, copier: Copier) -> int:
        """Of the moves in the link's bytes `flat`."""
        return fold(copier.digest(flat[move.start : move.end]) for move in self.moves)


def buckets_of(pieces: list[Piece], limit: int) -> list[Bucket]:
    """Lay pieces end to end, each on a cache line, in buckets of about `limit` bytes; a larger
    piece is cut by rows.
    """
    buckets, moves, at = [], [], 0
    for piece in pieces:
        for part in _cut(piece, limit):
            if moves and at + part.num_bytes - moves[0].start > limit:
                buckets.append(Bucket(tuple(moves)))
                moves = []
            moves.append(Move(part, at))
            at = aligned(at + part.num_bytes)
    return buckets + [Bucket(tuple(moves))] * bool(moves)


def buckets_of_buffer(of: Buffer, limit: int) -> list[Bucket]:
    """The same for all that a receiver holds, where it lies in its buffer."""
    buckets, moves = [], []
    for held in sorted(of.held.values(), key=lambda h: h.start):
        at = held.start
        for part in _cut(Piece(held.parameter, held.box), limit):
            if moves and at + part.num_bytes - moves[0].start > limit:
                buckets.append(Bucket(tuple(moves)))
                moves = []
            moves.append(Move(part, at))
            at += part.num_bytes
    return buckets + [Bucket(tuple(moves))] * bool(moves)


def _cut(piece: Piece, limit: int) -> list[Piece]:
    rows = piece.box.lengths[0]
    each = max(1, rows * limit // max(piece.num_bytes, 1))
    return [
        Piece(piece.parameter, piece.box.cut(0, r, min(each, rows - r)))
        for r in range(0, rows, each)
    ]


def size_of(buckets: list[Bucket]) -> int:
    return aligned(buckets[-1].end) if buckets else 0


class Progress:
    """Which buckets of a slot (or of a buffer) are whole. counter: [1] int64 that others may read:
    how many are, from the first on.
    """

    def __init__(self, count: int, counter: Tensor | None = None):
        self._changed = threading.Condition()
        self._done: list[object] = [None] * count
        self._digests: list[int | None] = [None] * count
        self._first, self._counter = 0, counter
        self._closed = False

    def reset(self) -> None:
        with self._changed:
            self._done, self._digests, self._first = (
                [None] * len(self._done),
                [None] * len(self._done),
                0,
            )
            if self._counter is not None:
                self._counter.zero_()

    def mark(
        self, index: int, event: torch.cuda.Event | None = None, digest: int | None = None
    ) -> None:
        """event: the copies on a device that must end first. digest: of the bucket, where it is
        known already.
        """
        with self._changed:
            self._done[index], self._digests[index] = event or True, digest
            while self._first < len(self._done) and self._done[self._first] is True:
                self._first += 1
            if self._counter is not None:
                self._counter.fill_(self._first)
            self._changed.notify_all()

    def digest(self, index: int) -> int | None:
        """What the bucket was marked with."""
        return self._digests[index]

    def wait(self, index: int) -> bool:
        """False if it was closed meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._done[index] is not None or self._closed)
            event = self._done[index]
        if event is not None and event is not True:
            event.synchronize()
        return event is not None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Target:
    """Where the moves of a bucket go in one of the receiver's buffers."""

    def __init__(self, bucket: Bucket, of: Buffer, flat: Tensor):
        parts: list[tuple[int, Tensor]] = []
        begins: list[int | None] = []  # where each begins in the buffer, if it is one run there
        for move in bucket.moves:
            held, box = of.held[move.piece.parameter.name], move.piece.box
            whole = (
                flat[held.start : held.start + held.num_bytes]
                .view(held.parameter.dtype)
                .view(held.box.lengths)
            )
            parts.append((move.start - bucket.start, whole[box.within(held.box)]))
            at = _flat_start(box, held.box)
            begins.append(None if at is None else held.start + at * held.parameter.dtype.itemsize)
        self._parts = Parts(parts)
        first, moves = begins[0], bucket.moves
        # No gaps: in the buffer they may be another sender's.
        joined = first is not None and all(a.end == b.start for a, b in pairwise(moves))
        joined = joined and all(
            at is not None and at - first == m.start - bucket.start for at, m in zip(begins, moves)
        )
        # The whole bucket as one range of the buffer, into which it can be received.
        self.in_place: Tensor | None = (
            flat[first : first + bucket.end - bucket.start] if joined else None
        )

    def write(self, source: Tensor, copier: Copier) -> int:
        """Copy the bucket's bytes [bytes] uint8 in, unless they were received in place; the
        bucket's digest.
        """
        return copier.copy_parts(source, self._parts)


def _flat_start(box: Box, held: Box) -> int | None:
    """Where the box begins in its holder's elements, if it is one run of them; else None."""
    partial = [i for i, (n, m) in enumerate(zip(box.lengths, held.lengths)) if n != m]
    if partial and any(n != 1 for n in box.lengths[: partial[-1]]):
        return None
    at = 0
    for offset, origin, length in zip(box.offsets, held.offsets, held.lengths):
        at = at * length + offset - origin
    return at


class Cover:
    """Which arrived buckets make which of the follower's buckets whole. arriving: of each link,
    what it carries.
    """

    def __init__(self, arriving: list[tuple[Bucket, ...]], buckets: tuple[Bucket, ...]):
        where = {}
        for number, bucket in enumerate(buckets):
            for move in bucket.moves:
                where.setdefault(move.piece.parameter.name, []).append((move.piece.box, number))
        self._adds: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for index, carried in enumerate(arriving):
            for i, bucket in enumerate(carried):
                adds = []
                for move in bucket.moves:
                    for box, number in where[move.piece.parameter.name]:
                        if common := _overlap(box, move.piece.box):
                            adds.append((number, common))
                self._adds[index, i] = adds
        self._totals = [sum(move.piece.box.numel for move in bucket.moves) for bucket in buckets]
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self._left = list(self._totals)

    def arrived(self, index: int, bucket: int, progress: Progress) -> None:
        with self._lock:
            for number, count in self._adds[index, bucket]:
                self._left[number] -= count
                if not self._left[number]:
                    progress.mark(number)


def _overlap(a: Box, b: Box) -> int:
    """Elements in common."""
    count = 1
    for p, n, q, m in zip(a.offsets, a.lengths, b.offsets, b.lengths):
        count *= max(0, min(p + n, q + m) - max(p, q))
    return count
