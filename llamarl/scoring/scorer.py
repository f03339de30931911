"""Scorer: the one Protocol that every kind of scorer meets, with its items and outcomes.

    submit(key, item) --> release(keys of a whole batch) --> poll() --> [(key, Outcome)]

A function in worker processes (pool.py), a judge behind a server (judge.py), an encoder
(classifier.py), a model that scores (model.py), novelty (novelty.py), a victim's replies
(replies.py) and a weighted sum of several (weighted.py) are Scorers. A MakeScorer makes one, given
the Site where it runs. tests/unit/test_scorer_contract.py tests each against this contract.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from llamarl.comm.together import Alone, Together
from llamarl.errors import RewardError
from llamarl.executor import ExecutorGroup, Meter, State
from llamarl.tasks.forms import with_sampled
from llamarl.types import ALONE, Ending, Outcome, Prompt, Stretch

Outcomes = list[tuple[int, Outcome]]  # outcomes, each with the key of its item


NOT_REACHED = Outcome.abstain("nobody waited for it")


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A completion to score, as tokens and as text. Two items are never equal, even with equal
    contents.
    """

    prompt: Prompt
    # [L] int64; ends with the stop token if the completion ended by itself. None: only the text is
    # known.
    token_ids: Tensor | None
    text: str  # of token_ids, without special tokens
    has_ended: bool  # by itself rather than for lack of room
    is_held_out: bool  # whether it belongs to an evaluation
    sample: tuple[int, int] | None = None  # ticket and sample_index of a training completion
    attack: Item | None = None  # for a victim's reply: the attack
    replies: tuple[Item, ...] = ()  # for an attack: the replies, which are scored in its place
    known: Outcome | None = None  # for an attack without replies to score: its outcome
    # The text of token ids with special tokens; None: there are none.
    decode_raw: Callable[[list[int]], str] | None = None
    ending: Ending = ALONE  # of a dialogue: how it ended, and what its environment gave

    @property
    def sampled_ids(self) -> Tensor:
        """The token ids [L], for scorers that need them. ValueError if only the text is known."""
        if self.token_ids is None:
            raise ValueError(f"{self.text[:40]!r} is a text without token ids")
        return self.token_ids

    @property
    def meta(self) -> dict[str, object]:
        """Return the meta of the prompt's row, with the sampled completion added. ValueError if the
        row already has that key.
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
        """The item that the policy sampled: this one, or for a victim's reply the attack."""
        return self if self.attack is None else self.attack


def text_item(prompt: str, completion: str, meta: dict[str, object]) -> Item:
    """Return an item with only a text, for scorers that read texts."""
    return Item(
        prompt=Prompt(torch.zeros(0, dtype=torch.int64), prompt, meta),
        token_ids=None,
        text=completion,
        has_ended=True,
        is_held_out=False,
    )


@dataclass(frozen=True, slots=True)
class Site:
    """The place where a scorer runs.

    group: the executor's ranks. together: calls that all of them make, begun by the first. metrics:
    takes the scorer's metrics; None: they are dropped. on_result: to be called, from any thread,
    when `poll` has something to do.
    reproducible: what is computed together must not depend on timing.
    """

    group: ExecutorGroup
    together: Together
    metrics: Meter | None = None
    on_result: Callable[[], None] = field(default=lambda: None)
    reproducible: bool = False


def site_alone(device: torch.device) -> Site:
    """Return the site of a scorer that one process has to itself: without metrics, and
    reproducible.
    """
    group = ExecutorGroup("alone", (0,), 0, device)
    return Site(group, Alone(), reproducible=True)


