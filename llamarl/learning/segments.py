"""Flat tensors: their runs (labels of a completion, completions of a group) and sums over them, how
they are joined from many, and the dtype for sums. Segments: sequences of tokens end to end, as an
attention reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
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


class Segments:
    """Segments of a microbatch: sequences of tokens, and what goes on with one of them."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._token_ids: list[Tensor] = []
        self._positions: list[int] = []  # of each one's first token
        self._parents: list[int] = []

    def add(self, token_ids: Tensor, *, position: int = 0, parent: int = -1) -> int:
        """Add tokens [n] int64 and return the segment's number. parent: the number of the segment
        that they go on with; -1: of none.
        """
        self.num_tokens += token_ids.numel()
        self._token_ids.append(token_ids)
        self._positions.append(position)
        self._parents.append(parent)
        return len(self._parents) - 1

    def packed(self) -> dict[str, Tensor]:
        """Return input_ids and positions [T], cu_seqlens [S+1] and parents [S], int64 on the CPU.

        Without a segment there is one token that nobody reads: a rank with fewer microbatches than
        its FSDP peers computes it, because all must run the same number.
        """
        if not self._parents:
            self.add(torch.zeros(1, dtype=torch.int64))
        sizes = torch.tensor([ids.numel() for ids in self._token_ids])
        return {
            "input_ids": torch.cat(self._token_ids),
            "positions": runs(torch.tensor(self._positions), sizes),
            "cu_seqlens": F.pad(sizes.cumsum(0), (1, 0)),
            "parents": torch.tensor(self._parents),
        }
