"""Compare runs: who reaches more reward, how soon, and at what distance from the reference.

    python recipes/compare.py runs/a runs/b                      two runs
    python recipes/compare.py runs/sweep-TIME target=0.9         every run of a --multirun
    python recipes/compare.py runs/* y=reward/mean x=kl/ref out=plots

y         a column of metrics.jsonl; eval/reward where all runs have it, else reward/mean
x         a column for the pareto plot; kl/ref for the runs that have it
target    a value of y to reach; the greatest that every run reached
out       the directory of the plots; comparison

Runs that differ only in their seed are one line: a mean, and a band from the least to the greatest.
Prints a table and writes into OUT

    progress.png   the value over seconds and over steps
    pareto.png     the value against KL to the reference, for runs that have one
    win_rate.png   win rate by gold against perplexity under the base, for runs with eval.gold and
                   eval.base: a point an evaluation (Async RLHF, figures 3 to 8)
    gold.png       the reward of held-out answers and their gold score over the root of the KL, for
                   runs with eval.gold and a reference (Gao et al. 2022, figure 1)

Exit status: 0, or 2 for a directory or a column that cannot be used.

    time-to-reward    seconds (time/wall_s) at which the first row has a value of at least the
                      target (OPPO, 4.1)
    steps-to-reward   its step
    pareto plot       the value against KL to the reference, over steps (Async RLHF, figure 3)
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from llamarl.config.conversion import REQUIRED, is_marked, load_config, to_values, value_differences
from llamarl.config.schema import Config
from llamarl.config.script import read_script
from llamarl.observe.plots import COLOURS, LOOK, marker_of, moving_mean, smoothing_width
from llamarl.observe.report import Columns, read_columns
from llamarl.observe.rows import EVALUATED, FILE_NAME
from llamarl.words.fields import Number, Text, settings_dataclass
from llamarl.words.findings import did_you_mean, show

KL = "kl/ref"
LENGTH = "completion/length_mean"
ROOT_KL = "kl/root"  # made of these two, in no row
GOLD = "eval/gold"
WIN_RATE = "eval/win_rate"
PERPLEXITY = "eval/perplexity"
REMEDIES = {  # what records a column that is missing
    KL: "; record it with reference=frozen",
    ROOT_KL: "; record it with reference=frozen",
    EVALUATED: "; record it with eval.every and eval.num_prompts",
    GOLD: "; record it with eval.gold",
    WIN_RATE: "; record it with eval.gold and eval.reference_key",
    PERPLEXITY: "; record it with eval.base",
}
# Keys that name a variant best, where several keys tell the variants apart equally well.
TELLING = (
    "loss.name",
    "max_lag",
    "buffer.kind",
    "trainer.minibatches_per_step",
    "trainer.updates_per_batch",
    "group_size",
    "overcommit",
    "loss.ratio_cap",
    "loss.beta",
    "lr",
)


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One run directory."""

    path: Path
    config: Config
    columns: Columns

    def values(self, *names: str) -> np.ndarray:
        """Return the values [names, rows], in float64, of the rows that have all of these columns.
        ValueError if there are none, naming what is near.
        """
        missing = [name for name in names if name not in self.columns]
        if missing:
            first = missing[0]
            hint = did_you_mean(first, list(self.columns)) or REMEDIES.get(first, "")
            raise ValueError(f"{self.path}: no values of {first}{hint}")
        values = np.stack([self.columns[name] for name in names])
        values = values[:, ~np.isnan(values).any(axis=0)]
        if not values.size:
            raise ValueError(f"{self.path}: no row has all of {', '.join(names)}")
        return values


Variants = dict[str, list[ComparedRun]]  # by label: of one config but for what is marked OUTWARD


