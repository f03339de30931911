"""What a run is expected to come to, where that was measured: conf/expected.yaml.

    default:
      overrides: []
      measured: torchrun --standalone --nproc-per-node=2 recipes/llama_async.py seed=N, N = 0 to 3
      stages:
        - {name: the start, column: eval/accuracy, first: 0, last: 0, mean: 0.40, within: 0.03,
           otherwise: the model or the held-out prompts are others}

An expectation holds for a run of the same settings: its config may differ from that of the
overrides only in what the schema marks OUTWARD (the seed, directories, how often things are
written) and in where its executors are. The interval of a stage is that in which a further seed is
expected to fall. Stages are in the order of the run, so that the first that differs says where to
look.
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
_NO_MATTER = ("placement.", "eval.save_samples")  # that do not change what is learned


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a run, by the mean of a column over its rows from step `first` to `last`."""

    name: str
    column: str
    first: int
    last: int
    mean: float
    within: float  # of the mean, either way
    otherwise: str  # what differs then, in words

    def found(self, rows: Sequence[Row]) -> float | None:
        """Return the mean of the column in these rows; None if they have no value in it."""
        values = []
        for row in rows:
            value = number_of(row, self.column)
            if value is not None and self.first <= step_of(row) <= self.last:
                values.append(value)
        return sum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True)
class Expectation:
    """What runs of some settings come to."""

    name: str
    overrides: tuple[str, ...]
    measured: str  # how, in words
    stages: tuple[Stage, ...]  # at least one; the last is the result


def read_expectations(file: Path = FILE) -> list[Expectation]:
    """Read the file. TypeError or KeyError if it is not as above."""
    found = []
    for name, values in yaml.safe_load(file.read_text()).items():
        one = Expectation(
            name=name,
            overrides=tuple(values["overrides"]),
            measured=values["measured"],
            stages=tuple(Stage(**stage) for stage in values["stages"]),
        )
        found.append(one)
    return found


def expectation_of(config: Config, file: Path = FILE) -> Expectation | None:
    """Return what is expected of a run; None if its settings were not measured."""
    values = to_values(config)
    for one in read_expectations(file):
        if one.stages[-1].last != config.max_steps:
            continue
        same = to_values(default_config(overrides=one.overrides))
        if not differing(same, values):
            return one
    return None


def differing(measured: Mapping[str, object], values: Mapping[str, object]) -> list[str]:
    """Return the keys in which a config differs from a measured one, of those that matter."""
    keys = value_differences(measured, values)
    return [key for key in keys if not (_is_of_no_matter(key) or is_marked(key, "outward"))]


def _is_of_no_matter(key: str) -> bool:
    return key.startswith(_NO_MATTER)


def verdict(expected: Expectation, rows: Sequence[Row]) -> str:
    """Return a line: that a run came to what was expected, or which stage was the first to differ,
    and what may differ there.
    """
    for stage in expected.stages:
        value = stage.found(rows)
        if value is None:
            return f"nothing to compare: no row from step {stage.first} has {stage.column}"
        if abs(value - stage.mean) > stage.within:
            return (
                f"not as expected at {stage.name}: {stage.column} {value:.1%}, expected "
                f"{_interval(stage)}: {stage.otherwise}"
            )
    last = expected.stages[-1]
    return f"as expected: {_interval(last)}"


def _interval(stage: Stage) -> str:
    return f"{stage.mean:.1%} ± {100 * stage.within:.1f}".replace("%", " %")
