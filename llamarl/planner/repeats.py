"""Runs of one setting, and what is typical of them.

    settings = by_setting([Path("runs/a"), Path("runs/b")])  # one, if only seeds and folders differ

A machine does other things too, and then a step, or a whole run, takes twice as long as at other
times. So the slowest and the fastest fifth of a run's steps are left out, and of several runs of a
setting the median counts. A run that is far from that median is named (`strays`), because a fit
cannot know which of two runs was disturbed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from llamarl.config.conversion import load_config, to_values
from llamarl.observe.rates import Row, number_of

_CUT = 5  # one of so many steps is left out at either end
STRAY = 0.25  # of the median of its setting: a run's seconds that differ by more are named
_QUESTION = "runs of its setting; was the machine busy?"
# What tells runs of one setting apart.
_OF_A_RUN = ("run_dir", "seed", "max_steps", "resume")


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the largest and the smallest fifth."""
    ordered = sorted(values)
    cut = len(ordered) // _CUT
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def step_of(rows: Sequence[Row]) -> float:
    """Return the seconds of a run's step, by the rows that are counted."""
    return trimmed_mean([number_of(row, "time/step_s") or 0.0 for row in rows])


def num_ranks(run: Path) -> int:
    """Return how many ranks a run had, by the traces that they left; 1 without any."""
    return max(1, len(list(run.glob("trace.rank*.json"))))


def by_setting(runs: Sequence[Path]) -> list[list[Path]]:
    """Return the runs of each setting, in the order of the first of each."""
    found: dict[str, list[Path]] = {}
    for run in runs:
        values = to_values(load_config(run / "config.yaml"))
        for name in _OF_A_RUN:
            values.pop(name, None)
        key = json.dumps([num_ranks(run), values], sort_keys=True, default=str)
        found.setdefault(key, []).append(run)
    return list(found.values())


def strays(steps_s: Mapping[Path, float], settings: Sequence[Sequence[Path]]) -> Iterator[str]:
    """Yield a sentence for each run whose step is far from the median of its setting. steps_s: a
    step's seconds by run, of those that say any.
    """
    for runs in settings:
        own = {run: steps_s[run] for run in runs if run in steps_s}
        if len(own) < 2:
            continue
        typical_s = statistics.median(own.values())
        for run, step_s in own.items():
            off = step_s / typical_s - 1
            if abs(off) > STRAY:
                yield (
                    f"{run.name}: {step_s:.3g} s a step, {off:+.0%} of the median of {len(own)} "
                    f"{_QUESTION}"
                )


def is_of_stray(note: str) -> bool:
    """Whether a sheet's note is a sentence of `strays`."""
    return note.endswith(_QUESTION)
