"""A Group of scored completions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from llamarl.types import Group


def build_group(
    ticket: int = 0,
    lengths: Sequence[int] | None = None,
    rewards: Sequence[float] | None = None,
    *,
    prompt: Sequence[int] | int = 3,
    vocab_size: int = 20,
    version: int = 0,
    **fields,
) -> Group:
    """Random tokens below vocab_size, drawn with the seed `ticket`, all sampled from `version` with
    logprob -3. A NaN reward makes a completion an error.

    prompt: its ids, or how many are drawn. lengths: one token each where only rewards are given.
    fields: replace any field of the Group as it stands.

        build_group(3, [2, 4], [1.0, 0.0], finish_reasons=("stop", "length"))
    """
    draw = torch.Generator().manual_seed(ticket)
    rewards = [1.0] * len(lengths or [1]) if rewards is None else list(rewards)
    lengths = [1] * len(rewards) if lengths is None else list(lengths)
    size, tokens = len(lengths), sum(lengths)
    if isinstance(prompt, int):
        prompt_ids = torch.randint(0, vocab_size, (prompt,), generator=draw)
    else:
        prompt_ids = torch.tensor(prompt, dtype=torch.int64)
    values = {
        "ticket": ticket,
        "prompt_ids": prompt_ids,
        "lengths": torch.tensor(lengths),
        "token_ids": torch.randint(0, vocab_size, (tokens,), generator=draw),
        "generator_logprobs": torch.full((tokens,), -3.0),
        "policy_versions": torch.full((tokens,), version, dtype=torch.int64),
        "ref_logprobs": torch.empty(0),
        "rewards": torch.tensor(rewards),
        "finish_reasons": ("stop",) * size,
        "outcomes": tuple("error" if math.isnan(reward) else "score" for reward in rewards),
    }
    return Group(**{**values, **fields})
