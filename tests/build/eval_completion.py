"""An answer to a held-out prompt, as a generator sends it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llamarl.types import EvalCompletion


def build_eval_completion(
    prompt: int = 0, sample: int = 0, tokens: Sequence[int] = (3, 4), *, version: int = 0, **fields
) -> EvalCompletion:
    """Tokens that were sampled from `version`. sample: 0 is the greedy answer, and 1 .. k are those
    sampled. fields: replace any field.
    """
    token_ids = torch.tensor(tokens, dtype=torch.int64)
    values = {
        "prompt_index": prompt,
        "greedy": sample == 0,
        "sample_index": max(0, sample - 1),
        "token_ids": token_ids,
        "policy_versions": torch.full_like(token_ids, version),
        "finish_reason": "stop",
    }
    return EvalCompletion(**{**values, **fields})
