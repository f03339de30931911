"""FairShares: how much of what may start a generator should get, so that none works through a batch
alone while others wait. Pure: no ledger, no messages.

When there is room, all generators that wait ask for it, and the first could have all of it. So it
gets an even share, and the others that wait get the rest. A generator that is in the middle of a
chunk does not wait: nothing is kept for it.

A share is kept for as long as the one that was held back takes to work off its own. It then asks
again, and whoever has not asked by then loses what was kept: on a rank that trains meanwhile, say.
"""

from __future__ import annotations


class FairShares:
    """Knows which generators wait, and which got no more than their share. Generators are named by
    their ranks.
    """

    def __init__(self, num_generators: int):
        # Generators that have not asked yet. They wait for their first weights, and so count as
        # waiting.
        self._num_unheard = num_generators
        self._heard: set[int] = set()
        self._waiting: set[int] = set()
        self._held_back: dict[int, None] = {}  # in the order in which they were

    def share(self, rank: int, room: int) -> int:
        """Return how many groups a generator that asks should get at most. room: how many may
        start.
        """
        if rank not in self._heard:
            self._heard.add(rank)
            self._num_unheard = max(0, self._num_unheard - 1)
        self._waiting.discard(rank)
        return -(-room // (1 + len(self._waiting) + self._num_unheard))

    def answered(self, rank: int, *, waits: bool, is_held_back: bool) -> list[int]:
        """Note how an ask was answered. Return the generators that were held back and may ask
        again, since nobody waits any more.

        waits: it has nothing to do, and got nothing. is_held_back: it would have got more, if that
        had not been kept for others.
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
        """Note that a generator has nothing to do until it gets some. If it was held back, it has
        worked off its share.
        """
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
