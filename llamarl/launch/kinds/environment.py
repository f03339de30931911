"""kind: environment. What the environment of a dialogue gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from llamarl.config.kinds.environment import EnvironmentKindSettings
from llamarl.launch.kinds.kind import Kind
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.by_set import BySet
from llamarl.scoring.environment import EnvironmentReward
from llamarl.scoring.in_turn import InTurn
from llamarl.scoring.pool import RewardPool
from llamarl.scoring.scorer import MakeScorer, Scorer, Site


class EnvironmentKind(Kind[EnvironmentKindSettings]):
    """The rewards that dialogues bring with them."""

    @property
    def identity(self) -> str:
        """The environment's import path."""
        task = self.job.config.task
        return f"environment {getattr(task, 'environment', '')}"

    def make(self, stream: StreamSettings | None) -> MakeScorer:
        """Return a function that makes the scorer. No environment plays the further sets of
        held-out prompts: the function of its own kind scores each.
        """
        name = self.given.name
        functions = self.job.set_rewards
        if not functions:
            return partial(EnvironmentReward, name)
        pool = partial(RewardPool, section=self.given.section, **self.scored.conversation)
        return partial(_by_set, name, {fn: partial(pool, fn) for fn in functions})


def _by_set(name: str, make_own: Mapping[str, Callable[..., Scorer]], site: Site) -> InTurn:
    def environment(on_result: Callable[[], None]) -> Scorer:
        return EnvironmentReward(name, site)

    return InTurn(BySet(environment, make_own, on_result=site.on_result))


KIND = EnvironmentKind