class Scorer(Protocol):
    """Scores items, many at a time and in any order, without blocking the caller.

        scorer = make_scorer(site)
        scorer.load()                  # on all ranks of the site; what follows, on the first alone
        scorer.start()
        scorer.submit(0, item)
        scorer.release([0])
        scorer.wait(timeout_s=1.0)
        scorer.poll()                  # [(0, Outcome.score(1.0))], or [] if it is not known yet
        scorer.close()

    An item that cannot be scored gets an Outcome of kind "error". Errors of the scorer itself are
    raised by `load`, `start` or `poll`: ValueError for what the user gave, RewardError if it cannot
    go on. All calls come from one thread.
    """

    name: str  # for messages, such as the function's import path
    is_novelty: bool = False  # whether its scores do not measure success
    computes: bool = False  # whether `poll` computes the scores, on this thread
    has_read_ahead: bool = False  # at the last `poll`, even if that brought no outcome

    @property
    def pending(self) -> int:
        """The number of items that are being scored, not counting those that wait for the rest of
        their batch.
        """
        raise NotImplementedError

    @property
    def is_computing(self) -> bool:
        """Whether the next `poll` computes here, on this thread."""
        return self.computes and self.pending > 0

    @property
    def is_busy(self) -> bool:
        """Whether it has enough to do for a while. More may be submitted, but it is better to wait,
        because an evaluation may come that should go first (routing.py).
        """
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
        """Note new tokens of a running completion of a prompt [P], which may be read ahead."""
        return None

    def forget(self, ticket: int, sample_index: int) -> None:
        """Drop what was read ahead of a completion, because no score of it is wanted."""
        return None

    def release(self, keys: Sequence[int]) -> None:
        """Note that these items make a batch: the completions of a ticket, or of an evaluation. A
        scorer that compares completions of one prompt can now begin.
        """
        return None

    def poll(self) -> Outcomes:
        """Return the outcomes that have become known since the last call, by key. A scorer that
        computes works only during this call, in bounded pieces, so call it until nothing is
        pending.
        """
        raise NotImplementedError

    def wait(self, timeout_s: float) -> bool:
        """Block until `poll` has something to do, at most timeout_s; False if it has not. A scorer
        that computes need not wait: it has while anything is pending.
        """
        return self.pending > 0

    def close(self) -> None:
        """Drop what is pending and free everything. A second call does nothing."""
        return None

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that it holds on the device and that may leave while others use it."""
        yield from ()

    def state_dict(self) -> State:
        """Return the state that a resumed run needs."""
        return {}

    def load_state_dict(self, state: Mapping) -> None:
        """Go on from a saved state."""
        return None


class Around(Scorer):
    """A Scorer before another one, which does all that a subclass does not change."""

    def __init__(self, scorer: Scorer):
        self.name = scorer.name
        self.scorer = scorer

    @property
    def pending(self) -> int:
        """The number of items that the scorer is scoring."""
        return self.scorer.pending

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

    def wait(self, timeout_s: float) -> bool:
        """Block until `poll` has something to do, at most timeout_s."""
        return self.scorer.wait(timeout_s)

    def close(self) -> None:
        """Close the scorer."""
        self.scorer.close()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the scorer's tensors."""
        yield from self.scorer.tensors()

    def state_dict(self) -> State:
        """Return the scorer's state."""
        return self.scorer.state_dict()

    def load_state_dict(self, state: Mapping) -> None:
        """Go on from the scorer's saved state."""
        self.scorer.load_state_dict(state)


MakeScorer = Callable[[Site], Scorer]

Waiting = TypeVar("Waiting")  # what waits: one unit of work


class Queue(Generic[Waiting]):
    """Holds units that wait for their turn. Units of evaluations come before all others, because
    rows of metrics and the end of a run wait for them. Among equals the order of arrival counts.
    """

    def __init__(self):
        self._evaluations: deque[Waiting] = deque()
        self._others: deque[Waiting] = deque()

    def put(self, unit: Waiting, *, is_held_out: bool) -> None:
        """Add a unit. is_held_out: whether it belongs to an evaluation."""
        (self._evaluations if is_held_out else self._others).append(unit)

    @property
    def first(self) -> Waiting:
        """The unit whose turn is next. IndexError if none waits."""
        return (self._evaluations or self._others)[0]

    def take(self) -> Waiting:
        """Remove the next unit and return it."""
        return (self._evaluations or self._others).popleft()

    def clear(self) -> None:
        """Drop all units."""
        self._evaluations.clear()
        self._others.clear()

    def __len__(self) -> int:
        return len(self._evaluations) + len(self._others)

    def __iter__(self) -> Iterator[Waiting]:
        return chain(self._evaluations, self._others)


def score_all(
    scorer: Scorer, items: Sequence[Item], *, wait_longer: Callable[[], bool] = lambda: True
) -> list[Outcome]:
    """Return the outcomes of items, in order, as one batch. Blocks; nothing else may be pending.
    wait_longer: asked from time to time; once it says no, the items without an outcome are
    NOT_REACHED, and the scorer is to be closed.
    """
    assert not scorer.pending, "other items are pending"
    for key, item in enumerate(items):
        scorer.submit(key, item)
    scorer.release(range(len(items)))
    outcomes = dict(scorer.poll())
    while scorer.pending and wait_longer():
        scorer.wait(1.0)
        outcomes.update(scorer.poll())
    return [outcomes.get(key, NOT_REACHED) for key in range(len(items))]


def try_scorer(
    scorer: Scorer,
    items: Sequence[Item],
    *,
    given: str,
    remedy: str = "correct what scores",
    must_score: bool = True,
    wait_longer: Callable[[], bool] = lambda: True,
) -> list[Outcome]:
    """Return the outcomes of items by a scorer that is started and closed for them alone.
    ValueError if it cannot be used, or if it fails on all of them in the same way. given: the key
    and value that name it. remedy: what to do then. must_score: raise if it fails on all; otherwise
    the caller sees that in the outcomes. wait_longer: as score_all's.
    """
    try:
        scorer.start()
        outcomes = score_all(scorer, items, wait_longer=wait_longer)
    except RewardError as error:  # the user can correct it, and nothing has started yet
        raise ValueError(str(error)) from error
    finally:
        scorer.close()
    kinds = {failure_of(outcome) for outcome in outcomes}
    if must_score and outcomes and None not in kinds and len(kinds) == 1:
        what = f"failed on all {len(outcomes)} samples: {outcomes[0].reason}"
        raise ValueError(f"{given}: {what}\n{remedy}")
    return outcomes


def failure_of(outcome: Outcome) -> str | None:
    """Return how an item failed: the first word of the reason, such as an exception's type. None
    unless it is an error.
    """
    if outcome.kind != "error":
        return None
    word, _, _ = outcome.reason.partition(" ")
    return word


def commonest(reasons: Sequence[str]) -> str:
    """Return the most frequent reason; among equals the one that came first."""
    ((reason, _),) = Counter(reasons).most_common(1)
    return reason
