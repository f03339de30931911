"""Streams, events and CUDA graphs that are not there: they remember who did what in which order.

What a stream does has no place in time but after what it was made to wait for. So every stream has
a clock, and so has the host: launching, waiting for an event or a stream, and synchronising carry
what one has seen over to another. Two of them that touch the same bytes, one of them writing,
without the later one having seen the earlier, are a race, and an error at once. All threads of the
host count as one: locks and queues between them are Python's.

A graph that is captured does nothing: its operations run when it is replayed, on the memory that
they were captured with.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

HOST = "host"
Clock = dict[str, int]  # who -> how many of its doings were seen


class OrderError(AssertionError):
    """Something was done in an order, or at a time, that a GPU would not allow."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a storage: those from the first to the last element of a tensor."""

    storage: int
    start: int
    end: int

    @classmethod
    def of(cls, host: Tensor) -> Span:
        """Return the span of a tensor on the CPU."""
        reach = 0
        for size, stride in zip(host.shape, host.stride()):
            reach += (size - 1) * stride
        start = host.storage_offset() * host.itemsize
        end = start + (reach + 1) * host.itemsize if host.numel() else start
        return cls(host.untyped_storage()._cdata, start, end)

    def overlaps(self, other: Span) -> bool:
        """Whether they have a byte in common. Both are of one storage."""
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True, slots=True)
class Access:
    """Who touched a span, and at which tick of its clock."""

    who: str
    tick: int
    span: Span
    writes: bool
    doing: str


@dataclass(frozen=True, slots=True)
class Done:
    """An entry of the log."""

    who: str  # a stream's name, or HOST
    what: str  # an operator's name, or: record, wait, synchronize, capture, replay
    thread: str


@dataclass(slots=True)
class Launch:
    """An operation, with the bytes that it reads and writes."""

    name: str
    run: Callable[[], object]
    reads: list[Span] = field(default_factory=list)
    writes: list[Span] = field(default_factory=list)


class Streams:
    """All streams of one device, and the order of what they did."""

    def __init__(self):
        self.log: list[Done] = []
        self.syncs: list[str] = []  # the host waited for the device, and why
        self.num_captures = 0
        self._clocks: dict[str, Clock] = defaultdict(dict)
        self._touched: dict[int, list[Access]] = defaultdict(list)
        self._thread = threading.local()
        self._lock = threading.RLock()
        self._made = 0
        self.default = Stream(self, "default")

    def make_stream(self, device=None, **_) -> Stream:
        """Stand in for torch.cuda.Stream."""
        self._made += 1
        return Stream(self, f"stream {self._made}")

    def make_event(self, **_) -> Event:
        """Stand in for torch.cuda.Event."""
        return Event(self)

    def make_graph(self, **_) -> Graph:
        """Stand in for torch.cuda.CUDAGraph."""
        return Graph(self)

    def current(self, device=None) -> Stream:
        """Return the stream of this thread."""
        return getattr(self._thread, "stream", self.default)

    def set_current(self, stream: Stream) -> None:
        """Make this thread launch on a stream from now on."""
        self._thread.stream = stream

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Launch on a stream inside the block."""
        before = self.current()
        self.set_current(stream)
        try:
            yield
        finally:
            self.set_current(before)

    @property
    def capturing(self) -> Graph | None:
        """The graph that this thread captures, or None."""
        return getattr(self._thread, "graph", None)

    def note(self, who: str, what: str) -> None:
        """Write a line into the log."""
        self.log.append(Done(who, what, threading.current_thread().name))

    def launch(self, launch: Launch) -> None:
        """Do an operation on this thread's stream; in a capture, when the graph is replayed."""
        stream = self.current()
        graph = self.capturing
        if graph is not None:
            if stream is not graph.stream:
                raise OrderError(f"{launch.name} on {stream.name} amid a capture on another")
            graph.launches.append(launch)
            return
        with self._lock:
            self.carry(HOST, stream.name)
            self.note(stream.name, launch.name)
            self.touch(stream.name, launch)
            launch.run()

    def touch(self, who: str, launch: Launch) -> None:
        """Note which bytes it reads and writes. OrderError for a race."""
        clock = self._clocks[who]
        tick = clock.get(who, 0) + 1
        clock[who] = tick
        kinds = [(span, False) for span in launch.reads]
        kinds += [(span, True) for span in launch.writes]
        for span, writes in kinds:
            earlier = self._touched[span.storage]
            kept = []
            for access in earlier:
                seen = clock.get(access.who, 0) >= access.tick
                conflicts = access.span.overlaps(span) and (writes or access.writes)
                if conflicts and not seen:
                    raise OrderError(
                        f"{launch.name} of {who} touches what {access.doing} of {access.who} "
                        "touches, and does not wait for it"
                    )
                inside = span.start <= access.span.start and access.span.end <= span.end
                if not (seen and inside and (writes or not access.writes)):
                    kept.append(access)
            kept.append(Access(who, tick, span, writes, launch.name))
            self._touched[span.storage] = kept

    def touch_from_host(self, name: str, reads: list[Span], writes: list[Span]) -> None:
        """The host itself reads or writes memory that a device also reaches."""
        with self._lock:
            self.touch(HOST, Launch(name, lambda: None, reads, writes))

    def carry(self, source: str, target: str) -> None:
        """From here on `target` has seen what `source` has."""
        self.merge(self._clocks[source], target)

    def merge(self, clock: Clock, target: str) -> None:
        """From here on `target` has seen what this clock has."""
        own = self._clocks[target]
        for who, tick in clock.items():
            own[who] = max(own.get(who, 0), tick)

    def clock_of(self, who: str) -> Clock:
        """Return a copy of one's clock."""
        return dict(self._clocks[who])

    def wait_for(self, stream: Stream, why: str) -> None:
        """Let the host wait for a stream."""
        if self.capturing is not None:
            raise OrderError(f"{why}: the host waits for the device amid a capture")
        with self._lock:
            self.syncs.append(why)
            self.note(HOST, "synchronize")
            self.carry(stream.name, HOST)

    def synchronize(self, device=None) -> None:
        """Stand in for torch.cuda.synchronize."""
        with self._lock:
            for who in list(self._clocks):
                self.carry(who, HOST)
            self.wait_for(self.default, "torch.cuda.synchronize")


