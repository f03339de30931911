"""KeptRows: keys and values of completions whose environment is working on an answer.

    row ends --keep--> KeptRows --restore--> a row of the completion's next turn

They are kept outside the slots, which other rows use meanwhile. The next turn copies them into its
slot and computes only the added tokens. When there are more than the allowed places, the oldest are
dropped, and their completions are recomputed from their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from llamarl.inference.cache import SlotCache

Key = tuple[int, int, int]  # stream, ticket and sample_index


@dataclass(slots=True, eq=False)
class Kept:
    """The first places of a completion, prompt included. Whoever holds it sees when it is
    dropped.
    """

    layers: list[Tensor] = field(default_factory=list)  # of each layer [2, J, places, K]

    @property
    def places(self) -> int:
        """How many tokens it holds; 0 once it is dropped."""
        return self.layers[0].shape[2] if self.layers else 0

    def drop(self) -> None:
        """Let go of the keys and values."""
        self.layers = []


class KeptRows:
    """Keeps at most `most_places` places, the newest rows first.

    num_dropped: rows that were dropped for want of room, ever.
    """

    def __init__(self, cache: SlotCache, most_places: int):
        self._cache = cache
        self._most = most_places
        self._rows: dict[Key, Kept] = {}  # the oldest first
        self.places = 0  # that are kept
        self.num_dropped = 0

    @property
    def keeps_any(self) -> bool:
        """Whether there is room for any place."""
        return self._most > 0

    def keep(self, key: Key, slot: int, places: int) -> None:
        """Copy the first places of a slot, in the place of what was kept under this key. Drops the
        oldest if there are too many.
        """
        self.forget(key)
        if not 0 < places <= self._most:
            return
        layers = [layer[:, slot, :, :places].clone() for layer in self._cache.layers]
        self._rows[key] = Kept(layers)
        self.places += places
        while self.places > self._most:
            oldest = next(iter(self._rows))
            self.forget(oldest)
            self.num_dropped += 1

    def of(self, key: Key) -> Kept:
        """Return what is kept under a key; an empty one if nothing is."""
        return self._rows.get(key) or Kept()

    def restore(self, kept: Kept, slot: int) -> None:
        """Copy what is kept to the first places of a slot."""
        for layer, own in zip(self._cache.layers, kept.layers, strict=True):
            layer[:, slot, :, : kept.places] = own

    def forget(self, key: Key) -> None:
        """Drop what is kept under a key, if anything is."""
        kept = self._rows.pop(key, None)
        if kept is not None:
            self.places -= kept.places
            kept.drop()

    def forget_all(self, ticket: int | None = None, stream: int | None = None) -> None:
        """Drop what is kept of a ticket and a stream; None: of any."""
        for key in list(self._rows):
            if stream in (None, key[0]) and ticket in (None, key[1]):
                self.forget(key)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that it holds."""
        for kept in self._rows.values():
            yield from kept.layers
