"""Weights on their way: stage, move, verify, commit.

    Publisher (trainer rank)                                       Subscriber (generator rank)
    publish(v): copy own shard into a free slot  <- the only stall
      thread:
        BEGIN v, slot                          ------------------>  a thread a link: claim the idle buffer for v
        the bytes, where they are sent         ------------------>  copy or receive them as they are staged, digest what arrived
        digest them too; END, digests, canary  ------------------>  compare
                                               <------------------  VERDICT: buckets that are wrong (BEGIN again, with these)
      all links agree: v is committed there, the slot free          all links whole: staged = v, swapped between two chunks

    thread      consumes           waits for                       unblocked by
    publisher   queued versions    each link's verdict             the subscriber; its death
    subscriber  headers            the last staged version's swap  swap() or skip(), if it must be kept
    forwarder   a claimed version  the next whole bucket           the subscriber's threads

Two slots at the source. At the destination one idle buffer beside the live weights: on a CPU they
change places at a swap, on a GPU the idle one is copied over the live one. A reader never sees a
half-written version.

A replica that others depend on hands each bucket on as soon as it is whole (Plan's chain).
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llamarl.comm.control import Control
from llamarl.ddma.copies import Copier
from llamarl.ddma.links import NUM_SLOTS, Header, Kind, LocalLink, Slots
from llamarl.ddma.payload import Bucket, Progress, size_of
from llamarl.errors import PeerDied, TimedOut, WeightsError

MAX_RETRIES = 3


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A sender's end of a link, and which of the sender's bytes it carries. Those with an equal
    base carry the same ones.

    handed_on: the receiver hands each bucket on as soon as it knows it to be right, and is told its
    digest with it.
    """

    link: LocalLink
    base: int
    first_bucket: int  # the number of this link's first bucket among the sender's
    buckets: tuple[Bucket, ...]
    handed_on: bool = False


def send_version(
    links: list[Outgoing],
    version: int,
    slot: int,
    data: Tensor,
    progress: Progress,
    evaluate: bool,
    canary: Callable[[], dict],
    copier: Copier,
    staged: Callable[[], None] | None = None,
) -> dict[int, int]:
    """Send a version as it becomes whole, until every receiver has it. Returns bucket number ->
    digest.

    staged: waits until all is staged; given, receivers that read this memory begin before, as its
    counter goes up. Without it they begin when all is whole. Bytes that are sent go bucket by
    bucket. WeightsError after MAX_RETRIES damaged deliveries.
    """
    digests: dict[int, int] = {}
    end: dict = {}
    late = [(out, list(range(len(out.buckets)))) for out in links]
    if staged is None and not all(out.link.streams for out in links):
        for out, indices in late:
            _await(progress, out, indices, version)
    for attempt in range(MAX_RETRIES):
        begin = {
            "slot": slot,
            "evaluate": evaluate,
            "staging": staged is not None and not attempt,
            "attempt": attempt,
        }
        for out, indices in late:
            out.link.send(
                Header(Kind.BEGIN, version, begin | {"buckets": indices, "first": out.first_bucket})
            )
        if staged is not None and not all(out.link.streams for out in links):
            staged()  # the digests would share the core with the staging
        sent = []
        for place in range(max((len(indices) for _, indices in late), default=0)):
            for out, indices in late:
                if place < len(indices):
                    sent += _send_bucket(
                        out, indices[place], version, data, progress, digests, copier
                    )
        for waits in filter(None, sent):
            waits()
        end = end if attempt else canary()
        for out, indices in late:
            found = [digests[out.first_bucket + i] for i in indices]
            out.link.send(
                Header(Kind.END, version, {"digests": found, "canary": end, "attempt": attempt})
            )
        verdicts = [(out, _verdict(out.link, version, attempt)) for out, _ in late]
        late = [(out, indices) for out, indices in verdicts if indices]
        if not late:
            return digests
    damaged = " and ".join(str(indices) for _, indices in late)
    raise WeightsError(
        f"buckets {damaged} of version {version} were absent or damaged {MAX_RETRIES} times"
    )


def _verdict(link: LocalLink, version: int, attempt: int) -> list[int]:
    """The buckets that the receiver says are wrong."""
    while True:
        header = link.recv(at_receiver=False)
        if header.kind == Kind.VERDICT and (header.version, header.more["attempt"]) == (
            version,
            attempt,
        ):
            return header.more["wrong"]


def _await(progress: Progress, out: Outgoing, indices: list[int], version: int) -> None:
    for i in indices:
        if not progress.wait(out.first_bucket + i):
            raise WeightsError(f"version {version} was given up: its sender is closing")


def _send_bucket(
    out: Outgoing,
    index: int,
    version: int,
    data: Tensor,
    progress: Progress,
    digests: dict[int, int],
    copier: Copier,
) -> list[Callable[[], None] | None]:
    """Send a bucket once it is whole, and digest it, unless its copying did, on its way. Returns
    what waits until it has gone.
    """
    _await(progress, out, [index], version)
    number, bucket = out.first_bucket + index, out.buckets[index]
    flat = data[out.base : out.base + size_of(out.buckets)]
    waits = out.link.send_bytes(flat[bucket.start : bucket.end])
    if number not in digests:
        known = progress.digest(number)
        digests[number] = bucket.digest(flat, copier) if known is None else known
    return [waits, out.link.send_digest(digests[number])] if out.handed_on else [waits]


NICE = 10  # of threads that work behind the model: a tenth of a core that both want


