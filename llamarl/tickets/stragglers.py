"""TicketTimes: the tickets in work, their generators, and the stragglers. Pure: times are given."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

_NEWEST = 256  # the median is over this many finished tickets
_ENOUGH = 8  # with fewer, nothing is called a straggler


@dataclass(slots=True)
class Work:
    """A ticket between its grant and its arrival at the trainer."""

    rank: int  # of its generator
    since_s: float
    is_resumed: bool = False  # started before a resume, so its whole time is not known
    is_named: bool = False  # the log has named it as a straggler
    is_ended: bool = False  # its generator has been told to end it


class TicketTimes:
    """Tracks the tickets in work. A straggler has taken more than `factor` times the median of the
    tickets that finished last.
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
        """Note tickets that have arrived. Tickets that finished before a resume are unknown, and
        ignored.
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
