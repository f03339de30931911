"""The generator rank's end of the weights path (see llamarl.ddma.transfer): receive, verify, stage, hand over, hand on."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Callable, NamedTuple

import torch
from torch import Tensor

from llamarl.control import Control, PeerDied
from llamarl.ddma.layout import Buffer
from llamarl.ddma.links import Header, Kind, LinkTimeout, LocalLink, Slots, WeightsError
from llamarl.ddma.payload import Bucket, Cover, Progress, Target
from llamarl.ddma.transfer import MAX_RETRIES, Outgoing, send_version, use_side_stream


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

    buffers: two that change places at a swap, or one whose content the caller copies out. follower: the link to the
    replica that this one hands its weights on to. in_order: no version is overtaken by a newer one, whether it must be
    evaluated or not; ranks that share a copy of the model need that, to take the same ones.
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
        in_order: bool = False,
    ):
        self.name, self._links, self._control, self._deadline_s, self._buffers = name, links, control, deadline_s, buffers
        self._targets = [[[Target(b, of, flat) for b in incoming.buckets] for incoming in links] for flat in buffers]
        self._idle = 0
        self._state = threading.Condition()
        self._staged: Staged | None = None
        self._receiving: int | None = None  # version; its links that are not whole yet
        self._missing: set[int] = set()
        self._in_order, self._closing = in_order, False
        self._follower, self._forwarding = follower, False
        self._versions: queue.Queue[tuple[int, bool, int] | None] = queue.Queue()  # for the forwarder, with the buffer
        self._sealed: dict[int, dict] = {}
        if follower:
            self._whole = Progress(len(follower.buckets))
            self._cover = Cover([incoming.buckets for incoming in links], follower.buckets)
            self._forwarder = control.thread(f"forward-{name}", self._forward)
        self._threads = [control.thread(f"subscribe-{name}-{i}", self._run, i) for i in range(len(links))]

    @property
    def staged(self) -> Staged | None:
        """The version that waits for `swap`, or None."""
        return self._staged

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
            use_side_stream(self._buffers[0].device)
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
        raise WeightsError(f"buckets {sorted(open_)} of version {begin.version} were absent or damaged {MAX_RETRIES} times")

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

        def free() -> bool:
            kept = self._staged is not None and (self._staged.evaluate or self._in_order)
            return self._receiving is None and not kept and not self._forwarding

        with self._state:
            self._state.wait_for(lambda: self._closing or self._receiving == version or free())
            if self._closing:
                return False
            if self._receiving is None:
                self._staged, self._receiving, self._missing = None, version, set(range(len(self._links)))
                if self._follower:
                    self._forwarding = True
                    self._whole.reset()
                    self._cover.reset()
                    self._versions.put((version, evaluate, self._idle))
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
            use_side_stream(self._buffers[0].device)
            out.link.offer(Slots(self._buffers))
            while (job := self._versions.get()) is not None:
                version, evaluate, buffer = job  # which may be the live one by now
                send_version(
                    [out], version, buffer, self._buffers[buffer], self._whole, evaluate, lambda: self._wait_sealed(version)
                )
                with self._state:
                    self._forwarding = False
                    self._state.notify_all()
            out.link.send(Header(Kind.CLOSE))
        except WeightsError as error:
            raise WeightsError(f"weights {self.name!r} handed on by rank {self._control.rank}: {error}") from error
        except RuntimeError as error:
            if not self._closing:
                raise PeerDied(
                    f"weights {self.name!r}: the link from rank {self._control.rank} to the next replica broke: {error}"
                ) from error

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
