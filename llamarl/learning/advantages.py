"""Advantages: the rewards of a group, compared with each other, or GAE over the tokens of a
completion. Pure.

A group's functions take rewards [..., G] and trained [..., G] bool, and give advantages of the
shape and dtype of the rewards, float32 at least; leading dims are groups. A completion that is not
trained on has advantage 0 and is in no mean, whatever its reward. A group with fewer than two
trained completions says nothing about which is better: all zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llamarl.learning.segments import wide_dtype

# TRL's; keeps a group of almost equal rewards from being blown up to unit variance.
GROUP_STD_EPS = 1e-4


def group_mean(rewards: Tensor, trained: Tensor) -> Tensor:
    """A_i = r_i - mean(r)        (LlamaRL; Dr. GRPO)"""
    centred, _ = _centred(rewards, trained)
    return centred.to(wide_dtype(rewards))


def group_mean_std(rewards: Tensor, trained: Tensor) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-4), std over n - 1        (GRPO, as TRL has it)"""
    centred, count = _centred(rewards, trained)
    others = (count - 1).clamp(min=1)
    variance = centred.square().sum(-1, keepdim=True) / others
    scaled = centred / (variance.sqrt() + GROUP_STD_EPS)
    return scaled.to(wide_dtype(rewards))


def leave_one_out(rewards: Tensor, trained: Tensor) -> Tensor:
    """A_i = r_i - mean of the others = n/(n - 1) (r_i - mean(r)), n trained ones        (RLOO;
    TBA, eq. 6)
    """
    centred, count = _centred(rewards, trained)
    others = (count - 1).clamp(min=1)
    scaled = centred * count / others
    return scaled.to(wide_dtype(rewards))


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "leave_one_out": leave_one_out,
}


def by_turn(rewards: Tensor, has_turn: Tensor) -> Tensor:
    """A_ik = R_ik - mean of R_jk over the j with a turn k,  R_ik = sum of r_il over l >= k

    What a turn is worth is what comes from it on, compared with the group's at its turn of the same
    number. rewards [G, K]: of each completion's turns. has_turn [G, K] bool: those that there are,
    of completions that may be trained on. Returns [G, K], 0 where there is no turn, or no other's
    to compare with.
    """
    to_come = torch.where(has_turn, rewards, 0).double().flip(1).cumsum(1).flip(1)
    centred, _ = _centred(to_come.mT, has_turn.mT)
    return centred.mT.to(wide_dtype(rewards))


def gae(
    rewards: Tensor, values: Tensor, lengths: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return (advantages [R], returns [R]) of completions packed end to end.

    A_t = sum_l (gamma lam)^l delta_{t+l},  delta_t = r_t + gamma V_{t+1} - V_t        (OPPO, eq. 1)
    return_t = A_t + V_t

    rewards, values [R], lengths [N] int64 with sum R; nothing comes after a completion's last
    token: V = 0 there. Float64 inside, the values' dtype outside (float32 at least), no gradient.
    log2(longest) passes over [R], whatever N is. gamma and lam: 0..1.
    """
    size = rewards.numel()
    v = values.detach().double()
    # left: tokens of the same completion that come after
    ends = lengths.cumsum(0).repeat_interleave(lengths, output_size=size)
    left = ends - 1 - torch.arange(size, device=v.device)
    v_next = _from_later(v, 1, left)
    deltas = rewards.detach().double() + gamma * v_next - v
    longest = int(lengths.max()) if lengths.numel() else 0
    advantages = deltas
    # After a pass with a step, each place holds its sum over the next 2 * step deltas.
    step = 1
    while step < longest:
        later = _from_later(advantages, step, left)
        decay = (gamma * lam) ** step
        advantages = advantages + decay * later
        step *= 2
    returns = advantages + v
    dtype = wide_dtype(values)
    return advantages.to(dtype), returns.to(dtype)


def _from_later(x: Tensor, step: int, left: Tensor) -> Tensor:
    """Return x[t + step] where that is in the same completion, else 0."""
    return torch.where(left >= step, x.roll(-step), 0)


def _centred(rewards: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return (r - mean, 0 where not valid; number of valid rewards [..., 1]), float64.

    In float64 the sum of equal float32 rewards is exact, so that their advantages are exactly 0 and
    can be dropped.
    """
    wide = torch.where(valid, rewards, 0).double()
    count = valid.sum(-1, keepdim=True)
    mean = wide.sum(-1, keepdim=True) / count.clamp(min=1)
    return torch.where(valid, wide - mean, 0), count
