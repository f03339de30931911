"""Flat tensors: their runs (labels of a completion, completions of a group) and sums over them, how
they are joined from many, and the dtype for sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_by(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Return [size]: for each index the sum of the values [R] that have it in `index` [R] (int64),
    0 without any.
    """
    return values.new_zeros(size).index_add(0, index, values)


def end_to_end(records: Sequence[object], field: str) -> Tensor:
    """Return the records' tensors of this name, one behind the other; at least one record."""
    return torch.cat([getattr(record, field) for record in records])


def owners(lengths: Tensor) -> Tensor:
    """Return the number of the run that each place is in: i, lengths[i] times. int64."""
    return torch.arange(len(lengths)).repeat_interleave(lengths)


def runs(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return lengths[i] consecutive numbers from starts[i] on, for each i, end to end. int64."""
    before = lengths.cumsum(0) - lengths
    shifts = (starts - before).repeat_interleave(lengths)
    return shifts + torch.arange(len(shifts))


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return the tensor's dtype, or float32 if that is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)
