"""Evaluation: each held-out prompt is answered greedily and, k times, as in training; what the
answers come to.

prompt j --submit--> engine --numbered--> Completion j/0 (greedy), j/1 .. j/k (sampled) --score--> Evaluations
Evaluations --finished--> eval/reward (and eval/accuracy), eval/length_mean, eval/pass_at_1_sampled, eval/pass_at_k
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from llamarl.checkpoint.checkpointer import LATEST, MANIFEST, CheckpointError, verify
from llamarl.inference import Engine, SamplingParams
from llamarl.tasks.pool import Outcome
from llamarl.types import Completion, Prompt

GREEDY, SAMPLED = 1, 2  # streams of the engine; training's is 0


def submit(
    engine: Engine, number: int, prompt: Prompt, sampling: SamplingParams, num_samples: int
) -> int:
    """Queue held-out prompt `number`: a greedy completion, and num_samples by `sampling`. Returns
    how many completions that makes.
    """
    greedy = SamplingParams(
        sampling.max_new_tokens, temperature=0.0, stop_token_ids=sampling.stop_token_ids
    )
    engine.submit(number, prompt.prompt_ids, greedy, stream=GREEDY)
    if num_samples:
        engine.submit(
            number, prompt.prompt_ids, dataclasses.replace(sampling, n=num_samples), stream=SAMPLED
        )
    return 1 + num_samples


def numbered(stream: int, completion: Completion) -> Completion:
    """An evaluation completion as it travels: sample_index 0 is greedy, 1 .. k are sampled."""
    return (
        dataclasses.replace(completion, sample_index=completion.sample_index + 1)
        if stream == SAMPLED
        else completion
    )


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


def find_model(given: str | Path) -> tuple[Path, Path | None]:
    """(the Hugging Face directory to evaluate, the run_dir that it comes from or None).

    given: such a directory; RUN_DIR/checkpoints/step_N; RUN_DIR/checkpoints/latest; or RUN_DIR, for
    its latest. FileNotFoundError or CheckpointError, saying what to give instead.
    """
    path = Path(given)
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints" / LATEST
    if path.name == LATEST:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; a run has it once it has a checkpoint")
        path = path.with_name(path.read_text().strip())
    if path.name == "hf" and (path.parent / MANIFEST).is_file():
        path = path.parent
    if (path / MANIFEST).is_file():
        if problems := verify(path):
            raise CheckpointError(f"checkpoint {path} is damaged:\n  " + "\n  ".join(problems[:10]))
        return path / "hf", path.absolute().parents[1]
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"{path}: neither a Hugging Face directory (it has no config.json) nor a checkpoint (no {MANIFEST}); "
            "give one of these, such as RUN_DIR/checkpoints/step_N or RUN_DIR/checkpoints/latest"
        )
    return path, None
