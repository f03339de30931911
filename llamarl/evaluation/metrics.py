"""The metrics of an evaluation: the columns eval/..., and eval/NAME/... for a set of eval.sets.

    ScoredAnswer --Evaluations.add--> Evaluation, once a policy version has all its answers

An error and an abstention are no scores. They are left out of every mean; without any score there
is no mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from llamarl.evaluation.ask import Answers, ScoredAnswer
from llamarl.scoring.scorer import commonest
from llamarl.tasks.parts import EvalSet, set_of

Metrics = Mapping[str, float | str | None]  # the values of columns


def pass_at_k(scores: Sequence[float], k: int) -> float:
    """Return the expected best of k of these n scores, drawn without replacement. ValueError unless
    1 <= k <= n.

    If c are 1 and the others 0 it is 1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et
    al. 2021 (eq. 1).
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples: need k from 1 to {n}")
    # In ascending order, score i (from 0) is the best in C(i, k - 1) of the C(n, k) draws.
    num_draws = math.comb(n, k)
    expected = 0.0
    for i, score in enumerate(sorted(scores)):
        share = math.comb(i, k - 1) / num_draws
        expected += score * share
    return expected


@dataclass(frozen=True, slots=True)
class GreedySums:
    """Sums over greedy answers, which ranks may add up."""

    prompts: float
    tokens: float
    scored: float  # answers with a score
    score: float
    graded: float  # scores other than 0 and 1

    @classmethod
    def of(cls, answers: Sequence[ScoredAnswer]) -> GreedySums:
        """Return the sums over these answers."""
        scores = [answer.score for answer in answers if answer.score is not None]
        return cls(
            prompts=len(answers),
            tokens=sum(answer.completion.token_ids.numel() for answer in answers),
            scored=len(scores),
            score=sum(scores),
            graded=sum(answer.is_graded for answer in answers),
        )

    def metrics(self, *, is_accuracy: bool) -> dict[str, float]:
        """Return the columns of the task's own prompts. is_accuracy: all scores are 0 or 1."""
        metrics = {"eval/length_mean": self.tokens / self.prompts}
        if self.scored:
            metrics["eval/reward"] = self.score / self.scored
            if is_accuracy:
                metrics["eval/accuracy"] = metrics["eval/reward"]
        if self.scored < self.prompts:
            metrics["eval/left_out"] = self.prompts - self.scored
        return metrics


def measure(
    answers: Sequence[ScoredAnswer], *, is_accuracy: bool, success_above: float | None = None
) -> dict[str, float | str]:
    """Return the metrics of a set's answers, under the columns of the task's own prompts.

    is_accuracy: all scores are 0 or 1. success_above: eval/success is the share of samples, or of
    greedy answers if none are sampled, that succeed; None: there is no eval/success.
    """
    greedy = [answer for answer in answers if answer.completion.greedy]
    sampled = [answer for answer in answers if not answer.completion.greedy]
    metrics: dict[str, float | str] = {
        "eval/errors": sum(answer.outcome.kind == "error" for answer in answers)
    }
    metrics |= GreedySums.of(greedy).metrics(is_accuracy=is_accuracy)
    if "eval/left_out" in metrics:
        reasons = [answer.outcome.reason for answer in greedy if answer.score is None]
        metrics["eval/left_out_reason"] = commonest(reasons)
    attempts = sampled or greedy
    if success_above is not None and any(answer.score is not None for answer in attempts):
        num_successes = sum(answer.succeeds(success_above) for answer in attempts)
        metrics["eval/success"] = num_successes / len(attempts)
    of_prompts = sampled_scores(sampled)
    if of_prompts:
        at_1 = sum(pass_at_k(scores, 1) for scores in of_prompts)
        best = sum(max(scores) for scores in of_prompts)
        metrics["eval/pass_at_1_sampled"] = at_1 / len(of_prompts)
        metrics["eval/pass_at_k"] = best / len(of_prompts)
    return metrics


def sampled_scores(answers: Iterable[ScoredAnswer]) -> list[list[float]]:
    """Return the scores of each prompt's samples, without prompts that have none."""
    of_prompts: dict[int, list[float]] = {}
    for answer in answers:
        if not answer.completion.greedy and answer.score is not None:
            of_prompts.setdefault(answer.completion.prompt_index, []).append(answer.score)
    return list(of_prompts.values())


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All answers of a policy version, and the metrics of their scores."""

    version: int
    answers: Answers
    metrics: Metrics


class Evaluations:
    """Collects answers by policy version, until a version has all: one greedy answer and
    num_samples sampled ones to each prompt of the sets. success_above: see `measure`.
    """

    def __init__(
        self,
        sets: Sequence[EvalSet],
        num_samples: int = 0,
        success_above: float | None = None,
    ):
        self._sets = sets
        self._num_answers = sum(one.count for one in sets) * (1 + num_samples)
        self._success_above = success_above
        # Once a set had a score other than 0 and 1, no later mean of the set is an accuracy.
        self._graded: set[EvalSet] = set()
        # By version, then by place.
        self._begun: dict[int, dict[tuple[int, int], ScoredAnswer]] = {}

    def add(self, answer: ScoredAnswer) -> Evaluation | None:
        """Take an answer. Return the evaluation of its version if this was the last one missing.

        If two answers come for one place, the newer counts.
        """
        if answer.is_graded:
            self._graded.add(set_of(self._sets, answer.completion.prompt_index))
        version = answer.version
        begun = self._begun.setdefault(version, {})
        begun[answer.place] = answer
        if len(begun) < self._num_answers:
            return None
        del self._begun[version]
        # A sum must not depend on which answer came first.
        in_order = [begun[place] for place in sorted(begun)]
        answers = {}
        metrics: dict[str, float | str] = {}
        for one in self._sets:
            own = [answer for answer in in_order if answer.completion.prompt_index in one.numbers]
            is_accuracy = one not in self._graded
            measured = measure(own, is_accuracy=is_accuracy, success_above=self._success_above)
            metrics |= one.columns(measured)
            answers[one] = own
        return Evaluation(version, answers, metrics)
