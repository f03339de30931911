"""Evaluation: each held-out prompt is answered greedily and, k times, as in training; what the
answers come to.

prompt j --submit--> engine --numbered--> Completion j/0 (greedy), j/1 .. j/k (sampled) --score--> Evaluations
Evaluations --finished--> eval/reward (and eval/accuracy), eval/length_mean, eval/pass_at_1_sampled, eval/pass_at_k
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from llamarl.tasks.pool import Outcome
from llamarl.types import Completion


def pass_at_k(scores: Sequence[float], k: int) -> float:
    """The expected best of k of these n scores, drawn without replacement. ValueError unless 1 <= k
    <= n.

    If c are 1 and the others 0 it is 1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et
    al. 2021 (eq. 1).
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples: need k from 1 to {n}")
    # In ascending order, the i-th from 0 is the best of C(i, k - 1) of the C(n, k) draws.
    draws = math.comb(n, k)
    return sum(score * (math.comb(i, k - 1) / draws) for i, score in enumerate(sorted(scores)))


def score_of(outcome: Outcome) -> float:
    """Whatever is not a score counts as wrong."""
    return outcome.value if outcome.kind == "score" else 0.0


class Evaluations:
    """Scores of evaluation completions, by policy version, until a version has all of them: 1 +
    num_samples a prompt.
    """

    def __init__(self, num_prompts: int, num_samples: int = 0):
        self._num_prompts, self._num_samples = num_prompts, num_samples
        self._is_graded = False  # a score other than 0 and 1 was seen: their mean is no accuracy
        # version -> (prompt, sample_index) -> outcome, tokens
        self._scores: dict[int, dict[tuple[int, int], tuple[Outcome, int]]] = {}

    @property
    def _num_completions(self) -> int:
        return self._num_prompts * (1 + self._num_samples)

    def add(self, completion: Completion, outcome: Outcome) -> None:
        if not completion.token_ids.numel():
            # aborted before its first token: no version sampled it, and its evaluation was given up
            return
        self._is_graded |= score_of(outcome) not in (0.0, 1.0)
        scores = self._scores.setdefault(int(completion.policy_versions[0]), {})
        scores[completion.ticket, completion.sample_index] = outcome, completion.token_ids.numel()

    def finished(self) -> list[tuple[int, dict[str, float]]]:
        """(version, metrics) of those that are whole, once each."""
        whole = [
            version
            for version, scores in self._scores.items()
            if len(scores) == self._num_completions
        ]
        return [(version, self._metrics(self._scores.pop(version))) for version in whole]

    def _metrics(self, scores: dict[tuple[int, int], tuple[Outcome, int]]) -> dict[str, float]:
        n, k = self._num_prompts, self._num_samples
        greedy = [scores[j, 0] for j in range(n)]
        reward = sum(score_of(outcome) for outcome, _ in greedy) / n
        metrics = {
            "eval/reward": reward,
            "eval/errors": sum(outcome.kind == "error" for outcome, _ in scores.values()),
            "eval/length_mean": sum(length for _, length in greedy) / n,
        }
        if not self._is_graded:
            metrics["eval/accuracy"] = reward
        if k:
            sampled = [[score_of(scores[j, i][0]) for i in range(1, k + 1)] for j in range(n)]
            metrics["eval/pass_at_1_sampled"] = sum(pass_at_k(s, 1) for s in sampled) / n
            metrics["eval/pass_at_k"] = sum(pass_at_k(s, k) for s in sampled) / n
        return metrics

    def missing(self) -> str | None:
        if not self._scores:
            return None
        version, scores = min(self._scores.items(), key=lambda item: item[0])
        missing = self._num_completions - len(scores)
        return f"data: {missing} evaluation completions of policy version {version}, from the generator"
