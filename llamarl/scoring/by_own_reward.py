"""ByOwnReward: where no function is named, prompts of several kinds are scored by the reward of
their own kind: sets of held-out prompts, and parts of a mixture that an environment plays.

    task=addition eval.sets={b: {kind: gsm8k, ...}}

    training, the task's own --> exact_match      b --> numeric_match

    task=mixture task.parts={a: {kind: addition}, c: {kind: environment, ...}}

    a --> exact_match                             c --> what the environment gave
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamarl.scoring.scorer import Item, Outcomes, Scorer
from llamarl.tasks.row_keys import REWARD_KEY


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
