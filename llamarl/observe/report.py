"""The report: one self-contained HTML page about a run.

    python -m llamarl.observe.report RUN_DIR [-o FILE]

Reads RUN_DIR/metrics.jsonl (and samples.jsonl, outcome.json and config.yaml, if there), also while
the run goes on. Alarms come first, then who was idle, samples (viewer.py), and curves as embedded
SVG images; the page loads nothing. To add a curve, add a Panel.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from llamarl.observe.alarms import Alarm, Observed, alarms_of
from llamarl.observe.ended import FILE_NAME as OUTCOME_NAME
from llamarl.observe.rates import ACCURACY, EVALUATED, Idle, Row, idle_shares, sets_of
from llamarl.observe.rows import FILE_NAME
from llamarl.observe.samples import FILE_NAME as SAMPLES_NAME
from llamarl.observe.samples import read_samples
from llamarl.observe.sinks import read_rows
from llamarl.observe.streaming import Columns, streaming_verdict
from llamarl.observe.viewer import POLICY, THEME, samples_html, style
from llamarl.words.choices import OWN, column_of

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

SMOOTH_FROM = 80  # values; shorter curves are shown as they are
BINS = 1000  # of a long curve, which is drawn by the least and the greatest value of each
COLOURS = ("#3366cc", "#dd7711", "#339955", "#aa4499", "#888888", "#bb3333", "#117777")
LOOK: dict[RcKeyType, object] = {  # of every plot, as matplotlib's settings
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": "#eeeeee",
    "legend.edgecolor": "none",
    "legend.framealpha": 0.6,
    "legend.loc": "upper right",  # to find the best place takes long, and differs between curves
    "lines.markersize": 3,
    "svg.fonttype": "none",
    "svg.hashsalt": "llamarl",
}


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot over steps, of some columns of the rows."""

    title: str
    series: dict[str, str]  # the label of each column
    note: str = ""  # how to read it
    log: bool = False
    percent: bool = False
    smooth: bool = True  # where there are many rows
    band: tuple[str, str] | None = None  # columns: the first series' least and greatest
    from_zero: bool = True


PANELS = (
    Panel(
        "Reward",
        {"reward/mean": "mean", "reward/std": "std"},
        "Over a step's completions.",
        from_zero=False,
    ),
    Panel(
        "Evaluation",
        {
            EVALUATED: "greedy",
            "eval/pass_at_1_sampled": "sampled",
            "eval/pass_at_k": "best of eval.num_samples",
        },
        "Mean reward over held-out prompts.",
        smooth=False,
        from_zero=False,
    ),
    Panel(
        "Gold score",
        {"eval/gold": "completions", "eval/gold_references": "what they are compared with"},
        "Mean over held-out prompts, by a scorer that nothing is trained on.",
        smooth=False,
        from_zero=False,
    ),
    Panel(
        "Win rate",
        {
            "eval/win_rate": "by gold; shaded: 95 %",
            "eval/win_rate_length_controlled": "at equal lengths",
        },
        "Held-out completions that gold prefers to the rows' answers; a tie is half a win.",
        percent=True,
        smooth=False,
        band=("eval/win_rate_low", "eval/win_rate_high"),
    ),
    Panel(
        "Perplexity under the base model",
        {"eval/perplexity": "of held-out completions"},
        "Rises as the policy moves away from eval.base.",
        smooth=False,
        from_zero=False,
    ),
    Panel(
        "Length of held-out completions",
        {"eval/length_mean": "tokens, mean"},
        smooth=False,
    ),
    Panel("Loss", {"loss/value": ""}, "A policy-gradient loss need not fall.", from_zero=False),
    Panel("Gradient norm", {"grad_norm": "before clipping"}),
    Panel("KL to the reference", {"kl/ref": "nats a token"}),
    Panel(
        "KL to the generator",
        {"kl/generator": "nats a token"},
        "The price of asynchrony: rises with lag.",
    ),
    Panel(
        "Entropy",
        {"entropy": "nats a token"},
        "A fall to 0 early in the run means lost exploration.",
    ),
    Panel(
        "Ratio, raw",
        {"ratio/max": "max", "ratio/mean": "mean"},
        "Before capping. A mean far from 1: too much lag, or the trainer and the generator "
        "disagree on logprobs.",
        log=True,
        smooth=False,
    ),
    Panel("Ratio, capped share", {"ratio/capped_fraction": "of trained tokens"}, percent=True),
    Panel(
        "Lag",
        {"lag/max": "max", "lag/mean": "mean"},
        "Steps (batches) between sampling and training.",
        smooth=False,
    ),
    Panel(
        "Trained tokens by lag",
        {
            f"lag/tokens/{lags}": f"{lags} steps"
            for lags in ("0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64+")
        },
        "What a replay buffer's most-on-policy probability and size make of it.",
        percent=True,
    ),
    Panel(
        "Replay buffer, age",
        {"buffer/age_max": "max", "buffer/age_mean": "mean", "buffer/age_min": "min"},
        "Steps, of what it holds. A least age that rises: no newer data comes.",
        smooth=False,
    ),
    Panel("Completion length", {"completion/length_mean": "tokens, mean"}),
    Panel(
        "Truncated completions",
        {
            "completion/truncated_fraction": "by max_new_tokens",
            "completion/deadline_truncated_fraction": "by time, not trained on",
        },
        percent=True,
    ),
    Panel(
        "Successful attacks",
        {"eval/success": "sampled in evaluations", "reward/success": "of the generator"},
        "The share of attacks whose replies have a mean score above victim.threshold.",
        percent=True,
    ),
    Panel("Generated tokens/s", {"generator/tokens_per_s": ""}),
    Panel("Step time", {"time/step_s": "seconds", "time/wait_for_data_s": "waiting for data"}),
    Panel("Reward errors", {"reward/error_rate": ""}, percent=True, smooth=False),
)

