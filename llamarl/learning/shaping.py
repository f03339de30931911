"""Shapes rewards before they become advantages: a set reward where the end token is missing, KL to
the reference, whitening.

    r_t = -beta KL_t + [t is the last token] * score        (Async RLHF 2.1; OPPO eq. 1's r_t)

    KL_t  = -x (k1, the papers'), x^2 / 2 (k2) or exp(x) - 1 - x (k3)        (Schulman)
    x     = log ref_t - log mu_t
    score = the task's reward, or missing_eos_penalty without an end token
            (Async RLHF tables 4 and 7)
    mu    = generator_logprobs, the policy that sampled the token; ref = ref_logprobs

Advantages by token (GAE) take r_t; those by completion take its sum, the whole completion's reward.
A completion that must not be trained on (no reward) keeps NaN, whatever its end.

Shapes: G completions of a group, T their tokens end to end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llamarl.learning.losses.regularisers import kl_to_reference
from llamarl.learning.segments import sum_by
from llamarl.types import Group

STD_EPS = 1e-8
# Float32 values that differ by less, as a share of their size, differ by rounding: they count as
# equal.
EQUAL = torch.finfo(torch.float32).eps

SumOverRanks = Callable[..., dict[str, float]]


@dataclass(frozen=True, slots=True)
class Shaping:
    """Settings of the shaping. missing_eos_penalty: the reward of a completion without an end
    token; None: its own. reward_kl_coef: beta, 0: no KL.
    """

    missing_eos_penalty: float | None = None
    reward_kl_coef: float = 0.0
    whiten: str = "none"  # a word of choices.Whiten

    @property
    def any(self) -> bool:
        """Whether rewards are changed at all."""
        return (
            self.missing_eos_penalty is not None
            or self.reward_kl_coef > 0
            or self.whitens("rewards")
        )

    def whitens(self, what: str) -> bool:
        """Whether `what`, "rewards" or "advantages", is whitened."""
        return self.whiten in (what, "both")


@dataclass(frozen=True, slots=True)
class Rewards:
    """The rewards of a group. A completion's reward is the sum of its tokens' rewards."""

    completions: Tensor  # [G] float32; NaN where the completion must not be trained on
    tokens: Tensor  # [T] float32; 0 there


def shape(group: Group, shaping: Shaping) -> Rewards:
    """Return the shaped rewards of a group. ValueError for a KL without ref_logprobs."""
    lengths = group.lengths
    scores = group.rewards.double()
    if shaping.missing_eos_penalty is not None:
        is_ended = [reason == "stop" for reason in group.finish_reasons]
        keeps_its_own = torch.tensor(is_ended, dtype=torch.bool) | scores.isnan()
        scores = torch.where(keeps_its_own, scores, shaping.missing_eos_penalty)
    tokens = torch.zeros(group.token_ids.numel(), dtype=torch.float64)
    if shaping.reward_kl_coef > 0:
        if group.ref_logprobs.numel() != tokens.numel():
            raise ValueError(
                f"reward_kl_coef={shaping.reward_kl_coef} needs ref_logprobs: reference=frozen, "
                "or 0"
            )
        x = group.ref_logprobs - group.generator_logprobs.double()
        tokens = -shaping.reward_kl_coef * kl_to_reference(x, "k1")
    completion_of = torch.arange(len(lengths)).repeat_interleave(lengths)
    is_rewarded = ~scores.isnan()
    tokens = torch.where(is_rewarded[completion_of], tokens, 0)
    completions = scores + sum_by(tokens, completion_of, len(lengths))
    is_begun = lengths > 0
    last = lengths.cumsum(0)[is_begun] - 1
    tokens = tokens.index_add(0, last, scores.nan_to_num(0)[is_begun])
    return Rewards(completions=completions.float(), tokens=tokens.float())


def whiten_rewards(
    groups: list[Group], rewards: list[Rewards], *, by_token: bool, total: SumOverRanks
) -> list[Rewards]:
    """Collective: divide rewards by their standard deviation in the batch, over tokens (GAE) or
    completions.

    Means stay: Huang et al. 2024 (the settings of Async RLHF's table 4) leave them for the value
    head, and a mean over a group takes them away anyway. Rewards that are all equal have no
    deviation and stay what they are. total(**values): the sums over ranks.
    """
    of = []
    for r, g in zip(rewards, groups):
        of.append(r.tokens[g.trained_tokens] if by_token else r.completions[g.trained])
    mean, std = moments(of, total)
    if std <= EQUAL * abs(mean):
        return rewards
    unit = std + STD_EPS
    return [Rewards(completions=r.completions / unit, tokens=r.tokens / unit) for r in rewards]


def whiten_advantages(
    advantages: list[Tensor], trained: list[Tensor], *, total: SumOverRanks
) -> list[Tensor]:
    """Collective: return (A - mean) / std over what is trained on all ranks; 0 at the others.

    [T] and [T] bool each, over tokens; or [G] and [G] bool, over completions.
    """
    own = [a[t] for a, t in zip(advantages, trained)]
    mean, std = moments(own, total)
    whitened = [(a.double() - mean) / (std + STD_EPS) for a in advantages]
    return [torch.where(t, w, 0).float() for w, t in zip(whitened, trained)]


def moments(values: list[Tensor], total: SumOverRanks) -> tuple[float, float]:
    """Collective: return the mean and the standard deviation over n - 1 (0 for fewer than two) of
    all ranks' values. Two passes, float64.
    """
    wide = torch.cat([torch.zeros(0), *values]).double()
    sums = total(count=float(wide.numel()), sum=float(wide.sum()))
    mean = sums["sum"] / max(sums["count"], 1.0)
    squares = total(squares=float((wide - mean).square().sum()))["squares"]
    return mean, (squares / max(sums["count"] - 1, 1.0)) ** 0.5
