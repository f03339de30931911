"""FairShares: how much of what may start each generator should get, so that none works through a
batch alone while the others wait. Pure: no ledger, no messages.

Whoever asks first could have all that there is room for. So a generator gets at most what brings it
to the level at which all have as many groups in work:

    level = (most in work - what those have that want no more) / those that may want more

A generator wants no more, for now, if its last ask was granted in full. Until a generator has
asked, it may want any number. The level rises as it turns out that others want less, and a
generator that was held back at it is told to ask again.
"""

from __future__ import annotations

from collections import Counter


class FairShares:
    """Knows what each generator has in work, and what it would have more. Generators are named by
    their ranks.
    """

    def __init__(self, num_generators: int):
        self._num_generators = num_generators
        self._in_work: Counter[int] = Counter()  # rank -> groups that have not arrived
        self._sated: set[int] = set()  # that want no more
        self._in_work_of_sated = 0
        self._held_back: dict[int, None] = {}  # in the order in which they were

    def most(self, rank: int, most_in_work: int) -> int:
        """Return how many groups a generator that asks should get at most. most_in_work: how many
        all could have in work together, if all that may start did.
        """
        self._set_sated(rank, is_sated=False)
        return max(0, self._level(most_in_work) - self._in_work[rank])

    def granted(self, rank: int, count: int, *, asked: int, allowed: int) -> None:
        """Note that an ask for so many groups, of which `allowed` were its share, was granted
        `count`.
        """
        self._held_back.pop(rank, None)
        self._in_work[rank] += count
        if count == asked:
            self._set_sated(rank, is_sated=True)
        elif count == allowed:
            self._held_back[rank] = None

    def goes_on(self, rank: int, count: int) -> None:
        """Note groups that a generator has in work, which it did not ask for: a resumed run's."""
        self._in_work[rank] += count

    def finished(self, rank: int) -> None:
        """Note that a generator's group has arrived."""
        self._in_work[rank] -= 1
        if rank in self._sated:
            self._in_work_of_sated -= 1

    def gone(self, rank: int) -> None:
        """Note that a generator is gone, and its groups with it."""
        self._set_sated(rank, is_sated=False)
        self._in_work[rank] = 0
        self._set_sated(rank, is_sated=True)

    def has_more_for(self, most_in_work: int) -> list[int]:
        """Return the generators that were held back and should get more by now, and forget that
        they were.
        """
        if not self._held_back:
            return []
        level = self._level(most_in_work)
        found = [rank for rank in self._held_back if self._in_work[rank] < level]
        for rank in found:
            del self._held_back[rank]
        return found

    def _level(self, most_in_work: int) -> int:
        """Return how many groups each that may want more should have in work, rounded up."""
        wanting = max(1, self._num_generators - len(self._sated))
        return -(-(most_in_work - self._in_work_of_sated) // wanting)

    def _set_sated(self, rank: int, *, is_sated: bool) -> None:
        if is_sated and rank not in self._sated:
            self._sated.add(rank)
            self._in_work_of_sated += self._in_work[rank]
        elif not is_sated and rank in self._sated:
            self._sated.remove(rank)
            self._in_work_of_sated -= self._in_work[rank]
