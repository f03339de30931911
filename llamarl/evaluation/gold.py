"""Gold: scores evaluations by a scorer that is never trained on.

    references, once ---> scorer ---+
    greedy answers -----> scorer ---+--> Judged --> eval/gold, eval/win_rate, ...

The reward of training is a proxy, which a policy learns to please. A scorer that it never sees
shows what the reward is worth (Gao et al. 2022; Async RLHF, 3.1). A model lies over the ranks of
its site, like the reward's models. A call scores only one round, so that completions of training
are not held up for long.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from llamarl.comm.together import Apart
from llamarl.errors import RewardError
from llamarl.evaluation.judges import Evaluated, FindsBySet, greedy_items, spans_of
from llamarl.evaluation.win_rate import Judged
from llamarl.scoring.scorer import Item, Site
from llamarl.scoring.weighted import Part
from llamarl.tasks.held_out import EvalSet
from llamarl.types import Outcome

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GoldSettings:
    """Settings of the gold scorer, and the texts that completions are compared with.

    scorer: makes the scorer. references: for each held-out prompt, in order, a completion to
    compare with; None: no win rate.
    sets: the sets whose prompts are completed, one after the other.
    """

    scorer: Part
    references: tuple[Item, ...] | None
    sets: tuple[EvalSet, ...]


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """A version's greedy completions, and the keys under which they are scored."""

    version: int
    answers: list[Item]
    keys: list[int]


class Gold(FindsBySet[Judged]):
    """Judges evaluations, in the order in which they came."""

    def __init__(self, settings: GoldSettings, site: Site):
        self.name = settings.scorer.name
        self.sets = settings.sets
        self._settings = settings
        # No metrics, because the reward has metrics of the same names about training.
        own = replace(site, metrics=None, together=Apart(site.together, "gold/"))
        self._scorer = settings.scorer.make(own)
        self._keys = itertools.count()
        self._outcomes: dict[int, Outcome] = {}
        self._evaluations: deque[_Evaluation] = deque()
        self._references: list[int] = []  # keys of the references, until these are scored
        self._against_N: np.ndarray | None = None

    def load(self) -> None:
        """Load this rank's share of the scorer."""
        self._scorer.load()

    def start(self) -> None:
        """Start the scorer, and begin with the references. ValueError if it cannot be used."""
        self._scorer.start()
        self._references = self._submit(self._settings.references or ())

    @property
    def pending(self) -> int:
        """The number of evaluations that are begun."""
        return len(self._evaluations)

    @property
    def is_computing(self) -> bool:
        """Whether the next `poll` computes."""
        return self._scorer.is_computing

    def begin(self, version: int, answers: Sequence[Evaluated]) -> None:
        """Take an evaluation, and submit its greedy completions."""
        items = greedy_items(answers)
        self._evaluations.append(_Evaluation(version, items, self._submit(items)))

    def findings(self) -> list[tuple[int, list[Judged]]]:
        """Score a round. RewardError if all outcomes of an evaluation are errors."""
        self._outcomes.update(self._scorer.poll())
        if self._references and self._outcomes.keys() >= set(self._references):
            self._against_N = self._scores(self._references, "reference answers")
            self._references = []
        if self._references or not self._evaluations:
            return []
        oldest = self._evaluations[0]
        if not self._outcomes.keys() >= set(oldest.keys):
            return []
        self._evaluations.popleft()
        judged = self._judged(oldest)
        return [(oldest.version, [judged.part(*span) for span in spans_of(self.sets)])]

    def wait(self, timeout_s: float) -> None:
        """Block until `poll` has something to do, at most timeout_s."""
        if not self.is_computing:
            self._scorer.wait(timeout_s)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the scorer's tensors."""
        yield from self._scorer.tensors()

    def close(self) -> None:
        """Drop the evaluations, and close the scorer."""
        self._evaluations.clear()
        self._scorer.close()

    def _submit(self, items: Sequence[Item]) -> list[int]:
        keys = [next(self._keys) for _ in items]
        for key, item in zip(keys, items):
            self._scorer.submit(key, item)
        if keys:
            self._scorer.release(keys)
        return keys

    def _scores(self, keys: list[int], what: str) -> np.ndarray:
        """Return the scores [N] of these keys; NaN, with a warning, for those without a score.
        RewardError if all are errors.
        """
        outcomes = [self._outcomes.pop(key) for key in keys]
        unscored = Counter(one.reason or one.kind for one in outcomes if one.kind != "score")
        if unscored:
            count = unscored.total()
            (reason, _), *_ = unscored.most_common(1)
            said = f"gold {self.name}: {count} of {len(keys)} {what} have no score: {reason}"
            if all(outcome.kind == "error" for outcome in outcomes):
                raise RewardError(f"{said}; correct the gold scorer, or leave eval.gold out")
            log.warning("%s; they are left out of eval/gold and eval/win_rate", said)
        return np.array([outcome.value for outcome in outcomes], dtype=np.float64)

    def _judged(self, evaluation: _Evaluation) -> Judged:
        answers = evaluation.answers
        what = f"completions of policy version {evaluation.version}"
        gold_N = self._scores(evaluation.keys, what)
        num_tokens_N = _num_tokens(answers)
        references = self._settings.references
        if references is None:
            return Judged(num_tokens_N=num_tokens_N, gold_N=gold_N)
        same = [one.text == other.text for one, other in zip(answers, references)]
        return Judged(
            num_tokens_N=num_tokens_N,
            gold_N=gold_N,
            against_N=self._against_N,
            against_tokens_N=_num_tokens(references),
            same_N=np.array(same),
        )


def _num_tokens(items: Sequence[Item]) -> np.ndarray:
    return np.array([item.sampled_ids.numel() for item in items])
