"""Alarms: problems of a run that need attention, each with its figure, threshold and remedy.

The report shows all of them (alarms_of). A running job logs those about its learning as warnings:
SignalWatch, LearningWatch and LagWatch are sinks. Checks of a trend look at the newest RECENT rows
that have the column.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from llamarl.observe.rates import ACCURACY, EVALUATED, Row, number_of, step_of
from llamarl.observe.samples import Shown
from llamarl.words.choices import GROUP_FIELDS

Columns = dict[str, np.ndarray]  # each [rows] in float64, NaN where a row has no value

RECENT = 20  # rows
OPEN_FACTOR = 10.0  # medians of a step's time: an open or finished step beyond them is too long
LEAST_OPEN_S = 30.0  # no shorter step is too long: short steps vary
EQUAL = 0.8  # share of groups from which nothing is learned
LEAST_STD = 1e-6  # of rewards: rounding gives equal ones a deviation just above 0
TRUNCATED = 0.25  # share of completions that end at the token limit
CUT_BY_TIME = 0.1  # share of completions that end at a deadline
ENTROPY = 0.02  # nats a token
LAG_SLOPE = 0.2  # steps of lag a step
LEAST_LAG = 4.0  # steps; below it growth says nothing
ERRORS = 0.05  # share of completions that could not be scored
RATIO = 2.0  # a mean ratio above it, or below its inverse
CAPPED = 0.3  # share of tokens whose ratio was capped
FALL = 0.1  # of an accuracy, from its best
WINDOW = 10  # rows at the start, and the newest, whose means are compared
STILL = 1.0  # standard errors of their difference, within which a reward has not moved
STILL_STEPS = 40  # many runs that learn well have not moved before this step
RISEN = 2.0  # standard errors from which a reward has risen
GAIN = 0.1  # gain of the held-out reward, in deviations of sampled rewards, that is a move
GROWN = 1.75  # factor by which entropy may grow
LEAST_GROWN = 1.0  # nats a token; below it growth says nothing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Alarm:
    """What is wrong, in words for people."""

    title: str
    figure: str  # what was found
    threshold: str  # what it passed
    remedy: str


@dataclass(frozen=True, slots=True)
class Observed:
    """A run as the checks see it. outcome: of outcome.json; None while the run goes on. silent_s:
    seconds since the newest row was written.
    """

    columns: Columns
    samples: Sequence[Shown] = ()
    outcome: Mapping[str, object] | None = None
    silent_s: float = 0.0


def alarms_of_learning(columns: Columns) -> list[Alarm]:
    """Return the alarms that a running job logs itself, about reward and entropy since step 1."""
    return _found(Observed(columns=columns), OF_LEARNING)


def alarms_of(run: Observed) -> list[Alarm]:
    """Return the alarms of a run. Those about a run that has stopped come first."""
    return _found(run, CHECKS)


def _found(run: Observed, checks: Iterable[Callable[[Observed], Alarm | None]]) -> list[Alarm]:
    alarms = [check(run) for check in checks]
    return [alarm for alarm in alarms if alarm is not None]


def _failed(run: Observed) -> Alarm | None:
    if run.outcome is None or run.outcome.get("ended") != "failed":
        return None
    return Alarm(
        title="The run failed",
        figure=f"after step {run.outcome.get('step')}",
        threshold="it was to make all its steps",
        remedy="The ranks printed why. resume=auto goes on from its newest checkpoint.",
    )


def _open_step(run: Observed) -> Alarm | None:
    """Find a step that has been open for far longer than the median: a stall, or a kill."""
    median_s = _median_step_s(run.columns)
    if run.outcome is not None or median_s is None:
        return None
    limit_s = max(LEAST_OPEN_S, OPEN_FACTOR * median_s)
    if run.silent_s <= limit_s:
        return None
    step = int(run.columns["step"][-1]) + 1
    waits = _longest_waits(run.columns)
    return Alarm(
        title=f"Step {step} is open far beyond the median",
        figure=f"{_seconds(run.silent_s)} since the last row",
        threshold=f"{_seconds(limit_s)}; the median step takes {_seconds(median_s)}",
        remedy=f"See whether its processes live. {waits}A rank that waits for longer than "
        "timeout_s says so itself, and for whom.",
    )


def _slow_step(run: Observed) -> Alarm | None:
    median_s = _median_step_s(run.columns)
    if median_s is None:
        return None
    taken_s = run.columns["time/step_s"]
    limit_s = max(LEAST_OPEN_S, OPEN_FACTOR * median_s)
    place = int(np.nanargmax(taken_s))
    if taken_s[place] <= limit_s:
        return None
    count = int(np.nansum(taken_s > limit_s))
    waited = run.columns.get("time/wait_for_data_s")
    of_it = ""
    if waited is not None and not np.isnan(waited[place]):
        of_it = f", {_seconds(waited[place])} of it waiting for data"
    return Alarm(
        title=f"Steps took far longer than the median: {count}",
        figure=f"step {run.columns['step'][place]:.0f}: {_seconds(taken_s[place])}{of_it}",
        threshold=f"{_seconds(limit_s)}; the median step takes {_seconds(median_s)}",
        remedy="trace.rank*.json shows what each rank did then (https://ui.perfetto.dev); "
        "straggler_factor names slow tickets, generator.max_seconds ends them.",
    )


def _not_the_same_tokens(run: Observed) -> Alarm | None:
    wrong = run.columns.get("tokens/reencode_mismatch")
    if wrong is None or not np.nansum(wrong):
        return None
    return Alarm(
        title="Dialogues hold other tokens than were sampled",
        figure=f"{np.nansum(wrong):.0f} tokens",
        threshold="0",
        remedy="This is an error in llamarl and not in the run: please report it with config.yaml.",
    )


def _equal_groups(run: Observed) -> Alarm | None:
    num_groups = 0
    num_equal = 0
    for sample in run.samples[-RECENT:]:
        for line in sample["groups"]:
            num_groups += 1
            num_equal += not line[GROUP_FIELDS.index("taught")]
    where = "of groups in the newest samples"
    if not num_groups:
        deviations = _recent(run.columns, "reward/std")
        num_groups = len(deviations)
        num_equal = int((deviations < LEAST_STD).sum())
        where = "of the newest steps had one reward for all"
    if not num_groups or num_equal / num_groups <= EQUAL:
        return None
    return Alarm(
        title="Most groups teach nothing: their rewards are all equal",
        figure=f"{num_equal / num_groups:.0%} {where}",
        threshold=f"{EQUAL:.0%}",
        remedy="If all are right, the task is learned: a harder one, or eval.target to end. If all "
        "are wrong: a warm start (recipes/sft.py), an easier task, another reward.fn, or a larger "
        "group_size. The samples below show which.",
    )


def _entropy(run: Observed) -> Alarm | None:
    entropy = _recent(run.columns, "entropy")
    if not len(entropy) or entropy.mean() >= ENTROPY:
        return None
    return Alarm(
        title="Entropy is near 0: nothing new is tried",
        figure=f"{entropy.mean():.2g} nats a token",
        threshold=f"{ENTROPY:g}",
        remedy="If the reward is not where it should be: a smaller lr, loss.entropy_coef, a "
        "reference with loss.kl_coef, or a checkpoint from before the fall.",
    )


def _unmoved(run: Observed) -> Alarm | None:
    """Find a reward that is where it began, within its noise from step to step. Groups of equal
    rewards have an alarm of their own.
    """
    rewards = run.columns.get("reward/mean", np.empty(0))
    moved = _moved(rewards)
    spread = _recent(run.columns, "reward/std")
    if moved is None or abs(moved) > STILL or not len(spread) or spread.mean() < LEAST_STD:
        return None
    known = rewards[~np.isnan(rewards)]
    if len(known) < STILL_STEPS:
        return None
    held_out = run.columns.get(EVALUATED, np.empty(0))
    held_out = held_out[~np.isnan(held_out)]
    if len(held_out) > 1 and held_out[-1] - held_out[0] > GAIN * spread.mean():
        return None  # sampled prompts may become harder
    rates = _recent(run.columns, "lr")
    rate = f" at lr {rates.max():g}" if len(rates) else ""
    return Alarm(
        title=f"The reward has not moved in {len(known)} steps{rate}",
        figure=f"{known[:WINDOW].mean():.3g} at first, {known[-WINDOW:].mean():.3g} now",
        threshold=f"{STILL:g} standard error between the first and the newest {WINDOW} steps",
        remedy="Unless the task is solved: a larger lr (3 to 10 times), more completions a step, "
        "an easier task, or a warm start (recipes/sft.py).",
    )


def _grown(run: Observed) -> Alarm | None:
    """Find an entropy that grows with the reward: a policy that unlearns its language for it."""
    moved = _moved(run.columns.get("reward/mean", np.empty(0)))
    entropy = run.columns.get("entropy", np.empty(0))
    known = entropy[~np.isnan(entropy)]
    if moved is None or moved < RISEN or len(known) < 2 * WINDOW:
        return None
    first, newest = known[:WINDOW].mean(), known[-WINDOW:].mean()
    if newest < max(LEAST_GROWN, GROWN * first):
        return None
    return Alarm(
        title="Entropy has grown while the reward rose: the policy may lose its language",
        figure=f"{first:.2g} nats a token at first, {newest:.2g} now",
        threshold=f"{GROWN:g} times, from {LEAST_GROWN:g} nats a token on",
        remedy="Read the samples of high reward. If they are no language: a smaller lr, "
        "reference=frozen with loss.kl_coef, or a reward that asks for more.",
    )


def _lag(run: Observed) -> Alarm | None:
    name = "buffer/age_min" if "buffer/age_min" in run.columns else "lag/mean"
    lags = _recent(run.columns, name)
    if len(lags) < RECENT or lags[-1] < LEAST_LAG:
        return None
    slope = steepness(lags.tolist())
    if slope < LAG_SLOPE:
        return None
    return Alarm(
        title="Lag grows: what is trained on becomes older from step to step",
        figure=f"{name} is {lags[-1]:.1f} steps and grows by {slope:.2f} a step",
        threshold=f"{LAG_SLOPE:g} a step, from {LEAST_LAG:g} steps on",
        remedy="Set max_lag, or a smaller overcommit; or more of what is slow between generator "
        "and trainer (reward.num_workers, placement).",
    )


def _ratio(run: Observed) -> Alarm | None:
    ratios = _recent(run.columns, "ratio/mean")
    if not len(ratios):
        return None
    mean = ratios.mean()
    if 1 / RATIO <= mean <= RATIO:
        return None
    return Alarm(
        title="Trainer and generator disagree about what was likely",
        figure=f"the mean ratio is {mean:.3g}",
        threshold=f"{1 / RATIO:g} to {RATIO:g}",
        remedy="A smaller max_lag or lr; colour the samples by logprob gap to see which tokens. "
        "With quantised weights compare weights/quantization_kl.",
    )


def _fall(run: Observed) -> Alarm | None:
    accuracy = run.columns.get(ACCURACY, np.empty(0))
    known = accuracy[~np.isnan(accuracy)]
    if len(known) < 2 or known.max() - known[-1] <= FALL:
        return None
    return Alarm(
        title="Held-out accuracy has fallen from its best",
        figure=f"{known[-1]:.1%}, after {known.max():.1%}",
        threshold=f"{FALL:.0%} less",
        remedy="Go on from an earlier checkpoint with a smaller lr. If reward/mean still rises, "
        "the reward is being deceived: read the samples of high reward.",
    )


# --- What the checks share ---


def _moved(values: np.ndarray) -> float | None:
    """Return the rise from the first rows' mean to the newest rows' mean, in standard errors; None
    while there are too few rows.
    """
    known = values[~np.isnan(values)]
    if len(known) < 2 * WINDOW:
        return None
    first, newest = known[:WINDOW], known[-WINDOW:]
    error = np.sqrt((first.var(ddof=1) + newest.var(ddof=1)) / WINDOW)
    difference = newest.mean() - first.mean()
    return float(difference / error) if error else float(np.sign(difference)) * np.inf


def _recent(columns: Columns, name: str) -> np.ndarray:
    values = columns.get(name, np.empty(0))
    return values[~np.isnan(values)][-RECENT:]


def _median_step_s(columns: Columns) -> float | None:
    taken_s = columns.get("time/step_s", np.empty(0))
    known = taken_s[~np.isnan(taken_s)]
    return float(np.median(known)) if len(known) >= 3 else None


def _longest_waits(columns: Columns) -> str:
    """Name the cause for which each executor waited longest in the last row."""
    causes: dict[str, tuple[float, str]] = {}
    for name, shares in columns.items():
        executor, found, cause = name.partition("/idle_fraction/")
        if found and not np.isnan(shares[-1]):
            causes[executor] = max(causes.get(executor, (0.0, "")), (float(shares[-1]), cause))
    waits = [f"{name} for {cause}" for name, (share, cause) in causes.items() if share > 0]
    return f"Before it waited: {', '.join(waits)}. " if waits else ""


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


@dataclass(frozen=True, slots=True)
class ShareCheck:
    """Finds a share of completions or tokens whose mean over the newest rows is above a limit."""

    column: str
    limit: float
    title: str
    what: str  # what the share is of
    remedy: str

    def __call__(self, run: Observed) -> Alarm | None:
        """Return the alarm, if there is one."""
        values = _recent(run.columns, self.column)
        if not len(values) or values.mean() <= self.limit:
            return None
        figure = f"{values.mean():.0%} {self.what}"
        return Alarm(self.title, figure, f"{self.limit:.0%}", self.remedy)


OF_LEARNING = (_unmoved, _grown)
# All checks, in the order of their alarms.
CHECKS = (
    _failed,
    _open_step,
    _slow_step,
    _not_the_same_tokens,
    ShareCheck(
        column="reward/error_rate",
        limit=ERRORS,
        title="Completions cannot be scored",
        what="of completions are errors",
        remedy="They are masked, so nothing is learned from them. The log has the reasons; raise "
        "reward.timeout_s if they are slow rather than wrong.",
    ),
    _equal_groups,
    ShareCheck(
        column="completion/truncated_fraction",
        limit=TRUNCATED,
        title="Many completions are cut off",
        what="of completions end at max_new_tokens",
        remedy="Raise max_new_tokens, or reward what ends by itself "
        "(trainer.missing_eos_penalty). See in the samples whether they go on for no reason.",
    ),
    ShareCheck(
        column="completion/deadline_truncated_fraction",
        limit=CUT_BY_TIME,
        title="Many completions are ended by a deadline, and not trained on",
        what="of completions",
        remedy="The longest are lost, which makes answers short: raise max_lag or "
        "generator.max_seconds, or set on_deadline=wait.",
    ),
    _entropy,
    *OF_LEARNING,
    _lag,
    _ratio,
    ShareCheck(
        column="ratio/capped_fraction",
        limit=CAPPED,
        title="The cap acts on many tokens",
        what="of trained tokens",
        remedy="A smaller max_lag or lr, or fewer updates of one batch.",
    ),
    _fall,
)

# --- While the run goes on ---

FIRST_STEPS = 3  # that bring nothing before it is said
MANY_CUT = 0.5  # share of completions that end at the token limit, from which that may be why


class SignalWatch:
    """Warns, once, where the first steps of a run bring no signal (a sink): all completions got the
    same reward, so that no one is better than another.
    """

    def __init__(self):
        self._num_flat = 0  # of the run's first steps; a resumed run is past them

    def write(self, row: Row) -> None:
        """Look at a row of the first steps."""
        if step_of(row) > FIRST_STEPS or row.get("reward/std") != 0.0:
            return
        self._num_flat += 1
        if self._num_flat == FIRST_STEPS:
            log.warning("%s", no_signal(row))

    def close(self) -> None:
        """Release nothing: there is nothing to release."""


class LearningWatch:
    """Warns, once each, of a reward that does not move and of an entropy that grows with it (a
    sink). It looks every WINDOW steps, at a run that it has seen from its first steps on: a
    resumed one is judged by the report, which has all rows.
    """

    COLUMNS = ("reward/mean", "reward/std", "entropy", "eval/reward", "lr")

    def __init__(self):
        self._rows: dict[str, list[float]] = {name: [] for name in self.COLUMNS}
        self._first: int | None = None
        self._said: set[str] = set()

    def write(self, row: Row) -> None:
        """Look at a row."""
        step = step_of(row)
        if self._first is None:
            self._first = step
        if self._first > WINDOW:
            return
        for name, values in self._rows.items():
            number = number_of(row, name)
            values.append(np.nan if number is None else number)
        if step == 0 or step % WINDOW:
            return
        columns = {name: np.asarray(values, float) for name, values in self._rows.items()}
        for alarm in alarms_of_learning(columns):
            kind = alarm.title.partition(" in ")[0]
            if kind not in self._said:
                self._said.add(kind)
                log.warning("%s: %s. %s", alarm.title, alarm.figure, alarm.remedy)

    def close(self) -> None:
        """Release nothing: there is nothing to release."""


def no_signal(row: Row) -> str:
    """Return the warning in a line or two, and then what to try, in the order of what it costs."""
    lines = [
        f"the first {FIRST_STEPS} steps brought no signal: every completion got the reward "
        f"{row['reward/mean']:g},",
        "so nothing is learned from them. recipes/evaluate.py shows what the model answers. Try",
    ]
    cut = number_of(row, "completion/truncated_fraction") or 0.0
    if cut >= MANY_CUT:
        lines.append(f"  - a larger max_new_tokens ({cut:.0%} of completions are cut off)")
    lines += [
        "  - another reward.fn (exact_match gives 0 to an answer within a sentence,",
        "    llamarl.tasks.rewards:numeric_match reads the number)",
        "  - an easier task (task.options.*)",
        "  - a larger group_size",
        "  - a warm start (recipes/sft.py)",
    ]
    return "\n".join(lines)


AGE = "buffer/age_min"
LEAST_WINDOW = 20  # steps that are looked at; three sync periods where that is more
STEEP = 0.8  # steps of age a step, from which no newer data comes
LATE = 8.0  # steps of age up to which nothing is said

_REMEDY = """\
the newest data that the trainer has is {age:.0f} steps old, {slope:.1f} steps older at each of the
last {window} steps: what reaches it was sampled by always the same versions. Try
  - a smaller overcommit, if one is set: it bounds what is on its way (docs/asynchrony.md)
  - more of what is slow between generator and trainer: reward.num_workers, or ranks of
    placement.generator, placement.reward, placement.victim (the report says who waits for what)"""


class LagWatch:
    """Warns, once, where the newest data of a replay buffer grows old by about a step a step (a
    sink). It is for runs without a bound on lag: a bound ends such a growth by itself.

    It looks at the newest data that could be drawn, not at what is drawn: draws by reward, and
    draws from a buffer that grows, become older as they should. sync_period: steps after which what
    came can be drawn.
    """

    def __init__(self, sync_period: int = 1):
        self._window = max(LEAST_WINDOW, 3 * sync_period)
        self._ages: deque[float] = deque(maxlen=self._window)
        self._is_said = False

    def write(self, row: Row) -> None:
        """Look at a row."""
        age = number_of(row, AGE)
        if age is None or self._is_said:
            return
        self._ages.append(float(age))
        if len(self._ages) < self._window or age <= LATE:
            return
        slope = steepness(self._ages)
        if slope >= STEEP:
            self._is_said = True
            log.warning("%s", _REMEDY.format(age=age, slope=slope, window=len(self._ages)))

    def close(self) -> None:
        """Release nothing: there is nothing to release."""


def steepness(values: Sequence[float]) -> float:
    """Return how much values grow from one to the next (at least two values): the median slope over
    all pairs, Theil and Sen's, which a few odd values do not move.
    """
    pairs = combinations(enumerate(values), 2)
    return statistics.median((after - before) / (j - i) for (i, before), (j, after) in pairs)
