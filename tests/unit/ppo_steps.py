"""A step of PPO on four groups, and what it computes of each sequence alone: logprobs, values,
shaped rewards, and GAE by its definition.
"""

from __future__ import annotations

import dataclasses

import torch

from llamarl.learning.losses.clipped import clipped
from llamarl.learning.losses.regularisers import regularised
from llamarl.learning.targets import Shaping
from llamarl.learning.values import CriticSettings, SharedCritic
from llamarl.models.attention import PackedAttention
from tests.updating import NAN, SETTINGS, group, update_of

PPO = CriticSettings(lr=0.3, coef=0.5, clip=0.1, gamma=0.9, gae_lambda=0.8)
BETA, EPS = 0.05, 0.2
CPU = torch.device("cpu")


def critic_of(settings=PPO, **start):
    """A head that has learnt something already, stepped by SGD so that a step is its gradient."""
    critic = SharedCritic(16, settings, betas=(0.9, 0.99), eps=1e-8, mesh=None, device=CPU)
    random = torch.Generator().manual_seed(3)
    critic.head.weight.data.copy_(torch.randn(16, generator=random) * 0.3)
    critic.head.bias.data.fill_(0.2)
    critic.optimizer = torch.optim.SGD(critic.parameters, lr=123.0)
    return critic


def ppo_update(critic=None, **changes):
    made = dict(
        shaping=Shaping(missing_eos_penalty=-1.0, reward_kl_coef=BETA),
        max_grad_norm=1e6,
        schedule="constant",
        lr=0.02,
    )
    return update_of(
        loss_fn=regularised(clipped), critic=critic or critic_of(), **{**made, **changes}
    )


def groups_of():
    """A masked completion, one that was cut off, and an ordinary group; the reference differs from
    the policy.
    """
    made = [
        group(4, [6, 2, 9], [1.0, 0.5, 0.0]),
        group(3, [1, 5, 2], [0.0, 1.0, NAN]),
        group(7, [2, 2, 8], [0.0, 3.0, 1.0], finish_reasons=("stop", "aborted", "length")),
        group(1, [3], [1.0]),  # a group of one is enough
    ]
    return [
        dataclasses.replace(g, ref_logprobs=torch.linspace(-4.0, -2.0, g.token_ids.numel()))
        for g in made
    ]


def sequences():
    """(tokens, prompt length, generator logprobs, shaped reward of each token) of every trained
    completion.
    """
    out = []
    for g in groups_of():
        at = 0
        for i, n in enumerate(g.lengths.tolist()):
            own, at = slice(at, at + n), at + n
            if not g.trained[i]:
                continue
            r = -BETA * (g.generator_logprobs[own] - g.ref_logprobs[own])
            r[-1] += g.rewards[i] if g.finish_reasons[i] == "stop" else -1.0
            out.append(
                (
                    torch.cat([g.prompt_ids, g.token_ids[own]]),
                    len(g.prompt_ids),
                    g.generator_logprobs[own],
                    r,
                )
            )
    return out


def forward(decoder, head, tokens, prompt):
    """(logprobs [L], values [L]) of one sequence alone."""
    kept = []

    def both(hidden, weight):
        kept.append(head(hidden)[prompt - 1 : -1])
        return hidden @ weight.T

    logits = decoder(
        tokens, torch.arange(len(tokens)), PackedAttention(torch.tensor([0, len(tokens)])), both
    )
    logprobs = (logits / SETTINGS.temperature).log_softmax(-1)[prompt - 1 : -1]
    return logprobs.gather(1, tokens[prompt:, None])[:, 0], kept[0]


def estimate(values, rewards, s=PPO):
    """GAE and returns by the definition: a double loop, in Python's floats."""
    v = [*values.tolist(), 0.0]
    r = rewards.tolist()
    n = len(rewards)
    delta = [r[t] + s.gamma * v[t + 1] - v[t] for t in range(n)]
    advantages = []
    for begin in range(n):
        ahead = range(n - begin)
        advantages.append(sum((s.gamma * s.gae_lambda) ** k * delta[begin + k] for k in ahead))
    return torch.tensor(advantages), torch.tensor([a + b for a, b in zip(advantages, v)])
