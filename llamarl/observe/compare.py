"""Several runs side by side: which reach more reward, how soon, and how far from the reference.
recipes/compare.py prints it.

Reads each RUN_DIR/metrics.jsonl and config.yaml. Runs whose configs differ only in what does not
change the learning problem (what the schema marks OUTWARD: the seed, where files go, how often they
are written) are one variant: drawn as a mean with a band from the least to the greatest. A variant is named by the keys
in which it differs from the others.

    time-to-reward    seconds (time/wall_s) at which the first row has a value of at least the target   (OPPO, 4.1)
    steps-to-reward   its step
    pareto plot       the value against KL to the reference, a path over steps                         (Async RLHF, figure 3)
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
from llamarl.observe.report import SMOOTH_FROM, column_of, moving_mean
from llamarl.observe.rows import EVALUATED, FILE_NAME, Row
from llamarl.observe.sinks import read_rows

REWARD, KL, SECONDS, STEP = "reward/mean", "kl/ref", "time/wall_s", "step"
# What names a variant best, where several keys tell the variants apart equally well.
TELLING = (
    "loss.fn",
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
        return any(row.get(column) is not None for row in self.rows)

    def columns(self, *names: str) -> np.ndarray:
        """[names, rows] float64 of the rows that have all of these. ValueError if there is none,
        naming what is near.
        """
        values = np.stack([column_of(self.rows, name) for name in names])
        values = values[:, ~np.isnan(values).any(axis=0)]
        if not values.size:
            known = sorted(
                {name for row in self.rows for name, value in row.items() if value is not None}
            )
            missing = next((name for name in names if name not in known), None)
            if missing is None:
                raise ValueError(f"{self.path}: no row has all of {', '.join(names)}")
            raise ValueError(
                f"{self.path}: no values of {missing}{did_you_mean(missing, known) or remedy(missing)}"
            )
        return values


@dataclass(frozen=True, slots=True)
class Variant:
    """Runs of one config but for what the schema marks OUTWARD."""

    label: str
    runs: tuple[Run, ...]


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
        found = (
            [directory]
            if (directory / FILE_NAME).is_file()
            else sorted((p.parent for p in directory.glob(f"*/{FILE_NAME}")), key=_natural)
        )
        if not found:
            raise FileNotFoundError(
                f"{directory}: no {FILE_NAME} in it or in a directory of it; give run directories, or a sweep's"
            )
        for path in found:
            runs[path.resolve()] = _load(path)
    return list(runs.values())


def _natural(path: Path) -> tuple[int, str]:
    """A sweep's 10 after its 9."""
    return (int(path.name) if path.name.isdecimal() else -1, path.name)


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
    first = runs[0].config
    differences = [config_differences(first, run.config) for run in runs]
    ours = {}  # the first run's values of all keys that make variants
    for found in differences:
        for key, (value, _) in found.items():
            if not is_marked(key, Mark.OUTWARD):
                ours[key] = value
    keys = sorted(ours, key=_telling_rank)
    columns = {}  # key -> its value in each run
    for key in keys:
        values = [found[key][1] if key in found else ours[key] for found in differences]
        columns[key] = [show(value) for value in values]
    told = _telling_keys(columns)
    members: dict[tuple[str, ...], list[Run]] = {}
    for place, run in enumerate(runs):
        name = tuple(columns[key][place] for key in told)
        members.setdefault(name, []).append(run)
    variants = []
    for name in sorted(members, key=lambda name: [_rank(value) for value in name]):
        label = _label(told, name) or runs[0].path.resolve().name
        variants.append(Variant(label, tuple(members[name])))
    return variants, [key for key in keys if key not in told]


def _telling_rank(key: str) -> int:
    """The order in which keys are tried; equal ones stay as they are in the config."""
    return TELLING.index(key) if key in TELLING else len(TELLING)


def _telling_keys(columns: dict[str, list[str]]) -> list[str]:
    """The keys that tell the runs apart, without those that follow from the ones before."""
    told: list[str] = []
    num_names = 0
    for key, column in columns.items():
        names = set(zip(*(columns[k] for k in told), column))
        if len(names) > num_names:
            told.append(key)
            num_names = len(names)
    return told


def _label(keys: list[str], values: tuple[str, ...]) -> str:
    """ "ppo, max_lag 1": the last part of each key where that is unmistakable."""
    last = [key.rpartition(".")[2] for key in keys]
    short = [key if last.count(name) > 1 else name for key, name in zip(keys, last)]
    return ", ".join(
        value if key == "loss.fn" else f"{name} {value}"
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
    final, best, seconds, steps, kl = [], [], [], [], []
    for run in variant.runs:
        step, wall_s, value = run.columns(STEP, SECONDS, y)
        there = np.flatnonzero(value >= target)
        final.append(value[-1])
        best.append(value.max())
        steps.append(step[there[0]] if there.size else np.nan)
        seconds.append(wall_s[there[0]] if there.size else np.nan)
        kl.append(run.columns(KL)[0][-1] if run.has(KL) else np.nan)
    return Result(variant, *(np.array(values) for values in (final, best, seconds, steps, kl)))


def path(run: Run, x: str, y: str) -> np.ndarray:
    """[x, y, step; rows] of the rows that have both, smoothed where they are many: a step's reward
    is noisy.
    """
    xs, ys, steps = run.columns(x, y, STEP)
    if len(ys) >= SMOOTH_FROM:
        width = min(101, len(ys) // 40 * 2 + 1)
        ys = moving_mean(ys, width)
        xs = moving_mean(xs, width) if x not in (STEP, SECONDS) else xs
    return np.stack([xs, ys, steps])


def band(
    paths: Sequence[np.ndarray], points: int = 200
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(x, mean, least, greatest) of y over runs at equal x, where all runs are; between rows on a
    line. Each [points].

    paths: [x, y, step; rows] with rising x. Where the runs share their x, those are the points.
    """
    shared = paths[0][0]
    if any(len(p[0]) != len(shared) or (p[0] != shared).any() for p in paths):
        start, end = max(p[0, 0] for p in paths), min(p[0, -1] for p in paths)
        shared = np.linspace(start, max(start, end), points)
    ys = np.stack([np.interp(shared, p[0], p[1]) for p in paths])
    return shared, ys.mean(axis=0), ys.min(axis=0), ys.max(axis=0)


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
    for r in results:
        there = (
            f" ({(~np.isnan(r.steps)).sum()} of {len(r.steps)})" if np.isnan(r.steps).any() else ""
        )
        cells = [
            _spread(r.final, 3),
            _spread(r.best, 3),
            _spread(r.seconds, 1) + there,
            _spread(r.steps, 0),
            _spread(r.kl, 4),
        ]
        rows.append([r.variant.label, str(len(r.variant.runs)), *cells])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    ]


def _spread(values: np.ndarray, digits: int) -> str:
    known = values[~np.isnan(values)]
    if not known.size:
        return "-"
    mean = f"{known.mean():.{digits}f}"
    return (
        mean
        if known.size == 1
        else f"{mean} ({known.min():.{digits}f} to {known.max():.{digits}f})"
    )
