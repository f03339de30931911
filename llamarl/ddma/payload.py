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
from llamarl.models.sharding import Box, aligned, overlap

# On a CPU a bucket stays in the cache between its arrival and its place.
BUCKET_BYTES = {"cpu": 4 << 20, "cuda": 16 << 20}


@dataclass(frozen=True, slots=True)
class Move:
    """A piece, and where it lies in its link's bytes."""

    piece: Piece
    start: int

    @property
    def end(self) -> int:
        return self.start + self.piece.num_bytes

    @property
    def name(self) -> str:
        """The parameter's."""
        return self.piece.parameter.name


@dataclass(frozen=True, slots=True)
class Bucket:
    """Moves that are sent, digested and acknowledged together: bytes [start, end) of a link's."""

    moves: tuple[Move, ...]

    @property
    def start(self) -> int:
        return self.moves[0].start

    @property
    def end(self) -> int:
        return self.moves[-1].end

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    @property
    def numel(self) -> int:
        """Elements of all its moves."""
        return sum(move.piece.box.numel for move in self.moves)

    def digest(self, flat: Tensor, copier: Copier) -> int:
        """The digest of the moves where they lie in the link's bytes, flat [bytes] uint8."""
        return fold(copier.digest(flat[move.start : move.end]) for move in self.moves)


def buckets_of(pieces: list[Piece], limit: int) -> list[Bucket]:
    """Pieces laid end to end, each on a cache line, in buckets of about `limit` bytes.

    A piece that is larger than that is cut by rows.
    """
    moves: list[Move] = []
    start = 0
    for piece in pieces:
        for part in _cut(piece, limit):
            move = Move(part, start)
            moves.append(move)
            start = aligned(move.end)
    return _grouped(moves, limit)


def buckets_of_buffer(of: Buffer, limit: int) -> list[Bucket]:
    """Buckets of all that a receiver holds, where it lies in its buffer."""
    moves: list[Move] = []
    for held in sorted(of.held.values(), key=lambda held: held.start):
        start = held.start
        for part in _cut(Piece(held.parameter, held.box), limit):
            moves.append(Move(part, start))
            start += part.num_bytes
    return _grouped(moves, limit)


def _grouped(moves: list[Move], limit: int) -> list[Bucket]:
    """Moves in buckets that span no more than `limit` bytes, or hold one move."""
    buckets: list[Bucket] = []
    together: list[Move] = []
    for move in moves:
        if together and move.end - together[0].start > limit:
            buckets.append(Bucket(tuple(together)))
            together = []
        together.append(move)
    if together:
        buckets.append(Bucket(tuple(together)))
    return buckets


