"""HeldOutCompletions: measures how well the weights in training complete held-out prompts, on a
rank of their trainer.

    weights --take--> Engine --greedy completions--> Scorer --ask--> Completed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from llamarl.errors import RewardError
from llamarl.evaluation.ask import eval_completion, submit
from llamarl.evaluation.metrics import score_of
from llamarl.inference import Engine, SamplingParams
from llamarl.inference.offline import completions_of
from llamarl.models.hf import named_parameters_hf
from llamarl.scoring.assembly import item_of
from llamarl.scoring.scorer import Scorer, score_all
from llamarl.scoring.trial import commonest
from llamarl.types import Prompt

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class Completed:
    """Sums over one rank's completions."""

    prompts: int
    tokens: int
    scored: int  # completions that have a score
    score: float
    graded: int  # scores other than 0 and 1


class HeldOutCompletions:
    """Completes prompts greedily under the weights that it was last given.

    engine: holds the whole model, as it will be saved. scorer: started, and used by nothing else.
    sampling: only its stop tokens and lengths are used. decode, decode_raw: give the text of token
    ids, without and with special tokens.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        scorer: Scorer,
        sampling: SamplingParams,
        chunk_tokens: int,
        prompts: Mapping[int, Prompt],
        decode: Decode,
        decode_raw: Decode,
    ):
        self._engine = engine
        self._scorer = scorer
        self._sampling = sampling
        self._chunk_tokens = chunk_tokens
        self._prompts = dict(prompts)
        self._decode = decode
        self._decode_raw = decode_raw
        self._held = dict(named_parameters_hf(engine.decoder))

    def take(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load these whole tensors, by their Hugging Face names, into the engine."""
        for name, tensor in weights:
            self._held[name].data.copy_(tensor)
        self._engine.weights_changed(version)

    def ask(self, numbers: Iterable[int]) -> Completed:
        """Complete the prompts of these numbers and score the completions. Blocks.

        RewardError if there are completions and none of them has a score.
        """
        for number in numbers:
            submit(self._engine, number, self._prompts[number], self._sampling, num_samples=0)
        completions = []
        for finished in completions_of(self._engine, self._chunk_tokens):
            completions += [eval_completion(stream, one) for stream, one in finished]
        # In the prompts' order, because a sum must not depend on which completion ended first.
        completions.sort(key=lambda one: one.prompt_index)
        items = []
        for one in completions:
            prompt = self._prompts[one.prompt_index]
            items.append(item_of(one, prompt, self._decode, self._decode_raw))
        outcomes = score_all(self._scorer, items)
        scores = [score for score in map(score_of, outcomes) if score is not None]
        if completions and not scores:
            reason = commonest([outcome.reason for outcome in outcomes])
            raise RewardError(
                f"none of {len(completions)} held-out completions has a score: {reason}"
            )
        return Completed(
            prompts=len(completions),
            tokens=sum(one.token_ids.numel() for one in completions),
            scored=len(scores),
            score=sum(scores),
            graded=sum(score not in (0.0, 1.0) for score in scores),
        )

    def close(self) -> None:
        """Close the scorer. A second call does nothing."""
        self._scorer.close()
