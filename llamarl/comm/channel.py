"""Channels: typed, named, bounded, in-order, one-way.

In one process a channel is a queue; across ranks it is p2p over a group of its own. A recipe
declares them (Gather, Scatter, Weights) between executors; the controller connects this rank's
ends.

    thread              consumes   waits for                 unblocked by        produces
    sender (a peer)     outbox     a record in the outbox    put(); close()      one message of all
                                                                                 that waits
    receiver (a peer)   the wire   the peer's next message   the peer; its close records in the
                                   room in the inbox         take()              inbox

Bounded means backpressure: an executor asks `has_room()` before a step and rests when there is
none. One step may go over the bound by what it emits; nothing is ever dropped, and `put` never
blocks, so a rank that hosts both ends cannot deadlock with itself.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch.distributed as dist

from llamarl.comm import wire
from llamarl.comm.control import Control
from llamarl.comm.groups import RankInfo, link_group
from llamarl.comm.meeting import reaching
from llamarl.comm.wire import recv_message, send_closed, send_message
from llamarl.errors import PeerDied
from llamarl.executor import Executor


class ChannelEnd(Protocol):
    """What a channel connects: the part of it that one rank writes to, or reads from."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ConnectContext:
    """What a channel needs to know in order to connect the ends that this rank has of it."""

    control: Control
    placement: Mapping[str, tuple[int, ...]]  # executor name -> its ranks, in executor order
    ranks: list[RankInfo]  # what every rank of the world says of itself
    timeout_s: float
    on_host: bool = False  # executors take turns on a device: nothing else may lie in its memory


@dataclass(frozen=True)
class Channel:
    """One arrow of the graph: Gather and Scatter carry records, others override `connect`."""

    name: str
    source: Executor
    destination: Executor
    capacity: int = field(default=4096, kw_only=True)  # records an end holds before it pushes back

    def route(self, record, num_destinations: int) -> list[int]:
        """Indices of the destination ranks that get the record."""
        raise NotImplementedError

    def connect(self, context: ConnectContext) -> tuple[ChannelEnd | None, ChannelEnd | None]:
        """Collective over the world: this rank's sender and receiver, each None where it has none.

        PeerDied names this rank and the channel if a rank cannot be reached.
        """
        group = self.link_group(context)
        control = context.control
        sources = context.placement[self.source.name]
        destinations = context.placement[self.destination.name]
        receiver = None
        if control.rank in destinations:
            receiver = Receiver(self.name, self.capacity, control)
            for rank in sources:
                if rank != control.rank:
                    receiver.listen(rank, group)
        if control.rank not in sources:
            return None, receiver

        def indices_of(record) -> list[int]:
            return self.route(record, len(destinations))

        sender = Sender(self.name, self.capacity, control, indices_of)
        for rank in destinations:
            if rank == control.rank:
                sender.add(receiver)
            else:
                sender.add(_Link(self.name, rank, group, self.capacity, control))
        return sender, receiver

    def link_group(
        self, context: ConnectContext, *, behind: Callable[[], None] | None = None
    ) -> dist.ProcessGroup | None:
        """Collective over the world: comm.groups.link_group between this channel's two sides."""
        sources = context.placement[self.source.name]
        destinations = context.placement[self.destination.name]
        with reaching(f"the ranks of channel {self.name}", rank=context.control.rank):
            return link_group(sources, destinations, behind=behind)


@dataclass(frozen=True)
class Gather(Channel):
    """Many producers, few consumers: a ticket's records all go to one of them.

    With spread=False everything goes to the first.
    """

    spread: bool = field(default=True, kw_only=True)

    def route(self, record, num_destinations):
        return [record.ticket % num_destinations if self.spread else 0]


