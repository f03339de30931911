"""Sums and maxima over the trainer's ranks, and questions that one yes decides."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.models.tp import TensorParallel

Number = Tensor | float  # a tensor of one element
Name = TypeVar("Name", bound=Hashable)


class TrainerRanks:
    """The ranks that train together: those of `group`, or one alone where it is None.

    Every method is collective over them. Ranks that share a tensor-parallel decoder are given the
    same groups; in sums they count once.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, tp: TensorParallel | None
    ):
        self._group = group
        self._device = device
        self.size = group.size() if group is not None else 1
        self.data_size = self.size // (tp.size if tp else 1)
        self._is_counted = tp is None or tp.rank == 0

    def any(self, wanted: bool) -> bool:
        """Whether any rank wants it."""
        return self.max(wanted=wanted)["wanted"] > 0

    def sum(self, **values: Number) -> dict[str, float]:
        """Return the sum of each value over the ranks, in float64; all ranks give the same
        names.
        """
        if not self._is_counted:
            values = dict.fromkeys(values, 0.0)
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, **values: Number) -> dict[str, float]:
        """Return the largest of each value over the ranks; all ranks give the same names."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def max_each(self, values: Sequence[int]) -> list[int]:
        """Return, for each value, the largest over the ranks; all ranks give as many."""
        largest = self._reduced(dict(enumerate(values)), dist.ReduceOp.MAX)
        return [int(value) for value in largest.values()]

    def total(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over the ranks of values of one shape, without gradient.
        ValueError for values that have one: it would be lost.
        """
        if values.requires_grad:
            raise ValueError("a sum over the trainer's ranks has no gradient: detach its values")
        total = values.clone() if self._is_counted else torch.zeros_like(values)
        if self.size > 1:
            dist.all_reduce(total, group=self._group)
        return total

    def union(self, names: list[str]) -> list[str]:
        """Return the names that any rank gives, sorted where there are several ranks. Ranks that
        share a decoder give the same ones.
        """
        if self.size == 1:
            return names
        known: set[str] = set()
        for message in self.gather(json.dumps(names).encode()):
            if message:  # ranks that share a decoder with another say nothing
                known.update(json.loads(message))
        return sorted(known)

    def gather(self, message: bytes) -> list[bytes]:
        """Return what each rank gives, in the order of ranks; of ranks that share a decoder only
        the first one's.
        """
        if self.size == 1:
            return [message]
        own = message if self._is_counted else b""
        size_1 = torch.tensor([len(own)], device=self._device)
        sizes = [torch.empty_like(size_1) for _ in range(self.size)]
        dist.all_gather(sizes, size_1, group=self._group)
        longest = max(int(size) for size in sizes)
        if not longest:
            return [b""] * self.size
        padded = bytearray(own.ljust(longest, b"\0"))
        mine = torch.frombuffer(padded, dtype=torch.uint8).to(self._device)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self._group)
        messages = []
        for part, size in zip(parts, sizes):
            messages.append(part[: int(size)].cpu().numpy().tobytes())
        return messages

    def _reduced(
        self, values: Mapping[Name, Number], operation: dist.ReduceOp.RedOpType
    ) -> dict[Name, float]:
        numbers = [float(value) for value in values.values()]
        if self.size > 1 and numbers:
            packed = torch.tensor(numbers, dtype=torch.float64, device=self._device)
            dist.all_reduce(packed, operation, group=self._group)
            numbers = packed.tolist()
        return dict(zip(values, numbers))
