"""Simulate a run: the real ledger and governors, with given seconds for everything that computes.

    result = simulate(SimulationSettings(max_lag=4, overcommit=8, update_s=5.0))
    result.step_s, result.mean_lag, result.idle

Time is an event queue, so an hour of a run takes seconds. The run's own ledger decides which
tickets start, which groups a step takes and who waits. The executors are stand-ins:

    generator   decodes chunks of all its rows, and swaps weights in between two chunks
    reward      num_workers score completions, first come, first served
    trainer     takes a step as soon as the ledger has one, publishes it, and goes on

docs/scaling.md says what is left out.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from llamarl.comm.channel import dp_rank_of
from llamarl.planner.costs import Split, StepWork, Timings
from llamarl.planner.profile import Count, FromZero, Natural, Positive, made
from llamarl.tickets.ledger import TicketLedger
from llamarl.words.fields import settings_dataclass

SHORT_S = 0.02  # a shorter wait of the trainer does not count as one: executors.trainer.SHORT_S
WEIGHT_SLOTS = 2  # versions on their way, before a publication has to wait


@settings_dataclass
class SimulationSettings:
    """The settings of a run that its time depends on, named as in conf/ where they are there, and
    seconds of its parts.

    warmup_steps: first steps that are not counted. num_generators: replicas. num_trainers:
    data-parallel ranks. in_flight_updates: None: whenever max_lag allows a lag. A completion's
    length is log-normal, rounded up and cut at max_new_tokens.
    """

    max_steps: Count = 50
    warmup_steps: Natural = 0
    seed: int = 0
    max_lag: Natural = 1
    overcommit: Natural | Literal["auto", "oppo", "window"] = "auto"
    groups_per_step: Count = 64
    group_size: Count = 8
    num_generators: Count = 1
    max_slots: Count = 512
    chunk_tokens: Count = 8
    in_flight_updates: bool | None = None
    num_workers: Count = 1
    num_trainers: Count = 1
    prompt_tokens: Natural = 128
    length_mean: Positive = 256.0
    length_sigma: FromZero = 0.5
    max_new_tokens: Count = 1024
    decode_s: FromZero = 0.02  # a decode step
    update_s: FromZero = 1.0  # a step, on each data-parallel rank
    score_s: FromZero = 0.0  # a completion, on one worker
    publish_s: FromZero = 0.0  # the trainer's stall
    transfer_s: FromZero = 0.0  # from there to the generators
    swap_s: FromZero = 0.0  # a generator's stall

    def problem(self) -> str:
        """Return why a run of these settings cannot go on; "" if it can."""
        if self.groups_per_step % self.num_trainers:
            return "groups_per_step: num_trainers must divide it, as each takes an equal share"
        if self.max_slots < self.group_size:
            return "max_slots: a generator needs room for a whole group, of group_size completions"
        if self.warmup_steps >= self.max_steps:
            return "warmup_steps: max_steps leaves no step to count"
        computing_s = (self.decode_s, self.update_s, self.score_s)
        if not any((*computing_s, self.publish_s, self.transfer_s, self.swap_s)):
            return "decode_s: all parts of a step take 0 s; give one of them a time"
        if self.max_lag == 0 and self.overcommit not in (0, "auto"):
            return "overcommit: max_lag=0 allows none; max_lag=1 allows a batch"
        return ""

    def lengths(self, ticket: int) -> list[int]:
        """Return the tokens of a ticket's completions, which depend on seed and ticket alone."""
        rng = random.Random(f"{self.seed} {ticket}")
        mu = math.log(self.length_mean) - self.length_sigma**2 / 2  # of a mean exp(mu + sigma^2/2)
        drawn = [rng.lognormvariate(mu, self.length_sigma) for _ in range(self.group_size)]
        return [max(1, min(math.ceil(length), self.max_new_tokens)) for length in drawn]

    def reward(self, step: int) -> float:
        """Return a made-up mean reward, for governors that follow it: rising, then level, noisy."""
        rng = random.Random(f"{self.seed} reward {step}")
        return 1.0 - math.exp(-step / 50) + rng.gauss(0.0, 0.05)

    def timings(self) -> Timings:
        """Return the seconds; prompts are read in no time."""
        return Timings(
            decode_s=lambda rows, context: self.decode_s,
            prefill_s=lambda tokens: 0.0,
            update_s=lambda completions, tokens: self.update_s,
            score_s=lambda completions: self.score_s * completions,
            publish_s=self.publish_s,
            transfer_s=self.transfer_s,
            swap_s=self.swap_s,
        )


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a simulated run after its warmup_steps, in simulated seconds.

    step_s: the mean, from the end of a step to the end of the next. idle: shares of the time of
    each executor. lags: steps -> completions that were trained on with this lag. closed_form_lag:
    1 + overcommit/batch, at most max_lag.
    """

    settings: SimulationSettings
    step_s: float
    steps_s: tuple[float, ...]
    idle: Mapping[str, float]
    lags: Mapping[int, int]
    mean_lag: float
    closed_form_lag: float


def simulate(settings: SimulationSettings, timings: Timings | None = None) -> Result:
    """Return what comes of a run with these settings. timings: in place of the settings' seconds.
    ValueError for settings that cannot go together, RuntimeError if the run stands still.
    """
    if problem := settings.problem():
        raise ValueError(problem)
    return _Simulation(settings, timings or settings.timings()).run()


class _Row(NamedTuple):
    """A completion that is being decoded; rows are ordered by the decode step of their end."""

    ends_at: int
    order: int
    ticket: int
    length: int
    version: int  # that sampled its first token


class _Generator:
    """A replica of the generator."""

    def __init__(self, run: _Simulation, index: int):
        self.index = index
        self.version = -1
        self.staged = -1
        self._run = run
        self._is_busy = False
        self._rows: list[_Row] = []  # a heap
        self._waiting: deque[tuple[int, int]] = deque()  # (ticket, length) without a slot
        self._decode_step = 0
        self._order = itertools.count()

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to decode."""
        return not (self._rows or self._waiting)

    def look(self) -> None:
        """Begin a step, unless one is under way."""
        if not self._is_busy:
            self._step()

    def _work(self, seconds: float, then: Callable[[], None]) -> None:
        self._is_busy = True
        self._run.busy_s["generator"] += seconds
        self._run.after(seconds, then)

    def _step(self) -> None:
        self._is_busy = False
        settings = self._run.settings
        in_flight = settings.in_flight_updates
        may_swap = settings.max_lag > 0 if in_flight is None else in_flight
        if self.staged > self.version and (may_swap or not self._rows):
            self.version = self.staged
            if self._run.timings.swap_s:
                self._work(self._run.timings.swap_s, self._step)
                return
        if self.version < 0:
            return
        room = (settings.max_slots - len(self._rows) - len(self._waiting)) // settings.group_size
        for ticket in self._run.start(self, room):
            self._waiting.extend((ticket, length) for length in settings.lengths(ticket))
        if not self.is_idle:
            self._decode()

    def _decode(self) -> None:
        """Sample a chunk for every row, or less if all end before."""
        settings = self._run.settings
        before = self._decode_step
        prompts = set()  # each is read once for all completions that start together
        while self._waiting and len(self._rows) < settings.max_slots:
            ticket, length = self._waiting.popleft()
            row = _Row(
                ends_at=before + length,
                order=next(self._order),
                ticket=ticket,
                length=length,
                version=self.version,
            )
            heapq.heappush(self._rows, row)
            prompts.add(ticket)
        num_rows = len(self._rows)
        seen = sum(row.length - (row.ends_at - before) for row in self._rows)
        done = before + settings.chunk_tokens
        finished: list[_Row] = []
        while self._rows and self._rows[0].ends_at <= done:
            finished.append(heapq.heappop(self._rows))
        if not self._rows:
            done = finished[-1].ends_at
        # Rows that have ended are computed to the end of the chunk, as on a GPU.
        context = seen + num_rows * (settings.prompt_tokens + (done - before - 1) / 2)
        seconds = (done - before) * self._run.timings.decode_s(num_rows, context)
        if prompts:
            seconds += self._run.timings.prefill_s(len(prompts) * settings.prompt_tokens)
        self._decode_step = done

        def end() -> None:
            self._run.score(finished)
            self._step()

        self._work(seconds, end)


