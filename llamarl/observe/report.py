"""One self-contained HTML page about a run:  python -m llamarl.observe.report RUN_DIR [-o FILE]

Reads RUN_DIR/metrics.jsonl (and config.yaml, if there), also while the run goes on. Curves are
embedded SVG images; the page loads nothing. To add a curve, add a Panel.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

import numpy as np

from llamarl.observe.rates import Idle, largest_first
from llamarl.observe.rows import ACCURACY, EVALUATED, FILE_NAME, Row
from llamarl.observe.sinks import read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTH_FROM = 80  # rows; shorter runs are shown as they are
COLOURS = ("#3366cc", "#dd7711", "#339955", "#aa4499", "#888888", "#bb3333", "#117777")


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot over steps, of some columns of the rows."""

    title: str
    series: tuple[tuple[str, str], ...]  # (column, label)
    note: str = ""  # how to read it
    log: bool = False
    percent: bool = False
    smooth: bool = True  # where there are many rows
    from_zero: bool = True


PANELS = (
    Panel(
        "Reward",
        (("reward/mean", "mean"), ("reward/std", "std")),
        "Over a step's completions.",
        from_zero=False,
    ),
    Panel(
        "Evaluation",
        (
            (EVALUATED, "greedy"),
            ("eval/pass_at_1_sampled", "sampled"),
            ("eval/pass_at_k", "best of eval.num_samples"),
        ),
        "Mean reward over held-out prompts.",
        smooth=False,
        from_zero=False,
    ),
    Panel("Loss", (("loss/value", ""),), "A policy-gradient loss need not fall.", from_zero=False),
    Panel("Gradient norm", (("grad_norm", "before clipping"),)),
    Panel("KL to the reference", (("kl/ref", "nats a token"),)),
    Panel(
        "KL to the generator",
        (("kl/generator", "nats a token"),),
        "The price of asynchrony: rises with lag.",
    ),
    Panel(
        "Entropy",
        (("entropy", "nats a token"),),
        "A fall to 0 early in the run means lost exploration.",
    ),
    Panel(
        "Ratio, raw",
        (("ratio/max", "max"), ("ratio/mean", "mean")),
        "Before capping. A mean far from 1: too much lag, or the trainer and the generator "
        "disagree on logprobs.",
        log=True,
        smooth=False,
    ),
    Panel("Ratio, capped share", (("ratio/capped_fraction", "of trained tokens"),), percent=True),
    Panel(
        "Lag",
        (("lag/max", "max"), ("lag/mean", "mean")),
        "Steps (batches) between sampling and training.",
        smooth=False,
    ),
    Panel(
        "Trained tokens by lag",
        tuple(
            (f"lag/tokens/{lags}", f"{lags} steps")
            for lags in ("0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64+")
        ),
        "What a replay buffer's most-on-policy probability and size make of it.",
        percent=True,
    ),
    Panel(
        "Replay buffer, age",
        (("buffer/age_max", "max"), ("buffer/age_mean", "mean")),
        "Steps, of what it holds.",
        smooth=False,
    ),
    Panel("Completion length", (("completion/length_mean", "tokens, mean"),)),
    Panel(
        "Truncated completions",
        (
            ("completion/truncated_fraction", "by max_new_tokens"),
            ("completion/deadline_truncated_fraction", "by time, not trained on"),
        ),
        percent=True,
    ),
    Panel("Generated tokens/s", (("generator/tokens_per_s", ""),)),
    Panel("Step time", (("time/step_s", "seconds"), ("time/wait_for_data_s", "waiting for data"))),
    Panel("Reward errors", (("reward/error_rate", ""),), percent=True, smooth=False),
)

STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#222;max-width:1240px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em;margin-bottom:.2em} h2{font-size:1.15em;margin:1.6em 0 .5em}
table{border-collapse:collapse}
td,th{padding:.25em 1.2em .25em 0;text-align:left;vertical-align:top;font-weight:normal}
th{color:#777} td.number{text-align:right;font-variant-numeric:tabular-nums}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(430px,1fr));gap:1em 1.4em}
figure{margin:0} figure img{width:100%} figcaption,.quiet{color:#777;font-size:.87em}
pre{background:#f6f6f6;padding:1em;overflow:auto;font-size:.87em}
"""


def write_report(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Write the page (default RUN_DIR/report.html) and return its path.

    FileNotFoundError or ValueError, saying what to do, if there are no rows or matplotlib is
    missing.
    """
    run_dir = Path(run_dir)
    file = run_dir / FILE_NAME
    if not file.is_file():
        raise FileNotFoundError(
            f"{file}: no such file; RUN_DIR is the run_dir that the training run printed"
        )
    rows = read_rows(file)
    if not rows:
        raise ValueError(f"{file} holds no rows yet; wait for the first step")
    out = Path(out) if out is not None else run_dir / "report.html"
    out.write_text(page(run_dir, rows), encoding="utf-8")
    return out


def page(run_dir: Path, rows: list[Row]) -> str:
    """The HTML of a run."""
    measured = [panel for panel in PANELS if is_measured(rows, panel)]
    absent = [panel.title for panel in PANELS if panel not in measured]
    idle = idle_over_run(rows)
    figures = [figure_html(draw(rows, panel), panel.title, panel.note) for panel in measured]
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>"
        f"<title>{html.escape(run_dir.name)}</title><style>{STYLE}</style>",
        f"<h1>{html.escape(run_dir.resolve().name)}</h1>",
        table_html(facts(rows)),
        "<h2>Where the time went</h2>" + idle_html(idle),
        "<h2>Curves</h2>" + panels_html(figures),
    ]
    if absent:
        names = html.escape(", ".join(absent))
        parts.append(f"<p class='quiet'>Not measured in this run: {names}.</p>")
    if idle:
        figures = [
            figure_html(draw_idle(rows, one), f"Idle: {one.executor}", one.knob) for one in idle
        ]
        parts.append("<h2>Idle share by cause</h2>" + panels_html(figures))
    config = run_dir / "config.yaml"
    if config.is_file():
        text = html.escape(config.read_text())
        details = f"<details><summary>config.yaml</summary><pre>{text}</pre></details>"
        parts.append("<h2>Config</h2>" + details)
    return "\n".join(parts) + "\n"


def facts(rows: list[Row]) -> list[tuple[str, str]]:
    """The run in a few lines: (name, formatted value), only what was measured."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None:
                columns.setdefault(name, []).append(value)
    found = [("steps", str(rows[-1]["step"]))]

    def fact(name: str, column: str, reduce: Callable[[list[float]], float], spec: str) -> None:
        if column in columns:
            found.append((name, format(reduce(columns[column]), spec)))

    fact("wall time, s", "time/wall_s", max, ".1f")
    evaluated = columns.get(EVALUATED, [])
    accuracy = columns.get(ACCURACY, [])
    if evaluated and len(accuracy) == len(evaluated):
        found.append(("accuracy", f"{accuracy[0]:.1%} → {accuracy[-1]:.1%}"))
    elif evaluated:
        change = f"{evaluated[0]:.4g} → {evaluated[-1]:.4g}"
        found.append(("reward, held-out prompts", change))
    fact("s a step, median", "time/step_s", median, ".3g")
    fact("generated tokens/s, median", "generator/tokens_per_s", median, ",.0f")
    fact("lag, mean", "lag/mean", fmean, ".2f")
    fact("lag, max", "lag/max", max, ".0f")
    fact("raw ratio, max", "ratio/max", max, ".3g")
    fact("capped tokens", "ratio/capped_fraction", fmean, ".2%")
    fact("padding computed", "packing/padding_fraction", fmean, ".1%")
    fact("microbatch budget unused", "packing/unused_budget_fraction", fmean, ".1%")
    fact("reward errors, worst step", "reward/error_rate", max, ".1%")
    fact("weights a publish, MB", "weights/bytes", lambda sizes: median(sizes) / 1e6, ".1f")
    fact("trainer − generator logprobs, max", "parity/logprob_diff_max", max, ".2g")
    return found


def idle_over_run(rows: list[Row]) -> list[Idle]:
    """The idle shares of the whole run by cause: those of its rows, weighted with the time that
    each row stands for.
    """
    suffix = "/idle_fraction"
    names = set().union(*rows)
    wall_s = np.nan_to_num(column_of(rows, "time/wall_s"))
    row_s = np.diff(wall_s, prepend=0).clip(min=1e-9)
    result = []
    for column in sorted(name for name in names if name.endswith(suffix)):
        share = column_of(rows, column)
        # An evaluation-only row and a row without a count carry no idle share, and so no weight.
        weight = np.where(np.isnan(share), 0, row_s)
        if not weight.any():
            continue
        prefix = f"{column}/"
        causes = {
            name.removeprefix(prefix): _weighted_mean(column_of(rows, name), weight)
            for name in names
            if name.startswith(prefix)
        }
        executor = column.removesuffix(suffix)
        result.append(Idle(executor, _weighted_mean(share, weight), largest_first(causes)))
    return result


def _weighted_mean(values: np.ndarray, weight: np.ndarray) -> float:
    return float(np.average(np.nan_to_num(values), weights=weight))


def is_measured(rows: list[Row], panel: Panel) -> bool:
    """Whether any column of a panel has a value in any row."""
    return any(has_values(rows, column) for column, _ in panel.series)


def has_values(rows: list[Row], column: str) -> bool:
    """Whether a column has a value in any row."""
    return any(row.get(column) is not None for row in rows)


def column_of(rows: list[Row], column: str) -> np.ndarray:
    """A column [rows] in float64, NaN where a row has no value."""
    values = (row.get(column) for row in rows)
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    """The centred mean over `width` (odd) values, over fewer at the ends; NaNs count for
    nothing.
    """
    known = ~np.isnan(values)
    window = np.ones(width)
    half = width // 2
    total = np.convolve(np.where(known, values, 0), window)[half : half + len(values)]
    count = np.convolve(known.astype(float), window)[half : half + len(values)]
    return np.where(count > 0.5, total / np.maximum(count, 1), np.nan)


def draw(rows: list[Row], panel: Panel) -> Figure:
    """The plot of one panel."""
    figure, axes = _figure(panel.percent)
    steps = column_of(rows, "step")
    shown = [(column, label) for column, label in panel.series if has_values(rows, column)]
    for (column, label), colour in zip(shown, COLOURS):
        values = column_of(rows, column)
        known = ~np.isnan(values)
        num_known = int(known.sum())
        if panel.smooth and num_known >= SMOOTH_FROM:
            axes.plot(steps[known], values[known], color=colour, linewidth=0.6, alpha=0.3)
            values = moving_mean(values, smoothing_width(num_known))
        axes.plot(
            steps[known],
            values[known],
            color=colour,
            linewidth=1.5,
            marker=marker_of(num_known),
            markersize=3,
            label=label,
        )
    if panel.log:
        axes.set_yscale("log")
    elif panel.from_zero:
        low, high = axes.dataLim.intervaly
        axes.set_ylim(min(0, low * 1.05), high * 1.05 if high > 0 else 1)
    if len(shown) > 1:
        axes.legend(frameon=False, loc="best")
    else:
        axes.set_ylabel(shown[0][1])
    return figure


def smoothing_width(num_values: int) -> int:
    """Over how many values a curve of so many is smoothed: an odd number, about a twentieth."""
    return min(101, num_values // 40 * 2 + 1)


def marker_of(num_values: int) -> str:
    """How matplotlib marks each of so many values: few by a dot, many not at all."""
    return "o" if num_values <= 40 else ""


def draw_idle(rows: list[Row], idle: Idle) -> Figure:
    """An executor's idle share over steps, its causes stacked."""
    figure, axes = _figure(percent=True)
    share = column_of(rows, f"{idle.executor}/idle_fraction")
    known = ~np.isnan(share)
    steps = column_of(rows, "step")[known]
    causes = [cause for cause, mean in idle.causes if mean > 0]
    if causes:
        shares = [
            np.nan_to_num(column_of(rows, f"{idle.executor}/idle_fraction/{cause}")[known])
            for cause in causes
        ]
        axes.stackplot(steps, *shares, labels=causes, colors=COLOURS, alpha=0.75)
    axes.plot(steps, share[known], color="#222", linewidth=1, label="idle")
    axes.set_ylim(0, 1)
    axes.legend(frameon=False, loc="best")
    return figure


def _figure(percent: bool) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(5.4, 2.5), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    return figure, axes


def figure_html(figure: Figure, title: str, note: str) -> str:
    """The plot as an SVG image inside the page, under its title."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "llamarl"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    caption = f"<figcaption>{html.escape(note)}</figcaption>" if note else ""
    title = html.escape(title)
    image = f"<img alt='{title}' src='data:image/svg+xml;base64,{data}'>"
    return f"<figure><strong>{title}</strong>{image}{caption}</figure>"


def panels_html(figures: list[str]) -> str:
    """Figures side by side."""
    return "<div class='panels'>" + "".join(figures) + "</div>"


def table_html(rows: list[tuple[str, str]]) -> str:
    """A table of (name, value) rows."""
    cells = "".join(
        f"<tr><th>{html.escape(name)}</th><td class='number'>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table>{cells}</table>"


def idle_html(idle: list[Idle]) -> str:
    """A line an executor: idle share, causes, and the knob to turn for the largest."""
    if not idle:
        return "<p class='quiet'>No busy or idle time was counted.</p>"
    lines = []
    for one in idle:
        texts = (one.executor, f"{one.share:.0%}", one.shown_causes or "-", one.knob or "-")
        cells = "".join(f"<td>{html.escape(text)}</td>" for text in texts)
        lines.append(f"<tr>{cells}</tr>")
    titles = ("executor", "idle", "waiting for", "to shorten the longest wait")
    head = "<tr>" + "".join(f"<th>{title}</th>" for title in titles) + "</tr>"
    return f"<table>{head}{''.join(lines)}</table>"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, or 2 for what cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m llamarl.observe.report", description="Write one HTML page about a run."
    )
    parser.add_argument("run_dir")
    parser.add_argument("-o", "--out", help="default: RUN_DIR/report.html")
    arguments = parser.parse_args(argv)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("the report needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    try:
        print(f"wrote {write_report(arguments.run_dir, arguments.out)}")
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
