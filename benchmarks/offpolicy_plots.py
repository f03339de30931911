"""The plots of benchmarks/offpolicy.py."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from offpolicy_results import Curve, _grid, accuracies, settled_lag

WIDTH, HEIGHT, DPI = 3.6, 3.0, 110  # inches a panel


def plot(study: str, curves: list[Curve], file: Path) -> None:
    """Held-out accuracy against optimizer updates, a panel a setting, with the range over seeds; `tba` against seconds too."""
    names, panels, cells = _grid(curves)
    if study in ("table", "tba"):
        panels = ["steps", "seconds"]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(WIDTH * columns, HEIGHT * rows), squeeze=False, sharey=True)
    colours = plt.get_cmap("tab20" if len(names) > 10 else "tab10").colors
    for ax, panel in zip(axes.flat, panels):
        for name, colour in zip(names, colours):
            curve = next(c for c in curves if c.case.curve == name) if study in ("table", "tba") else cells.get((name, panel))
            if curve:
                _draw(ax, curve, name, colour, "seconds" if panel == "seconds" else "updates")
        lags = [settled_lag(r) for c in curves if c.case.panel == panel for r in c.runs]
        title = panel if study not in ("lag",) else f"{panel} (reached: {statistics.mean(lags):.1f})"
        ax.set_title(title, fontsize=9)
        ax.set_xlabel("seconds, wall" if panel == "seconds" else "optimizer updates", fontsize=8)
        ax.grid(alpha=0.3)
        ax.tick_params(labelsize=8)
    for ax in axes[:, 0]:
        ax.set_ylabel("held-out accuracy", fontsize=8)
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0.12 if len(names) > 5 else 0.08, 1, 1))
    figure.legend(handles, labels, loc="lower center", ncols=min(5, len(labels)), fontsize=8, frameon=False)
    figure.savefig(file, dpi=DPI)
    plt.close(figure)


def _draw(ax: Axes, curve: Curve, name: str, colour: tuple, against: str) -> None:
    """The mean over seeds with their range where all were evaluated; against seconds, each seed by itself."""
    if against == "seconds":
        for i, run in enumerate(curve.runs):
            rows = [r for r in run.rows if r.get("eval/accuracy") is not None]
            ax.plot(
                [r["time/evaluated_s"] for r in rows],
                [r["eval/accuracy"] for r in rows],
                color=colour,
                lw=1,
                label="" if i else name,
            )
        return
    by_step = [dict(accuracies(run.rows)) for run in curve.runs]
    steps = sorted(set.intersection(*(set(found) for found in by_step)))
    values = [[found[s] for found in by_step] for s in steps]
    x = [s * curve.case.updates_a_step for s in steps]
    ax.plot(x, [statistics.mean(v) for v in values], color=colour, label=name, lw=1.5)
    ax.fill_between(x, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15, lw=0)
