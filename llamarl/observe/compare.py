"""Several runs side by side, by variant. recipes/compare.py measures, prints and draws them.

Reads each RUN_DIR/metrics.jsonl and config.yaml. Runs whose configs differ only in what does not
change the learning problem (what the schema marks OUTWARD: the seed, where files go, how often they
are written) are one variant, which is named by the keys in which it differs from the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llamarl.config.conversion import is_marked, load_config, to_values, value_differences
from llamarl.config.findings import show
from llamarl.config.hints import did_you_mean
from llamarl.config.schema import Config
from llamarl.observe.report import Columns, read_columns
from llamarl.observe.rows import EVALUATED, FILE_NAME

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


Variants = dict[str, list[Run]]  # by label: runs of one config but for what is marked OUTWARD


def load_runs(directories: Sequence[str | Path]) -> list[Run]:
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
            run = Run(path, load_config(config), columns)
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


def root_kl(run: Run) -> Columns:
    """Return the column ROOT_KL: the square root of the KL of whole completions to the model that
    training began with, in square roots of nats (Gao et al. 2022, section 3). Empty where no such
    model was asked.
    """
    has_all = {KL, LENGTH} <= run.columns.keys()
    if not has_all or run.config.reference.kind == "reset":
        return {}
    return {ROOT_KL: np.sqrt(np.maximum(completion_kl(run.columns), 0))}


def variants_of(runs: Sequence[Run]) -> tuple[Variants, list[str]]:
    """Group runs by variant, in the order of the values that name the variants. Returns them, and
    the keys that differ too but follow from those.

    A key is part of the label if what is in it so far does not settle the key's value in every run.
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


def _differing_values(runs: Sequence[Run]) -> dict[str, list[str]]:
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
    """Return a variant's name, such as "ppo, max_lag 1": the last part of each key where that is
    unmistakable.
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