class Scatter(Channel):
    """A group goes to one data-parallel rank: to all its tensor-parallel peers.

    To which one, a permutation of tickets says that is set once, and is the ledger's own.
    """

    def route(self, record, num_destinations):
        peers = self.destination.tensor_parallel
        first = dp_rank_of(record.ticket, num_destinations // peers) * peers
        return list(range(first, first + peers))


class Receiver:
    """The end that reads: one inbox, fed by local puts and by one thread a remote producer."""

    def __init__(self, name: str, capacity: int, control: Control):
        self.name = name
        self.capacity = capacity
        self._control = control
        self._inbox: deque = deque()
        self._room = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._closing = False

    def __len__(self) -> int:
        return len(self._inbox)

    def take(self, limit: int | None = None) -> list:
        """Up to `limit` records that have come, oldest first. Does not wait."""
        with self._room:
            count = len(self._inbox)
            if limit is not None:
                count = min(limit, count)
            records = [self._inbox.popleft() for _ in range(count)]
            self._room.notify_all()
        return records

    def has_room(self) -> bool:
        return len(self._inbox) < self.capacity

    def deliver(self, records: list) -> None:
        with self._room:
            self._inbox.extend(records)
        self._control.wake()

    def listen(self, rank: int, group: dist.ProcessGroup) -> None:
        name = f"recv-{self.name}-{rank}"
        self._threads.append(self._control.thread(name, self._receive, rank, group))

    def _receive(self, rank: int, group: dist.ProcessGroup) -> None:
        while True:
            try:
                message = recv_message(rank, group)
            except RuntimeError as error:
                if not self._closing:
                    link = f"channel {self.name!r} from rank {rank}"
                    self._control.fail(_broken(link, rank, self._control, error))
                return
            if message is None:
                return
            with self._room:
                self._room.wait_for(lambda: self._closing or self.has_room())
            self.deliver(wire.decode(message))

    def close(self) -> None:
        with self._room:
            self._closing = True
            self._room.notify_all()
        for thread in self._threads:
            thread.join(timeout=5)


class Sender:
    """The end that writes: to its consumer's inbox, or to the outbox of the link there."""

    def __init__(
        self, name: str, capacity: int, control: Control, route: Callable[[object], list[int]]
    ):
        self.name = name
        self.capacity = capacity
        self._control = control
        self._route = route
        self._consumers: list[Receiver | _Link] = []

    def add(self, consumer: Receiver | _Link) -> None:
        """Add the next destination rank, in executor order: the local inbox, or a link."""
        self._consumers.append(consumer)

    def put(self, record) -> None:
        """Send one record; never blocks. Ask `has_room` before the work that makes it."""
        for index in self._route(record):
            self._consumers[index].deliver([record])

    def has_room(self) -> bool:
        return all(consumer.has_room() for consumer in self._consumers)

    def close(self) -> None:
        """Send what waits, then say that no more comes."""
        for consumer in self._consumers:
            if isinstance(consumer, _Link):
                consumer.close()


class _Link:
    """Records for one remote rank, sent by a thread: all that waits goes as one message."""

    def __init__(
        self, name: str, rank: int, group: dist.ProcessGroup, capacity: int, control: Control
    ):
        self.name = name
        self.rank = rank
        self.capacity = capacity
        self._group = group
        self._control = control
        self._outbox: deque = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = control.thread(f"send-{name}-{rank}", self._send)

    def deliver(self, records: list) -> None:
        with self._changed:
            self._outbox.extend(records)
            self._changed.notify_all()

    def has_room(self) -> bool:
        return len(self._outbox) < self.capacity

    def _send(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._outbox or self._closing)
                records = list(self._outbox)
                self._outbox.clear()
            try:
                if not records:
                    send_closed(self.rank, self._group)
                    return
                send_message(wire.encode(records), self.rank, self._group)
            except RuntimeError as error:
                if not self._closing:
                    link = f"channel {self.name!r} to rank {self.rank}"
                    self._control.fail(_broken(link, self.rank, self._control, error))
                return
            self._control.wake()  # room again

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=5)


def _broken(link: str, rank: int, control: Control, error: Exception) -> PeerDied:
    """What gloo's error on a link with `rank` means."""
    cause = str(error).split(". ")[0].splitlines()[0]
    return PeerDied(f"{link}: {control.gone(PeerDied(cause, [rank]))}", [rank])


DP_RANK_SEED = 20  # of the pre-set permutation


@lru_cache(maxsize=64)
def _permutation(num_dp_ranks: int) -> tuple[int, ...]:
    dp_ranks = list(range(num_dp_ranks))
    random.Random(DP_RANK_SEED).shuffle(dp_ranks)
    return tuple(dp_ranks)


def dp_rank_of(ticket: int, num_dp_ranks: int) -> int:
    """The data-parallel trainer rank that trains on a ticket."""
    return _permutation(num_dp_ranks)[ticket % num_dp_ranks]
