"""What a study is made of: arms, seeds, values read off runs, questions, checks and verdicts.

A study is a claim that could come out otherwise. Its arms are settings of one job, and each seed
runs all of them, so that a question compares runs of one seed: the difference of two values, over
the seeds, with the 95 % interval of its mean (Student's t). A question says beforehand what it
expects, and by which margin:

    more   held if the whole interval lies above the margin; opposite if it lies below 0 (below a
           negative margin); smaller than the margin if it lies below that alone
    less   the same of the difference with its sign turned
    same   held if the interval lies within the margin on both sides, opposite if it lies outside

Whatever lies across a margin is not answered. A check says in which state a run must be to answer
at all; if one fails, the study has no answer, whatever its intervals say. A check or a question
that was thought of after the runs is part of a study's review, which the announcement lacks. It can
take a verdict away and give none: what is asked after the runs is not answered by them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

HELD = "held"
SMALLER = "smaller"  # than the margin, which `Question.worded` adds
OPPOSITE = "opposite"
NOT_ANSWERED = "not answered"
NOT_RUN = "not tested yet"
STEP = "step"

Row = dict[str, float | int | None]


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run. rows: a dict a step, its start's as step 0; failed: the error of a run that
    diverged, or None; load: runnable processes of the machine at its end.
    """

    rows: tuple[Row, ...]
    failed: str | None = None
    seconds: float = 0.0
    load: float = 0.0

    def known(self, *columns: str) -> list[Row]:
        """Return the rows that have all of these columns."""
        found = list(self.rows)
        for name in columns:
            found = [row for row in found if row.get(name) is not None]
        return found


Runs = Mapping[str, Run]  # of one seed: arm -> run


class Value(Protocol):
    """A number that is read off the runs of a seed; None where it cannot be."""

    @property
    def said(self) -> str: ...

    @property
    def columns(self) -> tuple[str, ...]: ...

    def __call__(self, runs: Runs) -> float | None: ...


# --- Values ---


@dataclass(frozen=True)
class _OfColumn:
    """A value of one column of one arm's run."""

    arm: str
    column: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)


@dataclass(frozen=True)
class Last(_OfColumn):
    """The mean of a column's last values."""

    count: int = 1

    @property
    def said(self) -> str:
        which = "the last" if self.count == 1 else f"the mean of the last {self.count}"
        return f"{which} {self.column} of [{self.arm}]"

    def __call__(self, runs: Runs) -> float | None:
        rows = runs[self.arm].known(self.column)
        if len(rows) < self.count:
            return None
        return statistics.mean(row[self.column] for row in rows[-self.count :])


@dataclass(frozen=True)
class After(_OfColumn):
    """A column's value after so many steps; None of a run that was not looked at then."""

    step: int

    @property
    def said(self) -> str:
        return f"{self.column} of [{self.arm}] after step {self.step}"

    def __call__(self, runs: Runs) -> float | None:
        for row in runs[self.arm].known(self.column):
            if row[STEP] == self.step:
                return row[self.column]
        return None


@dataclass(frozen=True)
class Gain(_OfColumn):
    """By how much the mean of a column's last values is above its first, the start's."""

    count: int = 1

    @property
    def said(self) -> str:
        return f"{Last(self.arm, self.column, self.count).said} above the start's"

    def __call__(self, runs: Runs) -> float | None:
        last = Last(self.arm, self.column, self.count)(runs)
        if last is None:
            return None
        return last - runs[self.arm].known(self.column)[0][self.column]


@dataclass(frozen=True)
class Start(_OfColumn):
    """A column's first value, which is the start's, times a factor."""

    times: float = 1.0

    @property
    def said(self) -> str:
        return f"{self.times:g} times the start's {self.column} of [{self.arm}]"

    def __call__(self, runs: Runs) -> float | None:
        rows = runs[self.arm].known(self.column)
        return self.times * rows[0][self.column] if rows else None


@dataclass(frozen=True)
class Highest(_OfColumn):
    """A column's largest value."""

    @property
    def said(self) -> str:
        return f"the highest {self.column} of [{self.arm}]"

    def __call__(self, runs: Runs) -> float | None:
        rows = runs[self.arm].known(self.column)
        return max((row[self.column] for row in rows), default=None)


@dataclass(frozen=True)
class LookOfHighest(_OfColumn):
    """Which of a run's looks at a column, from 1 on, has its largest value; the start is none."""

    @property
    def said(self) -> str:
        return (
            f"the number of the look after the start at which {self.column} of [{self.arm}] peaks"
        )

    def __call__(self, runs: Runs) -> float | None:
        rows = [row for row in runs[self.arm].known(self.column) if row[STEP] > 0]
        if not rows:
            return None
        values = [row[self.column] for row in rows]
        return 1 + values.index(max(values))


