"""Scorer: the one Protocol that every kind of scorer meets, with its items and outcomes.

    submit(key, item) --> release(keys of a whole batch) --> poll() --> [(key, Outcome)]

A function in worker processes (pool.py), a judge behind a server (judge.py), an encoder
(classifier.py), a model that scores (model.py), novelty (novelty.py), a victim's replies
(replies.py) and a weighted sum of several (weighted.py) are Scorers. What makes one is a
MakeScorer, which is given the Site that it runs at. tests/unit/test_scorer_contract.py holds each
to what is said here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from llamarl.executor import ExecutorGroup, Meter, State
from llamarl.scoring.together import Alone, Together
from llamarl.tasks.sampled import with_sampled
from llamarl.types import Prompt, Stretch


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one item."""

    kind: Literal["score", "abstain", "error"]
    value: float  # NaN unless kind is "score"
    reason: str  # why, for "abstain" and "error"
    # The value without what is given for novelty; None: nothing is.
    without_novelty: float | None = None

    @property
    def achieved(self) -> float:
        """The score that decides whether it succeeded: novelty is no success."""
        return self.value if self.without_novelty is None else self.without_novelty

    @classmethod
    def error(cls, reason: str) -> Outcome:
        """Return what is said of an item that could not be scored, which is never a score of 0."""
        return cls("error", math.nan, reason)

    @classmethod
    def abstain(cls, reason: str) -> Outcome:
        """Return what is said of an item that is to have no score."""
        return cls("abstain", math.nan, reason)

    @classmethod
    def score(cls, value: float, without_novelty: float | None = None) -> Outcome:
        """Return a score, or the error that it is no finite number."""
        if not math.isfinite(value):
            return cls.error(f"the score is {value}")
        return cls("score", value, "", without_novelty)


Outcomes = list[tuple[int, Outcome]]  # each with the key under which its item was submitted


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A completion to score, as tokens and as text. Two are never equal, whatever they hold."""

    prompt: Prompt
    # [L] int64; ends with the stop token if it has ended by itself. None: only its text is known.
    token_ids: Tensor | None
    text: str  # of token_ids, without special tokens
    has_ended: bool  # by itself, and not for want of room
    is_held_out: bool  # of an evaluation
    sample: tuple[int, int] | None = None  # ticket and sample_index of a training completion
    attack: Item | None = None  # of a victim's reply: what it replies to
    replies: tuple[Item, ...] = ()  # of an attack: the victim's, which are scored in its place
    known: Outcome | None = None  # of an attack: its outcome, where no reply is to be scored
    # The text of token ids with special tokens; None: there are none.
    decode_raw: Callable[[list[int]], str] | None = None

    @property
    def sampled_ids(self) -> Tensor:
        """The token ids [L], where what scores needs them. ValueError where only text is known."""
        if self.token_ids is None:
            raise ValueError(f"{self.text[:40]!r} is a text without token ids")
        return self.token_ids

    @property
    def meta(self) -> dict[str, object]:
        """Return the meta of the prompt's row, with what was sampled. ValueError if a key of the
        row is in the way.
        """
        if self.token_ids is None:
            return self.prompt.reward_meta
        token_ids = self.token_ids.tolist()
        raw_text = self.text if self.decode_raw is None else self.decode_raw(token_ids)
        return with_sampled(
            self.prompt.reward_meta, token_ids=token_ids, raw_text=raw_text, ended=self.has_ended
        )

    @property
    def of_policy(self) -> Item:
        """The item that the policy made: itself, or for a victim's reply the attack."""
        return self if self.attack is None else self.attack


def text_item(prompt: str, completion: str, meta: dict[str, object]) -> Item:
    """Return a completion of which only the text is known, for what reads texts."""
    return Item(
        prompt=Prompt(torch.zeros(0, dtype=torch.int64), prompt, meta),
        token_ids=None,
        text=completion,
        has_ended=True,
        is_held_out=False,
    )


@dataclass(frozen=True, slots=True)
class Site:
    """Where a scorer runs.

    group: the executor's ranks. together: calls that all of them make, begun by the first. metrics:
    None: nobody asks. on_result: called, from any thread, when `poll` has something to do.
    reproducible: what is computed together must not depend on what came when.
    """

    group: ExecutorGroup
    together: Together
    metrics: Meter | None = None
    on_result: Callable[[], None] = field(default=lambda: None)
    reproducible: bool = False