SUPERVISED = "examples/trained"  # the column that says of a run that it is no RL
SUPERVISED_PANELS = (
    Panel("Loss", {"loss/value": "of a step", "eval/loss": "held out"}),
    Panel(
        "Accuracy",
        {"preference/accuracy": "of a step", "eval/accuracy": "held out"},
        "The share of pairs in which a reward model scores the chosen one higher.",
        percent=True,
    ),
    Panel("Perplexity", {"eval/perplexity": "held out"}, smooth=False),
    Panel("Margin", {"preference/margin": "of a step", "eval/margin": "held out"}, from_zero=False),
    Panel(
        "Scores",
        {
            "preference/score_chosen": "chosen",
            "preference/score_rejected": "rejected",
            "eval/score_std": "held out, std",
        },
        "Only differences are learned: loss.center_coef keeps the mean near 0.",
        from_zero=False,
    ),
    Panel(
        "Reliability",
        {
            f"calibration/accuracy/{sure}": f"{sure} % sure"
            for sure in ("50-55", "60-65", "70-75", "80-85", "90-95", "95-100")
        },
        "Held-out pairs ranked right, by how sure the model was. Below the label: too sure.",
        percent=True,
        smooth=False,
    ),
    Panel("Calibration error", {"eval/calibration_error": "expected"}, percent=True, smooth=False),
    Panel("Gradient norm", {"grad_norm": "before clipping"}),
    Panel("Learning rate", {"lr": ""}, smooth=False),
    Panel("Tokens/s", {"trainer/tokens_per_s": ""}),
    Panel("Step time", {"time/step_s": "seconds"}),
)


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
        outcome=read_outcome(run_dir),
        silent_s=max(0.0, clock() - file.stat().st_mtime),
    )
    out.write_text(page(run_dir, seen), encoding="utf-8")
    return out


def read_outcome(run_dir: Path) -> dict[str, object] | None:
    """Return what a run's outcome.json says; None if there is none that can be read."""
    try:
        outcome = json.loads((run_dir / OUTCOME_NAME).read_text())
    except (OSError, ValueError):
        return None
    return outcome if isinstance(outcome, dict) else None


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


