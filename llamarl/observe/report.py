"""The report: one self-contained HTML page about a run.

    python -m llamarl.observe.report RUN_DIR [-o FILE]

Reads RUN_DIR/metrics.jsonl (and samples.jsonl, outcome.json and config.yaml, if there), also while
the run goes on. report.html is the page's template; it embeds viewer.css, viewer.js and the plots
(plots.py), and loads nothing.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from llamarl.observe.alarms import Columns, Observed, alarms_of
from llamarl.observe.ended import outcome_of
from llamarl.observe.plots import (
    LOOK,
    PANELS,
    SUPERVISED,
    SUPERVISED_PANELS,
    draw,
    draw_idle,
    is_of_evaluations,
    of_set,
)
from llamarl.observe.rates import ACCURACY, EVALUATED, Idle, Row, idle_shares, sets_of
from llamarl.observe.rows import FILE_NAME
from llamarl.observe.samples import FILE_NAME as SAMPLES_NAME
from llamarl.observe.samples import Shown, read_samples
from llamarl.observe.sinks import read_rows
from llamarl.words.choices import GROUP_FIELDS, OWN, column_of

MOST_BYTES = 1 << 24  # of the samples in a page
_ENOUGH = 0.5  # share of a completion that should be read before it ends
COMPACT = (",", ":")  # separators of the samples in JSON
_HERE = Path(__file__).parent


def write_report(
    run_dir: str | Path,
    out: str | Path | None = None,
    *,
    clock: Callable[[], float] = time.time,
) -> Path:
    """Write the page (default RUN_DIR/report.html) and return its path. clock: seconds since 1970.

    FileNotFoundError or ValueError, saying what to do, if there are no rows.
    """
    run_dir = Path(run_dir)
    file = run_dir / FILE_NAME
    if not file.is_file():
        raise FileNotFoundError(
            f"{file}: no such file; RUN_DIR is the run_dir that the training run printed"
        )
    columns = read_columns(file)
    out = Path(out or run_dir / "report.html")
    seen = Observed(
        columns=columns,
        samples=read_samples(run_dir / SAMPLES_NAME),
        outcome=outcome_of(run_dir),
        silent_s=max(0.0, clock() - file.stat().st_mtime),
    )
    out.write_text(page(run_dir, seen), encoding="utf-8")
    return out


def read_columns(file: Path) -> Columns:
    """Read the columns of a metrics.jsonl. ValueError if it is damaged or holds no rows yet."""
    rows = read_rows(file)
    if not rows:
        raise ValueError(f"{file} holds no rows yet; wait for the first step")
    return columns_of(rows)


def columns_of(rows: list[Row]) -> Columns:
    """Return each column that has a number in any row, in alphabetical order."""
    columns = {}
    for name in sorted(set().union(*rows)):
        numbers = [None if isinstance(row.get(name), str) else row.get(name) for row in rows]
        values = np.array(numbers, dtype=np.float64)
        if not np.isnan(values).all():
            columns[name] = values
    return columns


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot as the page shows it."""

    title: str
    note: str  # how to read it; empty: nothing
    svg: str  # the image in base64


@matplotlib.rc_context(LOOK)
def page(run_dir: Path, run: Observed) -> str:
    """Return the HTML of a run."""
    columns = run.columns
    is_supervised = SUPERVISED in columns
    curves = []
    absent = []
    names = sets_of(columns)
    for panel in SUPERVISED_PANELS if is_supervised else PANELS:
        panels = [panel, *(of_set(panel, name) for name in names if is_of_evaluations(panel))]
        shown = [one for one in panels if not one.series.keys().isdisjoint(columns)]
        curves += [Plot(one.title, one.note, svg_of(draw(columns, one))) for one in shown]
        if not shown:
            absent.append(panel.title)
    idle = idle_over_run(columns)
    idle_curves = []
    for one in idle:
        idle_curves.append(Plot(f"Idle: {one.executor}", one.knob, svg_of(draw_idle(columns, one))))
    config = run_dir / "config.yaml"
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": COMPACT}
    return environment.get_template("report.html").render(
        title=run_dir.name,
        heading=run_dir.resolve().name,
        # Our own files: nothing of a run is in them.
        style=Markup((_HERE / "viewer.css").read_text()),
        script=Markup((_HERE / "viewer.js").read_text()),
        facts=facts(columns),
        alarms=alarms_of(run),
        idle=idle,
        group_fields=GROUP_FIELDS,
        samples=None if is_supervised else fitting(run.samples),
        num_samples=len(run.samples),
        curves=curves,
        absent=absent,
        idle_curves=idle_curves,
        config=config.read_text() if config.is_file() else None,
    )


