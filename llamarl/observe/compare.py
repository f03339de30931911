"""Several runs side by side: which reach more reward, how soon, and how far from the reference.
recipes/compare.py prints it.

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

import numpy as np

from llamarl.config.conversion import (
    config_differences,
    did_you_mean,
    is_marked,
    load_config,
    show,
)
from llamarl.config.schema import Config, Mark
from llamarl.observe.report import SMOOTH_FROM, column_of, moving_mean, smoothing_width
from llamarl.observe.rows import EVALUATED, FILE_NAME, Row
from llamarl.observe.sinks import read_rows

REWARD, KL, SECONDS, STEP = "reward/mean", "kl/ref", "time/wall_s", "step"
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
    rows: list[Row]

    def has(self, column: str) -> bool:
        """Whether a column has a value in any row."""
        return any(row.get(column) is not None for row in self.rows)

    def columns(self, *names: str) -> np.ndarray:
        """The values [names, rows], in float64, of the rows that have all of these columns.
        ValueError if there is none, naming what is near.
        """
        values = np.stack([column_of(self.rows, name) for name in names])
        values = values[:, ~np.isnan(values).any(axis=0)]
        if not values.size:
            raise ValueError(f"{self.path}: {self._what_is_missing(names)}")
        return values

    def _what_is_missing(self, names: Sequence[str]) -> str:
        columns = set().union(*self.rows)
        known = sorted(name for name in columns if self.has(name))
        missing = [name for name in names if name not in known]
        if not missing:
            return f"no row has all of {', '.join(names)}"
        first = missing[0]
        return f"no values of {first}{did_you_mean(first, known) or remedy(first)}"


@dataclass(frozen=True, slots=True)
class Variant:
    """Runs of one config but for what the schema marks OUTWARD."""

    label: str
    runs: tuple[Run, ...]

    def has(self, column: str) -> bool:
        """Whether a column has a value in every run."""
        return all(run.has(column) for run in self.runs)


@dataclass(frozen=True, slots=True)
class Result:
    """A variant in numbers; each array [runs], NaN for a run that did not get there."""

    variant: Variant
    final: np.ndarray  # the last value
    best: np.ndarray
    seconds: np.ndarray  # to the target
    steps: np.ndarray  # to the target
    kl: np.ndarray  # the last


def remedy(column: str) -> str:
    """What records a column that is missing; "" if that is not known."""
    known = {
        KL: "; record it with reference=frozen",
        EVALUATED: "; record it with eval.every and eval.num_prompts",
    }
    return known.get(column, "")


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
            files = directory.glob(f"*/{FILE_NAME}")
            found = sorted((file.parent for file in files), key=_natural)
        if not found:
            raise FileNotFoundError(
                f"{directory}: no {FILE_NAME} in it or in a directory of it; "
                "give run directories, or a sweep's"
            )
        for path in found:
            runs[path.resolve()] = _load(path)
    return list(runs.values())


def _natural(path: Path) -> tuple[int, str]:
    """Sorts a sweep's 10 after its 9."""
    number = int(path.name) if path.name.isdecimal() else -1
    return number, path.name


def _load(path: Path) -> Run:
    if not (path / "config.yaml").is_file():
        raise FileNotFoundError(
            f"{path}/config.yaml: no such file; a run writes it beside {FILE_NAME}"
        )
    rows = read_rows(path / FILE_NAME)
    if not rows:
        raise ValueError(f"{path / FILE_NAME} holds no rows yet; wait for the first step")
    return Run(path, load_config(path / "config.yaml"), rows)


def variants_of(runs: Sequence[Run]) -> tuple[list[Variant], list[str]]:
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
    members: dict[tuple[str, ...], list[Run]] = {}
    for name, run in zip(names, runs):
        members.setdefault(name, []).append(run)
    variants = []
    for name in sorted(members, key=lambda name: [_rank(value) for value in name]):
        label = _label(told, name) or runs[0].path.resolve().name
        variants.append(Variant(label, tuple(members[name])))
    return variants, [key for key in keys if key not in told]


def _differing_values(runs: Sequence[Run]) -> dict[str, list[str]]:
    """By key in which any two runs differ, but for what is OUTWARD: each run's value as shown."""
    first = runs[0].config
    differences = [config_differences(first, run.config) for run in runs]
    values: dict[str, list[str]] = {}
    for found in differences:
        for key, (ours, _) in found.items():
            if not is_marked(key, Mark.OUTWARD):
                values[key] = [show(ours)] * len(runs)
    for i, found in enumerate(differences):
        for key in found.keys() & values.keys():
            _, theirs = found[key]
            values[key][i] = show(theirs)
    return values


