"""Rates: the counters of all ranks become a row's rates, idle shares by cause, and the key to turn.

Counters read here (all only grow; seconds are summed over the ranks of an executor):

    generator/tokens          tokens sampled
    weights/swap_stall_s      decode time lost to exchanging weights
    X/busy_s, X/idle_s        for every executor X: time inside steps that did work, and the rest
    X/idle_s/CAUSE            the part of X/idle_s spent waiting for CAUSE: the first word of
                              X.waiting_for() (data, weights, tickets, room, ...), or "no work"
                              when nothing was owed to X
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

Counters = dict[str, float]  # totals of one rank, or of all
Row = dict[str, float | str | None]  # of metrics.jsonl, by column; text where a reason is told

EVALUATED = "eval/reward"  # in every evaluation in which a completion has a score
LEFT_OUT = "eval/left_out"  # greedy completions without a score, if there are any
LEFT_OUT_REASON = "eval/left_out_reason"  # the commonest reason, as text
ACCURACY = "eval/accuracy"  # the same as EVALUATED, where all scores are 0 or 1
_TOLD = (EVALUATED, LEFT_OUT)  # one of them is in every evaluation

WINDOW_S = 1.0
MEAN = "mean/"  # counters mean/NAME/sum and mean/NAME/count become column NAME
SUM = "sum/"  # the growth of counter sum/NAME becomes column NAME
# Executors whose idle share every row has, null where nothing was counted.
ALWAYS = ("generator", "trainer")


def sets_of(columns: Iterable[str]) -> list[str]:
    """Return the names of the sets of eval.sets that have columns among these, in alphabetical
    order.
    """
    names = set()
    for column in columns:
        parts = column.split("/")
        if len(parts) == 3 and f"{parts[0]}/{parts[2]}" in _TOLD:
            names.add(parts[1])
    return sorted(names)


def is_evaluated(row: Row) -> bool:
    """Whether these values hold an evaluation, even one without any score."""
    return any(column in row for column in _TOLD) or bool(sets_of(row))


_MORE_RANKS = (
    "its process works for other executors meanwhile: start more ranks (torchrun --nproc-per-node)"
)
_SLOW_TRAINER = "the trainer is the slow side: move ranks to placement.trainer"
# The key to turn when an executor waits long for a cause.
KNOBS = {
    ("trainer", "data"): (
        "raise overcommit (then max_lag), "
        "or move ranks from placement.trainer to placement.generator"
    ),
    ("trainer", "weights"): "the generator takes weights late: lower generator.chunk_tokens",
    ("trainer", "no work"): _MORE_RANKS,
    ("generator", "tickets"): (
        "the trainer is the slow side: "
        "raise overcommit (then max_lag), or move ranks to placement.trainer"
    ),
    ("generator", "arrivals"): (
        "an executor between the generator and the trainer is slow: raise reward.num_workers or "
        "give it more ranks; more overcommit puts more on its way, which is older when it arrives"
    ),
    ("generator", "room"): (
        "what follows the generator is slow: "
        "raise reward.num_workers or move ranks to placement.trainer"
    ),
    ("generator", "weights"): "set generator.in_flight_updates=true and max_lag of at least 1",
    ("generator", "no work"): _MORE_RANKS,
    ("reward", "scores"): "raise reward.num_workers, or reward.max_parallel of a judge",
    ("reward", "room"): _SLOW_TRAINER,
    ("reference", "room"): _SLOW_TRAINER,
    ("victim", "room"): "raise reward.num_workers: the scorer of the replies is the slow side",
}
SHOWN_SHARE = 0.005  # of a cause: a smaller one rounds to 0 %


@dataclass(frozen=True, slots=True)
class Idle:
    """An executor's idle time, as shares (0 to 1) of its time."""

    executor: str
    share: float
    causes: tuple[tuple[str, float], ...]  # (cause, share), the largest first

    @property
    def knob(self) -> str:
        """The key to turn for the largest cause; empty when there is nothing to say."""
        if not self.causes:
            return ""
        largest, _ = self.causes[0]
        return KNOBS.get((self.executor, largest), "")

    @property
    def shown_causes(self) -> str:
        """The causes in words, as "data 7%, weights 1%"; empty if all round to 0 %."""
        shown = [(cause, share) for cause, share in self.causes if share >= SHOWN_SHARE]
        return ", ".join(f"{cause} {share:.0%}" for cause, share in shown)


def idle_shares(counters: Counters) -> list[Idle]:
    """Return the idle shares of every executor that has counted any time; a difference of two
    counter readings works as well.
    """
    shares = []
    timed = {name.split("/")[0] for name in counters if name.endswith(("/idle_s", "/busy_s"))}
    for executor in sorted(timed):
        idle_s = counters.get(f"{executor}/idle_s", 0)
        total_s = idle_s + counters.get(f"{executor}/busy_s", 0)
        if total_s <= 0:
            continue
        prefix = f"{executor}/idle_s/"
        causes = [
            (name.removeprefix(prefix), value / total_s)
            for name, value in counters.items()
            if name.startswith(prefix)
        ]
        # The largest first, equal ones by name.
        causes.sort(key=lambda cause: (-cause[1], cause[0]))
        shares.append(Idle(executor, idle_s / total_s, tuple(causes)))
    return shares


class RateMeter:
    """Turns counter readings, taken at every row, into rates.

    Rates are over the time since the previous row, or over the last WINDOW_S where rows come
    faster: other ranks' counters are up to a tenth of a second old, which would show as noise in
    rows of that length.
    """

    def __init__(self, *, wall_s: float, counters: Counters):
        self._readings: deque[tuple[float, Counters]] = deque([(wall_s, dict(counters))])

    def read(self, wall_s: float, counters: Counters) -> Row:
        """Return the derived values of the row that ends now; null where nothing was counted."""
        readings = self._readings
        while len(readings) > 1 and readings[1][0] <= wall_s - WINDOW_S:
            readings.popleft()
        start_s, start = readings[0]
        _, previous = readings[-1]
        readings.append((wall_s, dict(counters)))

        change = {name: value - start.get(name, 0) for name, value in counters.items()}
        elapsed = wall_s - start_s
        tokens_per_s = None
        if "generator/tokens" in change and elapsed > 0:
            tokens_per_s = change["generator/tokens"] / elapsed

        def since_previous(name: str) -> float:
            return counters.get(name, 0) - previous.get(name, 0)

        values: Row = {
            "generator/tokens_per_s": tokens_per_s,
            "weights/swap_stall_s": since_previous("weights/swap_stall_s"),
        }
        for name in counters:
            if name.startswith(MEAN) and name.endswith("/count"):
                kind = name.removesuffix("/count")
                count = since_previous(name)
                total = since_previous(f"{kind}/sum")
                values[kind.removeprefix(MEAN)] = total / count if count else None
            elif name.startswith(SUM):
                values[name.removeprefix(SUM)] = since_previous(name)
        for executor in ALWAYS:
            values[f"{executor}/idle_fraction"] = None
        for idle in idle_shares(change):
            column = f"{idle.executor}/idle_fraction"
            values[column] = idle.share
            for cause, share in idle.causes:
                values[f"{column}/{cause}"] = share
        return values


def number_of(row: Row, column: str) -> float | None:
    """Return a row's number; None where it has none in this column, or a text."""
    value = row.get(column)
    return None if isinstance(value, str) else value


def step_of(row: Row) -> int:
    """Return the step that a row belongs to."""
    step = number_of(row, "step")
    assert step is not None, "every row has its step"
    return int(step)
