"""The section `tickets`: which groups make up a batch, and what cannot go together with that."""

from __future__ import annotations

from typing import Literal

from llamarl.config.sections.loss import LossSettings
from llamarl.config.sections.run import RunSettings
from llamarl.config.sections.trainer import TrainerSettings
from llamarl.words.fields import Count, Flag, Positive, settings_dataclass
from llamarl.words.findings import Findings

# Losses whose optimum is a distribution: a group of equal outcomes says as much of it as any other.
_OF_DISTRIBUTIONS = ("tb", "tba")


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
    if trainer.advantages == "gae":
        found.add(
            "a value model learns from groups of equal outcomes too, so keep them; "
            "tickets.informative=false",
            "tickets.informative",
            "trainer.advantages",
        )
    if trainer.advantages == "turns":
        found.add(
            "groups of equal outcomes may have turns that differ, so keep them; "
            "tickets.informative=false",
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
