"""Groups that a replay buffer may hold, and a way to draw of them."""

from __future__ import annotations

import math

import torch

from llamarl.comm.together import TrainerRanks
from llamarl.learning.replay import DrawSettings
from llamarl.types import Group

ALONE = TrainerRanks(None, torch.device("cpu"), None)


def group(ticket, *, prompt=None, rewards=(0.0, 1.0), version=0, reasons=None, lengths=None):
    """Each completion is known by its tokens: ticket * 100 + its place."""
    n = len(rewards)
    lengths = torch.tensor(lengths or [1 + (ticket + i) % 3 for i in range(n)])
    token = torch.arange(n) + 100 * ticket
    tokens = token.repeat_interleave(lengths)
    return Group(
        ticket=ticket,
        prompt_ids=torch.tensor([7, ticket if prompt is None else prompt]),
        lengths=lengths,
        token_ids=tokens,
        generator_logprobs=-tokens.float(),
        policy_versions=torch.full_like(tokens, version),
        ref_logprobs=tokens.float() / 2,
        rewards=torch.tensor(rewards),
        finish_reasons=tuple(reasons or ("stop",) * n),
        outcomes=tuple("error" if math.isnan(r) else "score" for r in rewards),
    )


def draw(prompts=2, completions=2, most_on_policy=0.5, priority="softmax", temperature=1.0):
    return DrawSettings(prompts, completions, most_on_policy, priority, temperature)


def names_of(g):
    """What each completion of a group is known by."""
    return [int(part[0]) for part in g.token_ids.split(g.lengths.tolist())]
