"""A clock without time: it goes from event to event, and stands still in between.

    clock = VirtualClock()
    clock.after(2.0, arrive)     # arrive() at 2.0 s
    clock.after(1.0, leave)      # leave() at 1.0 s, which may set more
    clock.run(lambda: is_over)   # leave, arrive
    clock()                      # 2.0

Events of one time happen in the order in which they were set, so a run of it has no chance in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


class VirtualClock:
    """Seconds since 0 and the events to come. Calling it returns the time, as a real clock does."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0  # that have happened
        self._num_set = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Have something happen in so many seconds. ValueError if that is not a time to come."""
        if not seconds >= 0:
            raise ValueError(f"an event in {seconds} s: need at least 0")
        heapq.heappush(self._events, (self.now + seconds, self._num_set, do))
        self._num_set += 1

    def run(self, is_over: Callable[[], bool]) -> bool:
        """Let events happen until it is over. Return False if it is not and nothing is to come."""
        events = self._events
        while not is_over():
            if not events:
                return False
            self.now, _, do = heapq.heappop(events)
            self.num_events += 1
            do()
        return True
