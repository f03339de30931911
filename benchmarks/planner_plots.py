"""The plot of benchmarks/planner.py: predicted over measured, of every cell."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

MARGIN = 0.15
LAG = 0.2
DPI = 110
MIB = 1 << 20
Y_TICKS = (0.3, 0.5, 0.7, 0.85, 1, 1.15, 1.4, 2, 4)
X_TICKS = {1.0: (0.05, 0.1, 0.2, 0.5, 1), MIB: (400, 600, 800, 1200)}
COLOURS = {"tiny": "#1f77b4", "12.6 M": "#d62728"}
MARKS = {True: "o", False: "^"}  # synchronous or not


class Compared(Protocol):
    """A cell as it is drawn."""

    model: str
    ranks: int
    is_synchronous: bool
    is_held_out: bool
    step_s: float
    fit_s: float
    probe_s: float
    held: int
    fit_held: int
    lag: float
    fit_lag: float


def draw(rows: list[Compared], file: Path) -> None:
    """Write the picture: steps by the fit and by the probe, memory, and lag."""
    figure, axes = plt.subplots(1, 4, figsize=(15, 4.4), layout="constrained")
    held_out = [row for row in rows if row.is_held_out]
    _ratios(axes[0], held_out, "step_s", "fit_s", "s a step, measured", "fit, held-out cells")
    _ratios(axes[1], rows, "step_s", "probe_s", "s a step, measured", "probe, all cells")
    _ratios(axes[2], held_out, "held", "fit_held", "MiB of a rank, measured", "memory", MIB)
    _lags(axes[3], [row for row in held_out if not row.is_synchronous])
    handles = []
    for model, colour in COLOURS.items():
        for is_synchronous, mark in MARKS.items():
            how = "synchronous" if is_synchronous else "asynchronous"
            (line,) = axes[0].plot([], [], mark, color=colour, label=f"{model}, {how}")
            handles.append(line)
    good = sum(abs(row.fit_s / row.step_s - 1) <= MARGIN for row in held_out)
    alone = sum(abs(row.probe_s / row.step_s - 1) <= MARGIN for row in rows)
    figure.suptitle(
        f"A fit of other runs foretells {good} of {len(held_out)} held-out steps within 15 %; a "
        f"probe alone {alone} of {len(rows)} (filled: two ranks, hollow: three)",
        fontsize=10,
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(file, dpi=DPI)
    plt.close(figure)


def _ratios(
    ax: Axes, rows: list[Compared], true: str, ours: str, x: str, what: str, unit: float = 1.0
) -> None:
    """Draw predicted over measured, both axes by their logarithm, with the margin as a band."""
    good = 0
    for row in rows:
        ratio = getattr(row, ours) / getattr(row, true)
        good += abs(ratio - 1) <= MARGIN
        _point(ax, row, getattr(row, true) / unit, ratio)
    ax.axhspan(1 - MARGIN, 1 + MARGIN, color="#2ca02c", alpha=0.15)
    ax.axhline(1, color="#444", linewidth=0.8)
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis, ticks in ((ax.yaxis, Y_TICKS), (ax.xaxis, X_TICKS[unit])):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_ylim(0.27, 4.4)
    ax.set_xlabel(x, fontsize=9)
    ax.set_ylabel("predicted / measured", fontsize=9)
    ax.set_title(f"{what}: {good} of {len(rows)} within 15 %", fontsize=9)
    ax.grid(alpha=0.3)


def _lags(ax: Axes, rows: list[Compared]) -> None:
    good = 0
    for row in rows:
        good += abs(row.fit_lag - row.lag) <= LAG
        _point(ax, row, row.lag, row.fit_lag)
    ax.fill_between([0, 2.5], [-LAG, 2.5 - LAG], [LAG, 2.5 + LAG], color="#2ca02c", alpha=0.15)
    ax.plot([0, 2.5], [0, 2.5], color="#444", linewidth=0.8)
    ax.set_xlim(0, 2.5)
    ax.set_ylim(0, 2.5)
    ax.set_xlabel("mean lag in steps, measured", fontsize=9)
    ax.set_ylabel("predicted", fontsize=9)
    ax.set_title(f"lag: {good} of {len(rows)} within {LAG}", fontsize=9)
    ax.grid(alpha=0.3)


def _point(ax: Axes, row: Compared, x: float, y: float) -> None:
    """Draw a cell: filled with two ranks, hollow with three."""
    face = COLOURS[row.model] if row.ranks == 2 else "none"
    ax.plot(
        x,
        y,
        MARKS[row.is_synchronous],
        color=COLOURS[row.model],
        markerfacecolor=face,
        markersize=6,
    )
