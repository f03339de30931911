"""One line of the report: whether reading completions while they are sampled paid."""

from __future__ import annotations

import numpy as np

Columns = dict[str, np.ndarray]  # each [rows] in float64, NaN where a row has no value

_ENOUGH = 0.5  # share of a completion that should be read before it ends


def streaming_verdict(columns: Columns) -> str | None:
    """Return the share of tokens that were read before a completion ended, the wait that was left
    beside the time that a whole completion takes to be read, and which key to turn. None without
    reward.stream.
    """
    early = _mean(columns, "reward/prefilled_early")
    tail_s = _mean(columns, "reward/tail_s")
    if early is None or tail_s is None:
        return None
    said = f"{early:.0%} of a completion read before it ended; its score {tail_s:.2g} s after"
    whole_s = _seconds_a_completion(columns)
    if whole_s is None:
        return said
    said = f"{said} (read alone: {whole_s:.2g} s)"
    if tail_s < whole_s and early >= _ENOUGH:
        return f"paid: {said}"
    return f"did not pay: {said}; {_knob(columns, early)}"


def _knob(columns: Columns, early: float) -> str:
    if (_mean(columns, "reward/evictions") or 0) > 0:
        return "raise reward.cache_tokens"
    if early < _ENOUGH:
        return "lower reward.piece_tokens or generator.chunk_tokens"
    return (
        "the scorer is busy: a rank of its own in placement.reward, or larger reward.piece_tokens"
    )


def _seconds_a_completion(columns: Columns) -> float | None:
    """Return what one model takes to read the mean completion, at the pace that all of them had
    together; None if unknown.
    """
    seconds = _totals(columns, "/seconds")
    tokens = _totals(columns, "/tokens")
    length = _mean(columns, "completion/length_mean")
    if not tokens or length is None:
        return None
    return length * seconds / tokens


def _totals(columns: Columns, end: str) -> float:
    total = 0.0
    for name, values in columns.items():
        if name.startswith("reward/") and name.endswith(end):
            total += float(np.nansum(values))
    return total


def _mean(columns: Columns, name: str) -> float | None:
    values = columns.get(name, np.empty(0))
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