def load_runs(directories: Sequence[str | Path]) -> list[ComparedRun]:
    """Load the runs in these run directories, and in the directories of runs (sweeps) among them,
    in order.

    FileNotFoundError for a directory without any; ValueError for a run without rows, a damaged
    file, or a config.yaml of another version.
    """
    runs = {}
    for directory in map(Path, directories):
        found = [directory]
        if not (directory / FILE_NAME).is_file():
            found = [file.parent for file in directory.glob(f"*/{FILE_NAME}")]
            found.sort(key=lambda path: _rank(path.name))  # a sweep's 10 after its 9
        if not found:
            raise FileNotFoundError(
                f"{directory}: no {FILE_NAME} in it or in a directory of it; "
                "give run directories, or a sweep's"
            )
        for path in found:
            config = path / "config.yaml"
            if not config.is_file():
                raise FileNotFoundError(
                    f"{config}: no such file; a run writes it beside {FILE_NAME}"
                )
            columns = read_columns(path / FILE_NAME)
            run = ComparedRun(path, load_config(config), columns)
            columns.update(root_kl(run))
            runs[path.resolve()] = run
    return list(runs.values())


def completion_kl(columns: Columns) -> np.ndarray:
    """Return [rows]: the KL of whole completions to a reference that does not move, in nats.

    kl/ref is a mean over tokens; times the mean length it is the KL of a completion. A step's
    completions are of the policy before it. The policy of step 0 is the reference.
    """
    kl = columns[KL] * columns[LENGTH]
    kl[columns["step"] == 0] = 0
    return kl


def root_kl(run: ComparedRun) -> Columns:
    """Return the column ROOT_KL: the square root of the KL of whole completions to the model that
    training began with, in square roots of nats (Gao et al. 2022, section 3). Empty where no such
    model was asked.
    """
    has_all = {KL, LENGTH} <= run.columns.keys()
    reference = run.config.reference
    is_start = reference.kind == "frozen" and not reference.given
    if not has_all or not is_start:
        return {}
    return {ROOT_KL: np.sqrt(np.maximum(completion_kl(run.columns), 0))}


def variants_of(runs: Sequence[ComparedRun]) -> tuple[Variants, list[str]]:
    """Group runs by variant, in the order of the values that name the variants. Return the
    variants, and the keys that differ too but follow from those in the names.

    A key becomes part of the label if the keys before it do not determine its value in every run.
    """
    values = _differing_values(runs)
    # Those that tell most, then as in the config.
    keys = [key for key in TELLING if key in values]
    keys += [key for key in values if key not in TELLING]
    told: list[str] = []
    names: list[tuple[str, ...]] = [()] * len(
        runs
    )  # of each run, its values of the keys that are told
    for key in keys:
        longer = [(*name, value) for name, value in zip(names, values[key])]
        if len(set(longer)) > len(set(names)):
            told.append(key)
            names = longer
    variants: Variants = {}
    for i in sorted(range(len(runs)), key=lambda i: [_rank(value) for value in names[i]]):
        label = _label(told, names[i]) or runs[0].path.resolve().name
        variants.setdefault(label, []).append(runs[i])
    return variants, [key for key in keys if key not in told]


