"""Asks an engine for completions of held-out prompts, and a scorer for the scores of these.

    prompts --complete--> EvalCompletion --score--> ScoredAnswer

In a run of the main job the generator submits the prompts and the reward scores the completions. So
the two executors use `submit`, `eval_completion` and `ScoredAnswer` alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from llamarl.errors import RewardError
from llamarl.inference import Engine, SamplingParams
from llamarl.inference.offline import completions_of
from llamarl.inference.protocol import GenerationEngine
from llamarl.models.hf import named_parameters_hf
from llamarl.scoring.assembly import item_of
from llamarl.scoring.scorer import Item, Scorer, commonest, score_all
from llamarl.tasks.parts import EvalSet
from llamarl.types import Completion, EvalCompletion, Outcome, Prompt

# Streams of the engine: a stream has its own random numbers. Training has 0.
GREEDY = 1
SAMPLED = 2

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """A scored completion of a held-out prompt. It has at least one token."""

    completion: EvalCompletion
    item: Item  # as the scorer saw it
    outcome: Outcome

    @property
    def version(self) -> int:
        """The policy version that sampled it."""
        return int(self.completion.policy_versions[0])

    @property
    def place(self) -> tuple[int, int]:
        """Its place among the answers of a version: the prompt's number, then the number among the
        prompt's answers.
        """
        return self.completion.prompt_index, number_of(self.completion)

    @property
    def score(self) -> float | None:
        """The score; None for an error or an abstention."""
        return self.outcome.value if self.outcome.kind == "score" else None

    @property
    def is_graded(self) -> bool:
        """Whether the score is another one than 0 and 1, so that a mean with it is no accuracy."""
        return self.score not in (None, 0.0, 1.0)

    def succeeds(self, above: float) -> bool:
        """Whether there is a score, and the score without novelty is greater than `above`."""
        return self.score is not None and self.outcome.achieved > above


# The answers of each set: prompt by prompt the greedy one, and then the samples.
Answers = Mapping[EvalSet, Sequence[ScoredAnswer]]


def number_of(completion: EvalCompletion) -> int:
    """Return the number of a completion among its prompt's: 0 is the greedy one, 1 .. k are the
    samples.
    """
    return 0 if completion.greedy else completion.sample_index + 1


def submit(
    engine: GenerationEngine,
    prompt_index: int,
    prompt: Prompt,
    sampling: SamplingParams,
    num_samples: int,
) -> int:
    """Queue a held-out prompt: for a greedy completion, and for num_samples by `sampling`. Return
    the number of completions.
    """
    # Only lengths and stops of `sampling`: top_p, top_k, min_p and min_new_tokens are for samples.
    greedy = SamplingParams(
        sampling.max_new_tokens,
        temperature=0.0,
        stop_token_ids=sampling.stop_token_ids,
        stop_strings=sampling.stop_strings,
    )
    engine.submit(prompt_index, prompt.prompt_ids, greedy, stream=GREEDY)
    if num_samples:
        several = dataclasses.replace(sampling, n=num_samples)
        engine.submit(prompt_index, prompt.prompt_ids, several, stream=SAMPLED)
    return 1 + num_samples


def eval_completion(stream: int, completion: Completion) -> EvalCompletion:
    """Return a completion of one of these streams as the record that goes to the reward."""
    return EvalCompletion(
        prompt_index=completion.ticket,
        greedy=stream == GREEDY,
        sample_index=completion.sample_index,
        token_ids=completion.token_ids,
        policy_versions=completion.policy_versions,
        finish_reason=completion.finish_reason,
        loss_mask=completion.loss_mask,
        ending=completion.ending,
    )


def complete(
    engine: GenerationEngine,
    prompts: Mapping[int, Prompt],
    sampling: SamplingParams,
    *,
    num_samples: int,
    chunk_tokens: int,
    advance: Callable[[int], None] = lambda count: None,
) -> list[EvalCompletion]:
    """Return for each prompt, in the order of their numbers, the greedy completion and then the
    samples. Blocks. advance: called with the number of completions that have just ended.
    """
    for number, prompt in prompts.items():
        submit(engine, number, prompt, sampling, num_samples)
    completions = []
    for finished in completions_of(engine, chunk_tokens):
        completions += [eval_completion(stream, one) for stream, one in finished]
        advance(len(finished))
    # A sum over completions must not depend on which of them ended first.
    return sorted(completions, key=lambda one: (one.prompt_index, number_of(one)))


def score(
    scorer: Scorer,
    sets: Sequence[EvalSet],
    prompts: Mapping[int, Prompt],
    completions: Sequence[EvalCompletion],
    decode: Decode,
    decode_raw: Decode,
) -> dict[EvalSet, list[ScoredAnswer]]:
    """Return the answers of each set, from completions in the order of `complete`. Blocks.

    decode, decode_raw: return the text of token ids, without and with special tokens.
    """
    answers = {}
    for one in sets:
        own = [completion for completion in completions if completion.prompt_index in one.numbers]
        items = []
        for completion in own:
            items.append(item_of(completion, prompts[completion.prompt_index], decode, decode_raw))
        # Each set is a batch: a scorer that compares completions must not compare across sets.
        outcomes = score_all(scorer, items)
        answers[one] = list(map(ScoredAnswer, own, items, outcomes))
    return answers


@dataclass(kw_only=True)
class HeldOutPrompts:
    """The held-out prompts of a task, which the weights in training complete greedily.

    engine: holds the whole model, as it will be saved. scorer: started, and used by nothing else.
    sampling: only its stop tokens and lengths are used. decode, decode_raw: as in `score`.
    """

    engine: Engine
    scorer: Scorer
    sampling: SamplingParams
    chunk_tokens: int
    sets: Sequence[EvalSet]
    prompts: Mapping[int, Prompt]
    decode: Decode
    decode_raw: Decode

    def take(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load these whole tensors, by their Hugging Face names, into the engine."""
        held = dict(named_parameters_hf(self.engine.decoder))
        for name, tensor in weights:
            held[name].data.copy_(tensor)
        self.engine.weights_changed(version)

    def ask(self, numbers: Iterable[int]) -> list[ScoredAnswer]:
        """Return the answers to the prompts of these numbers, in order. Blocks. RewardError if
        there are answers and none of them has a score.
        """
        prompts = {number: self.prompts[number] for number in numbers}
        completions = complete(
            self.engine,
            prompts,
            self.sampling,
            num_samples=0,
            chunk_tokens=self.chunk_tokens,
        )
        by_set = score(self.scorer, self.sets, prompts, completions, self.decode, self.decode_raw)
        answers = list(chain.from_iterable(by_set.values()))
        if answers and all(answer.score is None for answer in answers):
            reason = commonest([answer.outcome.reason for answer in answers])
            raise RewardError(f"none of {len(answers)} held-out completions has a score: {reason}")
        return answers

    def close(self) -> None:
        """Close the scorer. A second call does nothing."""
        self.scorer.close()
