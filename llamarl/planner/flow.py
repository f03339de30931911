"""What flows between the stations of a simulated run, and what is counted of it.

    Begun    a ticket between its grant and its step          Tickets has them
    Sent     a completion on its way to the trainer           a Pipe carries it
    Span     what a station did, or waited for                a Meter counts it

A ticket, a completion and a group are numbers here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from llamarl.planner.clock import VirtualClock
from llamarl.planner.draws import Drawn, draw
from llamarl.planner.simulation_settings import SimulationSettings

MAX_SPANS = 20_000  # of a station; more are not kept for the picture


class Span(NamedTuple):
    """What a station did from one second to another; a wait has its cause as its name."""

    begin_s: float
    end_s: float
    name: str
    is_wait: bool


class Meter:
    """A station's busy and idle seconds, by cause, since the last reset.

    keeps_spans: also what it did when.
    """

    def __init__(self, clock: VirtualClock, cause: str, *, keeps_spans: bool):
        self.busy_s = 0.0
        self.idle_s: dict[str, float] = {}
        self.spans: list[Span] = []
        self._clock = clock
        self._since = clock.now
        self._name = cause
        self._is_wait = True
        self._keeps_spans = keeps_spans

    def work(self, name: str) -> None:
        """Note that the station works from now on."""
        self._turn_to(name, is_wait=False)

    def wait(self, cause: str) -> None:
        """Note that it waits from now on, and for what."""
        self._turn_to(cause, is_wait=True)

    def settle(self) -> None:
        """Count the seconds up to now."""
        now = self._clock.now
        seconds = now - self._since
        if seconds > 0:
            if self._is_wait:
                self.idle_s[self._name] = self.idle_s.get(self._name, 0.0) + seconds
            else:
                self.busy_s += seconds
            if self._keeps_spans:
                self._keep(now)
        self._since = now

    def reset(self) -> None:
        """Count anew from now on."""
        self.settle()
        self.busy_s = 0.0
        self.idle_s = {}

    def _turn_to(self, name: str, *, is_wait: bool) -> None:
        self.settle()
        self._name = name
        self._is_wait = is_wait

    def _keep(self, now: float) -> None:
        """Add the span that ends now, or make the last one longer."""
        span = Span(begin_s=self._since, end_s=now, name=self._name, is_wait=self._is_wait)
        if self.spans:
            last = self.spans[-1]
            if last.end_s == span.begin_s and last[2:] == span[2:]:
                self.spans[-1] = last._replace(end_s=now)
                return
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)


@dataclass(slots=True)
class Begun:
    """A ticket between its grant and its step."""

    drawn: Drawn
    step: int  # the next one to be taken when it was granted
    version: int  # that its generator held then
    since_s: float
    attempt: int = 0  # counts up if the ticket starts again
    num_sent: int = 0  # completions that have left the generator
    num_scored: int = 0
    num_tokens: int = 0  # of its completions
    oldest: list[int] = field(default_factory=list)  # of each completion: its oldest version


class Sent(NamedTuple):
    """A completion on its way to the trainer."""

    ticket: int
    attempt: int
    sample_index: int
    num_tokens: int
    oldest_version: int
    is_aborted: bool


class Tickets:
    """All that is known of the tickets that are started and not yet trained on."""

    def __init__(self, settings: SimulationSettings, clock: VirtualClock):
        self.begun: dict[int, Begun] = {}
        self.next_step = 0
        self.started_s = 0.0  # the integral of how many there are, over time
        self._settings = settings
        self._clock = clock
        self._since = 0.0

    def start(self, ticket: int, version: int) -> Begun:
        """Note that a generator which holds a version has been granted a ticket, for the first time
        or again.
        """
        self.settle()
        before = self.begun.get(ticket)
        new = Begun(
            drawn=draw(self._settings, ticket) if before is None else before.drawn,
            step=self.next_step,
            version=version,
            since_s=self._clock.now,
            attempt=0 if before is None else before.attempt,
        )
        self.begun[ticket] = new
        return new

    def lose(self, ticket: int) -> None:
        """Note that what there is of a ticket is gone, and that it will start again."""
        begun = self.begun[ticket]
        begun.attempt += 1
        begun.num_scored = 0

    def take(self, tickets: list[int]) -> list[Begun]:
        """Return what is known of these, which leave for a step."""
        self.settle()
        return [self.begun.pop(ticket) for ticket in tickets]

    def settle(self) -> None:
        """Add to the integral up to now."""
        now = self._clock.now
        self.started_s += len(self.begun) * (now - self._since)
        self._since = now


class Pipe:
    """The channel from all generators to one reward rank: an inbox, and an outbox a generator.

    capacity: of each of these, in records. num_full: generator -> how many of its outboxes, to
    whatever reward rank, are full. on_room: called when an outbox is full no more.
    """

    def __init__(self, capacity: int, num_full: list[int], on_room: Callable[[], None]):
        self.most_waiting = 0
        self._capacity = capacity
        self._inbox: deque[Sent] = deque()
        self._outbox: deque[tuple[int, Sent]] = deque()  # of all sources, in the order of arrival
        self._num_out = [0] * len(num_full)
        self._num_full = num_full
        self._on_room = on_room

    def __len__(self) -> int:
        return len(self._inbox) + len(self._outbox)

    def put(self, source: int, sent: Sent) -> None:
        """Send a record. It never waits: look at num_full before the work that makes it."""
        if len(self._inbox) < self._capacity:
            self._inbox.append(sent)
        else:
            self._outbox.append((source, sent))
            self._num_out[source] += 1
            if self._num_out[source] == self._capacity:
                self._num_full[source] += 1
        self.most_waiting = max(self.most_waiting, len(self))

    def take(self) -> Sent:
        """Take the record that came first."""
        sent = self._inbox.popleft()
        if self._outbox:
            source, moved = self._outbox.popleft()
            self._inbox.append(moved)
            was_full = self._num_out[source] == self._capacity
            self._num_out[source] -= 1
            if was_full:
                self._num_full[source] -= 1
                self._on_room()
        return sent
