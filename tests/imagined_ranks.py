"""Ranks that are threads of this process, and what they send each other.

A group is an Office for each rank. Where tensors are on the imagined GPU a transfer is NCCL's: it
goes by the order of the calls, whatever their tags say, on a stream of its own, which waits for the
caller's; waiting for it makes the caller's stream wait.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.imagined_gpu import OnGpu
from tests.imagined_streams import Stream, Streams

PATIENCE_S = 20.0


@dataclass(frozen=True)
class Office:
    """A group, as one of its ranks has it."""

    name: str
    rank: int


@dataclass
class Parcel:
    """What was sent, and whether it has arrived."""

    tensor: Tensor
    stream: Stream | None = None
    arrived: threading.Event = field(default_factory=threading.Event)


class Work:
    """Stands in for dist.Work."""

    def __init__(self, finish: Callable[[float], None]):
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> None:
        """See dist.Work."""
        self._finish(PATIENCE_S if timeout is None else timeout.total_seconds())


class Post:
    """Everything that is sent."""

    def __init__(self, streams: Streams):
        self._streams = streams
        self._parcels: dict[tuple, queue.Queue[Parcel]] = defaultdict(queue.Queue)
        # (group, sender, receiver) -> bytes of each transfer on the device, as either side called
        self.sent: dict[tuple, list[int]] = defaultdict(list)
        self.received: dict[tuple, list[int]] = defaultdict(list)

    def patched(self):
        """Return a context in which torch.distributed sends by this post."""
        return mock.patch.multiple(dist, send=self.send, isend=self.isend, irecv=self.irecv)

    def send(self, tensor: Tensor, dst: int, group: Office, tag: int = 0) -> None:
        """See dist.send."""
        self._parcels[group.name, group.rank, dst, tag].put(Parcel(tensor.clone()))

    def isend(self, tensor: Tensor, dst: int, group: Office, tag: int = 0) -> Work:
        """See dist.isend."""
        if not isinstance(tensor, OnGpu):
            self.send(tensor, dst, group, tag)
            return Work(lambda _: None)
        way = (group.name, group.rank, dst)
        self.sent[way].append(tensor.nbytes)
        stream = self._beside()
        parcel = Parcel(tensor, stream)
        self._parcels[way].put(parcel)

        def finish(timeout_s: float) -> None:
            assert parcel.arrived.wait(timeout_s), f"nobody received what {way} sent"
            self._streams.current().wait_stream(stream)

        return Work(finish)

    def irecv(self, tensor: Tensor, src: int, group: Office, tag: int = 0) -> Work:
        """See dist.irecv."""
        if not isinstance(tensor, OnGpu):
            waiting = self._parcels[group.name, src, group.rank, tag]
            return Work(lambda timeout_s: _take_on_host(tensor, waiting, timeout_s))
        way = (group.name, src, group.rank)
        self.received[way].append(tensor.nbytes)
        stream = self._beside()

        def finish(timeout_s: float) -> None:
            parcel = _next(self._parcels[way], timeout_s)
            assert parcel.tensor.shape == tensor.shape, "NCCL would hang, or mix two up"
            stream.wait_stream(parcel.stream)
            with self._streams.on(stream):
                tensor.copy_(parcel.tensor)
            parcel.stream.wait_stream(stream)
            parcel.arrived.set()
            self._streams.current().wait_stream(stream)

        return Work(finish)

    def _beside(self) -> Stream:
        """A stream that has seen what the caller's has."""
        stream = self._streams.make_stream()
        stream.wait_stream(self._streams.current())
        return stream


def _next(parcels: queue.Queue[Parcel], timeout_s: float) -> Parcel:
    try:
        return parcels.get(timeout=timeout_s)
    except queue.Empty:
        raise RuntimeError("timed out") from None


def _take_on_host(tensor: Tensor, parcels: queue.Queue[Parcel], timeout_s: float) -> None:
    tensor.copy_(_next(parcels, timeout_s).tensor.view(torch.uint8).view(tensor.dtype))
