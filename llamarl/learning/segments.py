"""Sums over runs of a flat tensor: labels of a completion, completions of a group."""

from __future__ import annotations

from torch import Tensor


def sum_by(values: Tensor, index: Tensor, size: int) -> Tensor:
    """[size]: the sum of the values [R] whose index [R] (int64) it is, 0 of none."""
    return values.new_zeros(size).index_add(0, index, values)
