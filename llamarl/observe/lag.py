"""LagWatch: warns when a run's data no longer becomes newer, so that it trains on ever older
tokens.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Sequence
from itertools import combinations

from llamarl.observe.rates import Row, number_of

AGE = "buffer/age_min"
LEAST_WINDOW = 20  # steps that are looked at; three sync periods where that is more
STEEP = 0.8  # steps of age a step, from which no newer data comes
LATE = 8.0  # steps of age up to which nothing is said

_REMEDY = """\
the newest data that the trainer has is {age:.0f} steps old, {slope:.1f} steps older at each of the
last {window} steps: what reaches it was sampled by always the same versions. Try
  - a smaller overcommit, if one is set: it bounds what is on its way (docs/staleness.md)
  - more of what is slow between generator and trainer: reward.num_workers, or ranks of
    placement.generator, placement.reward, placement.victim (the report says who waits for what)"""

log = logging.getLogger(__name__)


class LagWatch:
    """Warns, once, where the newest data of a replay buffer grows old by about a step a step (a
    sink). It is for runs without a bound on lag: a bound ends such a growth by itself.

    It looks at the newest data that could be drawn, not at what is drawn: draws by reward, and
    draws from a buffer that grows, become older as they should. sync_period: steps after which what
    came can be drawn.
    """

    def __init__(self, sync_period: int = 1):
        self._window = max(LEAST_WINDOW, 3 * sync_period)
        self._ages: deque[float] = deque(maxlen=self._window)
        self._is_said = False

    def write(self, row: Row) -> None:
        """Look at a row."""
        age = number_of(row, AGE)
        if age is None or self._is_said:
            return
        self._ages.append(float(age))
        if len(self._ages) < self._window or age <= LATE:
            return
        slope = steepness(self._ages)
        if slope >= STEEP:
            self._is_said = True
            log.warning("%s", _REMEDY.format(age=age, slope=slope, window=len(self._ages)))

    def close(self) -> None:
        """Release nothing: there is nothing to release."""


def steepness(values: Sequence[float]) -> float:
    """Return how much values grow from one to the next (at least two values): the median slope over
    all pairs, Theil and Sen's, which a few odd values do not move.
    """
    pairs = combinations(enumerate(values), 2)
    return statistics.median((after - before) / (j - i) for (i, before), (j, after) in pairs)
