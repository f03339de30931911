"""kind: function. A Python function in worker processes, tried on samples before a run starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from llamarl.scoring.kinds.kind import Given, Kind, KindSettings, RunFacts
from llamarl.words.fields import AnyText, Count, Options, Positive, settings_dataclass
from llamarl.words.findings import Findings

if TYPE_CHECKING:
    from llamarl.scoring.ahead import StreamSettings
    from llamarl.scoring.scorer import Item, Scorer, Site
    from llamarl.types import Outcome

log = logging.getLogger("llamarl")


@settings_dataclass
class FunctionKindSettings(KindSettings):
    kind: Literal["function"]
    fn: AnyText | None
    """module:function of (prompt, completion_text, meta); null: the task's own
    (docs/rewards.md).
    """
    options: Options
    """Further arguments of the function: reward.options.memory_mb=256."""
    num_workers: Count
    """Worker processes."""
    timeout_s: Positive
    """Seconds of a completion. Then its worker is killed and the completion is not trained on.
    The first call of a worker may take two minutes, in which it loads.
    """
    memory_mb: Count
    """MiB that a worker and its children may hold: resident, not mapped (Linux)."""

    def find(self, given: Given, run: RunFacts, found: Findings) -> None:
        """Add rows without an answer, which the task's own reward compares with, and options of a
        function that is not named.
        """
        if self.fn is not None:
            return
        if self.options:
            what = "these are options of a function of your own"
            remedy = f"{given.key('fn')}=module:function, or {given.key('options')}={{}}"
            found.add(f"{what}; {remedy}", given.key("options"), given.key("fn"))
        for answer_key in run.unanswered:
            what = "the task's own reward compares with the row's answer, and the rows have none"
            fn = f"{given.key('fn')}=module:function (rewards:zero with loss=distill)"
            remedy = f"{fn}, or {answer_key}=answer"
            found.add(f"{what}; {remedy}", answer_key, given.key("fn"))


class FunctionKind(Kind[FunctionKindSettings]):
    """A function that the user gave, or the task's own."""

    def try_out(self, samples: Sequence[Item]) -> None:
        """Let a user's function score samples, and warn if it scores none of them. ValueError if it
        fails on all in the same way and must not.
        """
        from llamarl.scoring.scorer import commonest

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
        from llamarl.scoring.pool import check_reward
        from llamarl.tasks.environment import GIVEN

        if self._path == GIVEN:
            return None
        return check_reward(
            self._path,
            samples,
            remedy=f"correct the function, or {self.given.remedy}",
            must_score=self.given.must_score,
            **self._pool_options,
            **self.scored.conversation,
        )

    @property
    def checks_rows(self) -> bool:
        """Whether the function comes with a check of rows."""
        from llamarl.tasks.rewards import row_check_of

        return row_check_of(self._path) is not None

    def row_problems(
        self, rows: Sequence[Item], wait_longer: Callable[[], bool]
    ) -> list[str | None]:
        """Return what the function's check of rows raises for each that it gets to."""
        from llamarl.scoring.pool import check_reward
        from llamarl.scoring.scorer import NOT_REACHED
        from llamarl.tasks.rewards import row_check_of

        path = row_check_of(self._path)
        assert path is not None, "it checks rows"
        outcomes = check_reward(
            path,
            rows,
            must_score=False,
            wait_longer=wait_longer,
            num_workers=self.settings.num_workers,
            **self._pool_options,
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
        return self.settings.fn or self.job.task.default_reward

    @property
    def _pool_options(self) -> dict[str, Any]:
        """What every pool has, whatever it scores. The key that names the function need not be
        section.fn.
        """
        return {
            "options": self.settings.options,
            "timeout_s": self.settings.timeout_s,
            "memory_mb": self.settings.memory_mb,
            "section": self.given.section,
            "fn_key": self.given.own_keys.get("fn", ""),
        }

    def make(self, site: Site, stream: StreamSettings | None = None) -> Scorer:
        """Return a pool of workers. If the user named no function, each further set of
        held-out prompts is scored by the reward of its own kind, and so is a part of a mixture that
        an environment plays.
        """
        from llamarl.scoring.routing import by_own_reward
        from llamarl.tasks.environment import GIVEN

        others: list[str] = []
        if self.settings.fn is None:
            others = [*self.job.set_rewards]
            others += [own for own in self.job.part_rewards if own == GIVEN]
        return by_own_reward(
            self._path,
            others,
            self.given.name,
            num_workers=self.settings.num_workers,
            on_result=site.on_result,
            **self._pool_options,
            **self.scored.conversation,
        )


SETTINGS = FunctionKindSettings
KIND = FunctionKind
