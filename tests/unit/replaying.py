"""Groups that a replay buffer may hold, and a way to draw of them."""

from __future__ import annotations

import torch

from llamarl.comm.together import TrainerRanks
from llamarl.learning.replay import DrawSettings
from tests.build.group import build_group

ALONE = TrainerRanks(None, torch.device("cpu"), None)


def group(ticket, *, prompt=None, rewards=(0.0, 1.0), version=0, reasons=None, lengths=None):
    """Each completion is known by its tokens: ticket * 100 + its place."""
    n = len(rewards)
    lengths = lengths or [1 + (ticket + i) % 3 for i in range(n)]
    tokens = (torch.arange(n) + 100 * ticket).repeat_interleave(torch.tensor(lengths))
    return build_group(
        ticket,
        lengths,
        rewards,
        prompt=[7, ticket if prompt is None else prompt],
        version=version,
        token_ids=tokens,
        generator_logprobs=-tokens.float(),
        ref_logprobs=tokens.float() / 2,
        finish_reasons=tuple(reasons or ("stop",) * n),
    )


def draw(prompts=2, completions=2, most_on_policy=0.5, priority="softmax", temperature=1.0):
    return DrawSettings(prompts, completions, most_on_policy, priority, temperature)


def names_of(g):
    """What each completion of a group is known by."""
    return [int(part[0]) for part in g.token_ids.split(g.lengths.tolist())]
