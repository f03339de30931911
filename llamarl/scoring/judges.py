"""Judges: what says more of an evaluation than its scores do, and how what they say is joined.

    held-out completions, scored --keep--> by policy version, until it has all
                                 --begin--> every EvalJudge --poll--> their metrics and the scores'

What a scorer says that is never trained on (gold.py), how likely the model that the policy began as
finds the answers (perplexity.py), how far apart they are (diversity.py), and the file that people
read (samples.py) are EvalJudges. What makes one is a MakeEvalJudge, which is given the Site that it
runs at.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from llamarl.scoring.evaluation import number_of
from llamarl.scoring.scorer import Item, Outcome, Site
from llamarl.tasks.held_out import EvalSet
from llamarl.types import EvalCompletion

Metrics = Mapping[str, float | str | None]  # columns of a row: eval/... and eval/NAME/...


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A held-out completion of at least a token, as what scored it saw it, and its outcome."""

    completion: EvalCompletion
    item: Item
    outcome: Outcome

    @property
    def version(self) -> int:
        """The policy version that sampled it."""
        return int(self.completion.policy_versions[0])

    @property
    def place(self) -> tuple[int, int]:
        """Which of its version's completions it is: its prompt, and its number among these."""
        return self.completion.prompt_index, number_of(self.completion)


class EvalJudge(Protocol):
    """Judges evaluations, in the order in which they came, without blocking who asks.

        judge = make_judge(site)
        judge.load()                   # on all ranks of the site; what follows, on the first alone
        judge.start()
        judge.begin(7, answers)
        judge.poll()                   # [(7, {"eval/gold": 0.5})], or [] if it is not known yet
        judge.close()

    What is wrong with the judge itself is raised by `load`, `start` or `poll`: ValueError or
    OSError for what the user gave, RewardError or NotFinite where it cannot go on.
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

        answers: of each held-out prompt, in order, the greedy one and then those that were sampled.
        """
        raise NotImplementedError

    def poll(self) -> list[tuple[int, Metrics]]:
        """Return the versions that are judged since the last call, with what is said of each. The
        call is also what gives the judge time to work, in bounded pieces.
        """
        raise NotImplementedError

    def wait(self, timeout_s: float) -> None:
        """Block until `poll` has something to do, at most timeout_s."""
        return None

    def tensors(self) -> Iterator[Tensor]:
        """Yield what it holds on the device, which may leave it while others use that."""
        yield from ()

    def close(self) -> None:
        """Drop what is pending and free everything. A second call does nothing."""
        return None


MakeEvalJudge = Callable[[Site], EvalJudge]


@dataclass(slots=True)
class _Begun:
    """An evaluation that is judged: what is known of it, and how many have not spoken of it."""

    metrics: dict[str, float | str | None]
    num_silent: int


class Judges:
    """All judges of a run's evaluations; without any, an evaluation has its scores' metrics alone.

    Its ranks load it together. `keep`, `begin` and `poll` are the first rank's.
    """

    def __init__(self, judges: Sequence[EvalJudge]):
        self._judges = judges
        # By version, those that came while not all have; asked twice, the newer answer counts.
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
        """The oldest version that some judge has not spoken of; None if there is none."""
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
        """Have an evaluation judged, all completions of which were kept. metrics: what their scores
        come to.
        """
        kept = self._kept.pop(version, {})
        answers = [kept[place] for place in sorted(kept)]
        self._begun[version] = _Begun(dict(metrics), len(self._judges))
        for judge in self._judges:
            judge.begin(version, answers)

    def poll(self) -> list[tuple[int, dict[str, float | str | None]]]:
        """Let judges do a piece of their work. Returns the versions of which all have spoken, with
        all metrics.
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
    """What a judge finds of the answers to one set."""

    def metrics(self) -> Metrics:
        """Return the columns of it, as those of the task's own prompts."""
        raise NotImplementedError


Found = TypeVar("Found", bound=Finding)


class FindsBySet(EvalJudge, Protocol[Found]):
    """A judge that judges each set of prompts by itself.

    sets: whose prompts the answers are, one set after the other.
    """

    sets: Sequence[EvalSet]

    def poll(self) -> list[tuple[int, Metrics]]:
        """Return what is found of each version, each set under its own columns."""
        judged: list[tuple[int, Metrics]] = []
        for version, findings in self.findings():
            columns: dict[str, float | str | None] = {}
            for one, finding in zip(self.sets, findings, strict=True):
                columns |= one.columns(finding.metrics())
            judged.append((version, columns))
        return judged

    def findings(self) -> list[tuple[int, list[Found]]]:
        """Do a piece of the work. Returns what is found of each version that is judged with it, set
        by set.
        """
        raise NotImplementedError


def find(judge: FindsBySet[Found], answers: Sequence[Evaluated]) -> list[Found]:
    """Load a judge and have it judge the answers of one evaluation, set by set. Blocks, and closes
    it.
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
    """Return the greedy answer to each prompt, in order."""
    return [answer.item for answer in answers if answer.completion.greedy]
