"""What a reward executor asks of whatever scores its completions.

    submit(key, item) --> release(keys of a whole batch) --> poll() --> [(key, Outcome)]

A RewardSource reads texts (SourceScoring). A model reads tokens, and computes a prompt once for all
its completions, so that it waits for the batch that they are in (executors/weighted.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from llamarl.tasks.source import Outcome, Outcomes, RewardSource, with_sampled
from llamarl.types import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A completion to score, as tokens and as text. Two are never equal, whatever they hold."""

    prompt: Prompt
    token_ids: Tensor  # [L] int64; ends with the stop token if it has ended by itself
    text: str  # of token_ids, without special tokens
    has_ended: bool  # by itself, and not for want of room
    is_held_out: bool  # of an evaluation
    sample: tuple[int, int] | None = None  # ticket and sample_index of a training completion
    attack: Item | None = None  # of a victim's answer: what it answers
    # The text of token ids with special tokens; None: there are none.
    decode_raw: Callable[[list[int]], str] | None = None

    @property
    def meta(self) -> dict[str, object]:
        """Returns the meta of the prompt's row, with what was sampled. ValueError if a key of the
        row is in the way.
        """
        token_ids = self.token_ids.tolist()
        raw_text = self.text if self.decode_raw is None else self.decode_raw(token_ids)
        return with_sampled(
            self.prompt.reward_meta, token_ids=token_ids, raw_text=raw_text, ended=self.has_ended
        )

    @property
    def of_policy(self) -> Item:
        """What the policy said: itself, or of a victim's answer the attack."""
        return self if self.attack is None else self.attack


Waiting = TypeVar("Waiting")  # a whole unit of work


class Queue(Generic[Waiting]):
    """What waits for its turn: units of evaluations before all others, for rows of metrics and the
    end of a run wait for them; among equals in the order in which they came.
    """

    def __init__(self):
        self._evaluations: deque[Waiting] = deque()
        self._others: deque[Waiting] = deque()

    def put(self, unit: Waiting, *, is_held_out: bool) -> None:
        """Have one wait. is_held_out: it is of an evaluation."""
        (self._evaluations if is_held_out else self._others).append(unit)

    @property
    def first(self) -> Waiting:
        """The one whose turn is next. IndexError if none waits."""
        return (self._evaluations or self._others)[0]

    def take(self) -> Waiting:
        """Take that one out."""
        return (self._evaluations or self._others).popleft()

    def clear(self) -> None:
        self._evaluations.clear()
        self._others.clear()

    def __len__(self) -> int:
        return len(self._evaluations) + len(self._others)

    def __iter__(self) -> Iterator[Waiting]:
        return chain(self._evaluations, self._others)


class Scoring(Protocol):
    """Scores items; made in the `setup` of its executor, stepped from one thread."""

    name: str  # what messages call it

    @property
    def pending(self) -> int:
        """The number of items that are being scored: of those that wait for their batch, none."""

    def start(self) -> None:
        """Block until items can be scored. ValueError says what the user has to change."""

    def submit(self, key: int, item: Item) -> None:
        """Take one item; does not block."""

    def release(self, keys: Sequence[int]) -> None:
        """These items are all of a batch: completions of a ticket, or of an evaluation."""

    def poll(self) -> Outcomes:
        """The outcomes that have become known since the last call, by key; also what gives it time
        to work, in bounded pieces.
        """

    def wait(self, timeout_s: float) -> bool:
        """Block until `poll` has something to do, at most timeout_s; False if it has not."""

    def close(self) -> None:
        """Drop what is pending and free everything. A second call does nothing."""


@dataclass(slots=True)
class _Batch:
    """Keys that were released together, and how many of them the source was not given yet."""

    keys: list[int]
    num_waiting: int


class SourceScoring:
    """A RewardSource as Scoring: it reads text, and tokens in meta. The answers to an attack are a
    batch.

    The source is given what keeps it busy. What waits beyond that waits here, where an evaluation
    overtakes it.
    """

    def __init__(self, source: RewardSource):
        self.source = source
        self.name = source.name
        self._reads_sampled = getattr(source, "reads_sampled", True)
        self._attacks: dict[int, Item] = {}  # what an answer that is being scored answers, by key
        self._waiting: Queue[tuple[int, Item]] = Queue()  # with their keys
        self._waiting_keys: set[int] = set()
        self._batches: dict[int, _Batch] = {}  # of those that wait and were released, by key
        self.start = source.start
        self.wait = source.wait

    @property
    def pending(self) -> int:
        return len(self._waiting) + self.source.pending

    def submit(self, key: int, item: Item) -> None:
        if item.attack is not None:
            self._attacks[key] = item.attack
        self._waiting.put((key, item), is_held_out=item.is_held_out)
        self._waiting_keys.add(key)
        self._hand_on()

    def release(self, keys: Sequence[int]) -> None:
        batches: dict[Item | None, list[int]] = {}
        for key in keys:
            batches.setdefault(self._attacks.get(key), []).append(key)
        for batch in batches.values():
            waiting = self._waiting_keys.intersection(batch)
            if waiting:
                self._batches |= dict.fromkeys(waiting, _Batch(batch, len(waiting)))
            else:
                self.source.release(batch)

    def poll(self) -> Outcomes:
        outcomes = self.source.poll()
        if self._hand_on():
            outcomes += self.source.poll()  # which begins with what it was given
        for key, _ in outcomes:
            self._attacks.pop(key, None)
        return outcomes

    def close(self) -> None:
        self._waiting.clear()
        self._waiting_keys.clear()
        self._batches.clear()
        self.source.close()

    def _hand_on(self) -> bool:
        """Give the source more, until it is busy. True if there was any."""
        has_given = False
        while self._waiting and not self.source.is_busy:
            key, item = self._waiting.take()
            self._waiting_keys.remove(key)
            meta = item.meta if self._reads_sampled else item.prompt.reward_meta
            self.source.submit(key, item.prompt.text, item.text, meta)
            self._release_with(key)
            has_given = True
        return has_given

    def _release_with(self, key: int) -> None:
        """Release the batch of an item that the source was just given, if it lacked that alone."""
        batch = self._batches.pop(key, None)
        if batch is None:
            return
        batch.num_waiting -= 1
        if not batch.num_waiting:
            self.source.release(batch.keys)


def score_all(scoring: Scoring, items: Sequence[Item]) -> list[Outcome]:
    """The outcomes of items, in order, as one batch. Blocks; nothing else may be pending."""
    for key, item in enumerate(items):
        scoring.submit(key, item)
    scoring.release(range(len(items)))
    outcomes = dict(scoring.poll())
    while scoring.pending:
        scoring.wait(1.0)
        outcomes.update(scoring.poll())
    return [outcomes[key] for key in range(len(items))]
