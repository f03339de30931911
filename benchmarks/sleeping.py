"""A reward that takes its time, for benchmarks/simulation.py."""

from __future__ import annotations

import time

SECONDS = 0.05


def slow(prompt: str, completion_text: str, meta: dict) -> float:
    """Return whether the completion is the answer, after SECONDS."""
    time.sleep(SECONDS)
    return float(completion_text.strip() == str(meta.get("answer", "")).strip())
