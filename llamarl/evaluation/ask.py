"""Held-out prompts in an engine: each gets a greedy completion and k samples as in training."""

from __future__ import annotations

import dataclasses

from llamarl.inference.protocol import GenerationEngine
from llamarl.inference.sampler import SamplingParams
from llamarl.types import Completion, EvalCompletion, Prompt

# Streams of the engine; training has 0.
GREEDY = 1
SAMPLED = 2


def submit(
    engine: GenerationEngine,
    prompt_index: int,
    prompt: Prompt,
    sampling: SamplingParams,
    num_samples: int,
) -> int:
    """Queue a held-out prompt: for a greedy completion, and for num_samples by `sampling`. Return
    how many completions that makes.
    """
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