class Stream:
    """Stands in for a torch.cuda.Stream."""

    def __init__(self, streams: Streams, name: str):
        self.name = name
        self._streams = streams

    def wait_stream(self, other: Stream) -> None:
        """See torch.cuda.Stream."""
        self._streams.note(self.name, f"wait for {other.name}")
        self._streams.carry(other.name, self.name)

    def wait_event(self, event: Event) -> None:
        """See torch.cuda.Stream."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """See torch.cuda.Stream."""
        event = event or Event(self._streams)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """See torch.cuda.Stream."""
        self._streams.wait_for(self, f"{self.name}.synchronize")


class Event:
    """Stands in for a torch.cuda.Event."""

    def __init__(self, streams: Streams):
        self._streams = streams
        self._seen: Clock | None = None

    def record(self, stream: Stream | None = None) -> None:
        """See torch.cuda.Event."""
        stream = stream or self._streams.current()
        self._streams.carry(HOST, stream.name)
        self._seen = self._streams.clock_of(stream.name)
        self._streams.note(stream.name, "record")

    def _recorded(self) -> Clock:
        if self._seen is None:
            raise OrderError("a wait for an event that was never recorded")
        return self._seen

    def wait(self, stream: Stream | None = None) -> None:
        """See torch.cuda.Event."""
        stream = stream or self._streams.current()
        self._streams.note(stream.name, "wait for an event")
        self._streams.merge(self._recorded(), stream.name)

    def synchronize(self) -> None:
        """See torch.cuda.Event."""
        self._streams.merge(self._recorded(), HOST)
        self._streams.note(HOST, "wait for an event")


class Graph:
    """Stands in for a torch.cuda.CUDAGraph."""

    def __init__(self, streams: Streams):
        self.stream = streams.default
        self.launches: list[Launch] = []
        self.num_replays = 0
        self._streams = streams
        self._is_whole = False

    def capture_begin(self, *pool, **_) -> None:
        """See torch.cuda.CUDAGraph."""
        streams = self._streams
        if self._is_whole or streams.capturing is not None:
            raise OrderError("a graph is captured once, and one at a time")
        self.stream = streams.current()
        if self.stream is streams.default:
            raise OrderError("nothing can be captured on the default stream")
        streams.num_captures += 1
        streams.note(self.stream.name, "capture")
        streams._thread.graph = self

    def capture_end(self) -> None:
        """See torch.cuda.CUDAGraph."""
        self._streams._thread.graph = None
        self._is_whole = True

    def replay(self) -> None:
        """See torch.cuda.CUDAGraph."""
        streams = self._streams
        if not self._is_whole or streams.capturing is not None:
            raise OrderError("a replay of what was not captured, or amid a capture")
        who = streams.current().name
        streams.carry(HOST, who)
        streams.note(who, "replay")
        self.num_replays += 1
        for launch in self.launches:
            streams.touch(who, launch)
            launch.run()
