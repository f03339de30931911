"""The trainer's ranks as one: sums and maxima over them, and questions that one yes decides."""

from __future__ import annotations

import torch
import torch.distributed as dist

from llamarl.models.tp import TensorParallel


class Ranks:
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
        """Whether one of them wants it."""
        return self.max(wanted=float(wanted))["wanted"] > 0

    def sum(self, **values: float) -> dict[str, float]:
        """The sum of each value over the ranks, in float64; all ranks give the same names."""
        if not self._is_counted:
            values = dict.fromkeys(values, 0.0)
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, **values: float) -> dict[str, float]:
        """The largest of each value over the ranks; all ranks give the same names."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def union(self, names: list[str]) -> list[str]:
        """The names that any rank gives, sorted where there are several ranks; none holds a
        comma.
        """
        if self.size == 1:
            return names
        text = ",".join(names).encode()
        longest = int(self.max(size=float(len(text)))["size"])
        mine = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        if text:
            mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self._group)
        known = set()
        for part in parts:
            known |= set(bytes(part.tolist()).rstrip(b"\0").decode().split(","))
        return sorted(known - {""})

    def _reduced(self, values: dict[str, float], operation: dist.ReduceOp) -> dict[str, float]:
        if self.size == 1 or not values:
            return dict(values)
        packed = torch.tensor(list(values.values()), dtype=torch.float64, device=self._device)
        dist.all_reduce(packed, operation, group=self._group)
        return dict(zip(values, packed.tolist()))