def _cut(piece: Piece, limit: int) -> list[Piece]:
    """A piece by rows, in parts of no more than `limit` bytes, or one row."""
    rows = piece.box.lengths[0]
    each = max(1, rows * limit // max(piece.num_bytes, 1))
    parts = []
    for first in range(0, rows, each):
        box = piece.box.cut(0, first, min(each, rows - first))
        parts.append(Piece(piece.parameter, box))
    return parts


def size_of(buckets: list[Bucket] | tuple[Bucket, ...]) -> int:
    """Bytes of a link whose buckets these are."""
    return aligned(buckets[-1].end) if buckets else 0


class Progress:
    """Which buckets of a slot (or of a buffer) are whole.

    counter: [1] int64, which other processes may read: how many are, from the first one on.
    """

    def __init__(self, count: int, counter: Tensor | None = None):
        self._changed = threading.Condition()
        self._count = count
        self._counter = counter
        self._closed = False
        self.reset()

    def reset(self) -> None:
        """Let no bucket be whole any more."""
        with self._changed:
            self._is_whole = [False] * self._count
            self._events: list[torch.cuda.Event | None] = [None] * self._count
            self._digests: list[int | None] = [None] * self._count
            self._num_first = 0  # whole ones before the first that is not
            if self._counter is not None:
                self._counter.zero_()

    def mark(
        self, index: int, event: torch.cuda.Event | None = None, digest: int | None = None
    ) -> None:
        """Say that a bucket is whole, or will be after this event on the device.

        digest: the bucket's, where it is known already.
        """
        with self._changed:
            self._is_whole[index] = True
            self._events[index] = event
            self._digests[index] = digest
            self._count_first()
            self._changed.notify_all()

    def _count_first(self) -> None:
        while self._num_first < self._count and self._is_whole_now(self._num_first):
            self._num_first += 1
        if self._counter is not None:
            self._counter.fill_(self._num_first)

    def _is_whole_now(self, index: int) -> bool:
        """Whether it waits for nothing on the device either."""
        return self._is_whole[index] and self._events[index] is None

    def digest(self, index: int) -> int | None:
        """The digest that the bucket was marked with."""
        return self._digests[index]

    def wait(self, index: int) -> bool:
        """Wait until a bucket is whole. False if this was closed before."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_whole[index] or self._closed)
            is_whole = self._is_whole[index]
            event = self._events[index]
        if event is not None:
            event.synchronize()
        return is_whole

    def close(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Target:
    """Where the moves of a bucket go in one of the receiver's buffers."""

    def __init__(self, bucket: Bucket, of: Buffer, flat: Tensor):
        parts: list[tuple[int, Tensor]] = []
        for move in bucket.moves:
            held = of.held[move.name]
            place = held.view_in(flat)[move.piece.box.within(held.box)]
            parts.append((move.start - bucket.start, place))
        self._parts = Parts(parts)
        first = _start_as_one_run(bucket, of)
        # The whole bucket as one range of the buffer, into which it can be received.
        self.in_place: Tensor | None = None
        if first is not None:
            self.in_place = flat[first : first + bucket.num_bytes]

    def write(self, source: Tensor, copier: Copier) -> int:
        """Put the bucket's bytes [bytes] uint8 in their places. Returns the bucket's digest.

        Bytes that were received in place are only digested.
        """
        return copier.copy_parts(source, self._parts)


def _start_as_one_run(bucket: Bucket, of: Buffer) -> int | None:
    """The byte of the buffer where the bucket lies as it was sent; None if it is no one run."""
    # No gaps: in the buffer they may be another sender's.
    if any(a.end != b.start for a, b in pairwise(bucket.moves)):
        return None
    first: int | None = None
    for move in bucket.moves:
        held = of.held[move.name]
        index = _flat_start(move.piece.box, held.box)
        if index is None:
            return None
        at = held.start + index * held.parameter.dtype.itemsize
        if first is None:
            first = at
        if at - first != move.start - bucket.start:
            return None
    return first


def _flat_start(box: Box, held: Box) -> int | None:
    """The index of the box's first element in its holder's, if it is one run of them; else None."""
    partial = [i for i, (n, m) in enumerate(zip(box.lengths, held.lengths)) if n != m]
    if partial and any(n != 1 for n in box.lengths[: partial[-1]]):
        return None
    index = 0
    for offset, origin, length in zip(box.offsets, held.offsets, held.lengths):
        index = index * length + offset - origin
    return index


class Assembly:
    """Makes the buckets that a receiver forwards out of those that arrive on its links.

    arriving: what each link carries; `forwarded`: buckets of the receiver's whole buffer.
    """

    def __init__(self, arriving: list[tuple[Bucket, ...]], forwarded: tuple[Bucket, ...]):
        boxes: dict[str, list[tuple[int, Box]]] = {}  # name -> (forwarded bucket, its box of it)
        for number, bucket in enumerate(forwarded):
            for move in bucket.moves:
                boxes.setdefault(move.name, []).append((number, move.piece.box))
        # (link, bucket) -> (forwarded bucket, elements of it that come with this one)
        self._brings: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for link, carried in enumerate(arriving):
            for index, bucket in enumerate(carried):
                self._brings[link, index] = _shares(bucket, boxes)
        self._totals = [bucket.numel for bucket in forwarded]
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Let nothing have arrived."""
        self._missing = list(self._totals)

    def arrived(self, link: int, bucket: int, progress: Progress) -> None:
        """Mark the buckets that are whole now that this one, which is right, has arrived."""
        with self._lock:
            for number, count in self._brings[link, bucket]:
                self._missing[number] -= count
                if not self._missing[number]:
                    progress.mark(number)


def _shares(bucket: Bucket, boxes: dict[str, list[tuple[int, Box]]]) -> list[tuple[int, int]]:
    """(number, elements) of the boxes that a bucket holds some elements of."""
    shares = []
    for move in bucket.moves:
        for number, box in boxes[move.name]:
            common = overlap(box, move.piece.box).numel
            if common:
                shares.append((number, common))
    return shares
