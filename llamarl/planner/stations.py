"""The reward ranks and the trainer of a simulated run.

    station    works on                      waits for, by the causes of metrics
    reward     completions, by its workers   data: completions
    trainer    a step; a publication         data: the groups of a step
                                             weights: a slot for the version to leave from

Each does what its executor does, and takes the seconds that Timings says.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial

from llamarl.comm.channel import dp_rank_of
from llamarl.planner.clock import VirtualClock
from llamarl.planner.draws import reward_of, waited_of
from llamarl.planner.flow import Begun, Meter, Pipe, Sent, Tickets
from llamarl.planner.simulation_settings import SimulationSettings
from llamarl.planner.timings import Timings
from llamarl.planner.turns import Cores, Rank, Turn
from llamarl.tickets.service import TicketService

# Another trainer rank writes no report. From a publication to its next turn this share of the
# leader's seconds passes: medians of traces are 0.17 and 0.34 ms.
_OF_OTHERS = 0.5
# A trainer's shorter wait for data does not count as one: executors.trainer.SHORT_S.
SHORT_S = 0.02
# Completions that a reward rank has handed to its scorer: executors.reward.MAX_PENDING.
MAX_PENDING = 1024


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
        rank: Rank,
        cores: Cores,
        on_group: Callable[[int], None],
        keeps_spans: bool,
    ):
        self.num_aborted = 0  # completions
        self._rank = rank
        self._cores = cores
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
        rank.join(self.turn)

    def look(self) -> None:
        """Take what came, and hand it to the workers that are free: at once where that takes no
        time, else at the next turn on its rank.
        """
        if self._timings.hosted_s:
            if self._rank.is_free:
                self.turn()
        else:
            self._take_in(self._take())

    def turn(self) -> None:
        """Host what came, if anything did."""
        taken = self._take()
        if taken:
            seconds = self._timings.hosted_s * len(taken)
            self._rank.work(seconds, partial(self._hosted, taken))

    def _hosted(self, taken: list[Sent]) -> None:
        self._take_in(taken)
        self._rank.leave(self.turn)

    def _take(self) -> list[Sent]:
        """Return what came, as far as it may be handed to the scorer."""
        taken: list[Sent] = []
        room = MAX_PENDING - len(self._pending) - self._num_scoring
        while len(self._pipe) and len(taken) < room:
            taken.append(self._pipe.take())
        return taken

    def _take_in(self, taken: list[Sent]) -> None:
        """Hand these to the workers that are free."""
        for sent in taken:
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
        self._cores.work(seconds, partial(self._scored, worker, batch))

    def _score_times(self, sent: Sent) -> float:
        begun = self._tickets.begun.get(sent.ticket)
        return 1.0 if begun is None else begun.drawn.score_times[sent.sample_index]

    def _scored(self, worker: int, batch: list[Sent]) -> None:
        heapq.heappush(self._free, worker)
        self._num_scoring -= len(batch)
        self.workers[worker].wait("data")
        for sent in batch:
            self._settle(sent)
        self._take_in([])
        self.look()

    def _settle(self, sent: Sent) -> None:
        """Count a completion in its group, which leaves if it is whole."""
        begun = self._tickets.begun.get(sent.ticket)
        if begun is None or begun.attempt != sent.attempt:
            return  # its ticket has started again, and this was of the generator that died
        begun.num_scored += 1
        begun.num_tokens += sent.num_tokens
        begun.oldest.append(sent.oldest_version)
        if begun.num_scored == self._settings.group_size:
            self._on_group(sent.ticket)


def _nothing() -> None:
    """Do nothing: no rank has begun anything."""


class LagBroken(AssertionError):
    """A group was trained on that is older than max_lag."""


class TrainerStation:
    """The data-parallel trainer ranks, which step together.

    services, ranks: of each rank, the leader's first. on_leave: called when a version begins to
    leave. hand_over: called with a version once it has left, for who is on the same rank. publish:
    called with it once it has arrived. on_taken: called with a step and its groups
    when it is taken. on_trained: with a new version.
    """

    def __init__(
        self,
        settings: SimulationSettings,
        timings: Timings,
        clock: VirtualClock,
        *,
        tickets: Tickets,
        services: list[TicketService],
        ranks: list[Rank],
        on_leave: Callable[[], None],
        hand_over: Callable[[int], None],
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
        self._on_leave = on_leave
        self._hand_over = hand_over
        self._publish = publish
        self._on_taken = on_taken
        self._on_trained = on_trained
        self._is_busy = True  # with the first publication
        self._is_woken = False
        self._num_in_flight = 0  # versions
        self._leaves: deque[int] = deque()  # versions that wait for the one before
        self._wait_since_s = 0.0
        self._ranks = ranks
        self._turns: list[Turn] = [self.turn]  # on each rank
        for number in range(1, len(ranks)):
            self._turns.append(partial(self._join_in, number))
        for rank, turn in zip(ranks, self._turns):
            rank.join(turn)
        self._to_do: dict[int, float] = {}  # rank's number -> seconds, until it has its turn
        self._num_at_work = 0  # ranks that have not ended what all do together
        self._then = _nothing  # once they have

    def begin(self) -> None:
        """Publish the weights that the run starts from."""
        self._leave()

    def turn(self) -> None:
        """Take a step on the leader's rank, if there is one to take."""
        if not self._is_busy:
            self._step()

    # --- What its ranks do together ---

    def _together(self, seconds: list[float], then: Callable[[], None]) -> None:
        """Have each rank compute for so long, once it has its turn there, and keep all of them
        until the last has ended; then do something.
        """
        self._then = then
        self._num_at_work = len(seconds)
        self._to_do = dict(enumerate(seconds))
        for number, rank in enumerate(self._ranks):
            if number == 0 or rank.is_free:
                self._join_in(number)

    def _join_in(self, number: int) -> None:
        """Begin this rank's share of what all do, if it has one to begin."""
        if number in self._to_do:
            self._ranks[number].work(self._to_do.pop(number), self._ended)

    def _ended(self) -> None:
        self._num_at_work -= 1
        if not self._num_at_work:
            self._then()

    def _again(self, seconds: float, then: Callable[[], None]) -> None:
        """Have all ranks, which it still keeps, compute for so long."""
        self._then = then
        self._num_at_work = len(self._ranks)
        for rank in self._ranks:
            rank.work(seconds, self._ended)

    def receive(self, ticket: int) -> None:
        """Take in a group, scored and whole."""
        num_ranks = len(self._services)
        self._services[dp_rank_of(ticket, num_ranks)].finish([ticket])
        self._wake()

    def _wake(self) -> None:
        if not (self._is_busy or self._is_woken):
            self._is_woken = True
            self._clock.after(0.0, self._look)

    def _look(self) -> None:
        self._is_woken = False
        if not self._is_busy and self._ranks[0].is_free:
            self._step()

    def _is_published(self, version: int) -> bool:
        """Whether a version leaves: every so many, and the last."""
        is_last = version == self._settings.max_steps
        return is_last or version % self._settings.publish_every == 0

    def _step(self) -> None:
        """Take a step if there is one to take."""
        if self.version == self._settings.max_steps:
            self.meter.wait("end")
            return
        has_room = self._num_in_flight < self._settings.weight_slots
        if self._is_published(self.version + 1) and not has_room:
            self.meter.wait("weights")
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
        seconds = []
        for share in shares:
            taken = self._tickets.take(share)
            groups += taken
            num_tokens = sum(self._settings.prompt_tokens + begun.num_tokens for begun in taken)
            count = len(taken) * self._settings.group_size
            seconds.append(self._timings.update_s(count, num_tokens))
        self._tickets.next_step = step + 1
        self._check(step, groups)
        self._on_taken(step, groups)
        self._is_busy = True
        self.meter.work("train")
        self._together(seconds, self._trained)

    def _check(self, step: int, groups: list[Begun]) -> None:
        """Hold the groups of a step to max_lag, as llamarl.learning.buffer does."""
        oldest = min(min(begun.oldest) for begun in groups)
        if step - oldest > self._settings.max_lag:
            raise LagBroken(f"step {step} trains on tokens of version {oldest}")

    def _trained(self) -> None:
        """Note that a step is made, and publish its version if it is one that is."""
        self.version += 1
        self._services[0].trained(reward_of(self._settings, self.version - 1))
        if self._is_published(self.version):
            self._leave()
        else:
            self._end_step()

    def _leave(self) -> None:
        """Publish this version. There is a slot that it can leave from, or its step would not have
        been taken.
        """
        self._num_in_flight += 1
        self._on_leave()
        self.meter.work("publish")
        self._again(self._timings.publish_s, self._published)

    def _published(self) -> None:
        """Send the version on its way, and go on with the next step."""
        self._hand_over(self.version)
        self._leaves.append(self.version)
        if len(self._leaves) == 1:
            self._clock.after(self._transfer_s(), self._arrived)
        self._end_step()

    def _end_step(self) -> None:
        """Leave all ranks, the leader's once it has reported the step."""
        report_s = self._timings.report_s
        if not report_s:
            for rank, turn in zip(self._ranks[1:], self._turns[1:]):
                rank.leave(turn)
            self._go_on()
            return
        for rank, turn in zip(self._ranks[1:], self._turns[1:]):
            rank.work(_OF_OTHERS * report_s, partial(rank.leave, turn))
        self._ranks[0].work(report_s, self._go_on)

    def _transfer_s(self) -> float:
        """Return how long the version that now goes is on its way."""
        if not self._timings.message_s:
            return self._timings.transfer_s
        way = waited_of(self._settings, "weights", self._leaves[0])
        return self._timings.transfer_s * way

    def _go_on(self) -> None:
        """Be free for the next step."""
        self._is_busy = False
        self._wait_since_s = self._clock.now
        if self.version:
            self._on_trained(self.version)
        self._ranks[0].leave(self._turns[0])

    def _arrived(self) -> None:
        """Hand over a version that has arrived, and let the next one leave."""
        self._publish(self._leaves.popleft())
        self._num_in_flight -= 1
        if self._leaves:
            self._clock.after(self._transfer_s(), self._arrived)
        self._wake()
