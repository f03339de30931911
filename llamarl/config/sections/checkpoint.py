"""The section `checkpoint`. Where a run is resumed from is said by `resume`, in run.py."""

from __future__ import annotations

from llamarl.words.fields import Count, Natural, settings_dataclass


@settings_dataclass
class CheckpointSettings:
    every: Natural
    """Steps between checkpoints; 0: one at the end alone."""
    keep: Count
    """Newest checkpoints that are kept."""