@matplotlib.rc_context(LOOK)
def page(run_dir: Path, run: Observed) -> str:
    """Return the HTML of a run."""
    columns = run.columns
    curves = []
    absent = []
    names = sets_of(columns)
    for panel in SUPERVISED_PANELS if SUPERVISED in columns else PANELS:
        panels = [panel, *(of_set(panel, name) for name in names if is_of_evaluations(panel))]
        shown = [one for one in panels if not one.series.keys().isdisjoint(columns)]
        curves += [figure_html(draw(columns, one), one.title, one.note) for one in shown]
        if not shown:
            absent.append(panel.title)
    idle = idle_over_run(columns)
    rows = [
        f"<tr><th>{escape(name)}</th><td class='number'>{escape(value)}</td></tr>"
        for name, value in facts(columns)
    ]
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'>{POLICY}"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>{escape(run_dir.name)}</title><style>{style()}</style>",
        f"{THEME}<h1>{escape(run_dir.resolve().name)}</h1>",
        f"<table>{''.join(rows)}</table>",
        f"<h2>Alarms</h2>{alarms_html(alarms_of(run))}",
        f"<h2>Where the time went</h2>{idle_html(idle)}",
    ]
    if SUPERVISED not in columns:
        parts.append(f"<h2 id='samples'>Samples</h2>{samples_html(run.samples)}")
    parts.append(f"<h2>Curves</h2>{panels_html(curves)}")
    if absent:
        titles = escape(", ".join(absent))
        parts.append(f"<p class='quiet'>Not measured in this run: {titles}.</p>")
    if idle:
        curves = [
            figure_html(draw_idle(columns, one), f"Idle: {one.executor}", one.knob) for one in idle
        ]
        parts.append(f"<h2>Idle share by cause</h2>{panels_html(curves)}")
    config = run_dir / "config.yaml"
    if config.is_file():
        text = escape(config.read_text())
        details = f"<details><summary>config.yaml</summary><pre>{text}</pre></details>"
        parts.append(f"<h2>Config</h2>{details}")
    return "\n".join(parts) + "\n"


def is_of_evaluations(panel: Panel) -> bool:
    """Whether a panel has a curve of held-out prompts."""
    return any(column.startswith("eval/") for column in panel.series)


def of_set(panel: Panel, name: str) -> Panel:
    """Return the same panel for a set of held-out prompts."""
    series = {}
    for column, label in panel.series.items():
        if column.startswith("eval/"):
            series[column_of(name, column)] = label
    band = None
    if panel.band is not None:
        least, greatest = panel.band
        band = (column_of(name, least), column_of(name, greatest))
    return replace(panel, title=f"{panel.title}: {name}", series=series, band=band)


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
    """Return the idle shares of the whole run by cause: those of its rows, weighted with the time
    that each row stands for.
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


def moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Return the centred mean over `width` (odd) values, over fewer at the ends; NaNs count for
    nothing.
    """
    known = ~np.isnan(values)
    window = np.ones(width)
    total = np.convolve(np.where(known, values, 0), window, mode="same")
    count = np.convolve(known, window, mode="same")
    return np.where(count > 0.5, total / np.maximum(count, 1), np.nan)


def draw(columns: Columns, panel: Panel) -> Figure:
    """Draw the plot of one panel."""
    figure, axes = _figure(panel.percent)
    shown = {column: label for column, label in panel.series.items() if column in columns}
    for (column, label), colour in zip(shown.items(), COLOURS):
        values = columns[column]
        known = ~np.isnan(values)
        steps = columns["step"][known]
        width = smoothing_width(len(steps)) if panel.smooth else 1
        if width > 1:
            places = drawn(values[known])
            axes.plot(steps[places], values[known][places], color=colour, linewidth=0.6, alpha=0.3)
            values = moving_mean(values, width)
        marker = marker_of(len(steps))
        places = drawn(values[known])
        axes.plot(steps[places], values[known][places], color=colour, marker=marker, label=label)
    if panel.band and columns.keys() >= set(panel.band):
        least, greatest = (columns[name] for name in panel.band)
        known = ~np.isnan(least)
        steps = columns["step"][known]
        edges = (least[known], greatest[known])
        places = np.union1d(*map(drawn, edges))
        low, high = (edge[places] for edge in edges)
        axes.fill_between(steps[places], low, high, color=COLOURS[0], alpha=0.15, linewidth=0)
    if panel.log:
        axes.set_yscale("log")
    elif panel.from_zero:
        low, high = axes.dataLim.intervaly
        top = high * 1.05 if high > 0 else 1
        axes.set_ylim(min(0, low * 1.05), top)
    if len(shown) > 1:
        axes.legend()
    else:
        for label in shown.values():
            axes.set_ylabel(label)
    return figure


