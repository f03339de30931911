"""The stations of a simulated run: generator replicas, reward ranks, the trainer.

    station     works on                     waits for, by the causes of metrics
    generator   a chunk of tokens a row;     weights: the first version
                a swap                       room: in the channel to the rewards
                                             tickets: the ledger grants none
    reward      completions, by its workers  data: completions
    trainer     a step; a publication        data: the groups of a step
                                             weights: a slot for the version to leave from

Each does what its executor does, in the same order, and takes the seconds that Timings says. A
ticket, a completion and a group are numbers here. What is asked of the ledger goes through the real
llamarl.tickets.service.TicketService.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from llamarl.comm.channel import dp_rank_of
from llamarl.planner.clock import VirtualClock
from llamarl.planner.draws import Drawn, draw, reward_of
from llamarl.planner.settings import SimulationSettings
from llamarl.planner.timings import Timings
from llamarl.tickets.service import TicketService

# A trainer's shorter wait for data does not count as one: executors.trainer.SHORT_S.
SHORT_S = 0.02
# Completions that a reward rank has handed to its scorer: executors.reward.MAX_PENDING.
MAX_PENDING = 1024
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
    num_tokens: int = 0  # of prompt and completions
    oldest: list[int] = field(default_factory=list)  # of each completion: its oldest version


class Sent(NamedTuple):
    """A completion on its way to the trainer."""

    ticket: int
    attempt: int
    sample_index: int
    num_tokens: int
    oldest_version: int
    is_aborted: bool


class Row(NamedTuple):
    """A live completion, in the order in which rows end."""

    ends_at: int  # the generator's decode step after which it has all its tokens
    order: int
    ticket: int
    sample_index: int
    began_at: int  # the decode step before its first token
    version: int  # that its first token was sampled by


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


class GeneratorStation:
    """One replica of the generator, as executors/generator.py leads it."""

    def __init__(
        self,
        index: int,
        settings: SimulationSettings,
        timings: Timings,
        clock: VirtualClock,
        *,
        tickets: Tickets,
        pipes: list[Pipe],
        num_full: list[int],
        on_sent: Callable[[int], None],
        keeps_spans: bool,
    ):
        self.index = index
        self.meter = Meter(clock, "weights", keeps_spans=keeps_spans)
        self.version = -1
        self.staged = -1
        self.is_dead = False
        self.num_sampled = 0  # tokens
        self.decode_s = 0.0  # spent on chunks
        self.rows_s = 0.0  # the integral of its rows over these
        self.service: TicketService  # set by whoever connects the ranks
        self._settings = settings
        self._timings = timings
        self._clock = clock
        self._tickets = tickets
        self._pipes = pipes
        self._num_full = num_full
        self._on_sent = on_sent
        self._is_slow = index == 0 and settings.slow_factor != 1.0
        self._is_busy = False
        self._is_woken = False
        self._rows: list[Row] = []  # a heap
        self._waiting: deque[tuple[int, int]] = deque()  # (ticket, sample) without a slot
        self._own: dict[int, Begun] = {}  # tickets of which not all completions are sent
        self._decode_step = 0
        self._context = 0  # tokens of all rows, prompts too
        self._num_rows = 0  # that ever were

    def wake(self) -> None:
        """Look for something to do, if it is idle."""
        if not (self._is_busy or self._is_woken or self.is_dead):
            self._is_woken = True
            self._clock.after(0.0, self._look)

    def stage(self, version: int) -> None:
        """Take in a version that has arrived whole, to be swapped in between two chunks."""
        if version > self.staged:
            self.staged = version
            self.wake()

    def die(self) -> None:
        """Die. What has been sent goes on; somebody else must start `unsent` again."""
        self.is_dead = True
        for ticket in self.unsent:
            self._tickets.lose(ticket)
        self.meter.wait("death")

    @property
    def unsent(self) -> list[int]:
        """The tickets of which not all completions are sent."""
        return sorted(self._own)

    def _look(self) -> None:
        self._is_woken = False
        if self._is_busy or self.is_dead:
            return
        self._step()

    def _step(self) -> None:
        """Make one step of the executor's loop."""
        if self._swaps():
            self.version = self.staged
            if self._timings.swap_s > 0:
                self._work("swap", self._timings.swap_s, self._swapped)
                return
        if self.version < 0:
            self.meter.wait("weights")
            return
        if self._num_full[self.index]:
            self.meter.wait("room")
            return
        ended = self.service.to_truncate() + self._expired()
        self._ask()
        aborted = self._abort(ended) if ended else []
        if not (self._rows or self._waiting or aborted):
            self.meter.wait("tickets")
            return
        self._decode(aborted)

    def _swaps(self) -> bool:
        if self.staged <= self.version:
            return False
        return self._settings.updates_in_flight or not self._rows

    def _swapped(self) -> None:
        self._is_busy = False
        self._step()

    def _work(self, name: str, seconds: float, then: Callable[[], None]) -> None:
        """Be busy for so long, and then go on unless it has died."""
        self._is_busy = True
        self.meter.work(name)
        if self._is_slow:
            seconds *= self._settings.slow_factor
        self._clock.after(seconds, partial(self._unless_dead, then))

    def _unless_dead(self, then: Callable[[], None]) -> None:
        if not self.is_dead:
            then()

    def _ask(self) -> None:
        """Ask for as many groups as there is room for, and take in what was granted."""
        free = self._settings.max_slots - len(self._rows) - len(self._waiting)
        room = free // self._settings.group_size
        was_woken = self._is_woken
        self._is_woken = True  # its own answer is no news
        if room > 0:
            granted = self.service.ask(self.index, room, self.version)
        else:
            granted = self.service.granted()
        self._is_woken = was_woken
        for ticket in granted:
            self._own[ticket.index] = self._tickets.start(ticket.index, self.version)
            for sample_index in range(self._settings.group_size):
                self._waiting.append((ticket.index, sample_index))

    def _expired(self) -> list[int]:
        most = self._settings.max_seconds
        if most is None:
            return []
        now = self._clock.now
        return [ticket for ticket, begun in self._own.items() if now - begun.since_s > most]

    def _abort(self, tickets: list[int]) -> list[Sent]:
        """End the unfinished completions of these tickets where they are, and return them."""
        ended = set(tickets)
        aborted = []
        kept = []
        for row in self._rows:
            if row.ticket in ended:
                num_tokens = self._decode_step - row.began_at
                self._context -= self._settings.prompt_tokens + num_tokens
                aborted.append(self._sent(row, num_tokens, is_aborted=True))
            else:
                kept.append(row)
        heapq.heapify(kept)
        self._rows = kept
        for _ in range(len(self._waiting)):
            ticket, sample_index = self._waiting.popleft()
            if ticket not in ended:
                self._waiting.append((ticket, sample_index))
                continue
            row = self._row(ticket, sample_index, length=0)
            aborted.append(self._sent(row, 0, is_aborted=True))
        return aborted

    def _row(self, ticket: int, sample_index: int, length: int) -> Row:
        self._num_rows += 1
        return Row(
            ends_at=self._decode_step + length,
            order=self._num_rows,
            ticket=ticket,
            sample_index=sample_index,
            began_at=self._decode_step,
            version=self.version,
        )

    def _sent(self, row: Row, num_tokens: int, *, is_aborted: bool) -> Sent:
        return Sent(
            ticket=row.ticket,
            attempt=self._own[row.ticket].attempt,
            sample_index=row.sample_index,
            num_tokens=num_tokens,
            oldest_version=row.version,
            is_aborted=is_aborted,
        )

    def _admit(self) -> int:
        """Give waiting completions the free slots, in order. Return how many prompt tokens that
        reads: a prompt once for all completions that start together.
        """
        prompts = set()
        free = self._settings.max_slots - len(self._rows)
        for _ in range(min(free, len(self._waiting))):
            ticket, sample_index = self._waiting.popleft()
            length = self._own[ticket].drawn.lengths[sample_index]
            heapq.heappush(self._rows, self._row(ticket, sample_index, length))
            prompts.add(ticket)
            self._context += self._settings.prompt_tokens
        return len(prompts) * self._settings.prompt_tokens

    def _decode(self, ended: list[Sent]) -> None:
        """Sample a chunk for every row, or less if all end before. ended: leaves with it."""
        prompt_tokens = self._admit()
        rows = self._rows
        num_rows = len(rows)
        before = self._decode_step
        done = before + self._settings.chunk_tokens
        finished = list(ended)
        last = before
        num_tokens = 0
        gone = 0  # context tokens that leave with the rows
        while rows and rows[0].ends_at <= done:
            row = heapq.heappop(rows)
            length = row.ends_at - row.began_at
            last = row.ends_at
            num_tokens += last - before
            gone += self._settings.prompt_tokens + length
            finished.append(self._sent(row, length, is_aborted=False))
        if not rows:
            done = last  # nobody samples after that
        count = done - before
        seconds = 0.0
        if prompt_tokens:
            seconds += self._timings.prefill_s(prompt_tokens)
        if count:
            # Rows that have ended are computed to the end of the chunk, as on a GPU.
            context = self._context + num_rows * (count - 1) // 2
            seconds += count * self._timings.decode_s(num_rows, context)
        num_tokens += count * len(rows)
        self._decode_step = done
        self._context += num_tokens - gone
        self.num_sampled += num_tokens
        self.decode_s += seconds
        self.rows_s += seconds * num_rows
        if seconds == 0.0:
            self._is_busy = True
            self._clock.after(0.0, partial(self._unless_dead, partial(self._decoded, finished)))
            return
        self._work("decode", seconds, partial(self._decoded, finished))

    def _decoded(self, finished: list[Sent]) -> None:
        """Send what has ended, and go on."""
        self._is_busy = False
        destinations = []
        for sent in finished:
            own = self._own[sent.ticket]
            own.num_sent += 1
            if own.num_sent == self._settings.group_size:
                del self._own[sent.ticket]
            destination = sent.ticket % len(self._pipes)
            self._pipes[destination].put(self.index, sent)
            if destination not in destinations:
                destinations.append(destination)
        # The whole chunk's completions are there before any is scored.
        for destination in destinations:
            self._on_sent(destination)
        self._step()


