"""Expected results of runs whose settings were measured: conf/expected.yaml.

    default:
      overrides: []
      measured: torchrun --standalone --nproc-per-node=2 recipes/llama_async.py seed=N, N = 0 to 3
      stages:
        - {name: the start, column: eval/accuracy, first: 0, last: 0, mean: 0.40, within: 0.03,
           otherwise: the model or the held-out prompts are others}

An expectation holds for a run of the same settings. Its config may differ from that of the
overrides in keys that the schema marks OUTWARD (the seed, directories, how often files are written)
and in the ranks of its executors. A further seed is expected to fall within `within` of the mean.
Stages are in the order of the run: the first that differs says where to look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from llamarl.config.command_line import default_config
from llamarl.config.conversion import is_marked, to_values, value_differences
from llamarl.config.files import CONF_DIR
from llamarl.config.schema import Config
from llamarl.observe.rates import Row, number_of, step_of

FILE = CONF_DIR / "expected.yaml"
_NO_MATTER = ("placement.", "eval.save_samples")  # keys that do not change what is learned


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of a run: the mean of a column over the rows from step `first` to step `last`."""

    name: str
    column: str
    first: int
    last: int
    mean: float
    within: float  # of the mean, either way
    otherwise: str  # what differs if the mean is another, in words

    def found(self, rows: Sequence[Row]) -> float | None:
        """Return the mean of the column in these rows; None if they have no value in it."""
        known = []
        for row in rows:
            value = number_of(row, self.column)
            if value is not None and self.first <= step_of(row) <= self.last:
                known.append(value)
        return sum(known) / len(known) if known else None

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} % ± {100 * self.within:.1f}"


@dataclass(frozen=True, slots=True)
class Expectation:
    """The expected course of runs whose config is the default with these overrides."""

    overrides: tuple[str, ...]
    stages: tuple[Stage, ...]  # at least one; the last is the result


def read_expectations(file: Path = FILE) -> list[Expectation]:
    """Read the file. TypeError or KeyError if it is not of the form above."""
    found = []
    for values in yaml.safe_load(file.read_text()).values():
        stages = tuple(Stage(**stage) for stage in values["stages"])
        found.append(Expectation(tuple(values["overrides"]), stages))
    return found


def expectation_of(config: Config, file: Path = FILE) -> Expectation | None:
    """Return the expectation of a run; None if its settings were not measured."""
    values = to_values(config)
    for one in read_expectations(file):
        # The cheap question first: composing a config takes tenths of a second.
        if one.stages[-1].last != config.max_steps:
            continue
        if not differing(to_values(default_config(overrides=one.overrides)), values):
            return one
    return None


def differing(measured: Mapping[str, object], values: Mapping[str, object]) -> list[str]:
    """Return the keys that change what is learned and in which a config differs from a measured
    one.
    """
    keys = value_differences(measured, values)
    return [key for key in keys if not (key.startswith(_NO_MATTER) or is_marked(key, "outward"))]


def verdict(expected: Expectation, rows: Sequence[Row]) -> str:
    """Return a line: the run came to what was expected, or the first stage that differs, and where
    to look then.
    """
    for stage in expected.stages:
        value = stage.found(rows)
        if value is None:
            return f"nothing to compare: no row from step {stage.first} has {stage.column}"
        if abs(value - stage.mean) > stage.within:
            return (
                f"not as expected at {stage.name}: {stage.column} {value:.1%}, expected "
                f"{stage}: {stage.otherwise}"
            )
    return f"as expected: {expected.stages[-1]}"