def fitting(samples: Sequence[Shown]) -> list[Shown]:
    """Return the samples, or evenly spread ones if all are more than MOST_BYTES of JSON."""
    kept = list(samples)
    while len(kept) > 1 and len(json.dumps(kept, separators=COMPACT)) > MOST_BYTES:
        kept = kept[::-1][::2][::-1]  # the newest stays
    return kept


def svg_of(figure: Figure) -> str:
    """Return a plot as an SVG image in base64."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def facts(columns: Columns) -> list[tuple[str, str]]:
    """Return the run in a few lines: (name, formatted value), only what was measured."""
    found = [("steps", f"{columns['step'][-1]:.0f}")]

    def known(column: str) -> np.ndarray:
        values = columns.get(column, np.empty(0))
        return values[~np.isnan(values)]

    def fact(name: str, column: str, reduce: Callable[[np.ndarray], float], spec: str) -> None:
        if column in columns:
            found.append((name, format(reduce(known(column)), spec)))

    fact("wall time, s", "time/wall_s", np.max, ".1f")
    for name in (OWN, *sets_of(columns)):
        evaluated = known(column_of(name, EVALUATED))
        accuracy = known(column_of(name, ACCURACY))
        where = f", {name}" if name else ""
        if len(accuracy) and len(evaluated) in (0, len(accuracy)):
            found.append((f"accuracy{where}", f"{accuracy[0]:.1%} → {accuracy[-1]:.1%}"))
        elif len(evaluated):
            change = f"{evaluated[0]:.4g} → {evaluated[-1]:.4g}"
            found.append((f"reward, held-out prompts{where}", change))
    fact("s a step, median", "time/step_s", np.median, ".3g")
    fact("generated tokens/s, median", "generator/tokens_per_s", np.median, ",.0f")
    fact("lag, mean", "lag/mean", np.mean, ".2f")
    fact("lag, max", "lag/max", np.max, ".0f")
    fact("raw ratio, max", "ratio/max", np.max, ".3g")
    fact("capped tokens", "ratio/capped_fraction", np.mean, ".2%")
    fact("padding computed", "packing/padding_fraction", np.mean, ".1%")
    fact("microbatch budget unused", "packing/unused_budget_fraction", np.mean, ".1%")
    fact("reward errors, worst step", "reward/error_rate", np.max, ".1%")
    streamed = streaming_verdict(columns)
    if streamed is not None:
        found.append(("streaming to the scorer", streamed))
    fact("weights a publish, MB", "weights/bytes", lambda sizes: np.median(sizes) / 1e6, ".1f")
    fact("trainer − generator logprobs, max", "parity/logprob_diff_max", np.max, ".2g")
    return found


def idle_over_run(columns: Columns) -> list[Idle]:
    """Return the idle shares of the whole run by cause: the mean over its rows, weighted by the
    time of each row.
    """
    wall_s = np.nan_to_num(columns.get("time/wall_s", columns["step"]))
    row_s = np.diff(wall_s, prepend=0).clip(min=1e-9)
    counters = {}
    for name, share in columns.items():
        executor, is_idle, cause = name.partition("/idle_fraction")
        if is_idle:
            # An evaluation-only row and a row without a count carry no idle share.
            counted = ~np.isnan(share)
            idle_s = np.sum(share[counted] * row_s[counted])
            counters[f"{executor}/idle_s{cause}"] = idle_s
            if not cause:
                counters[f"{executor}/busy_s"] = np.sum(row_s[counted]) - idle_s
    return idle_shares(counters)


def streaming_verdict(columns: Columns) -> str | None:
    """Say whether reading completions while they are sampled paid (None without reward.stream):
    the share of tokens that were read early, the wait after the end beside the time that reading a
    whole completion takes, and which key to turn.
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
    """Return the seconds in which a scorer reads the mean completion, at the mean pace of all
    scorers; None if unknown.
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


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, or 2 for what cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m llamarl.observe.report", description="Write one HTML page about a run."
    )
    parser.add_argument("run_dir")
    parser.add_argument("-o", "--out", help="default: RUN_DIR/report.html")
    arguments = parser.parse_args(argv)
    try:
        print(f"wrote {write_report(arguments.run_dir, arguments.out)}")
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
