"""kind: function. A Python function, in worker processes."""

from __future__ import annotations

from typing import Literal

from llamarl.config.kinds.kind import Given, KindSettings, RunFacts
from llamarl.words.fields import AnyText, Count, Options, Positive, settings_dataclass
from llamarl.words.findings import Findings


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
            remedy = f"{given.key('fn')}=module:function, or {answer_key}=answer"
            found.add(f"{what}; {remedy}", answer_key, given.key("fn"))


SETTINGS = FunctionKindSettings