def smoothing_width(num_values: int) -> int:
    """Return over how many values a curve is smoothed: an odd number, about a twentieth of all; 1
    for a short curve, which is not smoothed.
    """
    if num_values < SMOOTH_FROM:
        return 1
    return min(101, num_values // 40 * 2 + 1)


def drawn(values: np.ndarray) -> np.ndarray:
    """Return the places of the values that are drawn, ascending: all of a short curve; of a long
    one the first, the last, and the least and the greatest of each of BINS bins.
    """
    num_values = len(values)
    if num_values <= 2 * BINS:
        return np.arange(num_values)
    edges = np.linspace(0, num_values, BINS + 1).astype(int)
    places = [0, num_values - 1]
    for begin, end in itertools.pairwise(edges):
        inside = values[begin:end]
        places += [begin + inside.argmin(), begin + inside.argmax()]
    return np.unique(places)


def marker_of(num_values: int) -> str:
    """Return how matplotlib marks each of so many values: few by a dot, many not at all."""
    return "o" if num_values <= 40 else ""


def draw_idle(columns: Columns, idle: Idle) -> Figure:
    """Draw an executor's idle share over steps, its causes stacked."""
    figure, axes = _figure(percent=True)
    column = f"{idle.executor}/idle_fraction"
    share = columns[column]
    known = ~np.isnan(share)
    places = drawn(share[known])
    steps = columns["step"][known][places]
    causes = [cause for cause, mean in idle.causes if mean > 0]
    if causes:
        of_rows = [columns[f"{column}/{cause}"] for cause in causes]
        shares = [np.nan_to_num(values[known][places]) for values in of_rows]
        axes.stackplot(steps, *shares, labels=causes, colors=COLOURS, alpha=0.75)
    axes.plot(steps, share[known][places], color="#222", linewidth=1, label="idle")
    axes.set_ylim(0, 1)
    axes.legend()
    return figure


def _figure(percent: bool) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.4, 2.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    return figure, axes


def figure_html(figure: Figure, title: str, note: str) -> str:
    """Return the plot as an SVG image inside the page, under its title."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    caption = f"<figcaption>{escape(note)}</figcaption>" if note else ""
    title = escape(title)
    image = f"<img alt='{title}' src='data:image/svg+xml;base64,{data}'>"
    return f"<figure><strong>{title}</strong>{image}{caption}</figure>"


def panels_html(figures: list[str]) -> str:
    """Return figures side by side."""
    return f"<div class='panels'>{''.join(figures)}</div>"


def alarms_html(alarms: list[Alarm]) -> str:
    """Return the alarms, each with its figure, its threshold and its remedy."""
    if not alarms:
        return "<p class='quiet'>None.</p>"
    boxes = []
    for alarm in alarms:
        figure = (
            f"{escape(alarm.figure)} <span class='quiet'>(from {escape(alarm.threshold)})</span>"
        )
        box = (
            f"<p><strong>{escape(alarm.title)}</strong>: {figure}</p><p>{escape(alarm.remedy)}</p>"
        )
        boxes.append(f"<div class='alarm' role='alert'>{box}</div>")
    return "".join(boxes)


def idle_html(idle: list[Idle]) -> str:
    """Return a line for each executor: idle share, causes, and the knob to turn for the largest."""
    if not idle:
        return "<p class='quiet'>No busy or idle time was counted.</p>"
    head = "<th>executor</th><th>idle</th><th>waiting for</th><th>to shorten the longest wait</th>"
    lines = [f"<tr>{head}</tr>"]
    for one in idle:
        texts = (one.executor, f"{one.share:.0%}", one.shown_causes or "-", one.knob or "-")
        cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
        lines.append(f"<tr>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


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
