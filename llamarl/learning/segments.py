"""Sums and means over runs of a flat tensor: labels of a completion, completions of a group."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_by(values: Tensor, index: Tensor, size: int) -> Tensor:
    """[size]: the sum of the values [R] whose index [R] (int64) it is, 0 of none."""
    return values.new_zeros(size).index_add(0, index, values)


def mean_by(values: Tensor, index: Tensor, size: int, valid: Tensor) -> Tensor:
    """[size]: the mean of the valid values [R] whose index it is, 0 of none. What is not valid may
    hold anything.
    """
    count = sum_by(valid.to(values.dtype), index, size)
    return sum_by(torch.where(valid, values, 0), index, size) / count.clamp(min=1)