class RewardStation:
    """One reward rank: its workers score completions, and a group leaves once all of it is
    scored.
    """

    def __init__(
        self,
        settings: SimulationSettings,
        timings: Timings,
        clock: VirtualClock,
        *,
        tickets: Tickets,
        pipe: Pipe,
        on_group: Callable[[int], None],
        keeps_spans: bool,
    ):
        self.num_aborted = 0  # completions
        self._settings = settings
        self._timings = timings
        self._clock = clock
        self._tickets = tickets
        self._pipe = pipe
        self._on_group = on_group
        self._pending: deque[Sent] = deque()  # handed to the scorer
        self._num_scoring = 0
        self.workers = []
        for number in range(settings.num_workers):
            # The first worker is the one that is drawn: it works whenever any does.
            self.workers.append(Meter(clock, "data", keeps_spans=keeps_spans and number == 0))
        self._free = list(range(settings.num_workers))  # a heap of worker numbers

    def look(self) -> None:
        """Take what came, and hand it to the workers that are free."""
        while len(self._pipe) and len(self._pending) + self._num_scoring < MAX_PENDING:
            sent = self._pipe.take()
            if sent.is_aborted:
                self.num_aborted += 1
                self._settle(sent)
            else:
                self._pending.append(sent)
        while self._pending and self._free:
            self._begin()

    def _begin(self) -> None:
        """Have a worker score the next completions."""
        count = min(self._settings.score_batch, len(self._pending))
        batch = [self._pending.popleft() for _ in range(count)]
        seconds = self._timings.score_s(count) * max(self._score_times(sent) for sent in batch)
        if seconds == 0.0:
            for sent in batch:
                self._settle(sent)
            return
        worker = heapq.heappop(self._free)
        self._num_scoring += count
        self.workers[worker].work("score")
        self._clock.after(seconds, partial(self._scored, worker, batch))

    def _score_times(self, sent: Sent) -> float:
        begun = self._tickets.begun.get(sent.ticket)
        return 1.0 if begun is None else begun.drawn.score_times[sent.sample_index]

    def _scored(self, worker: int, batch: list[Sent]) -> None:
        heapq.heappush(self._free, worker)
        self._num_scoring -= len(batch)
        self.workers[worker].wait("data")
        for sent in batch:
            self._settle(sent)
        self.look()

    def _settle(self, sent: Sent) -> None:
        """Count a completion in its group, which leaves if it is whole."""
        begun = self._tickets.begun.get(sent.ticket)
        if begun is None or begun.attempt != sent.attempt:
            return  # its ticket has started again, and this was of the generator that died
        begun.num_scored += 1
        begun.num_tokens += self._settings.prompt_tokens + sent.num_tokens
        begun.oldest.append(sent.oldest_version)
        if begun.num_scored == self._settings.group_size:
            self._on_group(sent.ticket)


