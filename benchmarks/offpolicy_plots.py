"""The plots of benchmarks/offpolicy.py."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from offpolicy_results import TARGETS, Curve, accuracies, grid, settled_lag, soonest_first, steps_to

WIDTH = 3.6  # inches a panel
HEIGHT = 2.9
DPI = 110
LEGEND = 0.45  # inches


def plot(study: str, curves: list[Curve], folder: Path) -> Path | None:
    """A study's plot in folder/offpolicy_STUDY.png; None: it has none."""
    draw = {"search": None, "table": _losses, "tba": _against_time}.get(study, _panels)
    if draw is None:
        return None
    figure = draw(study, curves)
    file = folder / f"offpolicy_{study}.png"
    figure.savefig(file, dpi=DPI)
    plt.close(figure)
    return file


def _figure(count: int) -> tuple[plt.Figure, list[Axes]]:
    columns = min(3, count)
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(WIDTH * columns, HEIGHT * rows + LEGEND),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for ax in axes.flat:
        ax.grid(alpha=0.3)
        ax.tick_params(labelsize=8)
    for ax in axes.flat[count:]:
        ax.axis("off")
    return figure, list(axes.flat[:count])


def _finish(figure: plt.Figure, axes: list[Axes], x: str) -> plt.Figure:
    for ax in axes:
        ax.set_xlabel(x, fontsize=8)
    axes[0].set_ylabel("held-out accuracy", fontsize=8)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return figure


def _panels(study: str, curves: list[Curve]) -> plt.Figure:
    """Held-out accuracy against optimizer updates, a panel a setting: mean and range over seeds."""
    names, panels, cells = grid(curves)
    figure, axes = _figure(len(panels))
    for ax, panel in zip(axes, panels):
        for name, colour in zip(names, plt.get_cmap("tab10").colors):
            if (name, panel) in cells:
                _band(ax, cells[name, panel], name, colour)
        runs = itertools.chain.from_iterable(c.runs for c in curves if c.case.panel == panel)
        lags = [settled_lag(run) for run in runs]
        ax.set_title(
            f"{panel} (reached: {statistics.mean(lags):.1f})" if study == "lag" else panel,
            fontsize=9,
        )
    return _finish(figure, axes, "optimizer updates")


def _band(ax: Axes, curve: Curve, name: str, colour: tuple) -> None:
    by_step = [dict(accuracies(run.rows)) for run in curve.runs]
    steps = sorted(set.intersection(*(set(found) for found in by_step)))
    values = []
    for step in steps:
        values.append([found[step] for found in by_step])
    x = [s * curve.case.updates_a_step for s in steps]
    ax.plot(x, [statistics.mean(v) for v in values], color=colour, label=name, lw=1.5)
    ax.fill_between(
        x, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15, lw=0
    )


def _against_time(study: str, curves: list[Curve]) -> plt.Figure:
    """Held-out accuracy against steps and wall seconds, a line a seed: each ends where it reaches
    the target.
    """
    figure, axes = _figure(2)
    for ax, key, title in zip(axes, ("step", "time/evaluated_s"), ("steps", "seconds, wall")):
        for curve, colour in zip(curves, plt.get_cmap("tab10").colors):
            for i, run in enumerate(curve.runs):
                rows = [r for r in run.rows if r.get("eval/accuracy") is not None]
                label = None if i else curve.case.curve
                ax.plot(
                    [r[key] for r in rows],
                    [r["eval/accuracy"] for r in rows],
                    color=colour,
                    lw=1,
                    label=label,
                )
        ax.set_title(title, fontsize=9)
    return _finish(figure, axes, "")


def _losses(study: str, curves: list[Curve]) -> plt.Figure:
    """Steps and CPU seconds to the last target, a row a loss, a dot a seed; none where it was not
    reached.
    """
    figure, axes = _figure(2)
    figure.set_size_inches(2 * WIDTH, HEIGHT * 1.4)
    ordered = sorted(curves, key=soonest_first, reverse=True)
    for y, curve in enumerate(ordered):
        reached = [run for run in curve.runs if steps_to(run.rows, TARGETS[-1]) < float("inf")]
        axes[0].plot(
            [steps_to(run.rows, TARGETS[-1]) for run in reached],
            [y] * len(reached),
            "o",
            color="C0",
            alpha=0.6,
        )
        axes[1].plot([run.cpu_s for run in reached], [y] * len(reached), "o", color="C0", alpha=0.6)
    axes[0].set_yticks(range(len(ordered)), [c.case.curve for c in ordered], fontsize=8)
    for ax, what in zip(axes, ("steps", "CPU seconds")):
        ax.set_xlabel(f"{what} to {TARGETS[-1]:.0%}", fontsize=8)
        ax.set_xlim(left=0)
    return figure
