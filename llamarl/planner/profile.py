"""The hardware profile of a machine: its data sheet, assumptions with their reasons, and measured
times. It is a YAML file that can be copied to another machine and edited.

    profile = read_profile("h100")       # a profile that comes with llamarl
    profile = read_profile("NAME.yaml")
    profile.assumed("train_efficiency")  # 0.4
    write_profile(profile, "NAME.yaml")

    name: H100 SXM
    device:                        # Device: the maker's figures
      kind: gpu
      memory_gib: 80
      ...
    assumptions:                   # Assumptions
      train_efficiency: {value: 0.4, why: what pretraining at scale reports}
      ...
    measured: null                 # MeasuredTimes: times of one model, from `fit`

Sizes are in bytes, FLOPs and seconds. "GPU" stands for whatever a rank computes on: without GPUs it
is the rank's share of the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import numpy as np
import yaml
from pydantic import Field, TypeAdapter, ValidationError

from llamarl.models.config import ModelConfig
from llamarl.models.sharding import num_parameters
from llamarl.words.fields import settings_dataclass
from llamarl.words.findings import ConfigError, Problem, problems_of
from llamarl.words.names import did_you_mean

PROFILES = Path(__file__).parent / "profiles"

# Each may be the text of a number too: YAML reads 989e12 as a text, and words are texts.
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, description="a number above 0")]
FromZero = Annotated[float, Field(ge=0, allow_inf_nan=False, description="a number of at least 0")]
Share = Annotated[float, Field(gt=0, le=1, description="a share above 0, of at most 1")]
Factor = Annotated[float, Field(ge=1, allow_inf_nan=False, description="a number of at least 1")]
Count = Annotated[int, Field(ge=1, description="a whole number of at least 1")]
Natural = Annotated[int, Field(ge=0, description="a whole number of at least 0")]
Dtype = Literal["float32", "bfloat16", "float16", "float8", "int8"]
Reason = Annotated[str, Field(pattern=r"\S", description="the reason for it")]
Record = TypeVar("Record")


class BadProfile(ValueError):
    """A hardware profile cannot be used; the message names the file, the keys and the reasons."""


def made(record: type[Record], values: Mapping[str, object], **keys: str) -> Record:
    """Return a record of these values. ConfigError names all that are wrong. keys: field -> the
    key that users know it by, if it is another.
    """
    try:
        return TypeAdapter(record).validate_python(values)
    except ValidationError as error:
        raise ConfigError(list(_named(problems_of(error, record, values), keys))) from error


def _named(problems: Sequence[Problem], keys: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the problems with the keys that users know."""
    for problem in problems:
        name, equals, value = problem.where.partition("=")
        yield replace(problem, where=f"{keys.get(name, name)}{equals}{value}")


@settings_dataclass
class Flops:
    """FLOP/s of products without sparsity, by dtype. None: the maker does not state them."""

    float32: Positive | None = None
    bfloat16: Positive | None = None
    float16: Positive | None = None
    float8: Positive | None = None
    int8: Positive | None = None

    def __post_init__(self):
        if not self.stated:
            raise ValueError("need FLOP/s of one dtype at least, such as bfloat16: 989e12")

    @property
    def stated(self) -> dict[str, float]:
        """The dtypes with their FLOP/s."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@settings_dataclass
class Device:
    """The figures of one GPU, as its maker states them.

    kind: gpu or cpu. memory_gib: GiB. memory_bytes_per_s: its own memory. link_bytes_per_s: each
    way to a GPU of the same node; network_bytes_per_s: each way to a GPU of another node, this
    GPU's share; host_bytes_per_s: each way to host memory. gpus_per_node: how many GPUs the fast
    link joins.
    """

    kind: str
    memory_gib: Positive
    flops: Flops
    memory_bytes_per_s: Positive
    link_bytes_per_s: Positive
    network_bytes_per_s: Positive
    host_bytes_per_s: Positive
    gpus_per_node: Count

    def __post_init__(self):
        if self.kind not in ("gpu", "cpu"):
            raise ValueError(f"kind={self.kind}: need gpu or cpu")

    def flops_of(self, dtype: str) -> float:
        """Return FLOP/s in a dtype. BadProfile if the profile does not say."""
        stated = self.flops.stated
        if dtype in stated:
            return stated[dtype]
        known = ", ".join(stated)
        raise BadProfile(f"device.flops has no {dtype}, only {known}; add device.flops.{dtype}")


@settings_dataclass
class Assumption:
    """A number that was not measured, and the reason for it."""

    value: FromZero
    why: Reason


@settings_dataclass
class AssumedShare:
    """A share that was not measured, and the reason for it."""

    value: Share
    why: Reason


@settings_dataclass
class AssumedFactor:
    """A factor that was not measured, and the reason for it."""

    value: Factor
    why: Reason


@settings_dataclass
class Assumptions:
    """Numbers that no data sheet states.

    Shares of the device's figures that are reached, above 0 and at most 1: train_efficiency and
    prefill_efficiency of its FLOP/s; decode_efficiency of its FLOP/s at the few rows of a decode
    step; memory_efficiency, link_efficiency and network_efficiency of its bytes a second;
    tensor_efficiency of the speed that is kept at each doubling of the ranks that share a layer,
    without messages. memory_share: share of the memory that a job may fill.

    Seconds: link_latency_s and network_latency_s of a message between ranks; decode_layer_s of a
    layer of a decode step, and train_layer_s of a layer of a microbatch forward and backward, both
    beside computing and reading; score_s of a completion's score.

    imbalance: the largest data-parallel rank's work over the mean, at least 1. Batches are dealt by
    groups of uneven lengths.
    """

    train_efficiency: AssumedShare
    prefill_efficiency: AssumedShare
    decode_efficiency: AssumedShare
    memory_efficiency: AssumedShare
    link_efficiency: AssumedShare
    network_efficiency: AssumedShare
    tensor_efficiency: AssumedShare
    memory_share: AssumedShare
    link_latency_s: Assumption
    network_latency_s: Assumption
    decode_layer_s: Assumption
    train_layer_s: Assumption
    score_s: Assumption
    imbalance: AssumedFactor


@settings_dataclass
class Curve:
    """Seconds over size, never falling. xs: sizes, rising and above 0. ys: seconds, from 0."""

    xs: Annotated[tuple[Positive, ...], Field(min_length=1, description="sizes above 0")]
    ys: Annotated[tuple[FromZero, ...], Field(min_length=1, description="times of at least 0")]

    def __post_init__(self):
        if len(self.xs) != len(self.ys):
            raise ValueError(f"{len(self.xs)} sizes and {len(self.ys)} times: need as many")
        if not self.xs or not all(map(math.isfinite, self.xs + self.ys)):
            raise ValueError(f"sizes {list(self.xs)}, times {list(self.ys)}: need finite ones")
        if min(self.xs) <= 0 or min(self.ys) < 0:
            raise ValueError(f"sizes {list(self.xs)}, times {list(self.ys)}: need none below 0")
        if any(b <= a for a, b in zip(self.xs, self.xs[1:])):
            raise ValueError(f"sizes {list(self.xs)}: need rising ones")
        if any(b < a for a, b in zip(self.ys, self.ys[1:])):
            raise ValueError(f"times {list(self.ys)}: need times that never fall")

    @classmethod
    def through(cls, sizes: Sequence[float], seconds: Sequence[float]) -> Curve:
        """Return the curve of these points. Times of one size are averaged. A time below that of a
        smaller size is noise and is raised to it.
        """
        xs, places = np.unique(np.asarray(sizes, float), return_inverse=True)
        means = np.bincount(places, weights=np.asarray(seconds, float)) / np.bincount(places)
        return cls(tuple(xs.tolist()), tuple(np.maximum.accumulate(means).tolist()))

    def at(self, x: float) -> float:
        """Return the seconds of size x: linear between two sizes, level below the smallest, and
        proportional to x beyond the largest; 0 for x = 0.
        """
        if x <= 0:
            return 0.0
        beyond = max(1.0, x / self.xs[-1])
        return beyond * float(np.interp(x, self.xs, self.ys))

    def per_unit(self) -> list[tuple[float, float]]:
        """Return (size, seconds a unit) of every point: eta of LlamaRL's figure 5."""
        return [(x, y / x) for x, y in zip(self.xs, self.ys)]

    @property
    def unit_time_falls(self) -> bool:
        """Whether a unit takes no longer in a larger batch: assumption 7.1 of theorem 7.5."""
        units = [y for _, y in self.per_unit()]
        return all(b <= a * (1 + 1e-9) for a, b in zip(units, units[1:]))


