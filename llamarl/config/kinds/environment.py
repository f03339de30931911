"""kind: environment. What the environment of a dialogue gave."""

from __future__ import annotations

from typing import Literal

from llamarl.config.kinds.kind import Given, KindSettings, RunFacts
from llamarl.words.fields import settings_dataclass
from llamarl.words.findings import Findings


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


SETTINGS = EnvironmentKindSettings
