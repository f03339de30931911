"""A simulated run: its stations, connected, and what is counted of them.

    result = simulate(SimulationSettings(max_lag=4, overcommit=8), timings)
    result.step_s, result.mean_lag, result.closed_form.lag

What computes is replaced by the seconds that it takes (llamarl.planner.timings.Timings); what
decides who may start, which groups a step takes and who waits is the run's own code, on a clock
without time. docs/simulation.md says what is modelled and what is not.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from llamarl.observe.rates import Counters, Idle, idle_shares
from llamarl.planner.clock import VirtualClock
from llamarl.planner.draws import waited_of
from llamarl.planner.flow import Begun, Meter, Pipe, Span, Tickets
from llamarl.planner.generator import GeneratorStation
from llamarl.planner.mail import SimulatedMail
from llamarl.planner.simulation_settings import SimulationSettings
from llamarl.planner.stations import RewardStation, TrainerStation
from llamarl.planner.timings import Timings
from llamarl.planner.turns import Cores, Rank, SharedRanks
from llamarl.tickets.ledger import TicketLedger
from llamarl.tickets.service import TicketService

MAX_DRAWN = 8  # generators, and as many rewards, whose spans are kept for a picture


@dataclass(frozen=True, slots=True)
class Track:
    """What a station did when, for a picture."""

    station: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """Mean lags without looking at any group's own, and Little's law (docs/simulation.md)."""

    lag: float  # 1 + overcommit / groups_per_step, of the mean overcommit
    # Started groups just before a take over groups_per_step, less 1, plus the steps that a group's
    # generator was behind when it started it.
    little_lag: float
    mean_started: float  # groups that are started and not yet taken, over time
    groups_per_s: float
    mean_life_s: float  # of a group, from its start to its step


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What came of a simulated run, after its first warmup_steps. Seconds are simulated ones."""

    settings: SimulationSettings
    seconds: float
    step_s: float  # mean, from the end of a step to the end of the next
    steps_s: tuple[float, ...]  # each of them
    idle: tuple[Idle, ...]  # of each kind of station, over all of its kind
    lags: dict[int, int]  # steps -> completions that were trained on with this lag
    mean_lag: float
    max_lag: int
    mean_overcommit: float  # groups, over the steps
    closed_form: ClosedForm
    tokens_per_s: float
    rows: float  # completions that a generator decodes together, mean over its decoding
    num_aborted: int  # completions that were ended by time
    num_restarted: int  # tickets that started again, since a generator died
    most_waiting: int  # completions between generators and rewards, at worst
    num_events: int
    tracks: tuple[Track, ...] = field(default=(), repr=False)


def simulate(
    settings: SimulationSettings, timings: Timings, shared: SharedRanks | None = None
) -> SimulationResult:
    """Return what comes of a run with these settings whose pieces take these seconds. shared: the
    ranks that executors share, and the cores that ranks do; None: nobody shares anything.

    The result is a function of the two alone: the same settings give the same bits. RuntimeError,
    with what it waits for, if the run stands still.
    """
    return _Simulation(settings, timings, shared).run()


