"""kind: environment. What the environment of a dialogue gave."""

from __future__ import annotations

from typing import Literal

from llamarl.config.findings import Findings
from llamarl.config.kinds.kind import Given, KindSettings, RunFacts
from llamarl.config.marks import settings_dataclass


@settings_dataclass
class EnvironmentKindSettings(KindSettings):
    kind: Literal["environment"]

    def find(self, given: Given, run: RunFacts, found: Findings) -> None:
        """Add a task without an environment, and a victim."""
        if not run.has_environment:
            what = "only task=environment has an environment that gives rewards; another reward"
            found.add(what, given.key("kind"), "task.kind")


SETTINGS = EnvironmentKindSettings
