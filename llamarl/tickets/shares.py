"""FairShares: how many of the groups that may start go to one generator, so that none works through
a batch alone while others wait. Pure: no ledger, no messages.

When room appears, all waiting generators ask, and the first could take all of it. So each gets an
even share. A generator in the middle of a chunk does not wait, and no share is kept for it.

A share is kept until the generator that was held back has worked off its own share and asks again.
A generator that has not asked by then loses its share: its rank may be training, for example.
"""

from __future__ import annotations


class FairShares:
    """Tracks the generators that wait and those that were held back, by their ranks."""

    def __init__(self, num_generators: int):
        # Generators that have not asked yet wait for their first weights.
        self._num_unheard = num_generators
        self._heard: set[int] = set()
        self._waiting: set[int] = set()
        self._held_back: dict[int, None] = {}  # in the order in which they were

    def share(self, rank: int, room: int) -> int:
        """Return the most groups for a generator that asks. room: groups that may start."""
        if rank not in self._heard:
            self._heard.add(rank)
            self._num_unheard = max(0, self._num_unheard - 1)
        self._waiting.discard(rank)
        return -(-room // (1 + len(self._waiting) + self._num_unheard))

    def answered(self, rank: int, *, waits: bool, is_held_back: bool) -> list[int]:
        """Note the answer to an ask. Return the generators that were held back and may ask again,
        because no generator waits any more.

        waits: it has no work and got none. is_held_back: it got less because of others' shares.
        """
        self._held_back.pop(rank, None)
        if waits:
            self._waiting.add(rank)
        elif is_held_back:
            self._held_back[rank] = None
        if self._waiting or self._num_unheard:
            return []
        return self.told()

    def waits(self, rank: int) -> None:
        """Note that a generator has no work. If it was held back, it has worked off its share."""
        if rank in self._held_back:
            del self._held_back[rank]
            self._waiting.clear()
            self._num_unheard = 0
        else:
            self._waiting.add(rank)

    def told(self) -> list[int]:
        """Forget which generators were held back, and return them: they are told to ask again."""
        held_back = list(self._held_back)
        self._held_back.clear()
        return held_back