def give_way() -> None:
    """This thread, and those that it starts, work behind the model: they give way where there are
    too few cores.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    except (OSError, AttributeError):
        pass  # no such thing on this system: all threads are equal


def step_back(device: torch.device) -> None:
    """This thread gives way, and its copies do not queue behind the model's kernels."""
    give_way()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))


@dataclass(slots=True)
class _Job:
    version: int
    slot: int
    evaluate: bool
    must_differ: bool
    staged: threading.Event = field(default_factory=threading.Event)
    canary: dict | None = None
    sealed: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> dict:
        self.sealed.wait()
        return self.canary


class Publisher:
    """The trainer rank's end. links share `slots`, which hold `num_buckets` buckets.

    streams: a version is on its way while it is staged; else it waits for that, where both would
    share a core.
    """

    def __init__(
        self,
        name: str,
        slots: Slots,
        links: list[Outgoing],
        num_buckets: int,
        control: Control,
        timeout_s: float,
        copier: Copier,
        streams: bool = True,
    ):
        self.name, self._links, self._control, self._timeout_s, self._slots = (
            name,
            links,
            control,
            timeout_s,
            slots,
        )
        self._copier, self._streams = copier, streams and bool(slots.counters)
        counters = slots.counters or [None] * NUM_SLOTS
        self._progress = [Progress(num_buckets, counter) for counter in counters]
        self._free: queue.Queue[int] = queue.Queue()
        for slot in range(NUM_SLOTS):
            self._free.put(slot)
        self._peers = {out.link.peer for out in links if out.link.peer is not None}
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._last: dict[int, int] | None = None
        self.committed_version = -1
        self._closing = False
        self.bytes_per_sync = sum(
            move.piece.num_bytes for out in links for bucket in out.buckets for move in bucket.moves
        )
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
        """Stage a version and return; delivery goes on behind. Returns the seconds that the caller
        was held by staging.

        stage(slot, progress) copies every bucket in and marks it. canary() runs after it, while
        buckets travel: what the receivers are to check the version with. must_differ: the optimizer
        had a gradient, so a payload equal to the last one ends the run with WeightsError. TimedOut
        if no slot comes free: the generators have not taken the version before last. After a stop
        request they take none, and once a rank is lost nothing can be sent: a version without a
        slot is then given up, with canary() called all the same, for what is collective in it.
        """
        began = time.monotonic()
        slot = self._free_slot(version)
        if slot is None:
            canary()  # the other trainer ranks take part in it, and may not know yet
            return time.monotonic() - began
        job = _Job(version, slot, evaluate, must_differ)
        progress = self._progress[job.slot]
        progress.reset()
        self._jobs.put(job)
        stage(self._slots.tensors[job.slot], progress)
        job.staged.set()
        held_s = time.monotonic() - began
        job.canary = canary()
        job.sealed.set()
        return held_s

    def has_room(self) -> bool:
        """Whether a slot is free: `publish` then does not wait."""
        return not self._free.empty()

    def _free_slot(self, version: int) -> int | None:
        """None if none will come free: a stop was asked for, or a rank is lost without which no
        version is delivered.
        """
        until = time.monotonic() + self._timeout_s
        while time.monotonic() < until:
            self._control.check()
            try:
                return self._free.get(timeout=0.2)
            except queue.Empty:
                if self._control.stopping or self._is_cut_off():
                    return None
        raise TimedOut(
            f"trainer on rank {self._control.rank}, step {version}: the generators have not taken earlier weights for "
            f"{self._timeout_s:.0f} s (committed: version {self.committed_version}); a generator hangs, or an evaluation outlasts timeout_s"
        )

    def _is_cut_off(self) -> bool:
        loss = self._control.loss
        return loss is not None and (
            not self._thread.is_alive() or bool(getattr(loss, "ranks", set()) & self._peers)
        )

    def _run(self) -> None:
        version = -1
        try:
            step_back(self._slots.tensors[0].device)
            self._introduce()
            while (job := self._jobs.get()) is not None:
                version = job.version
                self._deliver(job)
                self._control.wake()
            self._closing = True
            for out in self._links:
                out.link.send(Header(Kind.CLOSE))
        except WeightsError as error:
            raise WeightsError(
                f"weights {self.name!r} from rank {self._control.rank}: {error}"
            ) from error
        except PeerDied as error:
            if self._closing:
                return  # that generator has ended already
            text = f"weights {self.name!r} from rank {self._control.rank}, version {version}: {self._control.gone(error)}"
            raise PeerDied(text, error.ranks) from error

    def _introduce(self) -> None:
        try:
            for out in self._links:
                out.link.offer(self._slots, out.base)
        finally:
            self._slots.close_files()

    def _deliver(self, job: _Job) -> None:
        data, progress = self._slots.tensors[job.slot], self._progress[job.slot]
        if not self._streams:
            job.staged.wait()
        staged = job.staged.wait if self._streams else None
        digests = send_version(
            self._links,
            job.version,
            job.slot,
            data,
            progress,
            job.evaluate,
            job.wait,
            self._copier,
            staged,
        )
        if job.must_differ and self.bytes_per_sync and digests == self._last:
            raise WeightsError(
                f"weights of version {job.version} equal those of the version before, after an optimizer step: "
                "the step changed nothing the generator can see (learning rate too small for its dtype?)"
            )
        self._last, self.committed_version = digests, job.version
        self._free.put(job.slot)

    def close(self) -> None:
        """Deliver what is queued, then say that no more comes. Waits a little, not for a peer that
        is gone.
        """
        self._jobs.put(None)
        self._thread.join(timeout=3)
