"""Simulate a run: the real ledger, governors and channel capacities on a clock without time.

    python -m llamarl.planner simulate max_lag=4 overcommit=8 decode_s=0.02 update_s=5
    python -m llamarl.planner simulate max_lag=1,2,4,8 overcommit=0,8,auto
    python -m llamarl.planner simulate max_lag=4 num_generators=4 slow_factor=3 -o picture.svg

Keys are the fields of SimulationSettings (simulation_settings.py), which have their names in conf/,
and of StraightTimings (straight.py). One or two keys may have several values, with commas: a table
then compares them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from llamarl.planner.picture import draw
from llamarl.planner.simulation_settings import Impossible, SimulationSettings
from llamarl.planner.straight import StraightTimings
from llamarl.planner.world import SimulationResult, simulate
from llamarl.words.names import did_you_mean

__all__ = ["describe", "run", "simulate"]

Values = dict[str, str]  # by key, as they were typed
NOT_TYPED = ("lengths",)  # --lengths reads them from a file
MEAN_LENGTH = "completion/length_mean"  # the column of a run's metrics


def describe(result: SimulationResult) -> str:
    """Return what came of a simulated run, in lines for people."""
    form = result.closed_form
    settings = result.settings
    steps = len(result.steps_s)
    lines = [
        f"{steps} steps in {result.seconds:.4g} simulated seconds, {result.num_events} events",
        f"step          {result.step_s:.4g} s mean, {min(result.steps_s):.4g} to "
        f"{max(result.steps_s):.4g} s",
        f"tokens        {result.tokens_per_s:,.0f} a second sampled, "
        f"{result.rows:.1f} rows of {settings.max_slots} together",
    ]
    for idle in result.idle:
        causes = idle.shown_causes or "-"
        lines.append(f"{idle.executor:<13} idle {idle.share:.1%} ({causes})")
    lines += [
        f"lag           {result.mean_lag:.3f} mean, {result.max_lag} at most, of max_lag "
        f"{settings.max_lag}",
        f"closed form   {form.lag:.3f} = 1 + overcommit {result.mean_overcommit:.2f} / "
        f"{settings.groups_per_step} groups, while overcommit alone holds back",
        f"by Little     {form.little_lag:.3f}; {form.mean_started:.2f} groups started and not yet "
        f"taken = {form.groups_per_s:.4g} a second x {form.mean_life_s:.4g} s",
        *_histogram(result),
    ]
    if result.num_aborted:
        lines.append(f"aborted       {result.num_aborted} completions, ended by time")
    if result.num_restarted:
        lines.append(f"restarted     {result.num_restarted} tickets of the generator that died")
    return "\n".join(lines)


def _histogram(result: SimulationResult) -> list[str]:
    """Return a bar for each lag."""
    total = sum(result.lags.values())
    lines = []
    for lag, count in result.lags.items():
        share = count / total
        bar = "#" * max(1, round(50 * share))
        lines.append(f"  lag {lag:>3}     {share:>6.1%} {bar}")
    return lines


def read_lengths(file: Path) -> tuple[int, ...]:
    """Return the lengths of completions, in tokens, of a file: a whole number a line; or a run's
    metrics.jsonl, which has the mean of each step and no more. ValueError for anything else.
    """
    lengths = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            value = json.loads(line)
            if isinstance(value, dict):
                value = value.get(MEAN_LENGTH)
            if value is not None:
                lengths.append(max(1, round(float(value))))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{file}, line {number}: need a number of tokens, or a row of a run's metrics.jsonl"
            ) from error
    if not lengths:
        raise ValueError(f"{file} has no lengths: need a number of tokens a line, or {MEAN_LENGTH}")
    return tuple(lengths)


def run(arguments: Sequence[str]) -> int:
    """Run the command line. Return the exit status: 0, or 2 for what cannot be simulated."""
    parser = argparse.ArgumentParser(
        prog="python -m llamarl.planner simulate",
        description="Simulate a run on a clock without time.",
        epilog=f"Keys: {', '.join(_hints())}.",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE[,VALUE]")
    parser.add_argument("--lengths", type=Path, help="completions' lengths, or a metrics.jsonl")
    parser.add_argument("-o", "--out", type=Path, help="a picture: .svg or .png")
    given = parser.parse_intermixed_args(arguments)
    try:
        _run(given.overrides, given.lengths, given.out)
    except (OSError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _run(overrides: list[str], lengths: Path | None, out: Path | None) -> None:
    values = _split(overrides)
    several = [key for key, options in values.items() if len(options) > 1]
    if len(several) > 2:
        raise ValueError(f"several values of {', '.join(several)}: a table has two sides")
    if several and out is not None:
        raise ValueError(f"--out: a picture is of one run, and {several[0]} has several values")
    known = () if lengths is None else read_lengths(lengths)
    if several:
        for line in table(values, several, known):
            print(line)
        return
    began = time.perf_counter()
    result = simulate_values({key: one for key, (one,) in values.items()}, known)
    took_s = time.perf_counter() - began
    print(describe(result))
    print(f"\nsimulated in {took_s:.2f} s, {result.num_events / took_s:,.0f} events a second")
    if out is not None:
        draw(result, out)
        print(f"wrote {out}")


def simulate_values(values: Values, lengths: tuple[int, ...] = ()) -> SimulationResult:
    """Return what comes of a run with these values, by key, and the defaults of all others.
    ValueError names what cannot be used.
    """
    own = {field.name for field in dataclasses.fields(SimulationSettings)}
    of_run: dict[str, Any] = {}
    of_timings: dict[str, Any] = {}
    for key, text in values.items():
        chosen = of_run if key in own else of_timings
        chosen[key] = _value(key, text)
    settings = SimulationSettings(**of_run, lengths=lengths)
    return simulate(settings, StraightTimings(**of_timings).timings())


def table(values: dict[str, list[str]], several: list[str], lengths: tuple[int, ...]) -> list[str]:
    """Return lines that compare the values of one or two keys: of two, a cell for each pair."""
    fixed = {key: options[0] for key, options in values.items() if key not in several}
    if len(several) == 1:
        return _column(fixed, several[0], values[several[0]], lengths)
    down, across = several
    cells = {}
    for row, column in itertools.product(values[down], values[across]):
        cells[row, column] = _cell({**fixed, down: row, across: column}, lengths)
    headings = [f"{across}={column}" for column in values[across]]
    width = max(len(text) for text in [*headings, *cells.values()]) + 2
    first = max(len(down), *(len(row) for row in values[down]))
    lines = [down.rjust(first) + "".join(text.rjust(width) for text in headings)]
    for row in values[down]:
        texts = [cells[row, column].rjust(width) for column in values[across]]
        lines.append(row.rjust(first) + "".join(texts))
    lines.append("each cell: seconds a step, mean lag / largest lag; -: not possible")
    return [line.rstrip() for line in lines]


def _cell(values: Values, lengths: tuple[int, ...]) -> str:
    try:
        result = simulate_values(values, lengths)
    except Impossible:
        return "-"
    return f"{result.step_s:.2f} s {result.mean_lag:.1f}/{result.max_lag}"


def _column(fixed: Values, key: str, options: list[str], lengths: tuple[int, ...]) -> list[str]:
    """Return a line for each value of one key."""
    width = max(len(key), *(len(option) for option in options))
    head = "    step s  lag mean  closed form  max  trainer idle  generator idle"
    lines = [key.rjust(width) + head]
    for option in options:
        result = simulate_values({**fixed, key: option}, lengths)
        idle = {one.executor: one.share for one in result.idle}
        lines.append(
            f"{option:>{width}}  {result.step_s:>8.4g}  {result.mean_lag:>8.3f}  "
            f"{result.closed_form.lag:>11.3f}  {result.max_lag:>3}  {idle['trainer']:>12.1%}  "
            f"{idle['generator']:>14.1%}"
        )
    return lines


def _hints() -> dict[str, object]:
    """Return every key that may be typed, and its type."""
    hints: dict[str, object] = {}
    for record in (SimulationSettings, StraightTimings):
        hints |= get_type_hints(record)
    return {key: hint for key, hint in hints.items() if key not in NOT_TYPED}


def _split(overrides: list[str]) -> dict[str, list[str]]:
    """Return the values of each key. ValueError for what is no KEY=VALUE, or no key."""
    known = _hints()
    values = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not text:
            raise ValueError(f"{override}: need KEY=VALUE")
        if key not in known:
            raise ValueError(f"{key}: unknown key{did_you_mean(key, known)}")
        values[key] = text.split(",")
    return values


def _value(key: str, text: str) -> object:
    """Return a value of the key's type. ValueError if the text is none."""
    hint = _hints()[key]
    types = get_args(hint) or (hint,)
    if text == "null" and type(None) in types:
        return None
    if bool in types and text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        if number in types:
            try:
                return number(text)
            except ValueError:
                continue
    if str in types:
        return text
    raise ValueError(f"{key}={text}: need {_named(types)}")


def _named(types: tuple[object, ...]) -> str:
    """Return what a value of these types is, in words."""
    words = {int: "a whole number", float: "a number", bool: "true or false"}
    words[type(None)] = "null"
    return " or ".join(words[one] for one in types if isinstance(one, type) and one in words)
