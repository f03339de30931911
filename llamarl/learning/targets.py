"""Makes a batch's targets: its rewards are shaped, turned into advantages, and whitened over all
ranks.

groups -> (with_signal) -> those that are trained on
rewards -> shape -> (whiten) -> advantages: of each group's completions, or GAE's of each token ->
(whiten) -> Targets

Shapes: G completions of a group, T their tokens end to end; C the tokens of all groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llamarl.learning.advantages import ADVANTAGES, gae
from llamarl.learning.reduction import Ranks
from llamarl.learning.segments import end_to_end
from llamarl.learning.shaping import (
    Rewards,
    Shaping,
    moments,
    shape,
    whiten_advantages,
    whiten_rewards,
)
from llamarl.learning.step_metrics import Row
from llamarl.learning.values import Critic, CriticSettings
from llamarl.types import Group


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of a group, made of its shaped rewards."""

    rewards: Tensor  # [G] float32, shaped; NaN where the completion must not be trained on
    advantages: Tensor  # [T] float32
    returns: Tensor  # [T] float32, what the value head learns; [0] without one
    old_values: Tensor  # [T] float32, what it said before the step; [0] without one

    @classmethod
    def of(cls, group: Group, advantages: Tensor, rewards: Tensor | None = None) -> Targets:
        """Return the targets that give every token of a completion its completion's advantage
        ([G]).

        rewards [G]: shaped; None: the group's own.
        """
        return cls(
            rewards=group.rewards if rewards is None else rewards,
            advantages=advantages.float().repeat_interleave(group.lengths),
            returns=torch.zeros(0),
            old_values=torch.zeros(0),
        )


def make_targets(
    groups: list[Group],
    shaping: Shaping,
    *,
    advantages: str,
    critic: Critic | None,
    old_values: Tensor | None,
    minibatches: list[slice],
    ranks: Ranks,
) -> tuple[list[Targets], Row]:
    """Collective: return the targets of this rank's groups, and metrics of the whole batch.

    advantages: a name in ADVANTAGES, where there is no critic; with one, old_values [C] are its
    values of all tokens. minibatches: which of the groups are trained on together;
    whiten=completions is over each of them, all other whitening over the batch. metrics:
    reward/shaped_mean where rewards are shaped; value/explained_variance of the old values: 1 -
    var(return - value) / var(return), None where the returns are all alike.
    """
    metrics: Row = {}
    rewards = [shape(g, shaping) for g in groups]
    if shaping.whitens("rewards"):
        rewards = whiten_rewards(groups, rewards, by_token=critic is not None, total=ranks.sum)
    if shaping.any:
        valid = [r.completions[~r.completions.isnan()] for r in rewards]
        metrics["reward/shaped_mean"] = moments(valid, ranks.sum)[0]
    if critic is None:
        by_completion = [ADVANTAGES[advantages](r.completions) for r in rewards]
        if shaping.whitens("completions"):
            # (A - mean A) / std A        (Magistral, 2.1)
            whitened = []
            for minibatch in minibatches:
                trained = [g.trained for g in groups[minibatch]]
                whitened += whiten_advantages(by_completion[minibatch], trained, total=ranks.sum)
            by_completion = whitened
        targets = [
            Targets.of(group, own_advantages, own_rewards.completions)
            for group, own_advantages, own_rewards in zip(groups, by_completion, rewards)
        ]
    else:
        assert old_values is not None, "a critic has said values before the step"
        targets = _targets_by_token(groups, rewards, critic.settings, old_values)
        metrics["value/explained_variance"] = _explained_variance(groups, targets, ranks)
    if shaping.whitens("advantages"):
        trained = [g.trained_tokens for g in groups]
        whitened = whiten_advantages([t.advantages for t in targets], trained, total=ranks.sum)
        targets = [replace(t, advantages=a) for t, a in zip(targets, whitened)]
    return targets, metrics


def with_signal(groups: list[Group], shaping: Shaping) -> list[Group]:
    """Return the groups in which two trained completions have different shaped rewards.

    The others have no advantage to learn from: Magistral (2.1) leaves them out of its batches, and
    so out of every mean and deviation.
    """
    kept = []
    for group in groups:
        rewards = shape(group, shaping).completions[group.trained]
        if rewards.unique().numel() > 1:
            kept.append(group)
    return kept


def _targets_by_token(
    groups: list[Group], rewards: list[Rewards], settings: CriticSettings, old_values: Tensor
) -> list[Targets]:
    """Return targets by GAE, all 0 for the tokens that are not trained on; old_values [C], 0 for
    these.
    """
    if not groups:
        return []
    lengths = end_to_end(groups, "lengths")
    tokens = end_to_end(rewards, "tokens")
    trained = end_to_end(groups, "trained_tokens")
    sizes = [g.token_ids.numel() for g in groups]
    advantages, returns = gae(
        tokens, old_values, lengths, gamma=settings.gamma, lam=settings.gae_lambda
    )
    all_3C = torch.where(trained, torch.stack([advantages, returns, old_values]), 0)
    return [
        Targets(
            rewards=own_rewards.completions,
            advantages=own_3T[0],
            returns=own_3T[1],
            old_values=own_3T[2],
        )
        for own_rewards, own_3T in zip(rewards, all_3C.split(sizes, dim=1), strict=True)
    ]


def _explained_variance(groups: list[Group], targets: list[Targets], ranks: Ranks) -> float | None:
    """Collective: return value/explained_variance, see make_targets."""
    returns = []
    errors = []
    for t, g in zip(targets, groups):
        returns.append(t.returns[g.trained_tokens])
        errors.append((t.returns - t.old_values)[g.trained_tokens])
    _, spread = moments(returns, ranks.sum)
    _, error = moments(errors, ranks.sum)
    return 1 - (error / spread) ** 2 if spread > 0 else None
