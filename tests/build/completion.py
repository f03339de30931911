"""A Completion as a generator sends it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llamarl.types import Completion


def build_completion(
    ticket: int = 0,
    sample_index: int = 0,
    tokens: Sequence[int] = (5, 2),
    *,
    prompt: Sequence[int] = (1, 2),
    version: int = 0,
    finish_reason: str = "stop",
    **fields,
) -> Completion:
    """Tokens that were sampled from `version` with logprob 0. fields: replace any field."""
    token_ids = torch.tensor(tokens, dtype=torch.int64)
    values = {
        "ticket": ticket,
        "sample_index": sample_index,
        "prompt_ids": torch.tensor(prompt, dtype=torch.int64),
        "token_ids": token_ids,
        "generator_logprobs": torch.zeros(len(token_ids)),
        "policy_versions": torch.full_like(token_ids, version),
        "finish_reason": finish_reason,
    }
    return Completion(**{**values, **fields})
