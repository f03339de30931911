"""What an environment gave for a dialogue, as a Scorer: each completion brings it with it."""

from __future__ import annotations

from dataclasses import replace

from llamarl.scoring.scorer import Item, Outcomes, Scorer
from llamarl.types import Outcome


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

    def wait(self, timeout_s: float) -> bool:
        """Whether `poll` has something to return; there is nothing to wait for."""
        return bool(self._done)