class _Simulation:
    """Builds the stations of a run, connects them, and counts."""

    def __init__(self, settings: SimulationSettings, timings: Timings, shared: SharedRanks | None):
        self.settings = settings
        self.clock = VirtualClock()
        self.cores = Cores(self.clock)
        if shared is not None:
            self.cores = Cores(self.clock, count=shared.cores, crowding=shared.crowding)
        self.message_s = timings.message_s
        self.num_posted = 0
        self.arrives_s: dict[tuple[int, int], float] = {}  # the last message from one to another
        self.shared = shared or _apart(settings)
        everyone = (*self.shared.trainer, *self.shared.generator, *self.shared.reward)
        self.ranks = {number: Rank(self.cores) for number in everyone}
        self.tickets = Tickets(settings, self.clock)
        self.ledger = TicketLedger(
            groups_per_step=settings.groups_per_step,
            max_lag=settings.max_lag,
            overcommit=settings.overcommit,
            num_pools=settings.num_trainers,
            num_generators=settings.num_generators,
            max_steps=settings.max_steps,
        )
        self.pipes: list[Pipe] = []
        self.generators: list[GeneratorStation] = []
        self.rewards: list[RewardStation] = []
        self._build_generators_and_rewards(timings)
        services = self._connect()
        self.leader = services[0]
        self.trainer = TrainerStation(
            settings,
            timings,
            self.clock,
            tickets=self.tickets,
            services=services[: settings.num_trainers],
            ranks=[self.ranks[number] for number in self.shared.trainer],
            on_leave=self._leave,
            hand_over=self._hand_over,
            publish=self._publish,
            on_taken=self._taken,
            on_trained=self._trained,
        )
        self.num_restarted = 0
        self.is_over = False
        self._restart_counts()

    def _build_generators_and_rewards(self, timings: Timings) -> None:
        settings = self.settings
        num_full = [0] * settings.num_generators
        for _ in range(settings.num_rewards):
            self.pipes.append(Pipe(settings.channel_capacity, num_full, self._wake_generators))
        for index in range(settings.num_generators):
            generator = GeneratorStation(
                index,
                settings,
                timings,
                self.clock,
                tickets=self.tickets,
                pipes=self.pipes,
                rank=self.ranks[self.shared.generator[index]],
                num_full=num_full,
                on_sent=self._sent,
                keeps_spans=index < MAX_DRAWN,
            )
            self.generators.append(generator)
        for index, pipe in enumerate(self.pipes):
            reward = RewardStation(
                settings,
                timings,
                self.clock,
                tickets=self.tickets,
                pipe=pipe,
                rank=self.ranks[self.shared.reward[index]],
                cores=self.cores,
                on_group=self._group,
                keeps_spans=index < MAX_DRAWN,
            )
            self.rewards.append(reward)

    def _connect(self) -> list[TicketService]:
        """Give every rank its access to the ledger: the trainers first, then the generators."""
        settings = self.settings
        world: list[SimulatedMail] = []
        wakes = [_nothing] * settings.num_trainers
        wakes += [generator.wake for generator in self.generators]
        post_later = self._post_later if self.message_s and settings.max_lag else None
        for rank, wake in enumerate(wakes):
            world.append(SimulatedMail(rank, world, wake, post_later))
        services = []
        for mail in world:
            service = TicketService(
                self.ledger,
                mail,
                trainer_ranks=tuple(range(settings.num_trainers)),
                timeout_s=1.0,
                truncate=settings.on_deadline == "truncate",
                straggler_factor=float("inf"),  # nobody reads a log
                clock=self.clock,
            )
            services.append(service)
        for generator, service in zip(self.generators, services[settings.num_trainers :]):
            generator.service = service
        return services

    def run(self) -> SimulationResult:
        """Let it happen, and return what came of it."""
        if self.settings.death_at_s is not None:
            self.clock.after(self.settings.death_at_s, self._die)
        self.trainer.begin()
        if not self.clock.run(lambda: self.is_over):
            raise RuntimeError(
                f"the simulated run stands still at {self.clock.now:.3f} s, step "
                f"{self.trainer.version}, which waits for {self.leader.waits_for()}"
            )
        return self._result()

    # --- What happens between stations ---

    def _sent(self, reward: int) -> None:
        self.rewards[reward].look()

    def _group(self, ticket: int) -> None:
        self.trainer.receive(ticket)

    def _leave(self) -> None:
        if self.settings.stops_generators:
            for generator in self.generators:
                generator.stop()

    def _hand_over(self, version: int) -> None:
        for generator in self.generators:
            if self.shared.feeds_itself(generator.index):
                generator.stage(version)
            elif self.shared.waits_for_others(generator.index):
                generator.expect(version)

    def _publish(self, version: int) -> None:
        for generator in self.generators:
            if not self.shared.feeds_itself(generator.index):
                generator.stage(version)

    def _wake_generators(self) -> None:
        for generator in self.generators:
            generator.wake()

    def _die(self) -> None:
        generator = self.generators[-1]
        unsent = generator.unsent
        generator.die()
        self.num_restarted = len(unsent)
        self.leader.start_again(unsent)

    def _post_later(self, sender: int, receiver: int, deliver: Callable[[], None]) -> None:
        """Deliver a message between two processes after its time, and after those before it."""
        placed = (*self.shared.trainer, *self.shared.generator)
        if placed[sender] == placed[receiver]:
            deliver()
            return
        self.num_posted += 1
        way_s = self.message_s * waited_of(self.settings, "message", self.num_posted)
        at_s = max(self.clock.now + way_s, self.arrives_s.get((sender, receiver), 0.0))
        self.arrives_s[sender, receiver] = at_s
        self.clock.after(at_s - self.clock.now, deliver)

    # --- What is counted ---

    def _meters(self) -> list[Meter]:
        meters = [generator.meter for generator in self.generators]
        for reward in self.rewards:
            meters += reward.workers
        return [*meters, self.trainer.meter]

    def _restart_counts(self) -> None:
        """Count from now on."""
        self.began_s = self.clock.now
        self.ends_s: list[float] = []  # of steps
        self.lags: Counter[int] = Counter()
        self.overcommits: list[int] = []
        self.started: list[int] = []  # groups, just before a step was taken
        self.behind: list[int] = []  # steps that a group's generator was behind at its start
        self.lives_s: list[float] = []
        self.sampled_before = sum(generator.num_sampled for generator in self.generators)
        for meter in self._meters():
            meter.reset()
        self.tickets.settle()
        self.started_before_s = self.tickets.started_s

    def _taken(self, step: int, groups: list[Begun]) -> None:
        """Note the groups that a step was taken of."""
        now = self.clock.now
        self.overcommits.append(self.ledger.overcommit)
        self.started.append(len(self.tickets.begun) + len(groups))
        for group in groups:
            self.behind.append(group.step - group.version)
            self.lives_s.append(now - group.since_s)
            self.lags.update(step - oldest for oldest in group.oldest)

    def _trained(self, version: int) -> None:
        self.ends_s.append(self.clock.now)
        if version == self.settings.warmup_steps:
            self._restart_counts()
        self.is_over = version == self.settings.max_steps

    def _result(self) -> SimulationResult:
        settings = self.settings
        for meter in self._meters():
            meter.settle()
        self.tickets.settle()
        seconds = self.clock.now - self.began_s
        begins_s = [self.began_s, *self.ends_s[:-1]]
        steps_s = [end - begin for begin, end in zip(begins_s, self.ends_s)]
        num_lags = sum(self.lags.values())
        lag_steps = sum(lag * count for lag, count in self.lags.items())
        sampled = sum(generator.num_sampled for generator in self.generators)
        mean_overcommit = statistics.fmean(self.overcommits)
        groups_per_step = settings.groups_per_step
        closed_form = ClosedForm(
            lag=1 + mean_overcommit / groups_per_step,
            little_lag=(
                statistics.fmean(self.started) / groups_per_step - 1 + statistics.fmean(self.behind)
            ),
            mean_started=(self.tickets.started_s - self.started_before_s) / seconds,
            groups_per_s=len(self.lives_s) / seconds,
            mean_life_s=statistics.fmean(self.lives_s),
        )
        return SimulationResult(
            settings=settings,
            seconds=seconds,
            step_s=seconds / len(self.ends_s),
            steps_s=tuple(steps_s),
            idle=tuple(idle_shares(self._counters())),
            lags=dict(sorted(self.lags.items())),
            mean_lag=lag_steps / num_lags,
            max_lag=max(self.lags),
            mean_overcommit=mean_overcommit,
            closed_form=closed_form,
            tokens_per_s=(sampled - self.sampled_before) / seconds,
            rows=sum(g.rows_s for g in self.generators) / sum(g.decode_s for g in self.generators),
            num_aborted=sum(reward.num_aborted for reward in self.rewards),
            num_restarted=self.num_restarted,
            most_waiting=max(pipe.most_waiting for pipe in self.pipes),
            num_events=self.clock.num_events,
            tracks=tuple(self._tracks()),
        )

    def _counters(self) -> Counters:
        """Return busy and idle seconds under the names of metrics."""
        counters: Counters = {}
        meters = [("generator", generator.meter) for generator in self.generators]
        for reward in self.rewards:
            meters += [("reward", worker) for worker in reward.workers]
        meters.append(("trainer", self.trainer.meter))
        for name, meter in meters:
            _add(counters, f"{name}/busy_s", meter.busy_s)
            for cause, seconds in meter.idle_s.items():
                _add(counters, f"{name}/idle_s", seconds)
                _add(counters, f"{name}/idle_s/{cause}", seconds)
        return counters

    def _tracks(self) -> list[Track]:
        tracks = []
        for generator in self.generators[:MAX_DRAWN]:
            name = f"generator {generator.index}"
            tracks.append(Track(station=name, spans=tuple(generator.meter.spans)))
        for index, reward in enumerate(self.rewards[:MAX_DRAWN]):
            spans = tuple(reward.workers[0].spans)
            tracks.append(Track(station=f"reward {index}", spans=spans))
        tracks.append(Track(station="trainer", spans=tuple(self.trainer.meter.spans)))
        return tracks


def _apart(settings: SimulationSettings) -> SharedRanks:
    """Return ranks of which each has one executor."""
    numbers = itertools.count()
    return SharedRanks(
        trainer=tuple(next(numbers) for _ in range(settings.num_trainers)),
        generator=tuple(next(numbers) for _ in range(settings.num_generators)),
        reward=tuple(next(numbers) for _ in range(settings.num_rewards)),
    )


def _nothing() -> None:
    """Do nothing: the trainer asks for its messages by itself."""


def _add(counters: Counters, name: str, seconds: float) -> None:
    counters[name] = counters.get(name, 0.0) + seconds
