"""Channels: typed, bounded, in-order, one-way.

In one process a channel is a queue; across ranks it is p2p over a group of its own. A channel
carries one type of record from an executor that produces it to one that consumes it:

    Gather(generator, reward, carries=Completion)

A graph's channels follow from its executors (llamarl.launch.graph), or a recipe lists them. The
controller connects this rank's ends.

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
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache, partial
from typing import Protocol

import torch.distributed as dist

from llamarl.comm import wire
from llamarl.comm.control import Control
from llamarl.comm.groups import RankInfo, connect_peers, link_group
from llamarl.comm.meeting import reaching
from llamarl.comm.wire import recv_message, send_message
from llamarl.errors import PeerDied, cause_of
from llamarl.executor import Executor
from llamarl.types import (
    Completion,
    EvalCompletion,
    EvalReplied,
    Group,
    Policy,
    ReferencePolicy,
    Replied,
    Stretch,
)

# What messages call the channel of a record; that of another record has the name of its type.
NAMES = {
    Completion: "completions",
    EvalCompletion: "evaluations",
    Stretch: "stretches",
    Replied: "replied",
    EvalReplied: "eval_replied",
    Group: "scored",
    Policy: "policy",
    ReferencePolicy: "reference_policy",
}


# What a record is of: the number of a ticket, or the name of an evaluation.
Subject = int | str

COUNTED_TICKETS = 8192  # the newest; more than a run has in work


class ChannelEnd(Protocol):
    """One rank's end of a channel, which it writes to or reads from."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ConnectContext:
    """The context in which a channel connects this rank's ends."""

    control: Control
    placement: Mapping[str, tuple[int, ...]]  # executor name -> its ranks, in executor order
    ranks: list[RankInfo]  # what every rank of the world says of itself
    timeout_s: float
    on_host: bool = False  # executors take turns on a device: nothing else may lie in its memory


@dataclass(frozen=True)
class Channel:
    """One arrow of the graph: Gather, Scatter and Broadcast carry records, others override
    `connect`.

    carries: the type of its records. name: what messages call it; by default after its records.
    """

    source: Executor
    destination: Executor
    _: KW_ONLY
    carries: type
    name: str = ""
    capacity: int = 4096  # records an end holds before it pushes back

    def __post_init__(self):
        if not self.name:
            name = NAMES.get(self.carries, self.carries.__name__)
            object.__setattr__(self, "name", name)

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
        peers: set[int] = set()
        if control.rank in sources:
            peers.update(destinations)
        if control.rank in destinations:
            peers.update(sources)
        peers.discard(control.rank)
        if peers:
            assert group is not None, "ranks that are linked have a group"
            with reaching(f"the ranks of channel {self.name}", rank=control.rank):
                connect_peers(peers, group, timeout_s=context.timeout_s, check=control.check)
        receiver: Receiver | None = None
        if control.rank in destinations:
            receiver = Receiver(self.name, self.capacity, control)
            for rank in sources:
                if rank != control.rank:
                    assert group is not None, "ranks that are linked have a group"
                    receiver.listen(rank, group)
        if control.rank not in sources:
            return None, receiver
        consumers: list[_Queue] = []  # in executor order
        for rank in destinations:
            if rank == control.rank:
                assert receiver is not None, "made above, where this rank is a destination"
                consumers.append(receiver)
            else:
                assert group is not None, "ranks that are linked have a group"
                consumers.append(_Link(self.name, self.capacity, control, rank, group))
        route = partial(self.route, num_destinations=len(destinations))
        return Sender(self.name, consumers, route), receiver

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

    Records that are of no ticket go to the first, and so does everything where that takes it for
    all.
    """

    def route(self, record, num_destinations):
        if self.destination.first_takes or not hasattr(record, "ticket"):
            return [0]
        return [record.ticket % num_destinations]


class Broadcast(Channel):
    """Every rank of the destination gets every record."""

    def route(self, record, num_destinations):
        return list(range(num_destinations))


class Scatter(Channel):
    """A group goes to one data-parallel rank: to all its tensor-parallel peers.

    To which one, a permutation of tickets says that is set once, and is the ledger's own.
    """

    def route(self, record, num_destinations):
        peers = self.destination.tensor_parallel
        first = dp_rank_of(record.ticket, num_destinations // peers) * peers
        return list(range(first, first + peers))


def subject_of(record) -> Subject | None:
    """Return what a record is of: its ticket, or the evaluation of a version; None: neither."""
    record = getattr(record, "attack", record)  # of replies of a victim
    if not isinstance(record, EvalCompletion):
        return getattr(record, "ticket", None)
    if not record.policy_versions.numel():
        return None  # no version sampled it
    return evaluation_of(int(record.policy_versions[0]))


def evaluation_of(version: int) -> Subject:
    """Return the subject of the records of a version's evaluation."""
    return f"the evaluation of policy version {version}"