def _differing_values(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Return, for each key in which two runs differ and which is not OUTWARD, each run's value as
    shown.
    """
    first = to_values(runs[0].config)
    values: dict[str, list[str]] = {}
    for i, run in enumerate(runs):
        for key, (ours, theirs) in value_differences(first, to_values(run.config)).items():
            if not is_marked(key, "outward"):
                of_runs = values.setdefault(key, [show(ours)] * len(runs))
                of_runs[i] = show(theirs)
    return values


def _label(keys: list[str], values: tuple[str, ...]) -> str:
    """Return a variant's name, such as "ppo, max_lag 1": each key by its last part, unless two
    keys share that.
    """
    last = [key.rpartition(".")[2] for key in keys]
    words = []
    for key, name, value in zip(keys, last, values):
        short = key if last.count(name) > 1 else name
        words.append(value if key == "loss.name" else f"{short} {value}")
    return ", ".join(words)


def _rank(value: str) -> tuple[float, str]:
    """Return a sort key that puts numbers by their value, before words."""
    try:
        return float(value), ""
    except ValueError:
        return math.inf, value


SECONDS = "time/wall_s"
STEP = "step"
STYLES = ("-", "--", ":", "-.")  # a further one each time that the colours begin anew
TITLES = {
    "eval/accuracy": "accuracy, held-out prompts",
    "eval/reward": "reward, held-out prompts",
    "reward/mean": "reward of a step's completions",
    SECONDS: "seconds",
    STEP: "step",
    "kl/ref": "KL to the reference, nats a token",
    ROOT_KL: "√KL to the first policy, √nats a completion",
    GOLD: "gold score, held-out prompts",
    WIN_RATE: "win rate by gold over references",
    PERPLEXITY: "perplexity of the answers under the base model",
}
JUDGED = (GOLD, WIN_RATE, PERPLEXITY)  # columns of the table, for runs that have any of them
LEGEND_WIDTH = 110  # characters that fit one row of a legend
LAST_STEP = "Large dots: the last step"


@settings_dataclass
class CompareSettings:
    runs: list[Text]  # directories, of a run or of a sweep's runs
    y: Text | None
    x: Text | None
    target: Number | None
    out: Text


DEFAULTS = {"runs": REQUIRED, "y": None, "x": None, "target": None, "out": "comparison"}


def parse(words: Sequence[str]) -> CompareSettings:
    """ConfigError."""
    return read_script(words, CompareSettings, DEFAULTS, doc=__doc__, listed="runs")


@matplotlib.rc_context(LOOK)
def run(args: CompareSettings) -> None:
    """FileNotFoundError or ValueError for what cannot be used."""
    runs = load_runs(args.runs)
    y = args.y or (EVALUATED if all_have(runs, EVALUATED) else "reward/mean")
    variants, implied = variants_of(runs)
    target = reachable(runs, y) if args.target is None else args.target
    print("\n".join(table(variants, y, target)))
    if implied:
        print(f"also differ, with what the names say: {', '.join(implied)}")
    figures = {"progress.png": draw_progress(variants, y, target)}
    x = args.x or KL
    measured = variants if args.x else with_columns(variants, x, y)
    if measured:
        figures["pareto.png"] = draw_pareto(measured, x, y)
    judged = with_columns(variants, PERPLEXITY, WIN_RATE)
    if judged:
        figures["win_rate.png"] = draw_win_rate(judged)
    optimised = with_columns(variants, ROOT_KL, GOLD)
    if optimised:
        figures["gold.png"] = draw_gold(optimised)
    for name, figure in figures.items():
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        figure.savefig(out / name, dpi=150)
        print(f"written  {out / name}")


def all_have(runs: Sequence[ComparedRun], column: str) -> bool:
    """Whether a column has a value in every run."""
    return all(column in run.columns for run in runs)


def with_columns(variants: Variants, x: str, y: str) -> Variants:
    """Return the variants all of whose runs have both columns. Name those that lack x alone."""
    found = {}
    for label, runs in variants.items():
        if not all_have(runs, y):
            continue
        if all_have(runs, x):
            found[label] = runs
        else:
            what = TITLES[x].partition(",")[0]
            said = f"{label}: no {what}, so {y} is not drawn over it{REMEDIES[x]}"
            print(f"compare: {said}", file=sys.stderr)
    return found


class Figures(NamedTuple):
    """A run in numbers; NaN for a target that it did not reach and a column that it has not."""

    final: float  # the last value
    best: float
    seconds: float  # to the target
    steps: float  # to the target
    kl: float  # the last
    # The last of JUDGED, in their order.
    gold: float
    win_rate: float
    perplexity: float


def reachable(runs: Sequence[ComparedRun], y: str) -> float:
    """Return the greatest value that every run reached."""
    return min(float(run.values(y).max()) for run in runs)


def measure(run: ComparedRun, y: str, target: float) -> Figures:
    """Return a run's figures; y is as it is in the rows, not smoothed."""
    step, wall_s, value = run.values(STEP, SECONDS, y)
    is_there = value >= target
    first = is_there.argmax()
    reached = is_there[first]
    return Figures(
        final=value[-1],
        best=value.max(),
        seconds=wall_s[first] if reached else math.nan,
        steps=step[first] if reached else math.nan,
        kl=_last(run, KL),
        gold=_last(run, GOLD),
        win_rate=_last(run, WIN_RATE),
        perplexity=_last(run, PERPLEXITY),
    )


def _last(run: ComparedRun, column: str) -> float:
    """NaN for a column that the run has not."""
    return run.values(column)[0, -1] if column in run.columns else math.nan


def table(variants: Variants, y: str, target: float) -> list[str]:
    """Return the lines of the table: a header, and a variant each, as mean (least to greatest).
    If some runs missed the target, a cell says how many reached it.
    """
    to_target = f"s to {target:.4g}"
    head = ["", "runs", f"{y} at the end", "best", to_target, "steps", f"{KL} at the end"]
    known: set[str] = set()
    for run in itertools.chain.from_iterable(variants.values()):
        known |= run.columns.keys()
    judged = [column for column in JUDGED if column in known]
    head += [f"{column} at the end" for column in judged]
    rows = [head]
    for label, runs in variants.items():
        figures = np.array([measure(run, y, target) for run in runs])
        final, best, seconds, steps, kl, *last = figures.T
        num_runs = len(runs)
        num_there = np.isfinite(steps).sum()
        there = f" ({num_there} of {num_runs})" if num_there < num_runs else ""
        cells = [
            label,
            str(num_runs),
            _spread(final, 3),
            _spread(best, 3),
            _spread(seconds, 1) + there,
            _spread(steps, 0),
            _spread(kl, 4),
        ]
        for column, values in zip(JUDGED, last):
            if column in judged:
                cells.append(_spread(values, 3))
        rows.append(cells)
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _spread(values: np.ndarray, digits: int) -> str:
    known = values[~np.isnan(values)]
    if not known.size:
        return "-"
    mean = f"{known.mean():.{digits}f}"
    if known.size == 1:
        return mean
    return f"{mean} ({known.min():.{digits}f} to {known.max():.{digits}f})"


def looks(labels: Sequence[str]) -> list[dict[str, object]]:
    """Return matplotlib's colour and line style for each variant. A sweep over one number goes from
    dark to light; over several keys, the first part of a label chooses the colour and the rest the
    style; otherwise all differ.
    """
    if _is_sweep_over_a_number(labels):
        shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.88, len(labels)))
        return [{"color": tuple(shade), "linestyle": "-"} for shade in shades]
    parts = [label.partition(", ") for label in labels]
    firsts = list(dict.fromkeys(first for first, _, _ in parts))
    rests = list(dict.fromkeys(rest for _, _, rest in parts))
    pairs: Iterable[tuple[str, str]] = itertools.cycle(itertools.product(STYLES, COLOURS))
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


