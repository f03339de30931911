"""Judges: measure more of an evaluation than its scores, and add their metrics.

    Evaluation --begin--> the work of every EvalJudge --poll--> all metrics, once all have judged

EvalJudges are: a scorer that is never trained on (gold.py), the likelihood of completions under the
model that the policy started from (perplexity.py), the distance between completions (diversity.py),
and the file for people to read (report.Samples).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Protocol, TypeVar

from torch import Tensor

from llamarl.evaluation.ask import Answers
from llamarl.evaluation.metrics import Evaluation, Metrics
from llamarl.scoring.scorer import Item, Site
from llamarl.tasks.parts import EvalSet


class Finding(Protocol):
    """What a judge finds about the answers of one set."""

    def metrics(self) -> Metrics:
        """Return its columns, under the names for the task's own prompts."""
        raise NotImplementedError


Found = TypeVar("Found", bound=Finding, covariant=True)

# What a judge does with one evaluation: it yields before each piece of work, and returns its
# findings by set.
JudgeWork = Generator[None, None, Mapping[EvalSet, Found]]


class EvalJudge(Protocol[Found]):
    """Judges evaluations without blocking the caller.

        judge = make_judge(site)
        judge.load()                       # on all ranks of the site
        judge.start()                      # from here on the first rank alone
        work = judge.judge(7, answers)
        advance(work)                      # None until it has judged; then its findings by set
        judge.close()

    Errors of the judge itself are raised by `load`, `start` or the work: ValueError or OSError for
    what the user gave, RewardError or NotFinite if it cannot go on.
    """

    @property
    def is_computing(self) -> bool:
        """Whether the next piece of a work that has begun computes here, on this thread."""
        return False

    def load(self) -> None:
        """Load models. Collective over the site's ranks: each holds its own share."""
        return None

    def start(self) -> None:
        """Block until evaluations can be judged."""
        return None

    def judge(self, version: int, answers: Answers) -> JudgeWork[Found]:
        """Return the work on the evaluation of a policy version. The first `advance` only begins
        it; each further one does a small piece, because completions of training wait meanwhile.
        """
        raise NotImplementedError

    def wait(self, timeout_s: float) -> None:
        """Block until work that has begun can go on, at most timeout_s."""
        return None

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that it holds on the device and that may leave while others use it."""
        yield from ()

    def close(self) -> None:
        """Free everything. A second call does nothing."""
        return None


MakeEvalJudge = Callable[[Site], EvalJudge[Finding]]


def advance(work: JudgeWork[Found]) -> Mapping[EvalSet, Found] | None:
    """Begin a judge's work, or do a piece of it. Return the findings if it has ended."""
    try:
        next(work)
    except StopIteration as end:
        return end.value
    return None


def find(judge: EvalJudge[Found], answers: Answers) -> Mapping[EvalSet, Found]:
    """Load a judge, let it judge one evaluation, and close it. Blocks."""
    judge.load()
    with closing(judge):
        judge.start()
        work = judge.judge(0, answers)
        advance(work)  # only begins it, so that there is nothing to wait for yet
        while (found := advance(work)) is None:
            judge.wait(1.0)
        return found


class Judges:
    """All judges of a run's evaluations. Without any, an evaluation only has the metrics of its
    scores.

    Its ranks load it together. `begin` and `poll` are the first rank's.
    """

    def __init__(self, judges: Sequence[EvalJudge[Finding]]):
        # A judge works on one evaluation after another, in the order in which they came.
        self._work: list[tuple[EvalJudge[Finding], deque[tuple[int, JudgeWork[Finding]]]]] = []
        for judge in judges:
            self._work.append((judge, deque()))
        self._metrics: dict[int, dict[str, float | str | None]] = {}  # so far, by version

    def load(self) -> None:
        """Load the models of all. Collective over the site's ranks."""
        for judge, _ in self._work:
            judge.load()

    def start(self) -> None:
        """Block until evaluations can be judged."""
        for judge, _ in self._work:
            judge.start()

    @property
    def oldest(self) -> int | None:
        """The oldest version that some judge has not judged yet; None if there is none."""
        return min(self._metrics, default=None)

    @property
    def is_computing(self) -> bool:
        """Whether the next `poll` computes here."""
        return any(begun and judge.is_computing for judge, begun in self._work)

    def begin(self, evaluation: Evaluation) -> None:
        """Let every judge begin with an evaluation."""
        self._metrics[evaluation.version] = dict(evaluation.metrics)
        for judge, begun in self._work:
            work = judge.judge(evaluation.version, evaluation.answers)
            advance(work)
            begun.append((evaluation.version, work))

    def poll(self) -> list[tuple[int, dict[str, float | str | None]]]:
        """Let each judge do a piece of its work. Return the versions that all have judged, with
        their metrics.
        """
        for _, begun in self._work:
            if not begun:
                continue
            version, work = begun[0]
            found = advance(work)
            if found is not None:
                begun.popleft()
                for one, finding in found.items():
                    self._metrics[version] |= one.columns(finding.metrics())
        waiting: set[int] = set()
        for _, begun in self._work:
            waiting.update(version for version, _ in begun)
        judged = [version for version in self._metrics if version not in waiting]
        return [(version, self._metrics.pop(version)) for version in judged]

    def tensors(self) -> Iterator[Tensor]:
        """Yield what the judges hold on the device."""
        for judge, _ in self._work:
            yield from judge.tensors()

    def close(self) -> None:
        """Drop what is pending, and free everything."""
        self._metrics.clear()
        for judge, begun in self._work:
            begun.clear()
            judge.close()


def greedy_items(answers: Answers) -> dict[EvalSet, list[Item]]:
    """Return the greedy completion of each prompt, in order."""
    found = {}
    for one, own in answers.items():
        found[one] = [answer.item for answer in own if answer.completion.greedy]
    return found


def spans_of(items: Mapping[EvalSet, Sequence]) -> dict[EvalSet, slice]:
    """Return the place of each set's items in a list of all items, set after set."""
    spans = {}
    begin = 0
    for one, own in items.items():
        spans[one] = slice(begin, begin + len(own))
        begin += len(own)
    return spans
