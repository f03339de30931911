"""Weights on their way: stage, move, verify, commit.

    Publisher (trainer rank)                                    Subscriber (generator rank)
    publish(v): copy own shard into a free slot   <- the only trainer stall
      thread: checksum each link's ranges
        begin(v, slot, checksums)           ------------------>   thread: copy or receive the ranges into the idle buffer
        payload, where memory is not shared ------------------>   verify every range
                                            <------------------   ok, or which ranges are wrong (sent again)
      all links ok: v is committed, the slot free                 staged = v; the generator swaps between two chunks

    thread      consumes         waits for                        unblocked by
    publisher   queued versions  each link's answer               the subscriber's verdict; its death
    subscriber  begin messages   the last staged version's swap   swap(), if that version must be evaluated

Two slots at the source, two buffers at the destination (live and idle), and swap exchanges them: at most one extra copy of
a shard on each side, and a reader never sees a half-written version.

How bytes cross is the transport's business: `local` (one process), `shm` (one host, the slots lie in shared memory that the
subscriber reads), `gloo` (p2p). Others join by giving `read`.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import socket
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.control import Control, DeadlineExceeded, PeerDied
from llamarl.ddma.plan import Range
from llamarl.p2p import recv_message, recv_tensor, send_message, send_tensor

NUM_SLOTS = 2
MAX_RETRIES = 3
BLOCK_BYTES = 1 << 18  # a checksum's working set stays in cache
_TO_SUBSCRIBER, _TO_PUBLISHER, _PAYLOAD = 1, 2, 3  # tags
SHM_DIR = Path("/dev/shm")


def checksum(flat: Tensor) -> int:
    """64-bit checksum of a contiguous uint8 tensor: position-weighted sum of its words, so that swaps show too."""
    whole = flat.numel() // 8 * 8
    aligned = flat.storage_offset() % 8 == 0  # a range of an odd shard may start anywhere
    per_block = min(BLOCK_BYTES, whole) // 8
    weights = torch.arange(1, per_block + 1).mul_(2).sub_(1)  # odd: no bit of a word is lost
    total = 0
    for i, block in enumerate(flat[:whole].split(BLOCK_BYTES)):
        words = (block if aligned else block.clone()).view(torch.int64)
        total += int((words * weights[: words.numel()]).sum()) * (2 * i + 1)
    for byte in flat[whole:].tolist():
        total = total * 257 + byte + 1
    return total & ((1 << 64) - 1)


class WeightsError(RuntimeError):
    """A version could not be delivered, or is not what it should be; the old one still serves."""


@dataclass(frozen=True, slots=True)
class Begin:
    """What a publisher says before a version's bytes. JSON on the wire."""

    version: int
    slot: int
    evaluate: bool  # must be loaded and evaluated: not to be overtaken by a newer version
    checksums: list[int]  # of each range of the link's plan


# -- messages of a link: in one process a pair of queues, across ranks p2p ----------------------------------------------


class LocalLink:
    """Both ends in one process; the subscriber reads the publisher's slots in place."""

    transport = "local"

    def __init__(self):
        self._queues = (queue.Queue(), queue.Queue())
        self.slots: list[Tensor] = []

    def offer_slots(self, slots: list[Tensor], paths: list[str]) -> None:
        self.slots = slots

    def accept_slots(self, size_bytes: int) -> None:
        return None

    def send(self, message: dict | None, to_subscriber: bool) -> None:
        self._queues[to_subscriber].put(message)

    def recv(self, at_subscriber: bool) -> dict | None:
        return self._queues[at_subscriber].get()

    def send_payload(self, slot: Tensor, ranges: tuple[Range, ...]) -> None:
        return None

    def read(self, begin: Begin, into: Tensor, ranges: tuple[Range, ...]) -> None:
        slot = self.slots[begin.slot]
        for r in ranges:
            into[r.destination_start : r.destination_start + r.size].copy_(slot[r.source_start : r.source_start + r.size])


