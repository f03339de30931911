"""InTurn: gives a scorer of texts as much as keeps it busy, and evaluations first.

    submit --> waiting: evaluations before all others --while it is not busy--> a Scorer --> poll

Items beyond what keeps the scorer busy wait here, where evaluations overtake them. The replies to
one attack make a batch, so that a scorer that compares completions compares these with each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from llamarl.scoring.scorer import Item, Outcomes, Queue, Scorer


@dataclass(slots=True)
class _Batch:
    """Keys that were released together, and how many of them the scorer has not got yet."""

    keys: list[int]
    num_waiting: int


class InTurn(Scorer):
    """A Scorer before another one."""

    def __init__(self, scorer: Scorer):
        self.scorer = scorer
        self.name = scorer.name
        self._attacks: dict[int, Item] = {}  # by key of a reply: its attack
        self._waiting: Queue[tuple[int, Item]] = Queue()  # with their keys
        self._waiting_keys: set[int] = set()
        self._batches: dict[int, _Batch] = {}  # the batches of released items that wait, by key

    @property
    def pending(self) -> int:
        """The number of items that wait here or are being scored."""
        return len(self._waiting) + self.scorer.pending

    @property
    def is_computing(self) -> bool:
        """Whether the next `poll` computes."""
        return self.scorer.is_computing

    @property
    def counts(self) -> Mapping[str, int]:
        """The scorer's own counts."""
        return self.scorer.counts

    def load(self) -> None:
        """Load the scorer's models."""
        self.scorer.load()

    def start(self) -> None:
        """Start the scorer."""
        self.scorer.start()

    def submit(self, key: int, item: Item) -> None:
        """Take one item, which waits here for its turn."""
        if item.attack is not None:
            self._attacks[key] = item.attack
        self._waiting.put((key, item), is_held_out=item.is_held_out)
        self._waiting_keys.add(key)
        self._hand_on()

    def release(self, keys: Sequence[int]) -> None:
        """Note that these items make a batch. Replies make one for each attack."""
        batches: dict[Item | None, list[int]] = {}
        for key in keys:
            batches.setdefault(self._attacks.get(key), []).append(key)
        for batch in batches.values():
            waiting = self._waiting_keys.intersection(batch)
            if waiting:
                self._batches |= dict.fromkeys(waiting, _Batch(batch, len(waiting)))
            else:
                self.scorer.release(batch)

    def poll(self) -> Outcomes:
        """Return the scorer's outcomes, and hand it more."""
        outcomes = self.scorer.poll()
        if self._hand_on():
            outcomes += self.scorer.poll()  # it first begins with new items
        for key, _ in outcomes:
            self._attacks.pop(key, None)
        return outcomes

    def wait(self, timeout_s: float) -> bool:
        """Block until `poll` has something to do, at most timeout_s."""
        return self.scorer.wait(timeout_s)

    def close(self) -> None:
        """Drop what waits, and close the scorer."""
        self._waiting.clear()
        self._waiting_keys.clear()
        self._batches.clear()
        self.scorer.close()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the scorer's tensors."""
        yield from self.scorer.tensors()

    def _hand_on(self) -> bool:
        """Give the scorer more, until it is busy. True if it got any."""
        has_given = False
        while self._waiting and not self.scorer.is_busy:
            key, item = self._waiting.take()
            self._waiting_keys.remove(key)
            self.scorer.submit(key, item)
            self._release_with(key)
            has_given = True
        return has_given

    def _release_with(self, key: int) -> None:
        """Release the batch of an item that the scorer has just got, if it was the batch's last."""
        batch = self._batches.pop(key, None)
        if batch is None:
            return
        batch.num_waiting -= 1
        if not batch.num_waiting:
            self.scorer.release(batch.keys)
