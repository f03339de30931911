"""kind: function. A Python function in worker processes, tried on samples before a run starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence

from llamarl.config.kinds.function import FunctionKindSettings
from llamarl.launch.kinds.kind import Kind, by_own_reward
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.pool import RewardPool, check_reward
from llamarl.scoring.scorer import NOT_REACHED, Item, Scorer, Site, commonest
from llamarl.tasks.environment import GIVEN
from llamarl.tasks.rewards import row_check_of
from llamarl.types import Outcome

log = logging.getLogger("llamarl")


class FunctionKind(Kind[FunctionKindSettings]):
    """A function that the user gave, or the task's own."""

    def try_out(self, samples: Sequence[Item]) -> None:
        """Let a user's function score samples, and warn if it scores none of them. ValueError if it
        fails on all in the same way and must not.
        """
        if self.settings.fn is None:
            return
        outcomes = self.score(samples) or []
        if any(outcome.kind == "score" for outcome in outcomes):
            return
        for kind, word in (("abstain", "abstains"), ("error", "fails")):
            reasons = [outcome.reason for outcome in outcomes if outcome.kind == kind]
            if reasons:
                log.warning(
                    "%s=%s %s on %d of the %d samples that it was tried on, and scores none: %s",
                    self.given.key("fn"),
                    self.settings.fn,
                    word,
                    len(reasons),
                    len(outcomes),
                    commonest(reasons),
                )

    def score(self, samples: Sequence[Item]) -> list[Outcome] | None:
        """Return the outcomes of samples; None if environments give them all. ValueError as try_out
        says.
        """
        if self._path == GIVEN:
            return None
        return check_reward(
            self._path,
            samples,
            section=self.given.section,
            fn_key=self._fn_key,
            remedy=f"correct the function, or {self.given.remedy}",
            must_score=self.given.must_score,
            options=self.settings.options,
            timeout_s=self.settings.timeout_s,
            memory_mb=self.settings.memory_mb,
            **self.scored.conversation,
        )

    @property
    def checks_rows(self) -> bool:
        """Whether the function comes with a check of rows."""
        return row_check_of(self._path) is not None

    def row_problems(
        self, rows: Sequence[Item], wait_longer: Callable[[], bool]
    ) -> list[str | None]:
        """Return what the function's check of rows raises for each that it gets to."""
        path = row_check_of(self._path)
        assert path is not None, "it checks rows"
        outcomes = check_reward(
            path,
            rows,
            section=self.given.section,
            fn_key=self._fn_key,
            must_score=False,
            wait_longer=wait_longer,
            options=self.settings.options,
            num_workers=self.settings.num_workers,
            timeout_s=self.settings.timeout_s,
            memory_mb=self.settings.memory_mb,
        )
        problems: list[str | None] = []
        for outcome in outcomes:
            if outcome is NOT_REACHED:
                problems.append(None)
                continue
            reason, _, _ = outcome.reason.partition("\n")
            # A row that takes too long to check, on a busy machine, may be right.
            problems.append(reason if "ValueError" in reason else "")
        return problems

    @property
    def identity(self) -> str:
        """The function's import path, with its options."""
        if not self.settings.options:
            return self._path
        return f"{self._path} {json.dumps(self.settings.options, sort_keys=True)}"

    @property
    def _path(self) -> str:
        """The function's import path."""
        return self.settings.fn or self.inputs.task.default_reward

    @property
    def _fn_key(self) -> str:
        """The key that names the function, which need not be section.fn."""
        return self.given.own_keys.get("fn", "")

    def make(self, site: Site, stream: StreamSettings | None = None) -> Scorer:
        """Return a pool of workers. If the user named no function, each further set of
        held-out prompts is scored by the reward of its own kind, and so is a part of a mixture that
        an environment plays.
        """

        def pool(path: str) -> RewardPool:
            return RewardPool(
                path,
                options=self.settings.options,
                num_workers=self.settings.num_workers,
                timeout_s=self.settings.timeout_s,
                memory_mb=self.settings.memory_mb,
                section=self.given.section,
                fn_key=self._fn_key,
                on_result=site.on_result,
                **self.scored.conversation,
            )

        others: list[str] = []
        if self.settings.fn is None:
            others = [*self.inputs.set_rewards]
            others += [own for own in self.inputs.part_rewards if own == GIVEN]
        return by_own_reward(self._path, others, pool, self.given.name)


KIND = FunctionKind