class RankLink:
    """Ends on two ranks: messages by p2p, bytes by p2p (`gloo`) or through shared memory (`shm`)."""

    def __init__(self, peer: int, group: dist.ProcessGroup, transport: str):
        self.peer, self.transport, self._group = peer, transport, group
        self._slots: list[Tensor] = []

    def offer_slots(self, slots: list[Tensor], paths: list[str]) -> None:
        self.send({"slots": paths if self.transport == "shm" else []}, to_subscriber=True)
        if self.transport == "shm":
            self.recv(at_subscriber=False)  # mapped: the files may lose their names, so that no crash leaves them behind

    def accept_slots(self, size_bytes: int) -> None:
        for path in self.recv(at_subscriber=True)["slots"]:
            self._slots.append(_map_shared(path, size_bytes, create=False))
        if self._slots:
            self.send({}, to_subscriber=False)

    def send(self, message: dict | None, to_subscriber: bool) -> None:
        tag = _TO_SUBSCRIBER if to_subscriber else _TO_PUBLISHER
        send_message(json.dumps(message).encode(), self.peer, self._group, tag)

    def recv(self, at_subscriber: bool) -> dict | None:
        return json.loads(recv_message(self.peer, self._group, _TO_SUBSCRIBER if at_subscriber else _TO_PUBLISHER))

    def send_payload(self, slot: Tensor, ranges: tuple[Range, ...]) -> None:
        if self.transport == "gloo":
            for r in ranges:
                send_tensor(slot[r.source_start : r.source_start + r.size], self.peer, self._group, _PAYLOAD)

    def read(self, begin: Begin, into: Tensor, ranges: tuple[Range, ...]) -> None:
        for r in ranges:
            target = into[r.destination_start : r.destination_start + r.size]
            if self.transport == "gloo":
                recv_tensor(target, self.peer, self._group, _PAYLOAD)
            else:
                target.copy_(self._slots[begin.slot][r.source_start : r.source_start + r.size])


Link = LocalLink | RankLink


def _map_shared(path: str, size_bytes: int, create: bool) -> Tensor:
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
    fd = os.open(path, flags, 0o600)
    try:
        if create:
            os.posix_fallocate(fd, 0, max(size_bytes, 1))  # fails here, not with a bus error later
        mapped = mmap.mmap(fd, max(size_bytes, 1))
    finally:
        os.close(fd)
    return torch.frombuffer(mapped, dtype=torch.uint8)[:size_bytes]


def shared_slots(size_bytes: int) -> tuple[list[Tensor], list[str]]:
    """Slots in shared memory and their files. WeightsError with the alternative if there is no room."""
    slots, paths = [], []
    for _ in range(NUM_SLOTS):
        path = tempfile.mktemp(prefix=f"llamarl-{os.getpid()}-", dir=SHM_DIR)
        try:
            slots.append(_map_shared(path, size_bytes, create=True))
        except OSError as error:
            raise WeightsError(
                f"no shared memory for {size_bytes:,} bytes of weights ({error}); set weights.transport=gloo"
            ) from error
        paths.append(path)
    return slots, paths


def private_slots(size_bytes: int) -> tuple[list[Tensor], list[str]]:
    return [torch.empty(size_bytes, dtype=torch.uint8) for _ in range(NUM_SLOTS)], []


