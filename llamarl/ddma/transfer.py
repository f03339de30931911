"""Weights on their way: stage, move, verify, commit.

    Publisher (trainer rank)                                       Subscriber (generator rank)
    publish(v): copy own shard into a free slot  <- the only stall
      thread, once all is copied (its digests would share the core with the copying):
        BEGIN v, slot                          ------------------>  a thread a link: claim the idle buffer for v
        BUCKET i, digest (and bytes)           ------------------>  copy or receive into it, digest what arrived
        END v, canary                          ------------------>
                                               <------------------  VERDICT: buckets that are absent or wrong (sent again)
      all links agree: v is committed there, the slot free          all links whole: staged = v, swapped between two chunks

    thread      consumes         waits for                        unblocked by
    publisher   queued versions  the next bucket to be copied     the device
                                 each link's verdict              the subscriber; its death
    subscriber  headers          the last staged version's swap   swap(), if that version must be kept
    forwarder   a claimed version  the next whole bucket          the subscriber's threads

Two slots at the source. At the destination one idle buffer beside the live weights: on a CPU they change places at a swap,
on a GPU the idle one is copied over the live one. A reader never sees a half-written version.

A replica that others depend on hands each bucket on as soon as it is whole (Plan's chain).
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Callable, NamedTuple

import torch
from torch import Tensor

from llamarl.control import Control, DeadlineExceeded, PeerDied
from llamarl.ddma.layout import Buffer, aligned
from llamarl.ddma.links import BLOCK_BYTES, NUM_SLOTS, Digest, Header, Kind, LinkTimeout, LocalLink, Slots, WeightsError
from llamarl.ddma.plan import Piece
from llamarl.models.sharding import Box

BUCKET_BYTES = 16 << 20
MAX_RETRIES = 3


# -- what a link carries ---------------------------------------------------------------------------------------------------


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

    def parts(self, flat: Tensor) -> list[Tensor]:
        """The bytes of each move in the link's bytes `flat`, where neighbours without padding between them are one on a CPU."""
        runs: list[list[int]] = []
        for move in self.moves:
            if runs and runs[-1][1] == move.start and not flat.is_cuda:
                runs[-1][1] = move.end
            else:
                runs.append([move.start, move.end])
        return [flat[a:b] for a, b in runs]


def buckets_of(pieces: list[Piece], limit: int = BUCKET_BYTES) -> list[Bucket]:
    """Lay pieces end to end, each on a cache line, in buckets of about `limit` bytes; a larger piece is cut by rows."""
    buckets, moves, at = [], [], 0
    for piece in pieces:
        for part in _cut(piece, limit):
            if moves and at + part.num_bytes - moves[0].start > limit:
                buckets.append(Bucket(tuple(moves)))
                moves = []
            moves.append(Move(part, at))
            at = aligned(at + part.num_bytes)
    return buckets + [Bucket(tuple(moves))] * bool(moves)


def buckets_of_buffer(of: Buffer, limit: int = BUCKET_BYTES) -> list[Bucket]:
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
    return [Piece(piece.parameter, piece.box.cut(0, r, min(each, rows - r))) for r in range(0, rows, each)]


def size_of(buckets: list[Bucket]) -> int:
    return aligned(buckets[-1].end) if buckets else 0


