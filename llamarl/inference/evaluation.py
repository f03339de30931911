"""Held-out prompts in an engine: each is answered greedily and, k times, as in training."""

from __future__ import annotations

import dataclasses

from llamarl.inference.protocol import GenerationEngine
from llamarl.inference.sampler import SamplingParams
from llamarl.types import Completion, Prompt

# Streams of the engine; training has 0.
GREEDY = 1
SAMPLED = 2


def submit(
    engine: GenerationEngine,
    number: int,
    prompt: Prompt,
    sampling: SamplingParams,
    num_samples: int,
) -> int:
    """Queue held-out prompt `number`: a greedy completion, and num_samples by `sampling`. Returns
    how many completions that makes.
    """
    greedy = SamplingParams(
        sampling.max_new_tokens, temperature=0.0, stop_token_ids=sampling.stop_token_ids
    )
    engine.submit(number, prompt.prompt_ids, greedy, stream=GREEDY)
    if num_samples:
        sampled = dataclasses.replace(sampling, n=num_samples)
        engine.submit(number, prompt.prompt_ids, sampled, stream=SAMPLED)
    return 1 + num_samples


def numbered(stream: int, completion: Completion) -> Completion:
    """An evaluation completion as it travels: sample_index 0 is greedy, 1 .. k are sampled."""
    if stream == GREEDY:
        return completion
    return dataclasses.replace(completion, sample_index=completion.sample_index + 1)