def path(run: ComparedRun, x: str, y: str) -> np.ndarray:
    """[x, y, step; rows] of the rows that have both, smoothed where they are many: a step's reward
    is noisy.
    """
    xs, ys, steps = run.values(x, y, STEP)
    width = smoothing_width(len(ys))
    if x not in (STEP, SECONDS):
        xs = moving_mean(xs, width)
    return np.stack([xs, moving_mean(ys, width), steps])


def band(paths: Sequence[np.ndarray], points: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """x [points] where all runs are, and y there [runs, points]; between rows runs are on a line.

    paths: [x, y, step; rows] with rising x. Where the runs share their x, those are the points.
    """
    x = paths[0][0]
    if not all(np.array_equal(p[0], x) for p in paths):
        start = max(p[0, 0] for p in paths)
        end = min(p[0, -1] for p in paths)
        x = np.linspace(start, max(start, end), points)
    ys = [np.interp(x, xs, values) for xs, values, _ in paths]
    return x, np.stack(ys)


def mean_path(paths: Sequence[np.ndarray]) -> np.ndarray:
    """[x, y, step; steps]: means over runs at the steps that all of them have, for an x that need
    not rise.
    """
    shared = reduce(np.intersect1d, [steps for _, _, steps in paths])
    if not shared.size:
        raise ValueError("the runs of a variant share no step; compare them one by one")
    aligned = [p[:, np.isin(p[2], shared)] for p in paths]
    return np.mean(aligned, axis=0)


def _subtitle(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize="small", color="#777777", loc="left")


def draw_pareto(variants: Variants, x: str, y: str) -> Figure:
    """Draw y against x: each run's path thin, a variant's mean at equal steps bold, the last step a
    dot.
    """
    figure, (axes,) = _figure(1)
    _draw_paths(axes, variants, x, y)
    _subtitle(axes, LAST_STEP)
    _legend(figure, axes)
    return figure


def draw_win_rate(variants: Variants) -> Figure:
    """Draw win rate against perplexity, a point an evaluation; of a variant's only run with the
    intervals of 95 %.
    """
    figure, (axes,) = _figure(1)
    axes.axhline(0.5, color="#999999", linewidth=0.8, linestyle=(0, (4, 3)))
    _draw_paths(axes, variants, PERPLEXITY, WIN_RATE)
    for runs, look in zip(variants.values(), looks(list(variants))):
        if len(runs) == 1:
            columns = (PERPLEXITY, f"{WIN_RATE}_low", f"{WIN_RATE}_high")
            xs, low, high = runs[0].values(*columns)
            axes.vlines(xs, low, high, color=look["color"], linewidth=0.8, alpha=0.3)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    how = f"{LAST_STEP}. Dashed: as good as the references. Bars: 95 %, of a run alone"
    _subtitle(axes, how)
    _legend(figure, axes)
    return figure


def draw_gold(variants: Variants) -> Figure:
    """Draw the reward that is trained on and gold over the root of the KL, a point an evaluation:
    where the first goes on rising and the second falls, the reward is over-optimised.
    """
    figure, both = _figure(2, share_y=False)
    for axes, y in zip(both, (EVALUATED, GOLD)):
        _draw_paths(axes, variants, ROOT_KL, y)
    _subtitle(both[0], "What is trained on (the proxy)")
    _subtitle(both[1], f"What is not (gold). {LAST_STEP}")
    _legend(figure, both[0])
    return figure


def _draw_paths(axes: Axes, variants: Variants, x: str, y: str) -> None:
    for (label, runs), look in zip(variants.items(), looks(list(variants))):
        paths = [path(run, x, y) for run in runs]
        if len(paths) > 1:
            for xs, ys, _ in paths:
                axes.plot(xs, ys, color=look["color"], linewidth=0.7, alpha=0.35)
        xs, ys, _ = mean_path(paths)
        _draw_mean(axes, xs, ys, label=label, **look)
        axes.plot(
            xs[-1],
            ys[-1],
            color=look["color"],
            marker="o",
            markersize=8,
            markeredgecolor="white",
            zorder=5,
        )
    axes.set(xlabel=TITLES.get(x, x), ylabel=TITLES.get(y, y))


def draw_progress(variants: Variants, y: str, target: float) -> Figure:
    """Draw y over seconds and over steps: a variant's mean, a band from its least run to its
    greatest, a line at the target.
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
    _subtitle(both[0], f"Dashed: the target, {target:.4g}")
    _legend(figure, both[0])
    return figure


def _draw_mean(axes: Axes, xs: np.ndarray, ys: np.ndarray, **look) -> None:
    axes.plot(xs, ys, linewidth=1.6, marker=marker_of(len(xs)), **look)


def _figure(panels: int, *, share_y: bool = True) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(7.2 if panels == 1 else 11, 4.8), layout="constrained")
    all_axes = figure.subplots(1, panels, sharey=share_y, squeeze=False)[0]
    for axes in all_axes:
        axes.margins(x=0.03)
    return figure, all_axes


def _legend(figure: Figure, axes: Axes) -> None:
    """Put the legend below the plots, in as many columns as the labels leave room for. The figure
    grows by its rows.
    """
    handles, labels = axes.get_legend_handles_labels()
    width, height = figure.get_size_inches()
    longest = max(map(len, labels)) + 6
    columns = max(1, min(len(labels), int(LEGEND_WIDTH * width / 11) // longest))
    figure.set_size_inches(width, height + 0.2 * -(-len(labels) // columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small")


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    try:
        run(parse(words))
    except (ValueError, FileNotFoundError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