class Progress:
    """Which buckets of a slot (or of a buffer) are whole."""

    def __init__(self, count: int):
        self._changed = threading.Condition()
        self._done: list[object] = [None] * count
        self._closed = False

    def reset(self) -> None:
        with self._changed:
            self._done = [None] * len(self._done)

    def mark(self, index: int, event: "torch.cuda.Event | None" = None) -> None:
        """event: the copies on a device that must end first."""
        with self._changed:
            self._done[index] = event or True
            self._changed.notify_all()

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


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A sender's end of a link, and which of the sender's bytes it carries. Those with an equal base carry the same ones."""

    link: LocalLink
    base: int
    first_bucket: int  # the number of this link's first bucket among the sender's
    buckets: tuple[Bucket, ...]


def send_version(
    links: list[Outgoing], version: int, slot: int, data: Tensor, progress: Progress, evaluate: bool, canary: Callable[[], dict]
) -> dict[int, int]:
    """Send a version as it becomes whole, until every receiver has it. Returns bucket number -> digest.

    WeightsError after MAX_RETRIES damaged deliveries.
    """
    digests: dict[int, int] = {}

    def send(out: Outgoing, indices: list[int]) -> None:
        for i in indices:
            number, bucket = out.first_bucket + i, out.buckets[i]
            if not progress.wait(number):
                raise WeightsError(f"version {version} was given up: its sender is closing")
            flat = data[out.base : out.base + size_of(out.buckets)]
            if number not in digests:
                state = Digest()
                for part in bucket.parts(flat):
                    state.update(part)
                digests[number] = state.value()
            out.link.send(Header(Kind.BUCKET, version, i, digests[number]))
            out.link.send_bytes(flat[bucket.start : bucket.end])

    for out in links:
        out.link.send(Header(Kind.BEGIN, version, slot, more={"evaluate": evaluate}))
    most = max((len(out.buckets) for out in links), default=0)
    for i in range(most):
        for out in links:
            if i < len(out.buckets):
                send(out, [i])
    end, late = canary(), links
    for _ in range(MAX_RETRIES):
        for out in late:
            out.link.send(Header(Kind.END, version, more=end))
        wrong = [(out, out.link.recv(at_receiver=False).more["wrong"]) for out in late]
        late = [out for out, indices in wrong if indices]
        if not late:
            return digests
        for out, indices in wrong:
            send(out, indices)
    raise WeightsError(f"weights of version {version} arrived damaged {MAX_RETRIES} times on {len(late)} link(s)")


def _use_side_stream(device: torch.device) -> None:
    """This thread's copies should not queue behind the model's kernels."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))


# -- the sender ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Job:
    version: int
    slot: int
    evaluate: bool
    must_differ: bool
    canary: dict | None = None
    sealed: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> dict:
        self.sealed.wait()
        return self.canary


class Publisher:
    """The trainer rank's end. links share `slots`, which hold `num_buckets` buckets."""

    def __init__(self, name: str, slots: Slots, links: list[Outgoing], num_buckets: int, control: Control, deadline_s: float):
        self.name, self._links, self._control, self._deadline_s, self._slots = name, links, control, deadline_s, slots
        self._progress = [Progress(num_buckets) for _ in range(NUM_SLOTS)]
        self._free: queue.Queue[int] = queue.Queue()
        for slot in range(NUM_SLOTS):
            self._free.put(slot)
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._last: dict[int, int] | None = None
        self.committed_version = -1
        self._closing = False
        self.bytes_per_sync = sum(move.piece.num_bytes for out in links for bucket in out.buckets for move in bucket.moves)
        self._thread = control.thread(f"publish-{name}", self._run)

    def publish(
        self,
        version: int,
        stage: Callable[[Tensor, Progress], None],
        *,
        evaluate: bool,
        must_differ: bool,
        canary: Callable[[], dict],
    ) -> float:
        """Stage a version and return; delivery goes on behind. Returns the seconds that the caller was held by staging.

        stage(slot, progress) copies every bucket in and marks it. canary() runs after it, while buckets travel: what the
        receivers are to check the version with. must_differ: the optimizer had a gradient, so a payload equal to the last
        one ends the run with WeightsError. DeadlineExceeded if no slot comes free: the generators have not taken the
        version before last.
        """
        began = time.monotonic()
        job = _Job(version, self._free_slot(version), evaluate, must_differ)
        progress = self._progress[job.slot]
        progress.reset()
        stage(self._slots.tensors[job.slot], progress)
        self._jobs.put(job)
        held_s = time.monotonic() - began
        job.canary = canary()
        job.sealed.set()
        return held_s

    def _free_slot(self, version: int) -> int:
        until = time.monotonic() + self._deadline_s
        while time.monotonic() < until:
            self._control.check()
            try:
                return self._free.get(timeout=0.2)
            except queue.Empty:
                continue
        raise DeadlineExceeded(
            f"trainer on rank {self._control.rank}, step {version}: the generators have not taken earlier weights for "
            f"{self._deadline_s:.0f} s (committed: version {self.committed_version}); a generator hangs, or an evaluation outlasts deadline_s"
        )

    def _run(self) -> None:
        version = -1
        try:
            _use_side_stream(self._slots.tensors[0].device)
            self._introduce()
            while (job := self._jobs.get()) is not None:
                version = job.version
                self._deliver(job)
                self._control.wake()
            self._closing = True
            for out in self._links:
                out.link.send(Header(Kind.CLOSE))
        except WeightsError as error:
            raise WeightsError(f"weights {self.name!r} from rank {self._control.rank}: {error}") from error
        except RuntimeError as error:
            if self._closing:
                return  # that generator has ended already
            text = f"weights {self.name!r} from rank {self._control.rank}, version {version}: a generator's link broke: {error}"
            raise PeerDied(text) from error

    def _introduce(self) -> None:
        try:
            for out in self._links:
                out.link.offer(self._slots, out.base)
        finally:
            self._slots.forget_names()

    def _deliver(self, job: _Job) -> None:
        data, progress = self._slots.tensors[job.slot], self._progress[job.slot]
        digests = send_version(self._links, job.version, job.slot, data, progress, job.evaluate, job.wait)
        if job.must_differ and self.bytes_per_sync and digests == self._last:
            raise WeightsError(
                f"weights of version {job.version} equal those of the version before, after an optimizer step: "
                "the step changed nothing the generator can see (learning rate too small for its dtype?)"
            )
        self._last, self.committed_version = digests, job.version
        self._free.put(job.slot)

    def close(self) -> None:
        """Deliver what is queued, then say that no more comes. Waits a little, not for a peer that is gone."""
        self._jobs.put(None)
        self._thread.join(timeout=3)


