"""What a source of scores is: the part of a reward that the reward executor asks of.

    submit(key, prompt, completion, meta) --> release(keys) --> poll() --> [(key, Outcome)]

RewardPool (pool.py) is one: a plain function in worker processes. Judge (judge.py), a model
behind a server, is another; an environment is one more, once it has RewardSource's members;
tests/unit/test_reward_contract.py holds every source to them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from llamarl.errors import RewardError


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one item that a source was given."""

    kind: Literal["score", "abstain", "error"]
    value: float  # NaN unless kind is "score"
    reason: str  # why, for "abstain" and "error"
    # The value without what is given for novelty; None: nothing is.
    without_novelty: float | None = None

    @property
    def achieved(self) -> float:
        """What says whether it succeeded: novelty is no success."""
        return self.value if self.without_novelty is None else self.without_novelty

    @classmethod
    def error(cls, reason: str) -> Outcome:
        """The item could not be scored, which is never a score of 0."""
        return cls("error", math.nan, reason)

    @classmethod
    def abstain(cls, reason: str) -> Outcome:
        """The item is to have no score."""
        return cls("abstain", math.nan, reason)


Outcomes = list[tuple[int, Outcome]]  # each with the key under which its item was submitted

# The key of meta under which a source finds what was sampled; no row may have it.
SAMPLED = "sampled"


def with_sampled(
    meta: Mapping[str, object], *, token_ids: list[int], raw_text: str, ended: bool
) -> dict[str, object]:
    """A row's meta with what was sampled under SAMPLED.

        {"answer": "46", "sampled": {"num_tokens": 3, "ended": True, "raw_text": "46</s>",
                                     "token_ids": [19, 21, 2]}}

    token_ids: [L], with the stop token of a completion that ended by itself (`ended`), and not for
    want of room. raw_text: their text with special tokens. ValueError if the row has the key.
    """
    check_row_keys(meta)
    sampled = {
        "num_tokens": len(token_ids),
        "ended": ended,
        "raw_text": raw_text,
        "token_ids": token_ids,
    }
    return {**meta, SAMPLED: sampled}


def check_row_keys(keys: Collection[str]) -> None:
    """ValueError if a row has the key that is llamarl's own."""
    if SAMPLED in keys:
        raise ValueError(
            f'the key "{SAMPLED}" is where a reward finds what was sampled; rename the row\'s own'
        )


class RewardSource(Protocol):
    """Scores completions, many at a time and in any order, without blocking who asks.

    The reward executor makes one in its `setup`, steps it from one thread, and closes it:

        source = make_source(on_result=wake)
        source.start()
        source.submit(0, "12+34=", "46", {"answer": "46"})
        source.release([0])
        source.wait(timeout_s=1.0)
        source.poll()        # [(0, Outcome("score", 1.0, ""))], or [] if it is not known yet
        source.close()

    An item that cannot be scored is an Outcome of kind "error". What is wrong with the source
    itself is raised by `start` or `poll`: ValueError for what the user gave, RewardError where it
    cannot go on.
    """

    name: str  # what messages call it, such as the function's import path

    @property
    def pending(self) -> int:
        """The number of items that were submitted and that `poll` has not returned; without those
        that wait for the rest of their batch.
        """

    @property
    def is_busy(self) -> bool:
        """Whether it has enough to do for a while. More may be submitted, but what is given later
        can be chosen later: an evaluation goes before what waits.
        """

    def start(self) -> None:
        """Block until items can be scored. ValueError says what the user has to change."""

    def submit(self, key: int, prompt: str, completion: str, meta: dict[str, object]) -> None:
        """Take one item; the call does not block. `poll` returns the key with the outcome, once.

        key: unique among what is pending. meta: JSON values; TypeError for others. In a run it has
        what was sampled under SAMPLED, unless the source has an attribute reads_sampled = False.
        """

    def release(self, keys: Sequence[int]) -> None:
        """These items are all of a batch, such as the completions of a ticket: what compares those
        of one prompt begins with them. What scores each by itself has begun already, and does
        nothing here.
        """

    def poll(self) -> Outcomes:
        """The outcomes that have become known since the last call, by key. The call does not block,
        and it is also what gives the source time to work: call it until nothing is pending.
        """

    def wait(self, timeout_s: float) -> bool:
        """Block until `poll` has something to do, at most timeout_s; False if it has not."""

    def close(self) -> None:
        """Drop what is pending and free everything. A second call does nothing."""


def score_all(
    source: RewardSource, samples: Sequence[tuple[str, str, dict[str, object]]]
) -> list[Outcome]:
    """The outcomes of (prompt, completion, meta) samples, in order, as one batch. Blocks; nothing
    else may be pending.
    """
    assert not source.pending, "the samples need the source to themselves"
    for key, sample in enumerate(samples):
        source.submit(key, *sample)
    source.release(range(len(samples)))
    outcomes = dict(source.poll())
    while source.pending:
        source.wait(1.0)
        outcomes.update(source.poll())
    return [outcomes[key] for key in range(len(samples))]


def try_source(
    source: RewardSource,
    samples: Sequence[tuple[str, str, dict[str, object]]],
    *,
    given: str,
    remedy: str = "correct what scores",
    must_score: bool = True,
) -> list[Outcome]:
    """The outcomes of samples by a source that is made for them alone: it is started and closed.
    ValueError if it cannot be used, or if it fails on all of them in the same way. given: the key
    and value that name it. remedy: what to do then. must_score: whether a failure on all of them
    is told as an error; else the caller sees it in the outcomes.
    """
    try:
        source.start()
        outcomes = score_all(source, samples)
    except RewardError as error:  # here it is the user's to correct, and nothing has started
        raise ValueError(str(error)) from error
    finally:
        source.close()
    kinds = {failure_of(outcome) for outcome in outcomes}
    if must_score and outcomes and None not in kinds and len(kinds) == 1:
        what = f"failed on all {len(outcomes)} samples: {outcomes[0].reason}"
        raise ValueError(f"{given}: {what}\n{remedy}")
    return outcomes


def failure_of(outcome: Outcome) -> str | None:
    """In what way an item failed: the first word of the reason, such as an exception's type. None
    unless it is an error.
    """
    if outcome.kind != "error":
        return None
    word, _, _ = outcome.reason.partition(" ")
    return word


def commonest(reasons: Sequence[str]) -> str:
    """The reason that is given most often; of several the one that came first."""
    ((reason, _),) = Counter(reasons).most_common(1)
    return reason


class MakeSource(Protocol):
    """How the reward executor comes to its source: `partial(RewardPool, "my_module:my_reward")`."""

    def __call__(self, *, on_result: Callable[[], None]) -> RewardSource:
        """A source that calls on_result(), from any thread, when `poll` has something to do."""
