"""Tracks who works on which ticket since when, and which tickets take far longer than most.

Pure: times are given, in seconds.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

_NEWEST = 256  # finished tickets that the median is of
_ENOUGH = 8  # before it says anything


@dataclass(slots=True)
class Work:
    """A ticket between its grant and its arrival at the trainer."""

    rank: int  # of its generator
    since_s: float
    is_resumed: bool = False  # begun by the run before; how long it took there is not known
    is_named: bool = False  # as a straggler
    is_ended: bool = False  # its generator has been told to end it


class TicketTimes:
    """Knows the tickets in work, and the stragglers among them.

    A straggler has taken more than `factor` times the median of those that finished last.
    """

    def __init__(self, factor: float):
        self.factor = factor
        self.work: dict[int, Work] = {}
        self._newest_s: deque[float] = deque(maxlen=_NEWEST)
        self.median_s: float | None = None

    def granted(
        self, tickets: Iterable[int], rank: int, now_s: float, *, is_resumed: bool = False
    ) -> None:
        """Note tickets that were granted to a rank."""
        for ticket in tickets:
            self.work[ticket] = Work(rank, now_s, is_resumed)

    def finished(self, tickets: Iterable[int], now_s: float) -> None:
        """Note tickets that have arrived.

        Unknown ones are ignored: a resumed run's that were finished before.
        """
        for ticket in tickets:
            work = self.work.pop(ticket, None)
            if work is not None and not work.is_resumed:
                self._newest_s.append(now_s - work.since_s)
        if len(self._newest_s) >= _ENOUGH:
            self.median_s = statistics.median(self._newest_s)

    def new_stragglers(self, now_s: float) -> dict[int, list[tuple[int, float]]]:
        """Return generator's rank -> (ticket, seconds so far) of the stragglers that are new since
        the last call.
        """
        found: dict[int, list[tuple[int, float]]] = {}
        if self.median_s is None:
            return found
        limit_s = self.factor * self.median_s
        for ticket, work in self.work.items():
            seconds = now_s - work.since_s
            if seconds > limit_s and not work.is_named:
                work.is_named = True
                found.setdefault(work.rank, []).append((ticket, seconds))
        return found
