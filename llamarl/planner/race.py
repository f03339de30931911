"""How long weights are on their way in runs that were made, by the lags that these had.

    sheet = with_race(fit_runs(runs, base), runs, prompt_tokens=6)

No run measures when a version has arrived. It races to the generator with the news that there is
room for tickets, and those that start before it has arrived are a step older: so the mean lag says
which comes first how often. Of runs of one setting the median counts. `transfer_s` becomes the mean
time, of some, with which simulated runs have lags nearest to those of the asynchronous runs whose
executors are apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llamarl.planner.check import check_run, lag_of, timed_rows
from llamarl.planner.fit import seen_of
from llamarl.planner.repeats import by_setting
from llamarl.planner.sheet import Sheet

_WAYS_S = (0.5e-3, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3)


def with_race(sheet: Sheet, runs: Sequence[Path], *, prompt_tokens: float = 0.0) -> Sheet:
    """Return the sheet with transfer_s by these runs; as it is where none says anything."""
    measured = sheet.measured
    if measured is None or sheet.device.kind != "cpu":
        return sheet
    telling = []
    for own in by_setting(runs):
        seen = seen_of(own[0], prompt_tokens)
        if seen is not None and seen.is_apart and not seen.is_synchronous:
            true = statistics.median(lag_of(timed_rows(run)) for run in own)
            telling.append((own[0], true))
    if not telling:
        return sheet

    def made(way_s: float) -> Sheet:
        return replace(sheet, measured=replace(measured, transfer_s=way_s))

    def off(way_s: float) -> float:
        total = 0.0
        for run, true in telling:
            predicted, _ = check_run(run, made(way_s), prompt_tokens=prompt_tokens).lag
            total += abs(predicted - true)
        return total

    return made(min(_WAYS_S, key=off))
