"""Takes times on a device, within a budget."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

REPEATS = 5
_LONG_S = 1.5  # after which a time is not taken again
_LEAST_S = 1e-7

Clock = Callable[[], float]


class Watch:
    """Takes times on a device, within a budget. clock: of what is timed; the budget's is the wall's
    where that counts the process's own seconds alone.
    """

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter):
        self.device = device
        self.clock = clock
        self._budget_clock = time.perf_counter if clock is time.process_time else clock

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds of one call, the device's work included."""
        began = self.clock()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return max(_LEAST_S, self.clock() - began)

    def shortest(self, work: Callable[[], object], repeats: int = REPEATS) -> float:
        """Return the least seconds of several calls, after one that warms up; of fewer where they
        are long.
        """
        is_spent = self.until(_LONG_S)
        self.seconds(work)
        found = [self.seconds(work)]
        while len(found) < repeats and not is_spent():
            found.append(self.seconds(work))
        return min(found)

    def until(self, budget_s: float) -> Callable[[], bool]:
        """Return a function that says whether a budget that begins now is spent."""
        end = self._budget_clock() + budget_s
        return lambda: self._budget_clock() >= end
