"""Who works on which ticket and since when, and which tickets take far longer than most. Pure:
times are given, in seconds.
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
    """Tickets in work. A straggler has taken more than `factor` times the median of those that
    finished last.
    """

    def __init__(self, factor: float):
        self.factor = factor
        self.work: dict[int, Work] = {}
        self._newest_s: deque[float] = deque(maxlen=_NEWEST)
        self.median_s: float | None = None

    def granted(self, tickets: Iterable[int], rank: int, now_s: float) -> None:
        self.work.update((ticket, Work(rank, now_s)) for ticket in tickets)

    def went_on(self, tickets: Iterable[int], rank: int, now_s: float) -> None:
        """After a resume: a generator goes on with tickets of the run before."""
        self.work.update((ticket, Work(rank, now_s, is_resumed=True)) for ticket in tickets)

    def finished(self, tickets: Iterable[int], now_s: float) -> None:
        """Tickets that are not known are of no interest: a resumed run's that were finished before."""
        done = [self.work.pop(ticket) for ticket in tickets if ticket in self.work]
        self._newest_s.extend(now_s - work.since_s for work in done if not work.is_resumed)
        if len(self._newest_s) >= _ENOUGH and done:
            self.median_s = statistics.median(self._newest_s)

    def new_stragglers(self, now_s: float) -> dict[int, list[tuple[int, float]]]:
        """Generator's rank -> (ticket, seconds so far) of those that have become stragglers since
        the last call.
        """
        found: dict[int, list[tuple[int, float]]] = {}
        if self.median_s is None:
            return found
        for ticket, work in self.work.items():
            seconds = now_s - work.since_s
            if not work.is_named and seconds > self.factor * self.median_s:
                work.is_named = True
                found.setdefault(work.rank, []).append((ticket, seconds))
        return found