# -- the receiver ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Incoming:
    """A receiver's end of a link, what it carries, and who sends it."""

    link: LocalLink
    buckets: tuple[Bucket, ...]
    sender: str  # for errors: "trainer rank 0"


class Staged(NamedTuple):
    """A whole, verified version that waits for `swap`."""

    version: int
    evaluate: bool  # must be loaded and evaluated: not to be overtaken by a newer version
    canary: dict


class _Target:
    """Where the moves of a bucket go in one of the receiver's buffers."""

    def __init__(self, bucket: Bucket, of: Buffer, flat: Tensor):
        self._copies: list[tuple[int, int, Tensor, bool]] = []  # start, end in the link's bytes; where to; whether flat bytes
        self.in_place: Tensor | None = None  # the whole bucket as one range of the buffer
        for move in bucket.moves:
            held = of.held[move.piece.parameter.name]
            at = _flat_start(move.piece.box, held.box)
            size, itemsize = move.piece.num_bytes, held.parameter.dtype.itemsize
            if at is None:
                whole = flat[held.start : held.start + held.num_bytes].view(held.parameter.dtype).view(held.box.lengths)
                self._copies.append((move.start, move.end, whole[move.piece.box.within(held.box)], False))
                continue
            begin = held.start + at * itemsize
            last = self._copies[-1] if self._copies else None
            joins = last and last[3] and not flat.is_cuda and last[1] == move.start
            if joins and last[2].storage_offset() + last[2].numel() == flat.storage_offset() + begin:
                first = last[2].storage_offset() - flat.storage_offset()
                self._copies[-1] = (last[0], move.end, flat[first : begin + size], True)
            else:
                self._copies.append((move.start, move.end, flat[begin : begin + size], True))
        if len(self._copies) == 1 and self._copies[0][3]:
            self.in_place = self._copies[0][2]

    def write(self, source: Tensor, start: int) -> int:
        """Copy the bucket's bytes, which begin at byte `start` of the link's, in; the digest of what is there then."""
        state = Digest()
        for begin, end, target, flat in self._copies:
            data = source[begin - start : end - start]
            if not flat:
                target.copy_(data.view(target.dtype).view(target.shape))
                state.update(target.contiguous().view(-1).view(torch.uint8))
            elif data.data_ptr() == target.data_ptr() or target.is_cuda:
                if data.data_ptr() != target.data_ptr():
                    target.copy_(data)
                state.update(target)
            else:
                for block, new in zip(target.split(BLOCK_BYTES), data.split(BLOCK_BYTES)):
                    block.copy_(new)
                    state.update(block)
        return state.value()


def _flat_start(box: Box, held: Box) -> int | None:
    """Where the box begins in its holder's elements, if it is one run of them; else None."""
    partial = [i for i, (n, m) in enumerate(zip(box.lengths, held.lengths)) if n != m]
    if partial and any(n != 1 for n in box.lengths[: partial[-1]]):
        return None
    at = 0
    for offset, origin, length in zip(box.offsets, held.offsets, held.lengths):
        at = at * length + offset - origin
    return at


