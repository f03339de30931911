"""kind: environment. What the environment of a dialogue gave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from llamarl.scoring.kinds.kind import Given, Kind, KindSettings, RunFacts
from llamarl.words.fields import settings_dataclass
from llamarl.words.findings import Findings

if TYPE_CHECKING:
    from llamarl.scoring.ahead import StreamSettings
    from llamarl.scoring.scorer import Scorer, Site


@settings_dataclass
class EnvironmentKindSettings(KindSettings):
    kind: Literal["environment"]

    def find(self, given: Given, run: RunFacts, found: Findings) -> None:
        """Add a run without an environment."""
        if not run.has_environment:
            what = (
                "no environment plays here; task=environment, or a part or a set of that kind, or "
                "another reward"
            )
            found.add(what, given.key("kind"), "task.kind")


class EnvironmentKind(Kind[EnvironmentKindSettings]):
    """The rewards that dialogues bring with them."""

    @property
    def identity(self) -> str:
        """The import paths of the environments."""
        return f"environment {' '.join(self.job.environment_paths)}"

    def make(self, site: Site, stream: StreamSettings | None = None) -> Scorer:
        """Return the scorer. Prompts that no environment plays, of a mixture
        or of a set, are scored by the function of their own kind.
        """
        from llamarl.scoring.routing import by_own_reward
        from llamarl.tasks.environment import GIVEN

        return by_own_reward(
            GIVEN,
            [*self.job.set_rewards, *self.job.part_rewards],
            self.given.name,
            section=self.given.section,
            on_result=site.on_result,
            **self.scored.conversation,
        )


SETTINGS = EnvironmentKindSettings
KIND = EnvironmentKind
