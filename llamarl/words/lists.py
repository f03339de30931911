"""Long lists in messages."""

from __future__ import annotations

from collections.abc import Sequence


def first_of(items: Sequence[str], most: int) -> list[str]:
    """Return the first `most` items and, if that leaves some out, how many more there are."""
    shown = list(items[:most])
    if len(items) > most:
        shown.append(f"and {len(items) - most} more")
    return shown
