"""Forwarder: sends on what a generator rank receives, to the same part of another replica."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

from torch import Tensor

from llamarl.ddma.links import Header, HeaderKind, Slots
from llamarl.ddma.payload import Bucket, BucketProgress
from llamarl.ddma.protocol import (
    LinkContext,
    Outgoing,
    QueuedVersion,
    send_version,
    work_behind_the_model,
)
from llamarl.errors import PeerDied, WeightsError
from llamarl.models.sharding import Box, overlap

_Arrival = tuple[int, int]  # a link of the receiver's, and a bucket of what it carries


class Forwarder:
    """Sends each version out of the receiver's own buffers, in a thread of its own.

    A bucket goes as soon as it and those before it are there, and so before the version is whole.
    arriving: what each of the receiver's links carries; on_sent() is called when the other replica
    has a version, and its buffer may be written again.
    """

    def __init__(
        self,
        context: LinkContext,
        out: Outgoing,
        buffers: list[Tensor],
        *,
        arriving: list[tuple[Bucket, ...]],
        on_sent: Callable[[], None],
    ):
        self._context = context
        self._out = out
        self._buffers = buffers
        self._on_sent = on_sent
        self._progress = BucketProgress()
        self._origins = _origins(arriving, out.buckets)
        self._lock = threading.Lock()
        self._arrived: set[_Arrival] = set()
        self._awaited: deque[set[_Arrival]] = deque()
        self._versions: queue.Queue[QueuedVersion | None] = queue.Queue()
        self._current: QueuedVersion | None = None
        self._closing = False
        context.control.thread(f"forward-{context.name}", self._run)

    def begin(self, version: int, buffer: int, *, must_load: bool, evaluate: bool) -> None:
        """Take up a version that begins to come into the buffer with this number. The last one has
        been sent.
        """
        self._progress.reset()
        self._arrived = set()
        self._awaited = deque(self._origins)
        self._current = QueuedVersion(
            version=version,
            must_load=must_load,
            evaluate=evaluate,
            slot=buffer,
            data=self._buffers[buffer],
            progress=self._progress,
        )
        self._versions.put(self._current)

    def arrived(self, link: int, bucket: int) -> None:
        """Note that a bucket of this link of the receiver's is in its place."""
        with self._lock:
            self._arrived.add((link, bucket))
            while self._awaited and self._awaited[0] <= self._arrived:
                self._awaited.popleft()
                self._progress.mark()

    def repairs(self) -> None:
        """Note that some of what has arrived was damaged, and comes again."""
        self._begun().was_repaired = True

    def seal(self, canary: dict) -> None:
        """Note that the version is whole and right, and ends with this canary."""
        self._begun().seal(canary)

    def _begun(self) -> QueuedVersion:
        assert self._current is not None, "no version has begun to come"
        return self._current

    def end(self) -> None:
        """Note that no more versions come."""
        self._versions.put(None)

    def close(self) -> None:
        """Wait for nothing any longer, and end."""
        self._closing = True
        self._versions.put(None)
        self._progress.close()
        if self._current is not None:
            self._current.seal(None)

    def _run(self) -> None:
        control = self._context.control
        where = f"{self._context} forwarded by rank {control.rank}"
        try:
            work_behind_the_model(self._buffers[0].device)
            self._out.link.offer(Slots(self._buffers))
            while True:
                queued = self._versions.get()
                if queued is None:
                    break
                send_version([self._out], queued, self._context.copier)
                self._on_sent()
            self._out.link.send(Header(HeaderKind.CLOSE))
        except WeightsError as error:
            if not self._closing:
                raise WeightsError(f"{where}: {error}") from error
        except PeerDied as error:
            if not self._closing:
                raise PeerDied(f"{where}: {control.gone(error)}", error.ranks) from error


def _origins(
    arriving: list[tuple[Bucket, ...]], forwarded: tuple[Bucket, ...]
) -> list[set[_Arrival]]:
    """Return, for each forwarded bucket, the arrivals that bring some of it."""
    boxes: dict[str, list[tuple[int, Box]]] = {}  # name -> (forwarded bucket, its box of it)
    for number, bucket in enumerate(forwarded):
        for region in bucket.regions:
            boxes.setdefault(region.name, []).append((number, region.box))
    origins: list[set[_Arrival]] = [set() for _ in forwarded]
    for link, carried in enumerate(arriving):
        for index, bucket in enumerate(carried):
            for region in bucket.regions:
                for number, box in boxes[region.name]:
                    if overlap(box, region.box).numel:
                        origins[number].add((link, index))
    return origins
