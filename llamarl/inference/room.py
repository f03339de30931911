"""How large a K/V cache is, in numbers alone: rows of equally many places, within a budget.

    room = Room(max_slots=8, max_len=1024, budget=4096)
    room.rows_of(100)        # 36: a row of 100 tokens takes 112 places
    room.reserve(3, 100)     # from here on it has 3 rows of 112 places
    room.reserve(4, 300)     # now 4 rows of 304

The scheduler reserves, and the cache makes its tensors as large as that (llamarl.inference.cache).
This file imports no torch.
"""

from __future__ import annotations

# Places are read in whole blocks: the CPU's softmax and products are slow on a ragged tail.
_BLOCK = 16


class Room:
    """The size of a cache of at most max_slots rows of at most max_len tokens, `budget` places in
    all.

    By default it grows with what is asked of it. is_fixed: it has its full size from the start, and
    two rows more: the last two are for `score` and for the prompt that is prefilled in chunks.
    """

    def __init__(self, *, max_slots: int, max_len: int, budget: int, is_fixed: bool = False):
        self.max_len = whole_blocks(max_len)
        self.budget = budget
        self.is_fixed = is_fixed
        self.rows = 0
        self.capacity = _BLOCK  # places of a row
        if is_fixed:
            affordable = self.rows_of(max_len)
            self.rows = min(max_slots, affordable) + 2
            self.capacity = self.max_len

    def rows_of(self, length: int) -> int:
        """Return how many rows of `length` tokens the budget holds: one in any case."""
        places = self.max_len if self.is_fixed else whole_blocks(length)
        return max(1, self.budget // places)

    def reserve(self, rows: int, length: int) -> None:
        """Grow, where that is needed, so that the first `rows` rows have `length` places each.

        IndexError for a length beyond max_len, and for more than a fixed size has.
        """
        if rows <= self.rows and length <= self.capacity:
            return
        if self.is_fixed or length > self.max_len:
            held = f"{self.rows} rows of at most {self.max_len}"
            raise IndexError(f"{rows} rows of {length} tokens in a cache of {held}")
        needed = whole_blocks(length)
        if length > self.capacity:
            # Doubling, so that a row that grows token by token is seldom copied.
            doubled = max(needed, 2 * self.capacity)
            self.capacity = min(doubled, self.max_len)
        if rows * self.capacity > self.budget:
            self.capacity = needed
        # Rows behind the reserved ones stay where the budget allows: longer rows may mean fewer.
        affordable = self.budget // self.capacity
        keepable = min(self.rows, affordable)
        self.rows = max(rows, keepable)


def whole_blocks(length: int) -> int:
    """Return the places that a row of so many tokens takes."""
    blocks = -(-length // _BLOCK)
    return blocks * _BLOCK