@settings_dataclass
class MeasuredTimes:
    """Seconds of one model on this machine, from runs with one rank an executor.

    parameters: how many numbers the model has. train: packed tokens of a microbatch -> its forward
    and backward, with its share of the optimizer. decode: rows -> a decode step. prefill: prompt
    tokens -> reading them. copy: bytes of the weights -> the stall of a publication. score:
    completions of a step -> their scores; None: not measured.
    """

    model: str
    parameters: Count
    dtype: Dtype
    train: Curve
    decode: Curve
    prefill: Curve
    copy: Curve
    score: Curve | None = None

    def is_of(self, model: ModelConfig, dtype: str) -> bool:
        """Whether these are times of this model in this dtype."""
        return (num_parameters(model), dtype) == (self.parameters, self.dtype)


@settings_dataclass
class Profile:
    """A hardware profile. notes: for its reader."""

    name: str
    device: Device
    assumptions: Assumptions
    measured: MeasuredTimes | None = None
    notes: Annotated[tuple[str, ...], Field(description="a list of texts")] = ()

    def assumed(self, name: str) -> float:
        """Return the value of an assumption."""
        return getattr(self.assumptions, name).value


def profile_path(given: str) -> Path:
    """Return the file of a profile, given by its name or as a file. BadProfile if there is none."""
    named = PROFILES / f"{given}.yaml"
    if named.is_file():
        return named
    path = Path(given)
    if path.is_file():
        return path
    known = sorted(file.stem for file in PROFILES.glob("*.yaml"))
    raise BadProfile(
        f"profile {given}: no such file, nor a hardware profile of that name (there are "
        f"{', '.join(known)}){did_you_mean(given, known)}; make one from runs of this machine with "
        "python -m llamarl.planner fit RUN_DIRS sheet=FILE"
    )


def read_profile(given: str | Path) -> Profile:
    """Read a profile by its name or file. BadProfile names everything that is wrong with it."""
    path = profile_path(str(given))
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadProfile(f"{path}: not YAML ({str(error).splitlines()[0]})") from error
    if not isinstance(raw, dict):
        raise BadProfile(f"{path}: need keys and values")
    try:
        return made(Profile, raw)
    except ConfigError as error:
        listed = "".join(f"\n  {problem.where}: {problem.what}" for problem in error.problems)
        raise BadProfile(f"{path} cannot be used:{listed}") from error


def write_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile as YAML, which read_profile reads to an equal one."""
    values = asdict(profile)
    text = yaml.safe_dump(_lists(values), sort_keys=False, allow_unicode=True, width=100)
    Path(path).write_text(text, encoding="utf-8")


def _lists(value: object) -> object:
    """Return nested values with lists in place of tuples, which YAML has not."""
    if isinstance(value, dict):
        return {key: _lists(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_lists(inner) for inner in value]
    return value
