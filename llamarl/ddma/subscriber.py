"""The generator rank's end of the weights path (see llamarl.ddma.transfer): receive, verify, stage,
hand over, hand on.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from llamarl.comm.control import Control
from llamarl.ddma.copies import Copier
from llamarl.ddma.layout import Buffer
from llamarl.ddma.links import Header, Kind, LocalLink, Slots
from llamarl.ddma.payload import Bucket, Cover, Progress, Target
from llamarl.ddma.transfer import MAX_RETRIES, Outgoing, send_version, step_back
from llamarl.errors import LinkTimeout, PeerDied, WeightsError

# buckets that may arrive before this thread, which works behind the model, comes to look at them
AHEAD = 8


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


class Subscriber:
    """The generator rank's end: receives into the idle buffer, hands it over at `swap`.

    buffers: two that change places at a swap, or one whose content the caller copies out. follower:
    the link to the replica that this one hands its weights on to. in_order: no version is overtaken
    by a newer one before `skip` says so; ranks that share a copy of the model need that, to take
    the same ones.
    """

    def __init__(
        self,
        name: str,
        of: Buffer,
        buffers: list[Tensor],
        links: list[Incoming],
        control: Control,
        timeout_s: float,
        copier: Copier,
        follower: Outgoing | None = None,
        in_order: bool = False,
    ):
        self.name, self._links, self._control, self._timeout_s, self._buffers = (
            name,
            links,
            control,
            timeout_s,
            buffers,
        )
        self._targets = [
            [[Target(b, of, flat) for b in incoming.buckets] for incoming in links]
            for flat in buffers
        ]
        self._copier, self._idle = copier, 0
        self._scratches: dict[tuple[int, int], Tensor] = {}
        self._state = threading.Condition()
        self._staged: Staged | None = None
        self._receiving: int | None = None  # version; its links that are not whole yet
        self._missing: set[int] = set()
        self._newest = (
            -1
        )  # version that has begun to come, though the idle buffer may not be its yet
        self._completed = [-1] * len(links)
        self._in_order, self._closing = in_order, False
        self._follower, self._forwarding = follower, False
        self._versions: queue.Queue[tuple[int, bool, int] | None] = (
            queue.Queue()
        )  # for the forwarder, with the buffer
        self._sealed: dict[int, dict] = {}
        if follower:
            self._whole = Progress(len(follower.buckets))
            self._cover = Cover([incoming.buckets for incoming in links], follower.buckets)
            self._forwarder = control.thread(f"forward-{name}", self._forward)
        self._threads = [
            control.thread(f"subscribe-{name}-{i}", self._run, i) for i in range(len(links))
        ]

    @property
    def staged(self) -> Staged | None:
        """The version that waits for `swap`, or None."""
        return self._staged

    @property
    def overtakable(self) -> bool:
        """Whether a newer version waits for the place of the staged one, which need not be
        evaluated.
        """
        staged = self._staged
        return staged is not None and not staged.evaluate and self._newest > staged.version

    def skip(self, version: int) -> None:
        """Let go of the staged version, if it is this one, for a newer one to come."""
        with self._state:
            if self._staged is not None and self._staged.version == version:
                self._staged = None
                self._state.notify_all()

    def swap(self, take: Callable[[Tensor], None]) -> Staged | None:
        """Hand the staged version's buffer [bytes] uint8 to take(). None if there is none.

        With two buffers it stays valid until the next swap; with one, `take` copies it out.
        """
        with self._state:
            if self._staged is None:
                return None
            staged, buffer = self._staged, self._buffers[self._idle]
            take(buffer)
            self._idle, self._staged = (self._idle + 1) % len(self._buffers), None
            self._state.notify_all()
        return staged

    def _run(self, index: int) -> None:
        incoming = self._links[index]
        try:
            step_back(self._buffers[0].device)
            incoming.link.accept()
            while self._receive_version(index, incoming):
                self._control.wake()
        except WeightsError as error:
            where = f"weights {self.name!r} on rank {self._control.rank}, from {incoming.sender}"
            raise WeightsError(f"{where}: {error}; the version in use is unchanged") from error
        except PeerDied as error:
            if not self._closing:
                where = (
                    f"weights {self.name!r} on rank {self._control.rank}, from {incoming.sender}"
                )
                raise PeerDied(f"{where}: {self._control.gone(error)}", error.ranks) from error

    def _receive_version(self, index: int, incoming: Incoming) -> bool:
        """One version of one link, from its BEGIN on. False when the sender closes.

        Headers of versions that are done with, and those that come twice, are passed over.
        """
        link, wanted = incoming.link, set(range(len(incoming.buckets)))
        version, begin, found = None, {"attempt": -1}, {}
        answered = -1
        while True:
            header = self._next_header(link, version, wanted, len(incoming.buckets))
            if header.kind == Kind.CLOSE:
                return self._end_of_versions(index)
            if header.version <= self._completed[index] or (
                version is not None and header.version != version
            ):
                continue
            attempt = header.more["attempt"]
            if header.kind == Kind.BEGIN and attempt > begin["attempt"]:
                if version is None and not self._claim(header.version, header.more["evaluate"]):
                    return self._end_of_versions(index)
                version, begin = header.version, header.more
                found = self._take_in(index, incoming, begin, version)
            elif header.kind == Kind.END and attempt > answered:
                answered = attempt
                said = (
                    zip(begin["buckets"], header.more["digests"])
                    if attempt == begin["attempt"]
                    else ()
                )  # else BEGIN was lost
                right = {i for i, digest in said if found.get(i) == digest} & wanted
                wanted -= right
                for i in right if self._follower and not link.streams else ():
                    self._cover.arrived(index, i, self._whole)
                verdict = {"wrong": sorted(wanted), "attempt": attempt}
                link.send(Header(Kind.VERDICT, header.version, verdict), to_receiver=False)
                if not wanted:
                    self._complete(version, index, begin["evaluate"], header.more["canary"])
                    return True
                if attempt == MAX_RETRIES - 1:
                    raise WeightsError(
                        f"buckets {sorted(wanted)} of version {header.version} were absent or damaged {MAX_RETRIES} times"
                    )

    def _next_header(
        self, link: LocalLink, version: int | None, wanted: set[int], count: int
    ) -> Header:
        """Waits without end for a new version, and up to the deadline within one."""
        try:
            return link.recv(timeout_s=None if version is None else self._timeout_s)
        except LinkTimeout as error:
            raise WeightsError(
                f"version {version} stopped on its way with buckets {sorted(wanted)} of {count} to come: {error}"
            ) from error

    def _take_in(self, index: int, incoming: Incoming, begin: dict, version: int) -> dict[int, int]:
        """Copy or receive these buckets into the idle buffer; the digest of each as it lies there."""
        link, targets, order = incoming.link, self._targets[self._idle][index], begin["buckets"]

        def fetch(n: int):
            """What waits for the bytes of the n-th, and for the digest where it comes with them."""
            i = order[n]
            bucket, place = incoming.buckets[i], None
            if link.streams:
                place = (
                    targets[i].in_place
                    if targets[i].in_place is not None
                    else self._scratch(index, n % AHEAD, bucket)
                )
            ready = begin["first"] + i + 1 if begin["staging"] else 0
            said = link.fetch_digest() if self._follower else None
            return link.fetch(
                begin["slot"], bucket.start, bucket.end - bucket.start, place, ready
            ), said

        found: dict[int, int] = {}

        def hand_on(n: int) -> None:
            """At once what is known to be right; else it is when END has said so. A digest comes
            behind the bucket after its own.
            """
            said = coming[n][1]
            if said and said(self._timeout_s) == found[order[n]]:
                self._cover.arrived(index, order[n], self._whole)

        coming: list = [fetch(n) for n in range(min(AHEAD - 1, len(order)))]
        for n, i in enumerate(order):
            if n + AHEAD - 1 < len(order):
                coming.append(fetch(n + AHEAD - 1))
            try:
                data = coming[n][0](self._timeout_s)
            except LinkTimeout as error:
                raise WeightsError(
                    f"version {version} stopped on its way with buckets {order[n:]} of {len(incoming.buckets)} to come: {error}"
                ) from error
            found[i] = targets[i].write(data, self._copier)
            if n:
                hand_on(n - 1)
        if order:
            hand_on(len(order) - 1)
        return found

    def _end_of_versions(self, index: int) -> bool:
        if self._follower and index == 0:
            self._versions.put(None)
        return False

    def _scratch(self, index: int, which: int, bucket: Bucket) -> Tensor:
        """One of a link's places for buckets that are scattered from there; kept, for fresh memory
        is slow.
        """
        if (index, which) not in self._scratches:
            largest = max(b.end - b.start for b in self._links[index].buckets)
            self._scratches[index, which] = torch.empty(
                largest, dtype=torch.uint8, device=self._buffers[0].device
            )
        return self._scratches[index, which][: bucket.end - bucket.start]

    def _claim(self, version: int, evaluate: bool) -> bool:
        """Wait until the idle buffer is this version's: dropping a staged one, unless that must be
        kept. False when closing.
        """

        def free() -> bool:
            kept = self._staged is not None and (self._staged.evaluate or self._in_order)
            return self._receiving is None and not kept and not self._forwarding

        with self._state:
            self._newest = max(self._newest, version)
            self._state.wait_for(lambda: self._closing or self._receiving == version or free())
            if self._closing:
                return False
            if self._receiving is None:
                self._staged, self._receiving, self._missing = (
                    None,
                    version,
                    set(range(len(self._links))),
                )
                if self._follower:
                    self._forwarding = True
                    self._whole.reset()
                    self._cover.reset()
                    self._versions.put((version, evaluate, self._idle))
            return True

    def _complete(self, version: int, index: int, evaluate: bool, canary: dict) -> None:
        self._completed[index] = version
        with self._state:
            self._missing.discard(index)
            if not self._missing:
                self._staged = Staged(version, evaluate, canary)
                if self._follower:
                    self._sealed[version] = canary
                self._receiving = None
                self._state.notify_all()

    def _forward(self) -> None:
        out = self._follower
        try:
            step_back(self._buffers[0].device)
            out.link.offer(Slots(self._buffers))
            while (job := self._versions.get()) is not None:
                version, evaluate, buffer = job  # which may be the live one by now
                send_version(
                    [out],
                    version,
                    buffer,
                    self._buffers[buffer],
                    self._whole,
                    evaluate,
                    lambda: self._wait_sealed(version),
                    self._copier,
                )
                with self._state:
                    self._forwarding = False
                    self._state.notify_all()
            out.link.send(Header(Kind.CLOSE))
        except WeightsError as error:
            raise WeightsError(
                f"weights {self.name!r} handed on by rank {self._control.rank}: {error}"
            ) from error
        except PeerDied as error:
            if not self._closing:
                text = f"weights {self.name!r} handed on by rank {self._control.rank}: {self._control.gone(error)}"
                raise PeerDied(text, error.ranks) from error

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
