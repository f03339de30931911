"""Compare runs: who reaches more reward, how soon, and at what distance from the reference.

    python recipes/compare.py runs/a runs/b                      two runs
    python recipes/compare.py runs/sweep-TIME --target 0.9       every run of a --multirun
    python recipes/compare.py runs/* --y reward/mean --x kl/ref --out plots

Runs that differ only in their seed are one line: a mean, and a band from the least to the greatest.
Prints a table and writes OUT/progress.png (the value over seconds and over steps) and
OUT/pareto.png (the value against KL to the reference, for runs that have one). Exit status: 0, or 2
for a directory or a column that cannot be used.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llamarl.observe.compare import (
    KL,
    SECONDS,
    STEP,
    Run,
    Variants,
    band,
    load_runs,
    mean_path,
    path,
    reachable,
    table,
    variants_of,
)
from llamarl.observe.report import COLOURS, LOOK, marker_of
from llamarl.observe.rows import EVALUATED

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
SMALL_GREY = {"fontsize": "small", "color": "#777777", "loc": "left"}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "directories", nargs="+", metavar="RUN_DIR", help="of a run, or of a sweep's runs"
    )
    parser.add_argument(
        "--y",
        help="column of metrics.jsonl; "
        "default: eval/reward where all runs have it, else reward/mean",
    )
    parser.add_argument(
        "--x", help=f"column of the pareto plot; default: {KL}, for the runs that have it"
    )
    parser.add_argument(
        "--target",
        type=float,
        help="value of --y to reach; default: the greatest that every run reached",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("comparison"),
        help="directory of the plots (default: comparison)",
    )
    return parser.parse_args(argv)


@matplotlib.rc_context(LOOK)
def run(args: argparse.Namespace) -> None:
    """FileNotFoundError or ValueError for what cannot be used."""
    runs = load_runs(args.directories)
    y = args.y or (EVALUATED if all_have(runs, EVALUATED) else "reward/mean")
    variants, implied = variants_of(runs)
    target = reachable(runs, y) if args.target is None else args.target
    print("\n".join(table(variants, y, target)))
    if implied:
        print(f"also differ, with what the names say: {', '.join(implied)}")
    figures = {"progress.png": draw_progress(variants, y, target)}
    x = args.x or KL
    measured = {}
    for label, runs in variants.items():
        if args.x or all_have(runs, KL):
            measured[label] = runs
        else:
            what = f"{label}: no {KL}, so not in the pareto plot"
            print(f"compare: {what}; record it with reference=frozen", file=sys.stderr)
    if measured:
        figures["pareto.png"] = draw_pareto(measured, x, y)
    for name, figure in figures.items():
        args.out.mkdir(parents=True, exist_ok=True)
        figure.savefig(args.out / name, dpi=150)
        print(f"written  {args.out / name}")


def all_have(runs: Sequence[Run], column: str) -> bool:
    """Whether a column has a value in every run."""
    return all(column in run.columns for run in runs)


def looks(labels: Sequence[str]) -> list[dict[str, object]]:
    """What matplotlib draws each variant with: dark to light for a sweep over one number; by the
    label's first part and by the rest for one over several keys; else distinct ones.
    """
    if _is_sweep_over_a_number(labels):
        shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.88, len(labels)))
        return [{"color": tuple(shade), "linestyle": "-"} for shade in shades]
    parts = [label.partition(", ") for label in labels]
    firsts = list(dict.fromkeys(first for first, _, _ in parts))
    rests = list(dict.fromkeys(rest for _, _, rest in parts))
    pairs = itertools.cycle(itertools.product(STYLES, COLOURS))
    if len(firsts) <= len(COLOURS) and len(rests) <= len(STYLES):
        pairs = [
            (STYLES[rests.index(rest)], COLOURS[firsts.index(first)]) for first, _, rest in parts
        ]
    return [{"color": colour, "linestyle": style} for _, (style, colour) in zip(labels, pairs)]


def _is_sweep_over_a_number(labels: Sequence[str]) -> bool:
    """Whether three labels or more are one name, each with a number: "max_lag 1", "max_lag 2"."""
    names = set()
    for label in labels:
        try:
            name, number = label.split(" ")
            float(number)
        except ValueError:
            return False
        names.add(name)
    return len(labels) > 2 and len(names) == 1


def draw_pareto(variants: Variants, x: str, y: str) -> Figure:
    """The plot of y against x: each run's path thin, a variant's mean at equal steps bold, the last
    step a dot.
    """
    figure, (axes,) = _figure(1)
    for (label, runs), look in zip(variants.items(), looks(list(variants))):
        paths = [path(run, x, y) for run in runs]
        if len(paths) > 1:
            for xs, ys, _ in paths:
                axes.plot(xs, ys, color=look["color"], linewidth=0.7, alpha=0.35)
        xs, ys, _ = mean_path(paths)
        _draw_mean(axes, xs, ys, label=label, **look)
        dot = {"marker": "o", "markersize": 8, "markeredgecolor": "white", "zorder": 5}
        axes.plot(xs[-1], ys[-1], color=look["color"], **dot)
    axes.set(xlabel=TITLES.get(x, x), ylabel=TITLES.get(y, y))
    axes.set_title("Large dots: the last step", **SMALL_GREY)
    _legend(figure, axes)
    return figure


def draw_progress(variants: Variants, y: str, target: float) -> Figure:
    """The plots of y over seconds and over steps: a variant's mean, a band from its least run to
    its greatest, a line at the target.
    """
    figure, both = _figure(2)
    for axes, x in zip(both, (SECONDS, STEP)):
        axes.axhline(target, color="#999999", linewidth=0.8, linestyle=(0, (4, 3)))
        for (label, runs), look in zip(variants.items(), looks(list(variants))):
            xs, ys = band([path(run, x, y) for run in runs])
            _draw_mean(axes, xs, ys.mean(axis=0), label=label, **look)
            if len(runs) > 1:
                least, greatest = ys.min(axis=0), ys.max(axis=0)
                axes.fill_between(xs, least, greatest, color=look["color"], alpha=0.15, linewidth=0)
        axes.set_xlabel(TITLES[x])
    both[0].set_ylabel(TITLES.get(y, y))
    both[0].set_title(f"Dashed: the target, {target:.4g}", **SMALL_GREY)
    _legend(figure, both[0])
    return figure


def _draw_mean(axes: Axes, xs: np.ndarray, ys: np.ndarray, **look) -> None:
    axes.plot(xs, ys, linewidth=1.6, marker=marker_of(len(xs)), **look)


def _figure(panels: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(7.2 if panels == 1 else 11, 4.8), layout="constrained")
    all_axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    for axes in all_axes:
        axes.margins(x=0.03)
    return figure, all_axes


def _legend(figure: Figure, axes: Axes) -> None:
    """Below the plots, in as many columns as the labels leave room for; the figure grows by its
    rows.
    """
    handles, labels = axes.get_legend_handles_labels()
    width, height = figure.get_size_inches()
    longest = max(map(len, labels)) + 6
    columns = max(1, min(len(labels), int(LEGEND_WIDTH * width / 11) // longest))
    figure.set_size_inches(width, height + 0.2 * -(-len(labels) // columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small")


def main(argv: list[str] | None = None) -> int:
    try:
        run(parse(argv))
    except (ValueError, FileNotFoundError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
