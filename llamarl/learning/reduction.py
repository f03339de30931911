"""The trainer's ranks as one: sums and maxima over them, and questions that one yes decides."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from llamarl.models.tp import TensorParallel


class Ranks:
    """Collective over `group` (the trainer's ranks), None for a single rank.

    Ranks that share a tensor-parallel decoder are given the same groups; in sums they count once.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, tp: TensorParallel | None
    ):
        self._group, self._device = group, device
        self.size = group.size() if group is not None else 1
        self.data_size = self.size // (tp.size if tp else 1)
        self._is_counted = tp is None or tp.rank == 0

    def any(self, wanted: bool) -> bool:
        """Whether one of them wants it."""
        if self.size == 1:
            return wanted
        flag = torch.tensor([float(wanted)], device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def reduce(
        self, sums: dict[str, float], maxima: dict[str, float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and maxima over the ranks, which may know different names when one had no
        microbatch. float64.
        """
        if self.size == 1:
            return dict(sums), dict(maxima)
        out = []
        for values, op, neutral in (
            (sums, dist.ReduceOp.SUM, 0.0),
            (maxima, dist.ReduceOp.MAX, -math.inf),
        ):
            names = self._all_names(sorted(values))
            values = values if self._is_counted or op == dist.ReduceOp.MAX else {}
            packed = torch.tensor(
                [values.get(n, neutral) for n in names], dtype=torch.float64, device=self._device
            )
            if names:
                dist.all_reduce(packed, op, group=self._group)
            out.append(dict(zip(names, packed.tolist())))
        return out[0], out[1]

    def sum(self, **values: float) -> dict[str, float]:
        """Sums alone."""
        return self.reduce(values, {})[0]

    def _all_names(self, names: list[str]) -> list[str]:
        """The union of every rank's metric names."""
        text = ",".join(names).encode()
        longest = torch.tensor([len(text)], device=self._device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self._group)
        mine = torch.zeros(int(longest), dtype=torch.uint8, device=self._device)
        if text:
            mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self._group)
        joined = [bytes(p.tolist()).rstrip(b"\0").decode() for p in parts]
        return sorted({n for part in joined for n in part.split(",") if n})