def host_id() -> str:
    """Equal on ranks that share memory files."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


# -- the two ends --------------------------------------------------------------------------------------------------------


class Publisher:
    """The trainer rank's end.

    links: (link, ranges) for each generator rank. `stage(flat uint8 slot)` copies the rank's shard in.
    """

    def __init__(
        self, name: str, size_bytes: int, links: list[tuple[Link, tuple[Range, ...]]], control: Control, deadline_s: float
    ):
        self.name, self._links, self._control, self._deadline_s = name, links, control, deadline_s
        shared = any(link.transport == "shm" for link, _ in links)
        self._slots, self._paths = shared_slots(size_bytes) if shared else private_slots(size_bytes)
        self._free: queue.Queue[int] = queue.Queue()
        for slot in range(NUM_SLOTS):
            self._free.put(slot)
        self._jobs: queue.Queue[tuple[int, int, bool, bool] | None] = queue.Queue()
        self._last: list[list[int]] | None = None
        self.committed_version = -1
        self._closing = False
        self.bytes_per_sync = sum(r.size for _, ranges in links for r in ranges)
        self._thread = control.thread(f"publish-{name}", self._run)

    def publish(self, version: int, stage: Callable[[Tensor], None], *, evaluate: bool, must_differ: bool) -> float:
        """Stage version `version` and return; delivery goes on behind. Returns the seconds that the caller was held.

        must_differ: the optimizer had a gradient, so a payload equal to the last one ends the run with WeightsError.
        DeadlineExceeded if no slot comes free: the generators have not taken the version before last.
        """
        began = time.monotonic()
        slot = self._free_slot(version)
        stage(self._slots[slot])
        self._jobs.put((version, slot, evaluate, must_differ))
        return time.monotonic() - began

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
            self._introduce()
            while (job := self._jobs.get()) is not None:
                version = job[0]
                self._deliver(*job)
                self._control.wake()
            self._closing = True
            for link, _ in self._links:
                link.send(None, to_subscriber=True)
        except WeightsError:
            raise
        except RuntimeError as error:
            if self._closing:
                return  # that generator has ended already
            text = f"weights {self.name!r} from rank {self._control.rank}, version {version}: a generator's link broke: {error}"
            raise PeerDied(text) from error

    def _introduce(self) -> None:
        try:
            for link, _ in self._links:
                link.offer_slots(self._slots, self._paths)
        finally:
            for path in self._paths:
                os.unlink(path)

    def _deliver(self, version: int, slot: int, evaluate: bool, must_differ: bool) -> None:
        data = self._slots[slot]
        sums = [[checksum(data[r.source_start : r.source_start + r.size]) for r in ranges] for _, ranges in self._links]
        if must_differ and self.bytes_per_sync and sums == self._last:
            raise WeightsError(
                f"weights of version {version} equal those of the version before, after an optimizer step: "
                "the step changed nothing the generator can see (learning rate too small for its dtype?)"
            )
        open_ = list(zip(self._links, sums))
        for attempt in range(MAX_RETRIES):
            for (link, ranges), link_sums in open_:
                link.send({"version": version, "slot": slot, "evaluate": evaluate, "checksums": link_sums}, to_subscriber=True)
                link.send_payload(data, ranges)
            wrong = [((link, ranges), s) for (link, ranges), s in open_ if not link.recv(at_subscriber=False)["ok"]]
            if not wrong:
                break
            open_ = wrong
        else:
            raise WeightsError(
                f"weights of version {version} arrived damaged {MAX_RETRIES} times on {len(open_)} link(s) of rank {self._control.rank}"
            )
        self._last, self.committed_version = sums, version
        self._free.put(slot)

    def close(self) -> None:
        """Deliver what is queued, then say that no more comes. Waits a little, not for a peer that is gone."""
        self._jobs.put(None)
        self._thread.join(timeout=3)


class Subscriber:
    """The generator rank's end: receives into the idle buffer, hands it over at `swap`."""

    def __init__(
        self, name: str, size_bytes: int, links: list[tuple[Link, tuple[Range, ...]]], source_bytes: list[int], control: Control
    ):
        self.name, self._links, self._control = name, links, control
        self._buffers = [torch.empty(size_bytes, dtype=torch.uint8) for _ in range(2)]
        self._idle = 0
        self._state = threading.Condition()
        self._staged: tuple[int, bool] | None = None  # version, evaluate
        self._closing = False
        self._source_bytes = source_bytes
        self._thread = control.thread(f"subscribe-{name}", self._run)

    @property
    def staged(self) -> tuple[int, bool] | None:
        """(version, whether it must be evaluated) that waits for `swap`, or None."""
        return self._staged

    def swap(self) -> tuple[int, bool, Tensor] | None:
        """Take the staged version: (version, evaluate, its buffer [bytes] uint8). None if there is none.

        The buffer stays valid until the next swap; the previous one becomes the idle buffer and is overwritten.
        """
        with self._state:
            if self._staged is None:
                return None
            version, evaluate = self._staged
            buffer = self._buffers[self._idle]
            self._idle, self._staged = 1 - self._idle, None
            self._state.notify_all()
        return version, evaluate, buffer

    def _run(self) -> None:
        try:
            for (link, _), size in zip(self._links, self._source_bytes):
                link.accept_slots(size)
            while self._receive_version():
                self._control.wake()
        except WeightsError:
            raise
        except RuntimeError as error:
            if not self._closing:
                raise PeerDied(
                    f"weights {self.name!r} on rank {self._control.rank}: the trainer's link broke: {error}"
                ) from error

    def _receive_version(self) -> bool:
        version, evaluate = -1, False
        for at, (link, ranges) in enumerate(self._links):
            message = link.recv(at_subscriber=True)
            if message is None:
                for other, _ in self._links[at + 1 :]:  # their farewells, so that no source waits for this end
                    other.recv(at_subscriber=True)
                return False
            begin = Begin(**message)
            if version == -1:
                self._claim_idle_buffer()
            elif begin.version != version:
                raise WeightsError(f"shards of versions {version} and {begin.version} came together")
            version, evaluate = begin.version, begin.evaluate
            self._receive_shard(link, ranges, begin)
        with self._state:
            self._staged = (version, evaluate)
        return True

    def _claim_idle_buffer(self) -> None:
        """Drop a staged version that a newer one overtakes, unless it is still to be evaluated."""
        with self._state:
            self._state.wait_for(lambda: self._closing or self._staged is None or not self._staged[1])
            self._staged = None

    def _receive_shard(self, link: Link, ranges: tuple[Range, ...], begin: Begin) -> None:
        into = self._buffers[self._idle]
        for _ in range(MAX_RETRIES):
            link.read(begin, into, ranges)
            sums = [checksum(into[r.destination_start : r.destination_start + r.size]) for r in ranges]
            wrong = [i for i, (a, b) in enumerate(zip(sums, begin.checksums)) if a != b]
            link.send({"ok": not wrong, "wrong": wrong}, to_subscriber=False)
            if not wrong:
                return
            message = link.recv(at_subscriber=True)
            if message is None:
                break
            begin = Begin(**message)
        raise WeightsError(f"weights of version {begin.version} arrived damaged {MAX_RETRIES} times; version in use is unchanged")

    def close(self) -> None:
        with self._state:
            self._closing = True
            self._state.notify_all()
        self._thread.join(timeout=2)
