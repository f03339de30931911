"""What a batch is trained towards: its rewards shaped, made advantages of, whitened over all ranks.

groups -> (with_signal) -> those that are trained on
rewards -> shape -> (whiten) -> advantages: of each group's completions, or GAE's of each token ->
(whiten) -> Targets
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from llamarl.learning.advantages import ADVANTAGES
from llamarl.learning.packing import Targets
from llamarl.learning.reduction import Ranks
from llamarl.learning.shaping import Shaping, moments, shape, whiten_advantages, whiten_rewards
from llamarl.learning.values import Critic
from llamarl.types import Group


def make_targets(
    groups: list[Group],
    shaping: Shaping,
    *,
    advantages: str,
    critic: Critic | None,
    old_values: Tensor | None,
    minibatches: list[slice],
    ranks: Ranks,
) -> tuple[list[Targets], dict[str, float | None]]:
    """Collective: the targets of this rank's groups, and metrics of the whole batch.

    advantages: a name in ADVANTAGES, where there is no critic; with one, old_values [C] are its
    values of all tokens. minibatches: which of the groups are trained on together;
    whiten=completions is over each of them, all other whitening over the batch. metrics:
    reward/shaped_mean where rewards are shaped; value/explained_variance of the old values: 1 -
    var(return - value) / var(return), None where the returns are all alike.
    """
    metrics: dict[str, float | None] = {}
    rewards = [shape(g, shaping) for g in groups]
    if shaping.whitens("rewards"):
        rewards = whiten_rewards(groups, rewards, by_token=critic is not None, total=ranks.sum)
    if shaping.any:
        valid = [r.completions[~r.completions.isnan()] for r in rewards]
        metrics["reward/shaped_mean"] = moments(_joined(valid), ranks.sum)[0]
    trained = [g.trained_tokens for g in groups]
    if critic is None:
        by_completion = [ADVANTAGES[advantages](r.completions) for r in rewards]
        if shaping.whitens("completions"):
            by_completion = _whitened_by_minibatch(groups, by_completion, minibatches, ranks)
        whole = [r.completions for r in rewards]
        targets = [Targets.of(*of) for of in zip(groups, by_completion, whole)]
    else:
        targets = critic.targets(groups, rewards, old_values)
        metrics["value/explained_variance"] = _explained_variance(targets, trained, ranks)
    if shaping.whitens("advantages"):
        whitened = whiten_advantages([t.advantages for t in targets], trained, total=ranks.sum)
        targets = [replace(t, advantages=a) for t, a in zip(targets, whitened)]
    return targets, metrics


def with_signal(groups: list[Group], shaping: Shaping) -> list[Group]:
    """Those in which two trained completions have different shaped rewards.

    The others have no advantage to learn from: Magistral (2.1) leaves them out of its batches, and
    so out of every mean and deviation.
    """
    return [group for group in groups if _has_signal(group, shaping)]


def _has_signal(group: Group, shaping: Shaping) -> bool:
    rewards = shape(group, shaping).completions[group.trained]
    return rewards.unique().numel() > 1


def _whitened_by_minibatch(
    groups: list[Group], advantages: list[Tensor], minibatches: list[slice], ranks: Ranks
) -> list[Tensor]:
    """Collective: (A - mean A) / std A over a minibatch's trained completions        (Magistral,
    2.1)
    """
    out = []
    for minibatch in minibatches:
        trained = [group.trained for group in groups[minibatch]]
        out += whiten_advantages(advantages[minibatch], trained, total=ranks.sum)
    return out


def _explained_variance(
    targets: list[Targets], trained: list[Tensor], ranks: Ranks
) -> float | None:
    returns = _joined([t.returns[m] for t, m in zip(targets, trained)])
    values = _joined([t.old_values[m] for t, m in zip(targets, trained)])
    _, spread = moments(returns, ranks.sum)
    _, error = moments(returns - values, ranks.sum)
    return 1 - (error / spread) ** 2 if spread > 0 else None


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([*parts, torch.zeros(0)])