class _Simulation:
    """The run: the clock, the ledger, the reward and the trainer, and the counting."""

    def __init__(self, settings: SimulationSettings, timings: Timings):
        self.settings = settings
        self.timings = timings
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._order = itertools.count()  # events of one time happen in the order they were set in
        self._scored: dict[int, list[_Row]] = {}  # completions of started tickets
        self.ledger = TicketLedger(
            groups_per_step=settings.groups_per_step,
            max_lag=settings.max_lag,
            overcommit=settings.overcommit,
            num_pools=settings.num_trainers,
            num_generators=settings.num_generators,
            max_steps=settings.max_steps,
        )
        self.generators = [_Generator(self, index) for index in range(settings.num_generators)]
        self._workers_free_s = [0.0] * settings.num_workers  # a heap: when each has nothing to do
        self.version = 0  # of the trainer
        self._is_training = True  # or publishing: the weights that the run starts from
        self._is_over = False
        self._wait_since_s = 0.0
        self._leaving: deque[int] = deque()  # versions on their way, one after another
        self._count_from_now()

    def _count_from_now(self) -> None:
        self.began_s = self.now
        self.ends_s: list[float] = []  # of steps
        self.busy_s = {"generator": 0.0, "reward": 0.0, "trainer": 0.0}
        self.lags: Counter[int] = Counter()
        self.overcommits: list[int] = []

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Have something happen in so many seconds."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), do))

    def run(self) -> Result:
        """Let everything happen. Return what came of it."""
        self._publish()
        while self._events and not self._is_over:
            self.now, _, do = heapq.heappop(self._events)
            do()
        if not self._is_over:
            raise RuntimeError(f"the run stands still at {self.now:.3f} s, step {self.version}")
        return self._result()

    def start(self, generator: _Generator, room: int) -> list[int]:
        """Return the tickets that a generator may start: at most an even share of those that it and
        all idle generators may.
        """
        if self.settings.max_lag:
            waiting = sum(one.is_idle for one in self.generators if one is not generator)
            room = min(room, -(-self.ledger.room // (1 + waiting)))
        granted = self.ledger.start(room, generator.version, generator.index)
        return [ticket.index for ticket in granted]

    def _wake_generators(self) -> None:
        for generator in self.generators:
            self.after(0.0, generator.look)

    # --- Reward ---

    def score(self, finished: Sequence[_Row]) -> None:
        """Score completions that a generator has finished, once a worker is free."""
        seconds = self.timings.score_s(1)
        for row in finished:
            if not seconds:
                self._arrive(row)
                continue
            ends_s = max(self.now, heapq.heappop(self._workers_free_s)) + seconds
            heapq.heappush(self._workers_free_s, ends_s)
            self.busy_s["reward"] += seconds
            self.after(ends_s - self.now, partial(self._arrive, row))

    def _arrive(self, row: _Row) -> None:
        """Take a scored completion in at the trainer."""
        own = self._scored.setdefault(row.ticket, [])
        own.append(row)
        if len(own) == self.settings.group_size:
            self.ledger.finish([row.ticket])
            self.after(0.0, self._train)

    # --- Trainer ---

    def _train(self) -> None:
        """Take a step, if there is one to take."""
        is_over = self.version == self.settings.max_steps
        if self._is_training or is_over or len(self._leaving) == WEIGHT_SLOTS:
            return
        tickets = self.ledger.take(self.version, self.now - self._wait_since_s > SHORT_S)
        if tickets is None:
            return
        self.overcommits.append(self.ledger.overcommit)
        completions = [0] * self.settings.num_trainers  # by data-parallel rank
        tokens = [0] * self.settings.num_trainers
        for ticket in tickets:
            rows = self._scored.pop(ticket)
            rank = dp_rank_of(ticket, self.settings.num_trainers)
            completions[rank] += len(rows)
            tokens[rank] += self.settings.prompt_tokens + sum(row.length for row in rows)
            self.lags.update(self.version - row.version for row in rows)
        assert max(self.lags) <= self.settings.max_lag, "the ledger bounds the lag"
        seconds = max(map(self.timings.update_s, completions, tokens))
        self._is_training = True
        self.busy_s["trainer"] += seconds
        self.after(seconds, self._trained)
        self._wake_generators()

    def _trained(self) -> None:
        self.version += 1
        self.ledger.trained(self.settings.reward(self.version - 1))
        self._wake_generators()
        self._publish()

    def _publish(self) -> None:
        self.busy_s["trainer"] += self.timings.publish_s
        self.after(self.timings.publish_s, self._published)

    def _published(self) -> None:
        """Send the version on its way, and go on with the next step."""
        self._leaving.append(self.version)
        if len(self._leaving) == 1:
            self.after(self.timings.transfer_s, self._arrived)
        self._is_training = False
        self._wait_since_s = self.now
        if self.version:
            self.ends_s.append(self.now)
            if self.version == self.settings.warmup_steps:
                self._count_from_now()
        self._is_over = self.version == self.settings.max_steps
        self._train()

    def _arrived(self) -> None:
        version = self._leaving.popleft()
        for generator in self.generators:
            generator.staged = version
        self._wake_generators()
        if self._leaving:
            self.after(self.timings.transfer_s, self._arrived)
        self._train()

    def _result(self) -> Result:
        settings = self.settings
        seconds = self.now - self.began_s
        if not seconds:
            raise ValueError("warmup_steps: the steps that are counted take 0 s; count more steps")
        overcommit = statistics.fmean(self.overcommits)
        numbers = (settings.num_generators, settings.num_workers, 1)
        idle = {}
        for (name, busy_s), number in zip(self.busy_s.items(), numbers):
            idle[name] = max(0.0, 1 - busy_s / number / seconds)
        return Result(
            settings=settings,
            step_s=seconds / len(self.ends_s),
            steps_s=tuple(np.diff([self.began_s, *self.ends_s]).tolist()),
            idle=idle,
            lags=dict(sorted(self.lags.items())),
            mean_lag=statistics.fmean(self.lags.elements()),
            closed_form_lag=min(settings.max_lag, 1 + overcommit / settings.groups_per_step),
        )


# --- The command ---


def of_plan(plan: Split, work: StepWork) -> SimulationSettings:
    """Return the settings of a plan that a search found."""
    return SimulationSettings(
        max_lag=plan.max_lag,
        overcommit=plan.overcommit,
        groups_per_step=work.groups,
        group_size=work.group_size,
        num_generators=plan.generator.replicas,
        max_slots=max(plan.generator.slots, work.group_size),
        num_trainers=plan.trainer.data_ranks,
        prompt_tokens=round(work.prompt_tokens),
        length_mean=work.completion_tokens,
        length_sigma=work.sigma,
        max_new_tokens=work.max_new_tokens,
    )


def describe(result: Result) -> str:
    """Return the outcome of a simulated run, in lines for people."""
    steps_s = result.steps_s
    lines = [
        f"step       {result.step_s:.4g} s, the mean of {len(steps_s)}; {min(steps_s):.4g} to "
        f"{max(steps_s):.4g} s",
        f"lag        {result.mean_lag:.3f} mean, {max(result.lags)} at most, of max_lag "
        f"{result.settings.max_lag}; closed form {result.closed_form_lag:.3f}",
    ]
    lines += [f"{name:<10} idle {share:.1%}" for name, share in result.idle.items()]
    return "\n".join(lines)


def lines_of_words(words: Sequence[str]) -> Iterator[str]:
    """Yield what is printed for KEY=VALUE[,VALUE] words: one run, or a table that compares the
    values of one or two keys. ValueError for words that cannot be used.
    """
    options: dict[str, list[str]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not text:
            raise ValueError(f"{word}: need KEY=VALUE")
        options[key] = text.split(",")
    several = [key for key, texts in options.items() if len(texts) > 1]
    if len(several) > 2:
        raise ValueError(f"several values of {', '.join(several)}: a table has two sides")

    def settings_of(**chosen: str) -> SimulationSettings:
        firsts = {key: texts[0] for key, texts in options.items()}
        return made(SimulationSettings, firsts | chosen)

    if not several:
        yield describe(simulate(settings_of()))
        return
    down, across = several if len(several) == 2 else (several[0], "max_steps")
    columns = options.get(across, [str(SimulationSettings().max_steps)])
    table = [[down, *(f"{across}={text}" for text in columns)]]
    for text in options[down]:
        chosen = [settings_of(**{down: text, across: column}) for column in columns]
        table.append([text, *map(_cell, chosen)])
    first = max(len(text) for text, *_ in table)
    width = 2 + max(max(map(len, cells)) for _, *cells in table)
    for text, *cells in table:
        yield (text.rjust(first) + "".join(cell.rjust(width) for cell in cells)).rstrip()
    yield "each cell: seconds a step, mean lag / largest lag; -: not possible"


def _cell(settings: SimulationSettings) -> str:
    if settings.problem():
        return "-"
    result = simulate(settings)
    return f"{result.step_s:.2f} s {result.mean_lag:.1f}/{max(result.lags)}"
