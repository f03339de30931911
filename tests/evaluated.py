"""Answers of evaluations, as judges take them."""

from __future__ import annotations

import torch

from llamarl.evaluation.judges import Evaluated
from llamarl.scoring.scorer import Item
from llamarl.types import EvalCompletion, Outcome, Prompt

SCORED = Outcome.score(0.0)


def evaluated(
    text: str,
    *,
    prompt: int = 0,
    sample: int = 0,
    prompt_ids: tuple[int, ...] = (1, 2),
    tokens: tuple[int, ...] = (3, 4),
    version: int = 0,
    outcome: Outcome = SCORED,
) -> Evaluated:
    """An answer to a held-out prompt; sample 0 is the greedy one, and 1 .. k are those sampled."""
    token_ids = torch.tensor(tokens)
    completion = EvalCompletion(
        prompt_index=prompt,
        greedy=sample == 0,
        sample_index=max(0, sample - 1),
        token_ids=token_ids,
        policy_versions=torch.full_like(token_ids, version),
        finish_reason="stop",
    )
    item = Item(
        prompt=Prompt(torch.tensor(prompt_ids), f"prompt {prompt}", {}),
        token_ids=token_ids,
        text=text,
        has_ended=True,
        is_held_out=True,
    )
    return Evaluated(completion, item, outcome)
