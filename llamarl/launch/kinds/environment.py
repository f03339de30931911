"""kind: environment. What the environment of a dialogue gave."""

from __future__ import annotations

from llamarl.config.kinds.environment import EnvironmentKindSettings
from llamarl.launch.kinds.kind import Kind, by_own_reward
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.pool import RewardPool
from llamarl.scoring.scorer import Scorer, Site
from llamarl.tasks.environment import GIVEN


class EnvironmentKind(Kind[EnvironmentKindSettings]):
    """The rewards that dialogues bring with them."""

    @property
    def identity(self) -> str:
        """The import paths of the environments."""
        played = self.inputs.config.environments.values()
        return f"environment {' '.join(one.environment for one in played)}"

    def make(self, site: Site, stream: StreamSettings | None = None) -> Scorer:
        """Return the scorer. Prompts that no environment plays, of a mixture
        or of a set, are scored by the function of their own kind.
        """

        def pool(path: str) -> RewardPool:
            return RewardPool(
                path,
                section=self.given.section,
                on_result=site.on_result,
                **self.scored.conversation,
            )

        others = [*self.inputs.set_rewards, *self.inputs.part_rewards]
        return by_own_reward(GIVEN, others, pool, self.given.name)


KIND = EnvironmentKind
