"""Judges: measure more of an evaluation than its scores, and join their metrics.

    held-out completions, scored --keep--> by policy version, until it has all
                                 --begin--> every EvalJudge --poll--> their metrics and the scores'

EvalJudges are: a scorer that is never trained on (gold.py), the likelihood of completions under the
model that the policy started from (perplexity.py), how far apart completions are (diversity.py),
and the file for people to read (samples.py). A MakeEvalJudge makes one, given the Site where it
runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from llamarl.evaluation.metrics import number_of
from llamarl.scoring.scorer import Item, Site
from llamarl.tasks.held_out import EvalSet
from llamarl.types import EvalCompletion, Outcome

Metrics = Mapping[str, float | str | None]  # columns of a row: eval/... and eval/NAME/...


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A held-out completion with at least one token, as the scorer's item, and its outcome."""

    completion: EvalCompletion
    item: Item
    outcome: Outcome

    @property
    def version(self) -> int:
        """The policy version that sampled it."""
        return int(self.completion.policy_versions[0])

    @property
    def place(self) -> tuple[int, int]:
        """Its place among its version's completions: its prompt, and its number for that prompt."""
        return self.completion.prompt_index, number_of(self.completion)


class EvalJudge(Protocol):
    """Judges evaluations, in the order in which they came, without blocking the caller.

        judge = make_judge(site)
        judge.load()                   # on all ranks of the site; what follows, on the first alone
        judge.start()
        judge.begin(7, answers)
        judge.poll()                   # [(7, {"eval/gold": 0.5})], or [] if it is not known yet
        judge.close()

    Errors of the judge itself are raised by `load`, `start` or `poll`: ValueError or OSError for
    what the user gave, RewardError or NotFinite if it cannot go on.
    """

    @property
    def is_computing(self) -> bool:
        """Whether the next `poll` computes here, on this thread."""
        return False

    def load(self) -> None:
        """Load models. Collective over the site's ranks: each holds its own share."""
        return None

    def start(self) -> None:
        """Block until evaluations can be judged."""
        return None

    def begin(self, version: int, answers: Sequence[Evaluated]) -> None:
        """Take the evaluation of a policy version; the call does not block.

        answers: for each held-out prompt, in order, the greedy completion and then the samples.
        """
        raise NotImplementedError

    def poll(self) -> list[tuple[int, Metrics]]:
        """Return the versions that were judged since the last call, with their metrics. The judge
        works only during this call, in bounded pieces.
        """
        raise NotImplementedError

    def wait(self, timeout_s: float) -> None:
        """Block until `poll` has something to do, at most timeout_s."""
        return None

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that it holds on the device and that may leave while others use it."""
        yield from ()

    def close(self) -> None:
        """Drop what is pending and free everything. A second call does nothing."""
        return None


MakeEvalJudge = Callable[[Site], EvalJudge]


@dataclass(slots=True)
class _Begun:
    """An evaluation in judgement: the metrics so far, and how many judges are still missing."""

    metrics: dict[str, float | str | None]
    num_silent: int


class Judges:
    """All judges of a run's evaluations. Without any, an evaluation only has the metrics of its
    scores.

    Its ranks load it together. `keep`, `begin` and `poll` are the first rank's.
    """

    def __init__(self, judges: Sequence[EvalJudge]):
        self._judges = judges
        # By version: the completions of evaluations that are not whole. If two come for one place,
        # the newer counts.
        self._kept: dict[int, dict[tuple[int, int], Evaluated]] = {}
        self._begun: dict[int, _Begun] = {}  # by version

    def load(self) -> None:
        """Load the models of all. Collective over the site's ranks."""
        for judge in self._judges:
            judge.load()

    def start(self) -> None:
        """Block until evaluations can be judged."""
        for judge in self._judges:
            judge.start()

    @property
    def oldest(self) -> int | None:
        """The oldest version that some judge has not judged yet; None if there is none."""
        return min(self._begun, default=None)

    @property
    def is_computing(self) -> bool:
        """Whether the next `poll` computes here."""
        return bool(self._begun) and any(judge.is_computing for judge in self._judges)

    def keep(self, answer: Evaluated) -> None:
        """Take a completion whose evaluation is not whole yet."""
        if self._judges:
            self._kept.setdefault(answer.version, {})[answer.place] = answer

    def begin(self, version: int, metrics: Metrics) -> None:
        """Let the judges judge an evaluation, whose completions were all kept. metrics: those of
        their scores.
        """
        kept = self._kept.pop(version, {})
        answers = [kept[place] for place in sorted(kept)]
        self._begun[version] = _Begun(dict(metrics), len(self._judges))
        for judge in self._judges:
            judge.begin(version, answers)

    def poll(self) -> list[tuple[int, dict[str, float | str | None]]]:
        """Let judges do a piece of their work. Return the versions that all have judged, with all
        metrics.
        """
        if not self._begun:
            return []
        for judge in self._judges:
            for version, said in judge.poll():
                begun = self._begun[version]
                begun.metrics |= said
                begun.num_silent -= 1
        done = [version for version, begun in self._begun.items() if not begun.num_silent]
        return [(version, self._begun.pop(version).metrics) for version in done]

    def tensors(self) -> Iterator[Tensor]:
        """Yield what the judges hold on the device."""
        for judge in self._judges:
            yield from judge.tensors()

    def close(self) -> None:
        """Drop what is pending, and free everything."""
        self._kept.clear()
        self._begun.clear()
        for judge in self._judges:
            judge.close()


class Finding(Protocol):
    """What a judge finds about the completions of one set."""

    def metrics(self) -> Metrics:
        """Return its columns, under the names for the task's own prompts."""
        raise NotImplementedError


Found = TypeVar("Found", bound=Finding)


class FindsBySet(EvalJudge, Protocol[Found]):
    """A judge that judges each set of prompts by itself.

    sets: the sets whose prompts are completed, one after the other.
    """

    sets: Sequence[EvalSet]

    def poll(self) -> list[tuple[int, Metrics]]:
        """Return the findings about each version, each set under its own columns."""
        judged: list[tuple[int, Metrics]] = []
        for version, findings in self.findings():
            columns: dict[str, float | str | None] = {}
            for one, finding in zip(self.sets, findings, strict=True):
                columns |= one.columns(finding.metrics())
            judged.append((version, columns))
        return judged

    def findings(self) -> list[tuple[int, list[Found]]]:
        """Do a piece of the work. Return the findings about each version that it completes, set by
        set.
        """
        raise NotImplementedError


def find(judge: FindsBySet[Found], answers: Sequence[Evaluated]) -> list[Found]:
    """Load a judge, let it judge the completions of one evaluation, set by set, and close it.
    Blocks.
    """
    judge.load()
    with closing(judge):
        judge.start()
        judge.begin(0, answers)
        found = judge.findings()
        while not found:
            judge.wait(1.0)
            found = judge.findings()
    ((_, of_sets),) = found
    return of_sets


def spans_of(sets: Sequence[EvalSet]) -> list[tuple[int, int]]:
    """Return where each set's prompts begin and end among the prompts of all, one after another."""
    ends = list(itertools.accumulate(one.count for one in sets))
    begins = [0, *ends[:-1]]
    return list(zip(begins, ends))


def greedy_items(answers: Sequence[Evaluated]) -> list[Item]:
    """Return the greedy completion of each prompt, in order."""
    return [answer.item for answer in answers if answer.completion.greedy]
