"""The plots of llamarl/observe/compare.py: the pareto plot, and a value over seconds and over
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llamarl.observe.compare import SECONDS, STEP, Variant, band, mean_path, path
from llamarl.observe.report import COLOURS, marker_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = ("-", "--", ":", "-.")  # a further one each time that the colours begin anew
TITLES = {
    "eval/accuracy": "accuracy, held-out prompts",
    "eval/reward": "reward, held-out prompts",
    "reward/mean": "reward of a step's completions",
    SECONDS: "seconds",
    STEP: "step",
    "kl/ref": "KL to the reference, nats a token",
}
LEGEND_WIDTH = 110  # characters that fit one row of a legend


def looks(variants: Sequence[Variant]) -> list[tuple[object, str]]:
    """(colour, line style) of each: dark to light for a sweep over one number; by the label's first
    part and by the rest for one over several keys; else distinct ones.
    """
    import matplotlib

    labels = [variant.label for variant in variants]
    if _is_sweep_over_a_number(labels):
        shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.88, len(labels)))
        return [(tuple(shade), "-") for shade in shades]
    parts = [label.partition(", ") for label in labels]
    firsts = list(dict.fromkeys(first for first, _, _ in parts))
    rests = list(dict.fromkeys(rest for _, _, rest in parts))
    if len(firsts) <= len(COLOURS) and len(rests) <= len(STYLES):
        return [
            (COLOURS[firsts.index(first)], STYLES[rests.index(rest)]) for first, _, rest in parts
        ]
    num_colours = len(COLOURS)
    return [
        (COLOURS[i % num_colours], STYLES[i // num_colours % len(STYLES)])
        for i in range(len(labels))
    ]


def _is_sweep_over_a_number(labels: Sequence[str]) -> bool:
    """Whether three labels or more are one name, each with a number: "max_lag 1", "max_lag 2"."""
    words = [label.split(" ") for label in labels]
    are_numbers = all(len(pair) == 2 and _is_number(pair[1]) for pair in words)
    return len(labels) > 2 and are_numbers and len({pair[0] for pair in words}) == 1


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def draw_pareto(variants: Sequence[Variant], x: str, y: str) -> Figure:
    """The plot of y against x: each run's path thin, a variant's mean at equal steps bold, the last
    step a dot.
    """
    figure, (axes,) = _figure(1)
    for variant, (colour, style) in zip(variants, looks(variants)):
        paths = [path(run, x, y) for run in variant.runs]
        if len(paths) > 1:
            for xs, ys, _ in paths:
                axes.plot(xs, ys, color=colour, linewidth=0.7, alpha=0.35)
        xs, ys, _ = mean_path(paths)
        _draw_mean(axes, xs, ys, color=colour, linestyle=style, label=variant.label)
        axes.plot(
            xs[-1],
            ys[-1],
            color=colour,
            marker="o",
            markersize=8,
            markeredgecolor="white",
            zorder=5,
        )
    axes.set_xlabel(TITLES.get(x, x))
    axes.set_ylabel(TITLES.get(y, y))
    _caption(axes, "Large dots: the last step")
    _legend(figure, axes, variants)
    return figure


def draw_progress(variants: Sequence[Variant], y: str, target: float) -> Figure:
    """The plots of y over seconds and over steps: a variant's mean, a band from its least run to
    its greatest, a line at the target.
    """
    figure, both = _figure(2)
    for axes, x in zip(both, (SECONDS, STEP)):
        axes.axhline(target, color="#999999", linewidth=0.8, linestyle=(0, (4, 3)))
        for variant, (colour, style) in zip(variants, looks(variants)):
            found = band([path(run, x, y) for run in variant.runs])
            _draw_mean(
                axes, found.x, found.mean, color=colour, linestyle=style, label=variant.label
            )
            if len(variant.runs) > 1:
                axes.fill_between(
                    found.x, found.least, found.greatest, color=colour, alpha=0.15, linewidth=0
                )
        axes.set_xlabel(TITLES[x])
    both[0].set_ylabel(TITLES.get(y, y))
    _caption(both[0], f"Dashed: the target, {target:.4g}")
    _legend(figure, both[0], variants)
    return figure


def _draw_mean(axes: Axes, xs: np.ndarray, ys: np.ndarray, **look) -> None:
    axes.plot(xs, ys, linewidth=1.6, marker=marker_of(len(xs)), markersize=3, **look)


def _caption(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize="small", color="#777777", loc="left")


def save(figure: Figure, file: Path) -> Path:
    """Write a plot to a file, in a directory that need not be there yet."""
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    return file


def _figure(panels: int) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2 if panels == 1 else 11, 4.8), layout="constrained")
    all_axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#eeeeee", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.margins(x=0.03)
    return figure, all_axes


def _legend(figure: Figure, axes: Axes, variants: Sequence[Variant]) -> None:
    """Below the plots, in as many columns as the labels leave room for; the figure grows by its
    rows.
    """
    width, height = figure.get_size_inches()
    longest = max(len(variant.label) for variant in variants) + 6
    columns = max(1, min(len(variants), int(LEGEND_WIDTH * width / 11) // longest))
    figure.set_size_inches(width, height + 0.2 * -(-len(variants) // columns))
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize="small"
    )