class LagBroken(AssertionError):
    """A group was trained on that is older than max_lag."""


class TrainerStation:
    """The data-parallel trainer ranks, which step together.

    services: of each rank, the leader's first. publish: called with a version once it has left.
    on_step: called with the groups of a step and its number when it is taken.
    """

    def __init__(
        self,
        settings: SimulationSettings,
        timings: Timings,
        clock: VirtualClock,
        *,
        tickets: Tickets,
        services: list[TicketService],
        publish: Callable[[int], None],
        on_taken: Callable[[int, list[Begun]], None],
        on_trained: Callable[[int], None],
    ):
        self.meter = Meter(clock, "weights", keeps_spans=True)
        self.version = 0
        self._settings = settings
        self._timings = timings
        self._clock = clock
        self._tickets = tickets
        self._services = services
        self._publish = publish
        self._on_taken = on_taken
        self._on_trained = on_trained
        self._is_busy = True  # with the first publication
        self._is_woken = False
        self._num_in_flight = 0  # versions
        self._leaves: deque[int] = deque()  # versions that wait for the one before
        self._is_waiting_for_slot = False
        self._wait_since_s = 0.0

    def begin(self) -> None:
        """Publish the weights that the run starts from."""
        self._leave()

    def receive(self, ticket: int) -> None:
        """Take in a group, scored and whole."""
        num_ranks = len(self._services)
        self._services[dp_rank_of(ticket, num_ranks)].finish([ticket])
        if not (self._is_busy or self._is_woken):
            self._is_woken = True
            self._clock.after(0.0, self._look)

    def _look(self) -> None:
        self._is_woken = False
        if not self._is_busy:
            self._step()

    def _step(self) -> None:
        """Take a step if there is one to take."""
        if self.version == self._settings.max_steps:
            self.meter.wait("end")
            return
        step = self.version
        has_waited = self._clock.now - self._wait_since_s > SHORT_S
        leader, *others = self._services
        first = leader.take(step, waited=has_waited)
        if first is None:
            self.meter.wait("data")
            return
        shares = [first]
        for service in others:
            share = service.take(step)
            assert share is not None, "the leader has told all ranks of the step"
            shares.append(share)
        groups = []
        seconds = 0.0
        for share in shares:
            taken = self._tickets.take(share)
            groups += taken
            num_tokens = sum(begun.num_tokens for begun in taken)
            count = len(taken) * self._settings.group_size
            seconds = max(seconds, self._timings.update_s(count, num_tokens))
        self._tickets.next_step = step + 1
        self._check(step, groups)
        self._on_taken(step, groups)
        self._is_busy = True
        self.meter.work("train")
        self._clock.after(seconds, self._trained)

    def _check(self, step: int, groups: list[Begun]) -> None:
        """Hold the groups of a step to max_lag, as llamarl.learning.buffer does."""
        oldest = min(min(begun.oldest) for begun in groups)
        if step - oldest > self._settings.max_lag:
            raise LagBroken(f"step {step} trains on tokens of version {oldest}")

    def _trained(self) -> None:
        """Note that a step is made, and publish its version."""
        self.version += 1
        self._services[0].trained(reward_of(self._settings, self.version - 1))
        self._leave()

    def _leave(self) -> None:
        """Publish this version, if there is a slot that it can leave from."""
        if self._num_in_flight == self._settings.weight_slots:
            self._is_waiting_for_slot = True
            self.meter.wait("weights")
            return
        self._num_in_flight += 1
        self.meter.work("publish")
        self._clock.after(self._timings.publish_s, self._published)

    def _published(self) -> None:
        """Send the version on its way, and go on with the next step."""
        self._leaves.append(self.version)
        if len(self._leaves) == 1:
            self._clock.after(self._timings.transfer_s, self._arrived)
        self._is_busy = False
        self._wait_since_s = self._clock.now
        if self.version:
            self._on_trained(self.version)
        self._step()

    def _arrived(self) -> None:
        """Hand over a version that has arrived, and let the next one leave."""
        self._publish(self._leaves.popleft())
        self._num_in_flight -= 1
        if self._leaves:
            self._clock.after(self._timings.transfer_s, self._arrived)
        if self._is_waiting_for_slot:
            self._is_waiting_for_slot = False
            self._leave()