class RecordCounts:
    """How many records of each ticket, and of each evaluation, have passed one end of a channel."""

    def __init__(self) -> None:
        self._counts: dict[Subject, int] = {}

    def add(self, record) -> None:
        """Count a record, if it is of a ticket or an evaluation."""
        subject = subject_of(record)
        if subject is None:
            return
        self._counts[subject] = self.of(subject) + 1
        if len(self._counts) > COUNTED_TICKETS:
            oldest = next(iter(self._counts))
            del self._counts[oldest]

    def of(self, subject: Subject) -> int:
        """Return how many records of a subject were counted."""
        return self._counts.get(subject, 0)


class _Queue:
    """Records that wait on this rank, and the threads between them and other ranks."""

    def __init__(self, name: str, capacity: int, control: Control):
        self.name = name
        self.capacity = capacity
        self._control = control
        self._records: deque = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._closing = False

    def has_room(self) -> bool:
        return len(self._records) < self.capacity

    def deliver(self, records: list) -> None:
        with self._changed:
            self._records.extend(records)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            self._control.join(thread)

    def _broke(self, way: str, rank: int, error: RuntimeError) -> None:
        """End this rank's loop with what gloo's error on a link with `rank` means."""
        if self._closing:
            return
        why = self._control.gone(PeerDied(cause_of(error), [rank]))
        text = f"channel {self.name!r} {way} rank {rank}: {why}"
        self._control.fail(PeerDied(text, [rank]))


class Receiver(_Queue):
    """The end that reads: one inbox, fed by local puts and by one thread a remote producer."""

    def __init__(self, name: str, capacity: int, control: Control):
        super().__init__(name, capacity, control)
        self.counts = RecordCounts()  # of what was taken

    def take(self, limit: int | None = None) -> list:
        """Up to `limit` records that have come, oldest first. Does not wait."""
        with self._changed:
            count = len(self._records) if limit is None else min(limit, len(self._records))
            records = [self._records.popleft() for _ in range(count)]
            self._changed.notify_all()
        for record in records:
            self.counts.add(record)
        return records

    def untaken(self, subject: Subject) -> int:
        """Return how many records of a subject have come and were not taken."""
        with self._changed:
            return sum(subject_of(record) == subject for record in self._records)

    def deliver(self, records: list) -> None:
        with self._changed:
            self._records.extend(records)
        # Threads wait for this queue only for room; who takes from it waits for its control.
        self._control.wake()

    def listen(self, rank: int, group: dist.ProcessGroup) -> None:
        name = f"recv-{self.name}-{rank}"
        self._threads.append(self._control.thread(name, self._receive, rank, group))

    def _receive(self, rank: int, group: dist.ProcessGroup) -> None:
        while True:
            try:
                message = recv_message(rank, group)
            except RuntimeError as error:
                self._broke("from", rank, error)
                return
            if not message:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self.has_room())
            self.deliver(wire.decode(message))


class _Link(_Queue):
    """Records for one remote rank, sent by a thread: all that waits goes as one message."""

    def __init__(
        self, name: str, capacity: int, control: Control, rank: int, group: dist.ProcessGroup
    ):
        super().__init__(name, capacity, control)
        self._threads.append(control.thread(f"send-{name}-{rank}", self._send, rank, group))

    def _send(self, rank: int, group: dist.ProcessGroup) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._records or self._closing)
                records = list(self._records)
                self._records.clear()
            try:
                send_message(wire.encode(records) if records else b"", rank, group)
            except RuntimeError as error:
                self._broke("to", rank, error)
                return
            if not records:
                return
            self._control.wake()  # room again


class Sender:
    """The end that writes: to its consumer's inbox, or to the outbox of the link there.

    consumers: of each destination rank, in executor order. route: their indices, for a record.
    """

    def __init__(self, name: str, consumers: list[_Queue], route: Callable[[object], list[int]]):
        self.name = name
        self._consumers = consumers
        self._route = route
        self.counts = RecordCounts()  # of what was put

    def put(self, record) -> None:
        """Send one record; never blocks. Ask `has_room` before the work that makes it."""
        self.counts.add(record)
        for index in self._route(record):
            self._consumers[index].deliver([record])

    def has_room(self) -> bool:
        return all(consumer.has_room() for consumer in self._consumers)

    def close(self) -> None:
        """Send what waits, then say that no more comes."""
        for consumer in self._consumers:
            if isinstance(consumer, _Link):
                consumer.close()


DP_RANK_SEED = 20  # of the pre-set permutation


def dp_rank_of(ticket: int, num_dp_ranks: int) -> int:
    """Return the data-parallel trainer rank that trains on a ticket."""
    return _permutation(num_dp_ranks)[ticket % num_dp_ranks]


@lru_cache
def _permutation(num_dp_ranks: int) -> list[int]:
    dp_ranks = list(range(num_dp_ranks))
    random.Random(DP_RANK_SEED).shuffle(dp_ranks)
    return dp_ranks
