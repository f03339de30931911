"""The sections `governor` and `tickets`: how many groups are started ahead, which groups make up a
batch, and what cannot go together with that.
"""

from __future__ import annotations

from typing import Literal

from llamarl.config.sections.loss import LossSettings
from llamarl.config.sections.run import RunSettings
from llamarl.config.sections.trainer import TrainerSettings
from llamarl.tickets.governors import GovernorSettings
from llamarl.words.fields import Count, Flag, Positive, settings_dataclass
from llamarl.words.findings import Findings


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


# Losses whose optimum is a distribution: a group of equal outcomes says as much of it as any other.
_OF_DISTRIBUTIONS = ("tb", "tba", "distill")


@settings_dataclass
class TicketsSettings:
    informative: Flag
    """Give back groups whose outcomes, before any shaping, are all equal, and start others for
    them (docs/asynchrony.md).
    """
    max_refill: Count
    """Batches that may be given back for a step. A step that needs more trains on the groups
    that it has.
    """
    sampler: Literal["uniform", "difficulty"]
    """How prompts are chosen. uniform: every one once an epoch; difficulty: by how often each
    was solved, for a few hundred rows that are drawn many times (docs/data.md).
    """
    half_life: Positive
    """With difficulty: a completion counts half after this many further groups of each prompt."""


def find_tickets(
    tickets: TicketsSettings,
    run: RunSettings,
    found: Findings,
    *,
    loss: LossSettings,
    trainer: TrainerSettings,
    buffer_kind: str,
    has_rows: bool,
) -> None:
    """Find what makes no sense without the groups of equal outcomes, and prompts among which
    nothing can choose. has_rows: whether the task's prompts are one list of rows.
    """
    if tickets.sampler != "uniform" and not has_rows:
        found.add(
            "prompts are chosen among the rows of one task: a mixture's parts keep their weights, "
            "and an environment without a file makes its own; tickets.sampler=uniform",
            "tickets.sampler",
            "task.kind",
        )
    if tickets.informative:
        _find_informative(run, found, loss=loss, trainer=trainer, buffer_kind=buffer_kind)


def _find_informative(
    run: RunSettings,
    found: Findings,
    *,
    loss: LossSettings,
    trainer: TrainerSettings,
    buffer_kind: str,
) -> None:
    """Find what needs the groups of equal outcomes, or cannot do without any of its groups."""
    if run.group_size == 1:
        found.add(
            "one completion has no other to differ from, so that every group would be given back; "
            "tickets.informative=false, or group_size=2",
            "tickets.informative",
            "group_size",
        )
    taught_by_equals = {
        "gae": "a value model learns from groups of equal outcomes too",
        "turns": "groups of equal outcomes may have turns that differ",
    }
    if trainer.advantages in taught_by_equals:
        found.add(
            f"{taught_by_equals[trainer.advantages]}, so keep them; tickets.informative=false",
            "tickets.informative",
            "trainer.advantages",
        )
    if loss.fn in _OF_DISTRIBUTIONS:
        found.add(
            "this loss fits a distribution, of which groups of equal outcomes say as much as any "
            "others, so keep them; tickets.informative=false, or loss=kimi_k2",
            "tickets.informative",
            "loss.fn",
        )
    if buffer_kind == "replay":
        found.add(
            "a step draws from all that the buffer holds, so that no batch is made up again for a "
            "group that is given back; tickets.informative=false, or buffer=fifo",
            "tickets.informative",
            "buffer.kind",
        )