@dataclass(frozen=True)
class MeanOver(_OfColumn):
    """The mean of a column over the second half of a run."""

    @property
    def said(self) -> str:
        return f"the mean {self.column} of the second half of [{self.arm}]"

    def __call__(self, runs: Runs) -> float | None:
        rows = [row for row in runs[self.arm].known(self.column) if row[STEP] > 0]
        if not rows:
            return None
        return statistics.mean(row[self.column] for row in rows[len(rows) // 2 :])


@dataclass(frozen=True)
class FirstAt(_OfColumn):
    """Where a column first has a value, in another column: steps or seconds to a target. A run that
    never has it counts as its end, which is less than the truth.
    """

    target: float
    of: str = STEP

    @property
    def said(self) -> str:
        return f"the {self.of} at which {self.column} of [{self.arm}] first is {self.target:g}"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column, self.of)

    def __call__(self, runs: Runs) -> float | None:
        rows = runs[self.arm].known(self.column, self.of)
        if not rows:
            return None
        reached = [row for row in rows if row[self.column] >= self.target]
        return (reached or rows[-1:])[0][self.of]


@dataclass(frozen=True)
class When(_OfColumn):
    """A column where another one first passes a value, between two looks in a line. The value may
    be one that is read off another arm's run. over: looks whose mean has to pass it.
    """

    by: str
    at: float | Value
    over: int = 1

    @property
    def said(self) -> str:
        at = f"{self.at:g}" if isinstance(self.at, float) else f"the {self.at.said}"
        by = self.by if self.over == 1 else f"mean {self.by} of {self.over} steps"
        return f"{self.column} of [{self.arm}] where its {by} first is {at}"

    @property
    def columns(self) -> tuple[str, ...]:
        of_at = () if isinstance(self.at, float) else self.at.columns
        return (self.column, self.by, *of_at)

    def __call__(self, runs: Runs) -> float | None:
        at = self.at if isinstance(self.at, float) else self.at(runs)
        if at is None:
            return None
        rows = runs[self.arm].known(self.column, self.by)
        looks = []
        for end in range(self.over, len(rows) + 1):
            newest = rows[end - self.over : end]
            looks.append((newest[-1][self.column], statistics.mean(row[self.by] for row in newest)))
        for (before, low), (after, high) in pairwise(looks):
            if low <= at <= high and low < high:
                return before + (at - low) / (high - low) * (after - before)
        return None


@dataclass(frozen=True)
class Between:
    """A column of several arms' ends where another one has a given arm's value, in lines between
    them: what a family of settings would have at equal success.
    """

    arms: tuple[str, ...]
    column: str
    by: str
    like: str

    @property
    def said(self) -> str:
        family = ", ".join(f"[{arm}]" for arm in self.arms)
        return f"the last {self.column}, between {family}, at the last {self.by} of [{self.like}]"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column, self.by)

    def __call__(self, runs: Runs) -> float | None:
        at = Last(self.like, self.by)(runs)
        points = []
        for arm in self.arms:
            pair = (Last(arm, self.by)(runs), Last(arm, self.column)(runs))
            if None not in pair:
                points.append(pair)
        if at is None:
            return None
        points.sort()
        for (low, first), (high, second) in zip(points, points[1:]):
            if low <= at <= high and low < high:
                return first + (at - low) / (high - low) * (second - first)
        return None


@dataclass(frozen=True)
class Fall(_OfColumn):
    """By how much a column ends below its largest value."""

    @property
    def said(self) -> str:
        return f"the fall of {self.column} of [{self.arm}] from its highest to its last"

    def __call__(self, runs: Runs) -> float | None:
        highest = Highest(self.arm, self.column)(runs)
        last = Last(self.arm, self.column)(runs)
        return None if highest is None or last is None else highest - last


@dataclass(frozen=True)
class Minus:
    """One value less another, as what a setting costs an arm."""

    left: Value
    right: Value

    @property
    def said(self) -> str:
        return f"({self.left.said} - {self.right.said})"

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.left.columns, *self.right.columns)

    def __call__(self, runs: Runs) -> float | None:
        left = self.left(runs)
        right = self.right(runs)
        return None if left is None or right is None else left - right


@dataclass(frozen=True)
class Over:
    """One value as a part of another, as the seconds of a step that an arm needs."""

    value: Value
    whole: Value

    @property
    def said(self) -> str:
        return f"({self.value.said} / {self.whole.said})"

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.value.columns, *self.whole.columns)

    def __call__(self, runs: Runs) -> float | None:
        value = self.value(runs)
        whole = self.whole(runs)
        return None if value is None or not whole else value / whole


@dataclass(frozen=True)
class Constant:
    """A number that was fixed beforehand."""

    number: float

    @property
    def said(self) -> str:
        return f"{self.number:g}"

    @property
    def columns(self) -> tuple[str, ...]:
        return ()

    def __call__(self, runs: Runs) -> float | None:
        return self.number


# --- Questions and checks ---


