"""The picture of a simulated run: what each station did when, and how old its data was."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from llamarl.observe.report import COLOURS, LOOK
from llamarl.planner.world import SimulationResult, Track

MAX_STEPS = 8  # the last ones, in the time line
WORKS = ("decode", "swap", "score", "train", "publish")
WAIT = "#e8e8e8"
DPI = 110


def draw(result: SimulationResult, file: Path) -> None:
    """Write the picture of a run; the file's name says in which form. ValueError if it cannot be
    written in that.
    """
    if file.suffix not in (".svg", ".png"):
        raise ValueError(f"{file}: need a name that ends in .svg or .png")
    with matplotlib.rc_context(LOOK):
        figure = picture(result)
        metadata = {"Date": None} if file.suffix == ".svg" else None
        figure.savefig(file, dpi=DPI, metadata=metadata)


def picture(result: SimulationResult) -> Figure:
    """Return the time line of the last steps above the shares of completions by lag."""
    height = 1.2 + 0.3 * len(result.tracks)
    figure = Figure(figsize=(9.0, height + 2.4), layout="constrained")
    line, lags = figure.subplots(2, 1, height_ratios=[height, 2.0])
    _draw_line(line, result)
    _draw_lags(lags, result)
    return figure


def _draw_line(axes: Axes, result: SimulationResult) -> None:
    """Draw a row for each station: its work in colour, its waits grey, with the cause if there is
    room for the word.
    """
    end_s = max((track.spans[-1].end_s for track in result.tracks if track.spans), default=0.0)
    begin_s = end_s - sum(result.steps_s[-MAX_STEPS:])
    shown = set()
    for row, track in enumerate(reversed(result.tracks)):
        shown |= _draw_track(axes, track, row, begin_s, end_s)
    axes.set_yticks(range(len(result.tracks)), [track.station for track in reversed(result.tracks)])
    axes.set_xlim(begin_s, end_s)
    axes.set_xlabel("seconds")
    axes.grid(axis="y", visible=False)
    for name, colour in zip(WORKS, COLOURS):
        if name in shown:
            axes.bar(0, 0, color=colour, label=name)
    axes.bar(0, 0, color=WAIT, label="waits")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(shown) + 1)


def _draw_track(axes: Axes, track: Track, row: int, begin_s: float, end_s: float) -> set[str]:
    """Draw a station's spans that are in sight. Return the names of its works."""
    colours = dict(zip(WORKS, COLOURS))
    bars: dict[str, list[tuple[float, float]]] = {}
    names = set()
    for span in track.spans:
        if span.end_s <= begin_s:
            continue
        seconds = span.end_s - span.begin_s
        colour = WAIT if span.is_wait else colours[span.name]
        bars.setdefault(colour, []).append((span.begin_s, seconds))
        if not span.is_wait:
            names.add(span.name)
        elif seconds > (end_s - begin_s) / 16:
            middle_s = max(span.begin_s, begin_s) / 2 + span.end_s / 2
            axes.text(middle_s, row, span.name, ha="center", va="center", fontsize=7)
    for colour, places in bars.items():
        axes.broken_barh(places, (row - 0.4, 0.8), color=colour, linewidth=0)
    return names


def _draw_lags(axes: Axes, result: SimulationResult) -> None:
    """Draw the share of each lag, the simulated mean and that of the closed form."""
    total = sum(result.lags.values())
    shares = [count / total for count in result.lags.values()]
    axes.bar(list(result.lags), shares, color=COLOURS[0], width=0.8)
    mean = f"mean {result.mean_lag:.2f}"
    axes.axvline(result.mean_lag, color=COLOURS[1], label=mean)
    form = result.closed_form.lag
    axes.axvline(form, color=COLOURS[3], linestyle="--", label=f"1 + overcommit / B = {form:.2f}")
    axes.set_xlim(-0.6, result.settings.max_lag + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.set_xlabel("lag, steps")
    axes.set_ylabel("completions")
    axes.legend()
