"""What a reward executor asks of whatever scores its completions.

    submit(key, item) --> release(keys of a whole batch) --> poll() --> [(key, Outcome)]

A RewardSource reads texts (SourceScoring). A model reads tokens, and computes a prompt once for all
its completions, so that it waits for the batch that they are in (executors/weighted.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from llamarl.tasks.source import Outcome, Outcomes, RewardSource
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

    @property
    def of_policy(self) -> Item:
        """What the policy said: itself, or of a victim's answer the attack."""
        return self if self.attack is None else self.attack


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


class SourceScoring:
    """A RewardSource as Scoring: it has no use for tokens. The answers to an attack are a batch."""

    def __init__(self, source: RewardSource):
        self.source = source
        self.name = source.name
        self._attacks: dict[int, Item] = {}  # what an answer that is being scored answers, by key
        self.start = source.start
        self.wait = source.wait
        self.close = source.close

    @property
    def pending(self) -> int:
        return self.source.pending

    def submit(self, key: int, item: Item) -> None:
        if item.attack is not None:
            self._attacks[key] = item.attack
        self.source.submit(key, item.prompt.text, item.text, item.prompt.reward_meta)

    def release(self, keys: Sequence[int]) -> None:
        batches: dict[Item | None, list[int]] = {}
        for key in keys:
            batches.setdefault(self._attacks.get(key), []).append(key)
        for batch in batches.values():
            self.source.release(batch)

    def poll(self) -> Outcomes:
        outcomes = self.source.poll()
        for key, _ in outcomes:
            self._attacks.pop(key, None)
        return outcomes


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
