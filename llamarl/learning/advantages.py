"""Rewards of a group become advantages. NaN marks a completion that must not be trained on: advantage 0, outside every mean.

Rewards [..., G] give advantages of the same shape and dtype, float32 at least; leading dims are groups. A group with fewer
than two valid rewards says nothing about which is better: all zeros.
"""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

STD_EPS = 1e-6  # keeps a group of almost equal rewards from being blown up to unit variance


def group_mean(rewards: Tensor) -> Tensor:
    """A_i = r_i - mean(r)        (LlamaRL; Dr. GRPO)"""
    return _centred(rewards)[0].to(_narrow(rewards))


def group_mean_std(rewards: Tensor) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6), std over n - 1        (GRPO)"""
    centred, count = _centred(rewards)
    variance = centred.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)
    return (centred / (variance.sqrt() + STD_EPS)).to(_narrow(rewards))


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {"group_mean": group_mean, "group_mean_std": group_mean_std}


def _centred(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """(r - mean, 0 where NaN; number of valid rewards [..., 1]), float64.

    In float64 the sum of equal float32 rewards is exact, so that their advantages are exactly 0 and can be dropped.
    """
    valid = ~rewards.isnan()
    wide = torch.where(valid, rewards, 0).double()
    count = valid.sum(-1, keepdim=True)
    mean = wide.sum(-1, keepdim=True) / count.clamp(min=1)
    return torch.where(valid, wide - mean, 0), count


def _narrow(rewards: Tensor) -> torch.dtype:
    return torch.promote_types(rewards.dtype, torch.float32)
