"""Sums over runs of a flat tensor, labels of a completion or completions of a group, and the dtype
in which sums are made.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sum_by(values: Tensor, index: Tensor, size: int) -> Tensor:
    """[size]: the sum of the values [R] whose index [R] (int64) it is, 0 of none."""
    return values.new_zeros(size).index_add(0, index, values)


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The tensor's dtype, float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)
