"""Several runs side by side: which reach more reward, how soon, and how far from the reference.
recipes/compare.py prints and draws it.

Reads each RUN_DIR/metrics.jsonl and config.yaml. Runs whose configs differ only in what does not
change the learning problem (what the schema marks OUTWARD: the seed, where files go, how often they
are written) are one variant: drawn as a mean with a band from the least to the greatest. A variant
is named by the keys in which it differs from the others.

    time-to-reward    seconds (time/wall_s) at which the first row has a value of at least the
                      target (OPPO, 4.1)
    steps-to-reward   its step
    pareto plot       the value against KL to the reference, over steps (Async RLHF, figure 3)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llamarl.config.conversion import (
    did_you_mean,
    is_marked,
    load_config,
    show,
    to_values,
    value_differences,
)
from llamarl.config.schema import Config
from llamarl.observe.report import Columns, moving_mean, read_columns, smoothing_width
from llamarl.observe.rows import EVALUATED, FILE_NAME

REWARD = "reward/mean"
KL = "kl/ref"
SECONDS = "time/wall_s"
STEP = "step"
REMEDIES = {  # what records a column that is missing
    KL: "; record it with reference=frozen",
    EVALUATED: "; record it with eval.every and eval.num_prompts",
}
# What names a variant best, where several keys tell the variants apart equally well.
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
class Run:
    """One run directory."""

    path: Path
    config: Config
    columns: Columns

    def values(self, *names: str) -> np.ndarray:
        """The values [names, rows], in float64, of the rows that have all of these columns.
        ValueError if there is none, naming what is near.
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


Variants = dict[str, list[Run]]  # by label: runs of one config but for what is marked OUTWARD


class Figures(NamedTuple):
    """A run in numbers; NaN for what it did not get to or has not recorded."""

    final: float  # the last value
    best: float
    seconds: float  # to the target
    steps: float  # to the target
    kl: float  # the last


def load_runs(directories: Sequence[str | Path]) -> list[Run]:
    """The runs in these run directories, and in the directories of runs (sweeps) among them, in
    order.

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
            runs[path.resolve()] = _load(path)
    return list(runs.values())


def _load(path: Path) -> Run:
    config = path / "config.yaml"
    if not config.is_file():
        raise FileNotFoundError(f"{config}: no such file; a run writes it beside {FILE_NAME}")
    columns = read_columns(path / FILE_NAME)
    return Run(path, load_config(config), columns)


def variants_of(runs: Sequence[Run]) -> tuple[Variants, list[str]]:
    """The runs by variant, in the order of the values that name them; and the keys that differ too,
    but follow from those.

    A key is part of the label if what is in it so far does not settle the key's value in every run.
    """
    values = _differing_values(runs)
    # Stable: but for those that tell most, as in the config.
    keys = sorted(values, key=lambda key: TELLING.index(key) if key in TELLING else len(TELLING))
    told: list[str] = []
    names = [()] * len(runs)  # of each run, its values of the keys that are told
    for key in keys:
        longer = [(*name, value) for name, value in zip(names, values[key])]
        if len(set(longer)) > len(set(names)):
            told.append(key)
            names = longer
    variants: Variants = {}
    for name, run in sorted(zip(names, runs), key=lambda pair: [_rank(v) for v in pair[0]]):
        label = _label(told, name) or runs[0].path.resolve().name
        variants.setdefault(label, []).append(run)
    return variants, [key for key in keys if key not in told]


def _differing_values(runs: Sequence[Run]) -> dict[str, list[str]]:
    """By key in which any two runs differ, but for what is OUTWARD: each run's value as shown."""
    first = to_values(runs[0].config)
    values: dict[str, list[str]] = {}
    for i, run in enumerate(runs):
        for key, (ours, theirs) in value_differences(first, to_values(run.config)).items():
            if not is_marked(key, "outward"):
                of_runs = values.setdefault(key, [show(ours)] * len(runs))
                of_runs[i] = show(theirs)
    return values


def _label(keys: list[str], values: tuple[str, ...]) -> str:
    """ "ppo, max_lag 1": the last part of each key where that is unmistakable."""
    last = [key.rpartition(".")[2] for key in keys]
    words = []
    for key, name, value in zip(keys, last, values):
        short = key if last.count(name) > 1 else name
        words.append(value if key == "loss.name" else f"{short} {value}")
    return ", ".join(words)


def _rank(value: str) -> tuple[float, str]:
    """Numbers by their value, before words."""
    try:
        return float(value), ""
    except ValueError:
        return math.inf, value


def all_have(runs: Sequence[Run], column: str) -> bool:
    """Whether a column has a value in every run."""
    return all(column in run.columns for run in runs)


def default_y(runs: Sequence[Run]) -> str:
    """The reward (or accuracy) of held-out prompts where every run has it, else the reward of what
    was sampled.
    """
    return EVALUATED if all_have(runs, EVALUATED) else REWARD


def reachable(runs: Sequence[Run], y: str) -> float:
    """The greatest value that every run reached."""
    return min(float(run.values(y).max()) for run in runs)


def measure(run: Run, y: str, target: float) -> Figures:
    """A run's figures; y is as it is in the rows, not smoothed."""
    step, wall_s, value = run.values(STEP, SECONDS, y)
    is_there = value >= target
    first = is_there.argmax()
    reached = is_there[first]
    return Figures(
        final=value[-1],
        best=value.max(),
        seconds=wall_s[first] if reached else math.nan,
        steps=step[first] if reached else math.nan,
        kl=run.values(KL)[0, -1] if KL in run.columns else math.nan,
    )


def path(run: Run, x: str, y: str) -> np.ndarray:
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
    return x, np.stack([np.interp(x, p[0], p[1]) for p in paths])


def mean_path(paths: Sequence[np.ndarray]) -> np.ndarray:
    """[x, y, step; steps]: means over runs at the steps that all of them have, for an x that need
    not rise.
    """
    shared = sorted(set.intersection(*(set(p[2]) for p in paths)))
    if not shared:
        raise ValueError("the runs of a variant share no step; compare them one by one")
    return np.stack([p[:, np.isin(p[2], shared)] for p in paths]).mean(axis=0)


def table(variants: Variants, y: str, target: float) -> list[str]:
    """Lines: a header, and a variant each; mean (least to greatest), and how many runs got to the
    target where not all did.
    """
    to_target = f"s to {target:.4g}"
    rows = [["", "runs", f"{y} at the end", "best", to_target, "steps", f"{KL} at the end"]]
    for label, runs in variants.items():
        figures = np.array([measure(run, y, target) for run in runs])
        final, best, seconds, steps, kl = figures.T
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