@dataclass(frozen=True)
class Question:
    """left less right, over the seeds, against a margin. times: of both, as 100 for points.
    decides: whether the study's verdict hangs on it; else it only says more.
    """

    name: str
    left: Value
    right: Value
    expect: str  # more | less | same
    margin: float
    unit: str
    times: float = 1.0
    form: str = ".1f"
    decides: bool = True

    def __post_init__(self) -> None:
        if self.expect not in ("more", "less", "same"):
            raise ValueError(f"{self.name}: expect={self.expect!r} is none of more, less, same")
        if self.expect == "same" and self.margin <= 0:
            raise ValueError(f"{self.name}: nothing is the same within a margin of {self.margin:g}")

    @property
    def bound(self) -> str:
        """Where the whole interval has to lie."""
        if self.expect == "same":
            return f"± {self.margin:g}"
        return f"> {self.margin:g}" if self.expect == "more" else f"< {-self.margin:g}"

    def worded(self, verdict: str) -> str:
        """Return a verdict with the margin where it needs one."""
        return f"smaller than {self.margin:g}" if verdict == SMALLER else verdict

    @property
    def said(self) -> str:
        if self.expect == "same":
            meant = f"equal within {self.margin:g} {self.unit}"
        else:
            meant = f"{self.expect} by over {self.margin:g} {self.unit}"
        times = "" if self.times == 1 else f", times {self.times:g}"
        decides = "" if self.decides else " (the verdict does not hang on it)"
        return (
            f"{self.name}: {self.left.said}, less {self.right.said}{times}; "
            f"expected {meant}{decides}"
        )


@dataclass(frozen=True)
class Check:
    """A state without which a run cannot answer: its value is above, or below, a limit, of every
    seed.
    """

    name: str
    value: Value
    side: str  # above | below
    limit: float

    def __post_init__(self) -> None:
        if self.side not in ("above", "below"):
            raise ValueError(f"{self.name}: side={self.side!r} is neither above nor below")

    @property
    def said(self) -> str:
        return f"{self.name}: {self.value.said} is {self.side} {self.limit:g}"

    def holds(self, runs: Runs) -> bool:
        """Whether a seed's runs are in this state. A value that cannot be read is in none."""
        found = self.value(runs)
        if found is None or not math.isfinite(found):
            return False
        return found > self.limit if self.side == "above" else found < self.limit


@dataclass(frozen=True)
class Arm:
    """A setting: words behind the job's. made_by: makes its rows in a directory of its own from all
    words of the run, in the place of a job.
    """

    name: str
    overrides: tuple[str, ...] = ()
    ranks: int = 1
    made_by: Callable[[Path, Sequence[str]], list[Row]] | None = None


@dataclass(frozen=True)
class Review:
    """What was found of a study after its runs. It is no part of what was announced.

    said: why, in sentences. title and source: what the table of claims has in place of the
    announced ones. checks: states that its runs should have been in too. undecided: names of
    questions on which the verdict should not hang. questions: what should have been asked, so that
    the runs do not answer the study.
    """

    said: str
    title: str | None = None
    source: str | None = None
    checks: tuple[Check, ...] = ()
    undecided: tuple[str, ...] = ()
    questions: tuple[Question, ...] = ()


@dataclass(frozen=True)
class Study:
    """A claim, what it is asked by, and what its runs are. `given` names paths that the command
    line gives (--given NAME=PATH) and that stand in overrides as {NAME}. minutes: that a core takes
    for all runs, as estimated from some steps. keeps_reports: whether each run's report, with its
    samples, stays beside its rows.
    """

    name: str
    paper: str
    section: str
    title: str
    claim: str
    refuted_by: str
    arms: tuple[Arm, ...]
    questions: tuple[Question, ...]
    checks: tuple[Check, ...]
    seeds: tuple[int, ...]
    common: tuple[str, ...]
    minutes: int
    y: str
    x: str = STEP
    recipe: str = "llama_async.py"
    given: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()  # columns of the table besides, each arm's last
    keeps_reports: bool = False
    review: Review | None = None

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.name}: two arms have one name: {names}")
        if len(self.seeds) < 2:
            raise ValueError(f"{self.name}: an interval needs at least 2 seeds")
        if not any(question.decides for question in self.questions):
            raise ValueError(f"{self.name}: no question decides, so there is no verdict")

    @property
    def asked(self) -> tuple[Question, ...]:
        """All questions, those of the review last."""
        return (*self.questions, *(self.review.questions if self.review else ()))

    @property
    def all_checks(self) -> tuple[Check, ...]:
        """All checks, those of the review last."""
        return (*self.checks, *(self.review.checks if self.review else ()))

    def decides(self, question: Question) -> bool:
        """Whether the verdict hangs on a question."""
        if self.review is None:
            return question.decides
        if self.review.questions:
            return question in self.review.questions
        return question.decides and question.name not in self.review.undecided

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are kept of a run."""
        found = [STEP, "time/wall_s", self.x, self.y, *self.shown]
        for question in self.asked:
            found += [*question.left.columns, *question.right.columns]
        for check in self.all_checks:
            found += check.value.columns
        return tuple(dict.fromkeys(found))
