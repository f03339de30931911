"""Flat tensors: sums over their runs (labels of a completion, completions of a group), how they are
made of many, and the dtype for sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_by(values: Tensor, index: Tensor, size: int) -> Tensor:
    """[size]: the sum of the values [R] whose index [R] (int64) it is, 0 of none."""
    return values.new_zeros(size).index_add(0, index, values)


def end_to_end(records: Sequence[object], field: str) -> Tensor:
    """The records' tensors of this name, one behind the other; at least one record."""
    return torch.cat([getattr(record, field) for record in records])


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The tensor's dtype, float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)