def site_alone(device: torch.device, *, on_result: Callable[[], None] = lambda: None) -> Site:
    """Return the site of a scorer that one process has to itself, without metrics. What is computed
    together does not depend on what came when.
    """
    group = ExecutorGroup("alone", (0,), 0, device)
    return Site(group, Alone(), on_result=on_result, reproducible=True)


class Scorer(Protocol):
    """Scores items, many at a time and in any order, without blocking who asks.

        scorer = make_scorer(site)
        scorer.load()                  # on all ranks of the site; what follows, on the first alone
        scorer.start()
        scorer.submit(0, item)
        scorer.release([0])
        scorer.wait(timeout_s=1.0)
        scorer.poll()                  # [(0, Outcome.score(1.0))], or [] if it is not known yet
        scorer.close()

    An item that cannot be scored is an Outcome of kind "error". What is wrong with the scorer
    itself is raised by `load`, `start` or `poll`: ValueError for what the user gave, RewardError
    where it cannot go on. It is stepped from one thread.
    """

    name: str  # what messages call it, such as the function's import path
    is_novelty: bool = False  # what it gives says nothing of success

    @property
    def pending(self) -> int:
        """The number of items that are being scored: of those that wait for the rest of their
        batch, none.
        """
        raise NotImplementedError

    @property
    def is_computing(self) -> bool:
        """Whether the next `poll` computes here, on this thread."""
        return False

    @property
    def is_busy(self) -> bool:
        """Whether it has enough to do for a while. More may be submitted, but what is given later
        can be chosen later: an evaluation goes before what waits (in_turn.py).
        """
        return False

    @property
    def has_read_ahead(self) -> bool:
        """Whether the last `poll` has read what was heard, though no outcome came of it."""
        return False

    @property
    def counts(self) -> Mapping[str, int]:
        """The scorer's own counts: a judge's "pairs", "order_ties", ..."""
        return {}

    def load(self) -> None:
        """Load models. Collective over the site's ranks: each holds its own share."""
        return None

    def start(self) -> None:
        """Block until items can be scored. ValueError says what the user has to change."""
        return None

    def submit(self, key: int, item: Item) -> None:
        """Take one item; the call does not block. `poll` returns the key with the outcome, once.
        key: unique among what is pending. TypeError if meta is not JSON.
        """
        raise NotImplementedError

    def hear(self, stretch: Stretch, prompt_ids: Tensor) -> None:
        """Take note of what a completion of a prompt [P] has grown by, which may be read ahead."""
        return None

    def forget(self, ticket: int, sample_index: int) -> None:
        """Drop what was heard of a completion: no score of it is wanted."""
        return None

    def release(self, keys: Sequence[int]) -> None:
        """Note that these items are all of a batch: completions of a ticket, or of an evaluation. A
        scorer that compares those of one prompt begins with them.
        """
        return None

    def poll(self) -> Outcomes:
        """Return the outcomes that have become known since the last call, by key. The call is also
        what gives the scorer time to work, in bounded pieces: call it until nothing is pending.
        """
        raise NotImplementedError

    def wait(self, timeout_s: float) -> bool:
        """Block until `poll` has something to do, at most timeout_s; False if it has not."""
        raise NotImplementedError

    def close(self) -> None:
        """Drop what is pending and free everything. A second call does nothing."""
        return None

    def tensors(self) -> Iterator[Tensor]:
        """Yield what it holds on the device, which may leave it while others use that."""
        yield from ()

    def state_dict(self) -> State:
        """Return what a run that goes on would miss."""
        return {}

    def load_state_dict(self, state: Mapping) -> None:
        """Go on from there."""
        return None


MakeScorer = Callable[[Site], Scorer]

Waiting = TypeVar("Waiting")  # a whole unit of work


class Queue(Generic[Waiting]):
    """Holds what waits for its turn: units of evaluations come before all others, because rows of
    metrics and the end of a run wait for them; among equals the first to come is first.
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
        """Drop all."""
        self._evaluations.clear()
        self._others.clear()

    def __len__(self) -> int:
        return len(self._evaluations) + len(self._others)

    def __iter__(self) -> Iterator[Waiting]:
        return chain(self._evaluations, self._others)


def score_all(scorer: Scorer, items: Sequence[Item]) -> list[Outcome]:
    """Return the outcomes of items, in order, as one batch. Blocks; nothing else may be pending."""
    assert not scorer.pending, "the items need the scorer to themselves"
    for key, item in enumerate(items):
        scorer.submit(key, item)
    scorer.release(range(len(items)))
    outcomes = dict(scorer.poll())
    while scorer.pending:
        scorer.wait(1.0)
        outcomes.update(scorer.poll())
    return [outcomes[key] for key in range(len(items))]
