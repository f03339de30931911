"""Evaluation: each held-out prompt gets a greedy completion and k samples as in training; these are
the metrics about them.

    prompt --submit--> engine --eval_completion--> EvalCompletion --score--> Evaluations
    Evaluations --finished--> eval/reward (and eval/accuracy), eval/length_mean,
                              eval/pass_at_1_sampled, eval/pass_at_k, eval/success
                              and the same for a set of eval.sets, as eval/NAME/...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.scoring.trial import commonest
from llamarl.tasks.held_out import EvalSet, set_of
from llamarl.types import EvalCompletion, Outcome, Prompt


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


def score_of(outcome: Outcome) -> float | None:
    """Return the score of an outcome; None for an error or an abstention."""
    return outcome.value if outcome.kind == "score" else None


def number_of(completion: EvalCompletion) -> int:
    """Return the number of a completion among its prompt's: 0 is the greedy one, 1 .. k are the
    samples.
    """
    return 0 if completion.greedy else completion.sample_index + 1


def sample_row(
    completion: EvalCompletion, of: EvalSet, prompt: Prompt, text: str, outcome: Outcome
) -> dict[str, object]:
    """Return a scored completion as an object of JSON, for people and for `recipes/evaluate.py
    --against`.

    score: null without one; then outcome is not "score", and reason says why. number: the held-out
    prompt's, in its set. sample: see number_of. set: the set's name; left out for the task's own.
    """
    row: dict[str, object] = {
        "prompt": prompt.text,
        "completion": text,
        "score": score_of(outcome),
        "outcome": outcome.kind,
        "number": completion.prompt_index - of.first,
        "sample": number_of(completion),
        "num_tokens": completion.token_ids.numel(),
        "finish_reason": completion.finish_reason,
    }
    if of.name:
        row["set"] = of.name
    if outcome.reason:
        row["reason"] = outcome.reason
    return row


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a completion in a version's evaluation. If two come for one place, the newer
    counts.
    """

    prompt_index: int
    greedy: bool
    sample_index: int = 0


@dataclass(frozen=True, slots=True)
class _Completed:
    """What is kept of a completion that was scored."""

    score: float | None  # None for an error and an abstention
    reason: str  # why there is no score
    is_error: bool
    succeeds: bool
    num_tokens: int


class Evaluations:
    """Scores of held-out completions, kept by policy version until a version has all of them: one
    greedy and num_samples sampled for each prompt of these sets.

    Completions without a score (an error or an abstention) are left out of every mean; if no greedy
    completion has a score, there is no mean. success_above: eval/success is the share of samples,
    or of greedy completions if none are sampled, whose score without novelty is above it.
    None: there is no eval/success.
    """

    def __init__(
        self,
        sets: Sequence[EvalSet],
        num_samples: int = 0,
        success_above: float | None = None,
    ):
        self._success_above = success_above
        self._sets = sets
        self._num_samples = num_samples
        self._num_completions = sum(one.count for one in sets) * (1 + num_samples)
        # Sets with a score other than 0 and 1, so that their mean is no accuracy.
        self._graded: set[EvalSet] = set()
        self._completed: dict[int, dict[_Place, _Completed]] = {}  # by version

    def add(self, completion: EvalCompletion, outcome: Outcome) -> None:
        """Take the outcome of one completion."""
        num_tokens = completion.token_ids.numel()
        if not num_tokens:
            # aborted before its first token, because its evaluation was given up
            return
        has_score = outcome.kind == "score"
        if has_score and outcome.value not in (0.0, 1.0):
            self._graded.add(set_of(self._sets, completion.prompt_index))
        version = int(completion.policy_versions[0])
        place = _Place(completion.prompt_index, completion.greedy, completion.sample_index)
        one = _Completed(
            score=outcome.value if has_score else None,
            reason=outcome.reason,
            is_error=outcome.kind == "error",
            succeeds=self._succeeds(outcome),
            num_tokens=num_tokens,
        )
        self._completed.setdefault(version, {})[place] = one

    def _succeeds(self, outcome: Outcome) -> bool:
        if self._success_above is None or outcome.kind != "score":
            return False
        return outcome.achieved > self._success_above

    def finished(self) -> list[tuple[int, dict[str, float | str]]]:
        """Return (version, metrics) of each version that has all its completions, once."""
        whole = [
            version
            for version, completed in self._completed.items()
            if len(completed) == self._num_completions
        ]
        found = []
        for version in whole:
            completed = self._completed.pop(version)
            metrics: dict[str, float | str] = {}
            for one in self._sets:
                metrics |= one.columns(self._metrics(one, completed))
            found.append((version, metrics))
        return found

    def _metrics(self, of: EvalSet, every: dict[_Place, _Completed]) -> dict[str, float | str]:
        """Return the metrics of a set's completions, under the columns of the task's own."""
        # In the order of prompts and samples, because the sums must not depend on which came first.
        n = of.count
        completed = {place: one for place, one in every.items() if place.prompt_index in of.numbers}
        greedy = [completed[_Place(j, greedy=True)] for j in of.numbers]
        metrics: dict[str, float | str] = {
            "eval/errors": sum(one.is_error for one in completed.values()),
            "eval/length_mean": sum(one.num_tokens for one in greedy) / n,
        }
        scores = [one.score for one in greedy if one.score is not None]
        if scores:
            reward = sum(scores) / len(scores)
            metrics["eval/reward"] = reward
            if of not in self._graded:
                metrics["eval/accuracy"] = reward
        if len(scores) < n:
            metrics["eval/left_out"] = n - len(scores)
            reasons = [one.reason for one in greedy if one.score is None]
            metrics["eval/left_out_reason"] = commonest(reasons)
        k = self._num_samples
        if self._success_above is not None:
            asked = [place for place in completed if place.greedy == (k == 0)]
            if any(completed[place].score is not None for place in asked):
                num_successes = sum(completed[place].succeeds for place in asked)
                metrics["eval/success"] = num_successes / len(asked)
        if k:
            of_prompts = []
            for j in of.numbers:
                sampled = [completed[_Place(j, False, i)].score for i in range(k)]
                of_prompts.append([score for score in sampled if score is not None])
            metrics |= _pass_metrics([of_prompt for of_prompt in of_prompts if of_prompt])
        return metrics


def _pass_metrics(of_prompts: Sequence[Sequence[float]]) -> dict[str, float | str]:
    """Return the mean and the best of the scores that each prompt's samples have, at least one."""
    if not of_prompts:
        return {}
    at_1 = sum(pass_at_k(scores, 1) for scores in of_prompts)
    best = sum(max(scores) for scores in of_prompts)
    return {
        "eval/pass_at_1_sampled": at_1 / len(of_prompts),
        "eval/pass_at_k": best / len(of_prompts),
    }
