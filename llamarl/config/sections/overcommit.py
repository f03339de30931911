"""The section `governor`, and what cannot go together about starting ahead: max_lag, overcommit,
its governor and on_deadline.
"""

from __future__ import annotations

from llamarl.config.sections.run import RunSettings
from llamarl.words.fields import Count, Natural, settings_dataclass
from llamarl.words.findings import Findings


@settings_dataclass
class GovernorSettings:
    start: Natural | None
    """Groups of overcommit to start with; null: half a batch."""
    least: Natural
    """Groups of overcommit at least."""
    most: Natural | None
    """Groups of overcommit at most; null: max_lag batches."""
    window: Count
    """Steps that oppo and window look back. window compares two such windows."""
    increase: Natural
    """Groups that oppo adds at a step after a rise of the reward."""
    decrease: Natural
    """Groups that oppo takes off at any other step."""


def find_overcommit(
    run: RunSettings, governor: GovernorSettings, found: Findings, *, buffer_kind: str
) -> None:
    """Find settings of starting ahead that contradict each other or the bound on lag."""
    if run.synchronous:
        _find_synchronous(run, found)
    elif run.max_lag is None:
        _find_unbounded(run, governor, found, buffer_kind=buffer_kind)
    elif run.on_deadline == "truncate" and run.overcommit == 0:
        found.add(
            "a straggler is truncated once other groups can fill its batch, and with "
            "overcommit=0 no other groups are started; overcommit=auto, or on_deadline=wait",
            "on_deadline",
            "overcommit",
        )
    if governor.most is not None and governor.least > governor.most:
        found.add("governor.least must not exceed governor.most", "governor.least", "governor.most")
    if governor.start is None:
        return
    if governor.start < governor.least:
        found.add(
            "governor.start must be at least governor.least", "governor.start", "governor.least"
        )
    if governor.most is not None and governor.start > governor.most:
        found.add("governor.start must be at most governor.most", "governor.start", "governor.most")


def _find_synchronous(run: RunSettings, found: Findings) -> None:
    """Find what a synchronous run cannot do."""
    if run.overcommit not in ("auto", 0):
        found.add(
            "without lag no group can start ahead of its step; overcommit=0, or max_lag=1",
            "overcommit",
            "max_lag",
        )
    if run.on_deadline == "truncate":
        found.add(
            "without lag every ticket is due at its own step, so no other can replace it; "
            "on_deadline=wait, or max_lag=1",
            "on_deadline",
            "max_lag",
        )


def _find_unbounded(
    run: RunSettings, governor: GovernorSettings, found: Findings, *, buffer_kind: str
) -> None:
    """Find what needs a bound on lag."""
    if run.overcommit in ("oppo", "window"):
        found.add(
            f"the rule {run.overcommit} needs a bounded lag; give a number of groups, or auto, "
            "which keeps two batches on their way",
            "overcommit",
            "max_lag",
        )
    for key, value in (("governor.start", governor.start), ("governor.most", governor.most)):
        if value is not None:
            found.add(
                f"without a bound on lag no rule changes overcommit; {key}=null, or max_lag=1",
                key,
                "max_lag",
            )
    if run.on_deadline == "truncate":
        found.add(
            "without a bound on lag no ticket has a deadline; on_deadline=wait, or "
            "generator.max_seconds",
            "on_deadline",
            "max_lag",
        )
    if buffer_kind != "replay":
        found.add(
            "max_lag=null needs buffer=replay, whose size bounds staleness; or set max_lag=1",
            "max_lag",
            "buffer.kind",
        )
