"""RewardsBySet: where no function is named, each set of held-out prompts is scored by the reward of
its own kind, as each part of a mixture is.

    task=addition eval.sets={b: {kind: gsm8k, ...}}

    training, the task's own --> exact_match      b --> numeric_match
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from llamarl.tasks.held_out import SET_KEY
from llamarl.tasks.mixture import REWARD_KEY
from llamarl.tasks.source import MakeSource, Outcomes, RewardSource


class RewardsBySet:
    """A RewardSource of several. make_main: of all but what `make_own` has: by import path the
    rewards of sets that have others.
    """

    def __init__(
        self,
        make_main: MakeSource,
        make_own: Mapping[str, MakeSource],
        *,
        on_result: Callable[[], None],
    ):
        self._main = make_main(on_result=on_result)
        self._own = {path: make(on_result=on_result) for path, make in make_own.items()}
        self._sources: list[RewardSource] = [self._main, *self._own.values()]
        self._givens: dict[int, RewardSource] = {}  # who scores a pending item, by key
        self.name = self._main.name

    @property
    def pending(self) -> int:
        """The number of items that were submitted and not returned."""
        return sum(source.pending for source in self._sources)

    @property
    def is_busy(self) -> bool:
        """Whether one of them has enough to do for a while."""
        return any(source.is_busy for source in self._sources)

    def start(self) -> None:
        """Block until items can be scored. ValueError says what the user has to change."""
        for source in self._sources:
            source.start()

    def submit(self, key: int, prompt: str, completion: str, meta: dict[str, object]) -> None:
        """Take one item, for the reward of its set."""
        source = self._main
        if SET_KEY in meta:
            source = self._own.get(meta.get(REWARD_KEY), self._main)
        self._givens[key] = source
        source.submit(key, prompt, completion, meta)

    def release(self, keys: Sequence[int]) -> None:
        """These items are all of a batch. One that was scored by itself needs no release."""
        for source in self._sources:
            own = [key for key in keys if self._givens.get(key) is source]
            if own:
                source.release(own)

    def poll(self) -> Outcomes:
        """The outcomes that have become known since the last call, by key."""
        outcomes: Outcomes = []
        for source in self._sources:
            outcomes += source.poll()
        for key, _ in outcomes:
            del self._givens[key]
        return outcomes

    def wait(self, timeout_s: float) -> bool:
        """Block until one of them may have scored, at most timeout_s."""
        waiting = [source for source in self._sources if source.pending]
        return bool(waiting) and waiting[0].wait(timeout_s)

    def close(self) -> None:
        """Drop what is pending and free everything."""
        self._givens.clear()
        for source in self._sources:
            source.close()
