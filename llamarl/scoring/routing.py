"""Which scorer of texts gets an item, and when.

    submit --> InTurn: evaluations first, while the scorer is not busy --> a Scorer --> poll
               ByOwnReward: each prompt's own reward: an import path, or what its environment gave

Items beyond what keeps a scorer busy wait in InTurn, where evaluations overtake them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llamarl.scoring.pool import RewardPool
from llamarl.scoring.scorer import Around, Item, Outcomes, Queue, Scorer
from llamarl.tasks.environment import GIVEN
from llamarl.tasks.forms import REWARD_KEY
from llamarl.types import Outcome


@dataclass(slots=True)
class _Batch:
    """Keys that were released together, and how many of them the scorer has not got yet."""

    keys: list[int]
    num_waiting: int


class InTurn(Around):
    """Holds the items of a scorer that is busy."""

    def __init__(self, scorer: Scorer):
        super().__init__(scorer)
        self._attacks: dict[int, Item] = {}  # by key of a reply: its attack
        self._waiting: Queue[tuple[int, Item]] = Queue()  # with their keys
        self._waiting_keys: set[int] = set()
        self._batches: dict[int, _Batch] = {}  # the batches of released items that wait, by key

    @property
    def pending(self) -> int:
        """The number of items that wait here or are being scored."""
        return len(self._waiting) + self.scorer.pending

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

    def close(self) -> None:
        """Drop what waits, and close the scorer."""
        self._waiting.clear()
        self._waiting_keys.clear()
        self._batches.clear()
        self.scorer.close()

    def _hand_on(self) -> bool:
        """Give the scorer more, until it is busy. True if it got any."""
        has_given = False
        while self._waiting and not self.scorer.is_busy:
            key, item = self._waiting.take()
            self._waiting_keys.remove(key)
            self.scorer.submit(key, item)
            has_given = True
            batch = self._batches.pop(key, None)
            if batch is None:
                continue
            batch.num_waiting -= 1
            if not batch.num_waiting:
                self.scorer.release(batch.keys)
        return has_given


class ByOwnReward(Scorer):
    """Several Scorers of texts. own: by reward, the scorer of prompts whose kind has this reward.
    main: the scorer of all else.
    """

    def __init__(self, main: Scorer, own: Mapping[str, Scorer]):
        self._main = main
        self._own = own
        self._scorers: list[Scorer] = [self._main, *self._own.values()]
        self._givens: dict[int, Scorer] = {}  # the scorer of each pending item, by key
        self.name = self._main.name

    @property
    def pending(self) -> int:
        """The number of items that are being scored."""
        return sum(scorer.pending for scorer in self._scorers)

    @property
    def is_busy(self) -> bool:
        """Whether one of them has enough to do for a while."""
        return any(scorer.is_busy for scorer in self._scorers)

    def start(self) -> None:
        """Start all scorers."""
        for scorer in self._scorers:
            scorer.start()

    def submit(self, key: int, item: Item) -> None:
        """Take one item, and hand it to the reward of its kind."""
        own = item.prompt.meta.get(REWARD_KEY)
        scorer = self._own.get(own, self._main) if isinstance(own, str) else self._main
        self._givens[key] = scorer
        scorer.submit(key, item)

    def release(self, keys: Sequence[int]) -> None:
        """Note that these items make a batch. Items that are scored alone need no release."""
        for scorer in self._scorers:
            own = [key for key in keys if self._givens.get(key) is scorer]
            if own:
                scorer.release(own)

    def poll(self) -> Outcomes:
        """Return the outcomes of all scorers."""
        outcomes: Outcomes = []
        for scorer in self._scorers:
            outcomes += scorer.poll()
        for key, _ in outcomes:
            del self._givens[key]
        return outcomes

    def wait(self, timeout_s: float) -> bool:
        """Block until one of them may have scored, at most timeout_s."""
        waiting = [scorer for scorer in self._scorers if scorer.pending]
        return bool(waiting) and waiting[0].wait(timeout_s)

    def close(self) -> None:
        """Drop what is pending, and close all scorers."""
        self._givens.clear()
        for scorer in self._scorers:
            scorer.close()


class EnvironmentReward(Scorer):
    """Scores a completion with the reward of its ending. name: of it, in messages. One without a
    reward is an error.
    """

    def __init__(self, name: str):
        self.name = name
        self._done: Outcomes = []

    @property
    def pending(self) -> int:
        """The number of items that `poll` has not returned."""
        return len(self._done)

    def submit(self, key: int, item: Item) -> None:
        """Take an item, whose score is known."""
        reward = item.ending.reward
        if reward is None:
            why = "the environment gave no reward: it has no get_reward, and no turn had one"
            self._done.append((key, Outcome.error(why)))
        else:
            outcome = Outcome.score(reward)
            if outcome.kind == "score":
                outcome = replace(outcome, turn_rewards=item.ending.turn_rewards)
            self._done.append((key, outcome))

    def poll(self) -> Outcomes:
        """Return the outcomes of all items."""
        done, self._done = self._done, []
        return done


def by_own_reward(main: str, others: Sequence[str], name: str, **options: Any) -> Scorer:
    """Return the scorer of prompts of several kinds.

    main: the default reward, an import path or GIVEN (the environment's reward). others: rewards
    that some prompts name for themselves. name: of the scorer, in messages. options: of the
    RewardPool of each import path.
    """
    scorers: dict[str, Scorer] = {}
    for path in dict.fromkeys((main, *others)):
        scorers[path] = EnvironmentReward(name) if path == GIVEN else RewardPool(path, **options)
    default = scorers.pop(main)
    return InTurn(ByOwnReward(default, scorers) if scorers else default)
