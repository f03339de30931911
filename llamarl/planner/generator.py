"""A generator replica of a simulated run.

It does what executors/generator.py does, in the same order, and takes the seconds that Timings
says:

    works on                              waits for, by the causes of metrics
    a chunk of tokens a row; a swap       weights: the first version; with stops_generators,
                                          any that is on its way; a part of one that
                                          its own rank has the other part of
                                          room: in the channel to the rewards
                                          tickets: the ledger grants none
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from llamarl.planner.clock import VirtualClock
from llamarl.planner.flow import Begun, Meter, Pipe, Sent, Tickets
from llamarl.planner.simulation_settings import SimulationSettings
from llamarl.planner.timings import Timings
from llamarl.planner.turns import Rank
from llamarl.tickets.service import TicketService


class Row(NamedTuple):
    """A live completion, in the order in which rows end."""

    ends_at: int  # the generator's decode step after which it has all its tokens
    order: int
    ticket: int
    sample_index: int
    began_at: int  # the decode step before its first token
    version: int  # that its first token was sampled by


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
        rank: Rank,
        num_full: list[int],
        on_sent: Callable[[int], None],
        keeps_spans: bool,
    ):
        self.index = index
        self.meter = Meter(clock, "weights", keeps_spans=keeps_spans)
        self.version = -1
        self.staged = -1
        self._expected = -1  # the version that its rank's trainer has published a part of
        self._is_held = False  # whether its turn waits for that
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
        self._num_stops = 0  # versions on their way for which it stands still
        self._rows: list[Row] = []  # a heap
        self._waiting: deque[tuple[int, int]] = deque()  # (ticket, sample) without a slot
        self._own: dict[int, Begun] = {}  # tickets of which not all completions are sent
        self._decode_step = 0
        self._context = 0  # tokens of all rows, prompts too
        self._num_rows = 0  # that ever were
        self._rank = rank
        rank.join(self.turn)

    def wake(self) -> None:
        """Look for something to do, if it is idle."""
        if not (self._is_busy or self._is_woken or self.is_dead):
            self._is_woken = True
            self._clock.after(0.0, self._look)

    def stop(self) -> None:
        """Stand still after this chunk, until the version that now leaves is staged."""
        self._num_stops += 1

    def stage(self, version: int) -> None:
        """Take in a version that has arrived whole, to be swapped in between two chunks."""
        self._num_stops = max(0, self._num_stops - 1)
        if version > self.staged:
            self.staged = version
            if self._is_held and version >= self._expected:
                self._is_held = False
                self._resumed()
            else:
                self.wake()

    def expect(self, version: int) -> None:
        """Have the next turn wait, on its rank, until this version is staged."""
        self._expected = version

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
        if self._rank.is_free:
            self.turn()

    def turn(self) -> None:
        """Make a step of the executor's loop, unless its last one is under way."""
        if not (self._is_busy or self.is_dead):
            self._step()

    def _step(self) -> None:
        """Make one step of the executor's loop."""
        if self._num_stops:
            self.meter.wait("weights")
            return
        if self._expected > self.staged and self._may_swap():
            self._is_held = self._is_busy = True
            self._rank.is_free = False
            self.meter.wait("weights")
            return
        if self._swaps():
            self.version = self.staged
            seconds = self._timings.swap_s
            if self._settings.recompute_kv and self._rows:
                seconds += self._timings.prefill_s(self._context)
            if seconds > 0:
                self._work("swap", seconds, self._resumed)
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
        return self.staged > self.version and self._may_swap()

    def _may_swap(self) -> bool:
        return self._settings.updates_in_flight or not self._rows

    def _resumed(self) -> None:
        """Go on with a turn that was in the middle."""
        self._is_busy = False
        self._rank.is_free = True
        self._step()
        if self._rank.is_free:
            self._rank.pass_on(self.turn)

    def _work(self, name: str, seconds: float, then: Callable[[], None]) -> None:
        """Be busy for so long, and then go on unless it has died."""
        self._is_busy = True
        self.meter.work(name)
        if self._is_slow:
            seconds *= self._settings.slow_factor
        self._rank.work(seconds, partial(self._unless_dead, then))

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
            is_idle = not (self._rows or self._waiting)
            granted = self.service.ask(self.index, room, self.version, is_idle=is_idle)
            if not (granted or self.service.is_refused):
                # It was told at once that it may ask.
                granted = self.service.ask(self.index, room, self.version, is_idle=is_idle)
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
        seconds += self._timings.sampled_s * (len(finished) - len(ended))
        num_tokens += count * len(rows)
        self._decode_step = done
        self._context += num_tokens - gone
        self.num_sampled += num_tokens
        self.decode_s += seconds
        self.rows_s += seconds * num_rows
        if seconds == 0.0:
            self._is_busy = True
            self._rank.work(0.0, partial(self._unless_dead, partial(self._decoded, finished)))
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
        self._rank.leave(self.turn)