def _label(keys: list[str], values: tuple[str, ...]) -> str:
    """ "ppo, max_lag 1": the last part of each key where that is unmistakable."""
    last = [key.rpartition(".")[2] for key in keys]
    short = [key if last.count(name) > 1 else name for key, name in zip(keys, last)]
    return ", ".join(
        value if key == "loss.name" else f"{name} {value}"
        for key, name, value in zip(keys, short, values)
    )


def _rank(value: str) -> tuple[float, str]:
    """Numbers by their value, before words."""
    try:
        return float(value), ""
    except ValueError:
        return math.inf, value


def default_y(runs: Sequence[Run]) -> str:
    """The reward (or accuracy) of held-out prompts where every run has it, else the reward of what
    was sampled.
    """
    return EVALUATED if all(run.has(EVALUATED) for run in runs) else REWARD


def reachable(runs: Sequence[Run], y: str) -> float:
    """The greatest value that every run reached."""
    return min(float(run.columns(y)[0].max()) for run in runs)


def measure(variant: Variant, y: str, target: float) -> Result:
    """A variant's figures; y is as it is in the rows, not smoothed."""
    num_runs = len(variant.runs)
    result = Result(
        variant=variant,
        final=np.empty(num_runs),
        best=np.empty(num_runs),
        seconds=np.full(num_runs, np.nan),
        steps=np.full(num_runs, np.nan),
        kl=np.full(num_runs, np.nan),
    )
    for i, run in enumerate(variant.runs):
        step, wall_s, value = run.columns(STEP, SECONDS, y)
        result.final[i] = value[-1]
        result.best[i] = value.max()
        there = np.flatnonzero(value >= target)
        if there.size:
            result.steps[i] = step[there[0]]
            result.seconds[i] = wall_s[there[0]]
        if run.has(KL):
            result.kl[i] = run.columns(KL)[0][-1]
    return result


def path(run: Run, x: str, y: str) -> np.ndarray:
    """[x, y, step; rows] of the rows that have both, smoothed where they are many: a step's reward
    is noisy.
    """
    xs, ys, steps = run.columns(x, y, STEP)
    if len(ys) >= SMOOTH_FROM:
        width = smoothing_width(len(ys))
        ys = moving_mean(ys, width)
        if x not in (STEP, SECONDS):
            xs = moving_mean(xs, width)
    return np.stack([xs, ys, steps])


@dataclass(frozen=True, slots=True)
class Band:
    """y over several runs at equal x; each array [points]."""

    x: np.ndarray
    mean: np.ndarray
    least: np.ndarray
    greatest: np.ndarray


def band(paths: Sequence[np.ndarray], points: int = 200) -> Band:
    """The band of runs over the x where all of them are; between rows they are on a line.

    paths: [x, y, step; rows] with rising x. Where the runs share their x, those are the points.
    """
    x = paths[0][0]
    if not all(np.array_equal(p[0], x) for p in paths):
        start = max(p[0, 0] for p in paths)
        end = min(p[0, -1] for p in paths)
        x = np.linspace(start, max(start, end), points)
    ys = np.stack([np.interp(x, p[0], p[1]) for p in paths])
    return Band(x=x, mean=ys.mean(axis=0), least=ys.min(axis=0), greatest=ys.max(axis=0))


def mean_path(paths: Sequence[np.ndarray]) -> np.ndarray:
    """[x, y, step; steps]: means over runs at the steps that all of them have, for an x that need
    not rise.
    """
    shared = sorted(set.intersection(*(set(p[2]) for p in paths)))
    if not shared:
        raise ValueError("the runs of a variant share no step; compare them one by one")
    return np.stack([p[:, np.isin(p[2], shared)] for p in paths]).mean(axis=0)


def table(results: Sequence[Result], y: str, target: float) -> list[str]:
    """Lines: a header, and a variant each; mean (least to greatest), and how many runs got to the
    target where not all did.
    """
    head = [
        "",
        "runs",
        f"{y} at the end",
        "best",
        f"s to {target:.4g}",
        "steps",
        f"{KL} at the end",
    ]
    rows = [head]
    for result in results:
        num_runs = len(result.steps)
        num_there = int((~np.isnan(result.steps)).sum())
        there = f" ({num_there} of {num_runs})" if num_there < num_runs else ""
        cells = [
            result.variant.label,
            str(num_runs),
            _spread(result.final, 3),
            _spread(result.best, 3),
            _spread(result.seconds, 1) + there,
            _spread(result.steps, 0),
            _spread(result.kl, 4),
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
