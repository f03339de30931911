"""kind: environment. What the environment of a dialogue gave."""

from __future__ import annotations

from functools import partial

from llamarl.config.kinds.environment import EnvironmentKindSettings
from llamarl.launch.kinds.kind import Kind
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.environment import EnvironmentReward
from llamarl.scoring.scorer import MakeScorer


class EnvironmentKind(Kind[EnvironmentKindSettings]):
    """The rewards that dialogues bring with them."""

    @property
    def identity(self) -> str:
        """The environment's import path."""
        task = self.job.config.task
        return f"environment {getattr(task, 'environment', '')}"

    def make(self, stream: StreamSettings | None) -> MakeScorer:
        """Return a function that makes the scorer."""
        return partial(EnvironmentReward, self.given.name)


KIND = EnvironmentKind
