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
from llamarl.planner.draws import reward_of
from llamarl.planner.flow import Begun, Meter, Pipe, Sent, Tickets
from llamarl.planner.simulation_settings import SimulationSettings
from llamarl.planner.timings import Timings
from llamarl.tickets.service import TicketService

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
    on_taken: called with a step and its groups when it is taken. on_trained: with a new version.
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
