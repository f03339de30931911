"""The data sheet of a machine: what its devices can do, what is assumed of them and why, and what
was measured on them. A YAML file that can be carried elsewhere and edited.

    sheet = read_sheet("h100")     # one that comes with llamarl, by its name
    sheet = read_sheet("NAME.yaml")
    sheet.assumed.train_efficiency # 0.4
    write_sheet(sheet, "NAME.yaml")

    name: H100 SXM
    device:                        # Device
      kind: gpu
      memory_gib: 80
      ...
    assumptions:                   # Assumed, each with its reason
      train_efficiency: {value: 0.4, why: what pretraining at scale reports}
      ...
    measured: null                 # Measured: curves of one model on one device

Sizes are in bytes, FLOPs and seconds. A GPU is whatever a rank computes on: on a machine without
one it is the share of the CPU that a rank has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path

import yaml

from llamarl.models.config import ModelConfig
from llamarl.models.sharding import num_parameters
from llamarl.planner.curves import Cost, Curve, FitError
from llamarl.words.names import did_you_mean

SHEETS = Path(__file__).parent / "sheets"
KINDS = ("gpu", "cpu")
DTYPES = ("float32", "bfloat16", "float16", "float8", "int8")
# What Measured has of a step besides its curves.
BESIDES = (
    "together_s",
    "sampled_s",
    "hosted_s",
    "publish_s",
    "swap_s",
    "turn_s",
    "crowding",
    "transfer_s",
)


class BadSheet(ValueError):
    """A data sheet cannot be used; the message names the file, the key and what it needs."""


@dataclass(frozen=True, slots=True)
class Device:
    """The figures of one GPU, as its maker states them or a probe measured them.

    kind: gpu, or cpu: a rank's share of a CPU. memory_gib: GiB. flops: FLOP/s of products without
    sparsity, by dtype. memory_bytes_per_s: of its own memory. link_bytes_per_s: each way to a GPU
    of the same node; network_bytes_per_s: each way to one of another node, a GPU's share;
    host_bytes_per_s: each way to host memory. gpus_per_node: how many GPUs the fast link joins.
    """

    kind: str
    memory_gib: float
    flops: Mapping[str, float]
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    host_bytes_per_s: float
    gpus_per_node: int

    def flops_of(self, dtype: str) -> float:
        """Return FLOP/s in a dtype. BadSheet where the sheet does not say."""
        if dtype not in self.flops:
            known = ", ".join(self.flops)
            raise BadSheet(f"device.flops has no {dtype}, only {known}; add device.flops.{dtype}")
        return self.flops[dtype]


@dataclass(frozen=True, slots=True)
class Assumption:
    """A number that was not measured, and the reason for it."""

    value: float
    why: str


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What is assumed of a machine.

    Shares of the device's figures that are reached, 0 to 1: train_efficiency and
    prefill_efficiency of its FLOP/s; decode_efficiency of them, by the few rows of a decode step;
    memory_efficiency, link_efficiency and network_efficiency of its bytes a second;
    tensor_efficiency of the speed that is kept at each doubling of the ranks that share a layer,
    messages apart. memory_share: of its memory that a job may fill.

    Seconds: link_latency_s and network_latency_s of a message between ranks; decode_layer_s of a
    layer of a decode step, and train_layer_s of one of a microbatch forward and backward, besides
    computing and reading; score_s of a completion's score, on all that score together.

    imbalance: the largest data-parallel rank's work over the mean, because batches are shared out
    by groups and their lengths differ.
    """

    train_efficiency: Assumption
    prefill_efficiency: Assumption
    decode_efficiency: Assumption
    memory_efficiency: Assumption
    link_efficiency: Assumption
    network_efficiency: Assumption
    tensor_efficiency: Assumption
    memory_share: Assumption
    link_latency_s: Assumption
    network_latency_s: Assumption
    decode_layer_s: Assumption
    train_layer_s: Assumption
    score_s: Assumption
    imbalance: Assumption

    def of(self, name: str) -> float:
        """Return the value of an assumption."""
        return getattr(self, name).value


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one model on one device, with one rank for each executor.

    model, parameters, dtype: which model, how many numbers it has, and what it computes in.
    microbatch: (packed tokens, pairs of a query and a key) -> forward and backward. update_s: of an
    update besides its microbatches: optimizer, checks, packing. decode: (rows, tokens of context)
    -> a decode step. prefill: prompt tokens -> reading them. score: completions -> their scores,
    None: not measured. copy: bytes -> copying them on the device.

    What a step takes besides, 0 where it was not measured. together_s: more of an update on several
    data-parallel ranks, on each. sampled_s: of a completion on its generator, besides decode steps:
    its submission, its record. hosted_s: of a completion on the rank that hosts the reward, besides
    the worker that scores it. publish_s, swap_s: of a version on either side, besides the copies:
    the canary. turn_s: of a synchronous step in which nobody works, because a message is on its
    way. crowding: the share by which a piece takes longer while all other cores of the machine are
    busy. transfer_s: of a version to a generator of an asynchronous run, the mean.
    """

    model: str
    parameters: int
    dtype: str
    microbatch: Cost
    update_s: float
    decode: Cost
    prefill: Curve
    copy: Curve
    score: Curve | None = None
    together_s: float = 0.0
    sampled_s: float = 0.0
    hosted_s: float = 0.0
    publish_s: float = 0.0
    swap_s: float = 0.0
    turn_s: float = 0.0
    crowding: float = 0.0
    transfer_s: float = 0.0

    def is_of(self, model: ModelConfig, dtype: str) -> bool:
        """Whether it is about this model in this dtype."""
        return (num_parameters(model), dtype) == (self.parameters, self.dtype)


@dataclass(frozen=True, slots=True)
class Sheet:
    """A data sheet. notes: what its reader should know, for people."""

    name: str
    device: Device
    assumptions: Assumptions
    measured: Measured | None = None
    notes: tuple[str, ...] = field(default=())

    def assumed(self, name: str) -> float:
        """Return the value of an assumption."""
        return self.assumptions.of(name)


# --- Reading ---


def sheet_path(given: str) -> Path:
    """Return the file of a sheet that is given by its name or as a file. BadSheet if there is
    none.
    """
    named = SHEETS / f"{given}.yaml"
    if named.is_file():
        return named
    path = Path(given)
    if path.is_file():
        return path
    known = sorted(file.stem for file in SHEETS.glob("*.yaml"))
    raise BadSheet(
        f"sheet {given}: no such file, nor a sheet of that name (there are {', '.join(known)})"
        f"{did_you_mean(given, known)}; make one of this machine with "
        "python -m llamarl.planner fit --probe sheet=FILE"
    )


def read_sheet(given: str | Path) -> Sheet:
    """Read a sheet by its name or file. BadSheet names all that is wrong with it."""
    path = sheet_path(str(given))
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadSheet(f"{path}: not YAML ({str(error).splitlines()[0]})") from error
    reader = _Reader()
    sheet = reader.sheet(raw)
    if reader.problems or sheet is None:
        listed = "\n".join(f"  {problem}" for problem in reader.problems)
        raise BadSheet(f"{path} cannot be used:\n{listed}")
    return sheet


class _Reader:
    """Reads the parts of a sheet, and collects what is wrong with them."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def sheet(self, raw: object) -> Sheet | None:
        given = self._section(raw, "", fields(Sheet))
        if given is None:
            return None
        device = self._device(given["device"])
        assumptions = self._assumptions(given["assumptions"])
        measured = None
        if given.get("measured") is not None:
            measured = self._measured(given["measured"])
        notes = given.get("notes") or []
        if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
            self.problems.append("notes: need a list of texts")
        if self.problems or device is None or assumptions is None:
            return None
        return Sheet(
            name=str(given["name"]),
            device=device,
            assumptions=assumptions,
            measured=measured,
            notes=tuple(notes),
        )

    def _section(self, raw: object, place: str, known: tuple[Field, ...]) -> dict | None:
        """Return a section whose keys are those of a record; None, and a problem, otherwise."""
        if not isinstance(raw, dict):
            self.problems.append(f"{place or 'the sheet'}: need keys and values, not {raw!r}")
            return None
        names = [one.name for one in known]
        inside = f"{place}." if place else ""
        for key in raw.keys() - set(names):
            near = did_you_mean(str(key), names)
            self.problems.append(f"{inside}{key}: unknown key{near}")
        is_whole = True
        for one in known:
            if one.default is MISSING and one.default_factory is MISSING and one.name not in raw:
                self.problems.append(f"{inside}{one.name}: missing")
                is_whole = False
        return raw if is_whole else None

    def _number(self, raw: object, place: str, *, least: float | None = None) -> float:
        """Return a finite number above 0, or of at least `least`. YAML reads 1e9 as a text: such
        a text is a number too.
        """
        number = math.nan
        if isinstance(raw, int | float | str) and not isinstance(raw, bool):
            try:
                number = float(raw)
            except ValueError:
                number = math.nan
        is_enough = number > 0 if least is None else number >= least
        if not (math.isfinite(number) and is_enough):
            bound = "above 0" if least is None else f"of at least {least:g}"
            self.problems.append(f"{place}={raw!r}: need a finite number {bound}")
            return 1.0
        return number

    def _device(self, raw: object) -> Device | None:
        given = self._section(raw, "device", fields(Device))
        if given is None:
            return None
        speeds = {}
        if not isinstance(given["flops"], dict) or not given["flops"]:
            self.problems.append("device.flops: need FLOP/s by dtype, such as {bfloat16: 989e12}")
            return None
        for dtype, flops in given["flops"].items():
            if dtype not in DTYPES:
                near = did_you_mean(str(dtype), DTYPES)
                self.problems.append(f"device.flops.{dtype}: unknown dtype{near}")
            speeds[dtype] = self._number(flops, f"device.flops.{dtype}")
        numbers = {}
        for one in fields(Device):
            if one.name not in ("kind", "flops"):
                numbers[one.name] = self._number(given[one.name], f"device.{one.name}")
        gpus = numbers.pop("gpus_per_node")
        if gpus % 1:
            self.problems.append(f"device.gpus_per_node={gpus:g}: need a whole number")
        kind = str(given["kind"])
        if kind not in KINDS:
            self.problems.append(f"device.kind={kind}: need one of {', '.join(KINDS)}")
        return Device(kind=kind, flops=speeds, gpus_per_node=int(gpus), **numbers)

    def _assumptions(self, raw: object) -> Assumptions | None:
        given = self._section(raw, "assumptions", fields(Assumptions))
        if given is None:
            return None
        found = {}
        for one in fields(Assumptions):
            place = f"assumptions.{one.name}"
            entry = self._section(given[one.name], place, fields(Assumption))
            if entry is None:
                continue
            if not isinstance(entry["why"], str) or not entry["why"].strip():
                self.problems.append(f"{place}.why: need the reason for the value, as a text")
            value = self._bounded(entry["value"], one.name, f"{place}.value")
            found[one.name] = Assumption(value, str(entry["why"]))
        return None if self.problems else Assumptions(**found)

    def _bounded(self, raw: object, name: str, place: str) -> float:
        """Return an assumption's value: a share is at most 1, an imbalance at least that."""
        least = 0.0 if name.endswith("_s") else None
        if name == "imbalance":
            least = 1.0
        value = self._number(raw, place, least=least)
        if name.endswith(("_efficiency", "_share")) and value > 1:
            self.problems.append(f"{place}={value:g}: need a share of at most 1")
        return value

    def _measured(self, raw: object) -> Measured | None:
        given = self._section(raw, "measured", fields(Measured))
        if given is None:
            return None
        score = given.get("score")
        microbatch = self._cost(given["microbatch"], "measured.microbatch")
        decode = self._cost(given["decode"], "measured.decode")
        prefill = self._curve(given["prefill"], "measured.prefill")
        copy = self._curve(given["copy"], "measured.copy")
        scores = None if score is None else self._curve(score, "measured.score")
        parameters = self._number(given["parameters"], "measured.parameters")
        update_s = self._number(given["update_s"], "measured.update_s", least=0.0)
        besides = {}
        for name in BESIDES:
            place = f"measured.{name}"
            besides[name] = self._number(given.get(name, 0.0), place, least=0.0)
        if given["dtype"] not in DTYPES:
            self.problems.append(
                f"measured.dtype={given['dtype']!r}: need one of {', '.join(DTYPES)}"
            )
        if microbatch is None or decode is None or prefill is None or copy is None:
            return None
        return Measured(
            model=str(given["model"]),
            parameters=int(parameters),
            dtype=str(given["dtype"]),
            microbatch=microbatch,
            update_s=update_s,
            decode=decode,
            prefill=prefill,
            copy=copy,
            score=scores,
            **besides,
        )

    def _curve(self, raw: object, place: str) -> Curve | None:
        given = self._section(raw, place, fields(Curve))
        if given is None:
            return None
        numbers = []
        for name in ("xs", "ys"):
            values = given[name]
            if not isinstance(values, list) or not values:
                self.problems.append(f"{place}.{name}: need a list of numbers")
                return None
            where = f"{place}.{name}"
            numbers.append(tuple(self._number(value, where, least=0.0) for value in values))
        xs, ys = numbers
        try:
            return Curve(xs, ys, self._error(given.get("error"), f"{place}.error"))
        except ValueError as error:
            self.problems.append(f"{place}: {error}")
            return None

    def _cost(self, raw: object, place: str) -> Cost | None:
        given = self._section(raw, place, fields(Cost))
        if given is None:
            return None
        curve = self._curve(given["curve"], f"{place}.curve")
        slope = self._number(given.get("slope", 0.0), f"{place}.slope", least=0.0)
        each = self._number(given.get("each", 0.0), f"{place}.each", least=0.0)
        if curve is None:
            return None
        return Cost(curve, slope, self._error(given.get("error"), f"{place}.error"), each)

    def _error(self, raw: object, place: str) -> FitError:
        if raw is None:
            return FitError()
        given = self._section(raw, place, fields(FitError)) or {}
        numbers = {}
        for name, value in given.items():
            numbers[name] = self._number(value, f"{place}.{name}", least=0.0)
        points = int(numbers.get("points", 0))
        return FitError(
            typical=numbers.get("typical", 0.0), worst=numbers.get("worst", 0.0), points=points
        )


# --- Writing ---


def write_sheet(sheet: Sheet, path: str | Path) -> None:
    """Write a sheet as YAML, which read_sheet reads to an equal one."""
    text = yaml.safe_dump(_plain(sheet), sort_keys=False, allow_unicode=True, width=100)
    Path(path).write_text(text, encoding="utf-8")


def _plain(value: object) -> object:
    """Return records as dicts, and tuples as lists, all the way down."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    return value
