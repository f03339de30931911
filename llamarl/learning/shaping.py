"""Shapes rewards before they become advantages: a set reward where the end token is missing, KL to
the reference, whitening.

    r_t = -beta KL_t + [t is the last token] * score        (Async RLHF 2.1; OPPO eq. 1's r_t)

    KL_t  = -x (k1, the papers'), x^2 / 2 (k2) or exp(x) - 1 - x (k3)        (Schulman)
    x     = log ref_t - log mu_t
    score = the task's reward, or missing_eos_penalty where it was cut off
            (Async RLHF tables 4 and 7)
    mu    = generator_logprobs, the policy that sampled the token; ref = ref_logprobs

Advantages by token (GAE) take r_t; those by completion take its sum, the whole completion's reward.
A completion that must not be trained on (no reward) keeps NaN, whatever its end.

Shapes: G completions of a group, T their tokens end to end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from llamarl.learning.losses.regularisers import kl_to_reference
from llamarl.learning.segments import end_to_end, owners, sum_by
from llamarl.types import Group

STD_EPS = 1e-8
# Float32 values that differ by less, as a share of their size, differ by rounding: they count as
# equal.
EQUAL = torch.finfo(torch.float32).eps

SumOverRanks = Callable[..., dict[str, float]]


@dataclass(frozen=True, slots=True)
class Shaping:
    """Settings of the shaping. missing_eos_penalty: the reward of a completion that was cut off;
    None: its own. reward_kl_coef: beta, 0: no KL.
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
    return shape_all([group], shaping)[0]


def shape_all(groups: list[Group], shaping: Shaping) -> list[Rewards]:
    """Return the shaped rewards of each group. ValueError for a KL without ref_logprobs.

    All groups are computed end to end: N completions, C tokens.
    """
    if not groups:
        return []
    lengths = end_to_end(groups, "lengths")
    loss_mask = end_to_end(groups, "loss_mask")
    num_completions = len(lengths)
    completion_of = owners(lengths)
    own = end_to_end(groups, "rewards").double()
    scores = own
    if shaping.missing_eos_penalty is not None:
        reasons = chain.from_iterable(g.finish_reasons for g in groups)
        is_ended = [reason == "stop" for reason in reasons]
        keeps_its_own = torch.tensor(is_ended, dtype=torch.bool) | scores.isnan()
        scores = torch.where(keeps_its_own, scores, shaping.missing_eos_penalty)
    tokens = torch.zeros(len(completion_of), dtype=torch.float64)
    if shaping.reward_kl_coef > 0:
        if any(g.ref_logprobs.numel() != g.token_ids.numel() for g in groups):
            raise ValueError(
                f"reward_kl_coef={shaping.reward_kl_coef} needs ref_logprobs: reference=frozen, "
                "or 0"
            )
        generator_logprobs = end_to_end(groups, "generator_logprobs").double()
        x = end_to_end(groups, "ref_logprobs") - generator_logprobs
        tokens = -shaping.reward_kl_coef * kl_to_reference(x, "k1")
        tokens = torch.where(loss_mask, tokens, 0)
    is_rewarded = ~scores.isnan()
    tokens = torch.where(is_rewarded[completion_of], tokens, 0)
    completions = scores + sum_by(tokens, completion_of, num_completions)
    # What is for a turn stands at its end, and the rest at the end of all.
    keeps_turns = is_rewarded & (scores == own)
    turn_rewards = end_to_end(groups, "turn_rewards").double()
    of_turns = torch.where(keeps_turns[completion_of], turn_rewards, 0)
    tokens = tokens + of_turns
    scores = scores - sum_by(of_turns, completion_of, num_completions)
    is_begun = sum_by(loss_mask.long(), completion_of, num_completions) > 0
    # A completion's last token was sampled, if any was.
    last = lengths.cumsum(0)[is_begun] - 1
    tokens = tokens.index_add(0, last, scores.nan_to_num(0)[is_begun])
    by_group = completions.float().split([g.lengths.numel() for g in groups])
    tokens_by_group = tokens.float().split([g.token_ids.numel() for g in groups])
    pairs = zip(by_group, tokens_by_group, strict=True)
    return [Rewards(completions=own_N, tokens=own_C) for own_N, own_C in pairs]


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