class Subscriber:
    """The generator rank's end: receives into the idle buffer, hands it over at `swap`.

    buffers: two that change places at a swap, or one whose content the caller copies out. follower: the link to the
    replica that this one hands its weights on to.
    """

    def __init__(
        self,
        name: str,
        of: Buffer,
        buffers: list[Tensor],
        links: list[Incoming],
        control: Control,
        deadline_s: float,
        follower: Outgoing | None = None,
    ):
        self.name, self._links, self._control, self._deadline_s, self._buffers = name, links, control, deadline_s, buffers
        self._targets = [[[_Target(b, of, flat) for b in incoming.buckets] for incoming in links] for flat in buffers]
        self._idle = 0
        self._state = threading.Condition()
        self._staged: Staged | None = None
        self._receiving: int | None = None  # version; its links that are not whole yet
        self._missing: set[int] = set()
        self._held_from: int | None = None
        self._closing = False
        self._follower, self._forwarding = follower, False
        self._versions: queue.Queue[tuple[int, bool] | None] = queue.Queue()  # for the forwarder
        self._sealed: dict[int, dict] = {}
        if follower:
            self._whole = Progress(len(follower.buckets))
            self._cover = _Cover(links, of, follower.buckets)
            self._forwarder = control.thread(f"forward-{name}", self._forward)
        self._threads = [control.thread(f"subscribe-{name}-{i}", self._run, i) for i in range(len(links))]

    @property
    def staged(self) -> Staged | None:
        """The version that waits for `swap`, or None."""
        return self._staged

    def hold_from(self, version: int) -> None:
        """From now on a staged version >= this one is not overtaken by a newer one until it is swapped."""
        with self._state:
            self._held_from = version

    def swap(self, take: Callable[[Tensor], None]) -> Staged | None:
        """Hand the staged version's buffer [bytes] uint8 to take(). None if there is none.

        With two buffers it stays valid until the next swap; with one, `take` copies it out.
        """
        with self._state:
            if self._staged is None:
                return None
            staged, buffer = self._staged, self._buffers[self._idle]
            take(buffer)
            self._idle, self._staged, self._held_from = (self._idle + 1) % len(self._buffers), None, None
            self._state.notify_all()
        return staged

    def _run(self, index: int) -> None:
        incoming = self._links[index]
        try:
            _use_side_stream(self._buffers[0].device)
            incoming.link.accept()
            while self._receive_version(index, incoming):
                self._control.wake()
        except WeightsError as error:
            where = f"weights {self.name!r} on rank {self._control.rank}, from {incoming.sender}"
            raise WeightsError(f"{where}: {error}; the version in use is unchanged") from error
        except RuntimeError as error:
            if not self._closing:
                raise PeerDied(
                    f"weights {self.name!r} on rank {self._control.rank}: the link from {incoming.sender} broke: {error}"
                ) from error

    def _receive_version(self, index: int, incoming: Incoming) -> bool:
        """One version of one link, from its BEGIN on. False when the sender closes."""
        begin = incoming.link.recv()
        while begin.kind not in (Kind.BEGIN, Kind.CLOSE):
            self._drain(incoming, begin)
            begin = incoming.link.recv()
        if begin.kind == Kind.CLOSE or not self._claim(begin.version, begin.more["evaluate"]):
            if self._follower and index == 0:
                self._versions.put(None)
            return False
        open_ = set(range(len(incoming.buckets)))
        for _ in range(MAX_RETRIES):
            end = self._receive_buckets(index, incoming, begin, open_)
            incoming.link.send(Header(Kind.VERDICT, begin.version, more={"wrong": sorted(open_)}), to_receiver=False)
            if not open_:
                self._complete(index, begin, end.more)
                return True
        raise WeightsError(
            f"buckets {sorted(open_)} of version {begin.version} were absent or damaged {MAX_RETRIES} times"
        )

    def _receive_buckets(self, index: int, incoming: Incoming, begin: Header, open_: set[int]) -> Header:
        """Take in what comes until END; strikes what arrived whole off `open_`."""
        link = incoming.link
        while True:
            try:
                header = link.recv(timeout_s=self._deadline_s)
            except LinkTimeout as error:
                raise WeightsError(
                    f"version {begin.version} stopped on its way with buckets {sorted(open_)} of {len(incoming.buckets)} to come: {error}"
                ) from error
            if header.version == begin.version and header.kind == Kind.END:
                return header
            if header.version != begin.version or header.kind != Kind.BUCKET or header.index not in open_:
                self._drain(incoming, header)
                continue
            bucket, target = incoming.buckets[header.index], self._targets[self._idle][index][header.index]
            place = None
            if link.receives:
                place = target.in_place if target.in_place is not None else self._scratch(bucket)
            data = link.bytes_of(begin.index, bucket.start, bucket.end - bucket.start, place)
            if target.write(data, bucket.start) == header.digest:
                open_.discard(header.index)
                if self._follower:
                    self._cover.arrived(index, header.index, self._whole)

    def _drain(self, incoming: Incoming, header: Header) -> None:
        """Take the bytes of a bucket that is not awaited off the wire."""
        if header.kind == Kind.BUCKET and incoming.link.receives:
            bucket = incoming.buckets[header.index]
            incoming.link.bytes_of(0, 0, bucket.end - bucket.start, self._scratch(bucket))

    def _scratch(self, bucket: Bucket) -> Tensor:
        return torch.empty(bucket.end - bucket.start, dtype=torch.uint8, device=self._buffers[0].device)

    def _claim(self, version: int, evaluate: bool) -> bool:
        """Wait until the idle buffer is this version's: dropping a staged one, unless that must be kept. False when closing."""

        def kept() -> bool:
            s = self._staged
            return s is not None and (s.evaluate or (self._held_from is not None and s.version >= self._held_from))

        with self._state:
            free = lambda: self._receiving is None and not kept() and not self._forwarding  # noqa: E731
            self._state.wait_for(lambda: self._closing or self._receiving == version or free())
            if self._closing:
                return False
            if self._receiving is None:
                self._staged, self._receiving, self._missing = None, version, set(range(len(self._links)))
                if self._follower:
                    self._forwarding = True
                    self._whole.reset()
                    self._cover.reset()
                    self._versions.put((version, evaluate))
            return True

    def _complete(self, index: int, begin: Header, canary: dict) -> None:
        with self._state:
            self._missing.discard(index)
            if not self._missing:
                self._staged = Staged(begin.version, begin.more["evaluate"], canary)
                if self._follower:
                    self._sealed[begin.version] = canary
                self._receiving = None
                self._state.notify_all()

    def _forward(self) -> None:
        out = self._follower
        try:
            _use_side_stream(self._buffers[0].device)
            out.link.offer(Slots([]))
            while (job := self._versions.get()) is not None:
                version, evaluate = job
                data = self._buffers[self._idle]
                send_version([out], version, 0, data, self._whole, evaluate, lambda: self._wait_sealed(version))
                with self._state:
                    self._forwarding = False
                    self._state.notify_all()
            out.link.send(Header(Kind.CLOSE))
        except WeightsError as error:
            raise WeightsError(f"weights {self.name!r} handed on by rank {self._control.rank}: {error}") from error
        except RuntimeError as error:
            if not self._closing:
                raise PeerDied(f"weights {self.name!r}: the link from rank {self._control.rank} to the next replica broke: {error}") from error

    def _wait_sealed(self, version: int) -> dict:
        with self._state:
            self._state.wait_for(lambda: version in self._sealed or self._closing)
            return self._sealed.pop(version, {})

    def close(self) -> None:
        with self._state:
            self._closing = True
            self._state.notify_all()
        if self._follower:
            self._versions.put(None)
            self._whole.close()
        for thread in self._threads:
            thread.join(timeout=2)


class _Cover:
    """Which arrived buckets make which of the follower's buckets whole."""

    def __init__(self, links: list[Incoming], of: Buffer, buckets: tuple[Bucket, ...]):
        self._of, self._links = of, links
        where = {}
        for number, bucket in enumerate(buckets):
            for move in bucket.moves:
                where.setdefault(move.piece.parameter.name, []).append((move.piece.box, number))
        self._adds: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for index, incoming in enumerate(links):
            for i, bucket in enumerate(incoming.buckets):
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
