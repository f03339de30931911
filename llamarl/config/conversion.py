"""Plain values to the schema of llamarl.config.schema and back: strict, and everything that does
not fit told at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from llamarl.config.loss_options import LOSS_OPTIONS
from llamarl.config.schema import Config, LossSettings, Mark
from llamarl.native.files import replace_text
from llamarl.words.names import nearest

# Keys of earlier releases -> today's.
RENAMED = {
    "deadline_s": "timeout_s",
    "generator.quantize_keep": "generator.quantize_exclude",
    "loss.length_normalise": "loss.length_normalize",
    "loss.normalise": "loss.normalize",
    "reference.enabled": "reference.kind",
}


@dataclass(frozen=True, slots=True)
class Problem:
    where: str  # a key, or key=value
    what: str
    keys: tuple[str, ...] = ()  # the keys that it is about


class ConfigError(ValueError):
    """All problems of a config, one aligned line each."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        width = min(max(len(p.where) for p in problems), 50)
        lines = [f"  {p.where:<{width}}   {p.what}" for p in problems]
        super().__init__("\n".join(["bad config, nothing started:", *lines]))


@functools.cache
def _hints(schema: type) -> dict[str, object]:
    """The type of each field of a dataclass."""
    hints = get_type_hints(schema, include_extras=True)
    return {field.name: hints[field.name] for field in fields(schema)}


def _is_union(hint: object) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def schemas_of(hint: object) -> tuple[type, ...]:
    """The dataclasses that a section may be: several where it has kinds; () if it is no section."""
    arms = get_args(hint) if _is_union(hint) else (hint,)
    return arms if all(map(is_dataclass, arms)) else ()


def _kinds_of(schema: type) -> tuple[str, ...]:
    """The kinds that a dataclass of a section of several kinds stands for."""
    return get_args(_hints(schema)["kind"])


def _fields_below(
    schema: type = Config, prefix: str = ""
) -> Iterator[tuple[str, dataclasses.Field]]:
    """Every key of the schema and its field, sections before what is in them; a key that several
    kinds of a section have comes once for each. The options of losses are not among them.
    """
    for field in fields(schema):
        if schema is LossSettings and field.name == "options":
            continue
        key = prefix + field.name
        yield key, field
        for inner in schemas_of(_hints(schema)[field.name]):
            yield from _fields_below(inner, f"{key}.")


@functools.cache
def known_keys() -> tuple[str, ...]:
    """Every key of the schema, sections and the options of all losses included: ("max_steps", ...,
    "loss", "loss.fn", ...).
    """
    keys = [key for key, _ in _fields_below()]
    options = [f"loss.{name}" for name in LOSS_OPTIONS]
    return tuple(dict.fromkeys(keys + options))


@functools.cache
def sections_of_kinds() -> tuple[str, ...]:
    """The sections whose keys depend on their kind: ("beta_schedule", "task", ...)."""
    return tuple(name for name, hint in _hints(Config).items() if len(schemas_of(hint)) > 1)


@functools.cache
def _marked_keys(mark: Mark) -> frozenset[str]:
    return frozenset(
        key for key, field in _fields_below() if mark in field.metadata.get("marks", ())
    )


def is_marked(key: str, mark: Mark) -> bool:
    """Whether a key bears a mark of the schema: by itself, or by the section that it is in."""
    section = key.partition(".")[0]
    return not _marked_keys(mark).isdisjoint((key, section))


def did_you_mean(key: str, names: Sequence[str]) -> str:
    """ "; did you mean NAME?" for the nearest name, by its last part or as a whole; "" when none is
    near. A key of an earlier release is answered with its name of today.
    """
    if key in RENAMED:
        return f"; it is called {RENAMED[key]} now"
    last = {name.rpartition(".")[2]: name for name in reversed(names)}
    tail = key.rpartition(".")[2]
    if tail in last:
        return f"; did you mean {last[tail]}?"
    near = nearest(key, names, cutoff=0.75)
    if near is None:
        near = last.get(nearest(tail, last, cutoff=0.7))
    return "" if near is None else f"; did you mean {near}?"


def need(value: object, hint: object) -> str:
    """What a value that does not fit should have been: "need X", with the nearest word."""
    near = did_you_mean(value, names_of(hint)) if isinstance(value, str) else ""
    return f"need {describe(hint)}{near}"


def describe(hint: object) -> str:
    """What a value must be, in words."""
    if get_origin(hint) is Annotated:
        base, bounds = get_args(hint)
        return f"{describe(base)} {bounds}"
    if get_origin(hint) is Literal:
        return " or ".join(get_args(hint))
    if _is_union(hint):
        return " or ".join(describe(arm) for arm in get_args(hint))
    if get_origin(hint) is list and get_origin(get_args(hint)[0]) is Literal:
        return f"a list of some of {', '.join(get_args(get_args(hint)[0]))}"
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        type(None): "null",
        list[int]: "a list of ranks such as [0,1]",
        list[str]: "a list of texts such as [a,b]",
    }
    return words[hint]


def names_of(hint: object) -> list[str]:
    """The words among what a value may be."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [name for arm in get_args(hint) for name in names_of(arm)]


def convert(value: object, hint: object) -> object:
    """The value in the hint's type. ValueError, without words, if it does not fit."""
    if _is_union(hint):
        return _first_fit(value, get_args(hint))
    origin = get_origin(hint)
    if origin is Annotated:
        base, bounds = get_args(hint)
        converted = convert(value, base)
        if converted in bounds:
            return converted
    elif origin is Literal:
        if value in get_args(hint):
            return value
    elif origin is list:
        (item_hint,) = get_args(hint)
        if isinstance(value, list):
            return [convert(item, item_hint) for item in value]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        return _number(value, hint)
    elif type(value) is hint:
        return value
    raise ValueError


def _first_fit(value: object, hints: Sequence[object]) -> object:
    """The value in the first of these types that it fits. ValueError if it fits none."""
    for hint in hints:
        try:
            return convert(value, hint)
        except ValueError:
            continue
    raise ValueError


def _number(value: float, hint: object) -> object:
    """A number as a type that can be written as one. ValueError if it does not fit."""
    if not math.isfinite(value):
        raise ValueError
    if hint is int and value == int(value):
        return int(value)
    if hint is float:
        return float(value)
    if hint is str:
        return str(value)
    raise ValueError


class _Reader:
    """Reads nested values into the schema; what does not fit is added to `problems`."""

    def __init__(self):
        self.problems: list[Problem] = []

    def section(self, values: object, schemas: Sequence[type], prefix: str) -> object | None:
        """A section whose keys begin with prefix, as one of these dataclasses; None if it cannot
        be.
        """
        if not isinstance(values, Mapping):
            section = prefix.removesuffix(".")
            example = prefix + fields(schemas[0])[0].name
            what = f"a section; set its keys, such as {example}"
            self.problems.append(Problem(f"{section}={show(values)}", what, (section,)))
            return None
        if len(schemas) == 1:
            return self._fill(values, schemas[0], prefix)
        schema = self._chosen(values, schemas, prefix)
        return self._fill_kind(values, schema, schemas, prefix) if schema is not None else None

    def _chosen(
        self, values: Mapping[str, object], schemas: Sequence[type], prefix: str
    ) -> type | None:
        """The dataclass of the kind that is asked for."""
        key = f"{prefix}kind"
        by_kind = {kind: schema for schema in schemas for kind in _kinds_of(schema)}
        if "kind" not in values:
            self.problems.append(Problem(key, f"missing; need {' or '.join(by_kind)}", (key,)))
            return None
        kind = values["kind"]
        if kind not in by_kind:
            what = need(kind, Literal[tuple(by_kind)])
            self.problems.append(Problem(f"{key}={show(kind)}", what, (key,)))
            return None
        return by_kind[kind]

    def _fill_kind(
        self, values: Mapping[str, object], schema: type, schemas: Sequence[type], prefix: str
    ) -> object | None:
        """A section of several kinds, as the chosen one. A null for another kind's key says no more
        than that it is not this kind's.
        """
        section, kind, own = prefix.removesuffix("."), values["kind"], _hints(schema)
        kinds_with: dict[str, list[str]] = {}
        for other in schemas:
            for name in _hints(other):
                kinds_with.setdefault(name, []).extend(_kinds_of(other))
        missing = [name for name in own if name not in values]
        if missing:
            what = f"needs {', '.join(missing)} too; choose it with its keys: {section}={kind}"
            given = tuple(prefix + str(name) for name in values)
            self.problems.append(Problem(f"{prefix}kind={kind}", what, given))
            self._refuse_unknown([name for name in values if name not in kinds_with], prefix)
            return None
        foreign = [name for name in values if name in kinds_with and name not in own]
        for name in foreign:
            if values[name] is not None:
                what = f"only {section}={' or '.join(kinds_with[name])} has it"
                self.problems.append(Problem(prefix + name, what, (prefix + name,)))
        kept = {name: value for name, value in values.items() if name not in foreign}
        return self._fill(kept, schema, prefix)

    def _fill(self, values: Mapping[str, object], schema: type, prefix: str) -> object | None:
        """The dataclass of these values; None if a key is missing or does not fit."""
        unknown = dict(values)
        read = {}
        for name, hint in _hints(schema).items():
            key = prefix + name
            if schema is LossSettings and name == "options":
                read[name] = unknown
                unknown = {}
            elif name not in values:
                needed = "a section" if schemas_of(hint) else describe(hint)
                self.problems.append(Problem(key, f"missing; need {needed}", (key,)))
            elif schemas := schemas_of(hint):
                read[name] = self.section(unknown.pop(name), schemas, f"{key}.")
            else:
                self._value(unknown.pop(name), hint, key, read)
        self._refuse_unknown(unknown, prefix)
        return schema(**read) if len(read) == len(fields(schema)) else None

    def _refuse_unknown(self, names: Iterable[object], prefix: str) -> None:
        for name in names:
            key = f"{prefix}{name}"
            self.problems.append(Problem(key, "unknown key" + did_you_mean(key, known_keys())))

    def _value(self, value: object, hint: object, key: str, read: dict[str, object]) -> None:
        """Put one value into `read` under the last part of its key."""
        name = key.rpartition(".")[2]
        if value == "???":
            self.problems.append(Problem(key, f"required: set {key}={name.upper()}", (key,)))
            return
        try:
            read[name] = convert(value, hint)
        except ValueError:
            self.problems.append(Problem(f"{key}={show(value)}", need(value, hint), (key,)))


def show(value: object) -> str:
    """As it is written on a command line."""
    if isinstance(value, list):
        return "[" + ",".join(map(show, value)) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


def to_config(composed: DictConfig | Mapping[str, object]) -> Config:
    """The typed config. ConfigError names every unknown key, wrong type and value out of range at
    once.
    """
    reader = _Reader()
    values = composed
    if isinstance(composed, DictConfig):
        try:
            values = OmegaConf.to_container(composed, resolve=True)
        except OmegaConfBaseException as error:
            problem = Problem(str(error.full_key), str(error).splitlines()[0])
            reader.problems.append(problem)
            values = OmegaConf.to_container(composed, resolve=False)
    config = reader.section(values, (Config,), "")
    if reader.problems:
        raise ConfigError(_without_echoes(reader.problems, composed))
    return config


def _without_echoes(
    problems: list[Problem], composed: DictConfig | Mapping[str, object]
) -> list[Problem]:
    """The problems but for those of a value that is another's by reference, and wrong with it."""
    wrong = {key for problem in problems for key in problem.keys}
    return [p for p in problems if not (p.keys and _source(composed, p.keys[0]) in wrong)]


def _source(composed: DictConfig | Mapping[str, object], key: str) -> str | None:
    """The key that a value refers to ("${model.dtype}"), None for a plain one."""
    if not isinstance(composed, DictConfig):
        return None
    section, _, name = key.rpartition(".")
    node = OmegaConf.select(composed, section) if section else composed
    if not isinstance(node, DictConfig) or name not in node:
        return None
    if not OmegaConf.is_interpolation(node, name):
        return None
    reference = OmegaConf.to_container(node, resolve=False)[name]
    return reference.removeprefix("${").removesuffix("}")


def to_values(config: Config) -> dict[str, object]:
    """The inverse of to_config: nested plain values under the keys of the command line."""
    values = dataclasses.asdict(config)
    values["loss"].update(values["loss"].pop("options"))
    return values


def save_config(config: Config, path: str | Path) -> None:
    """Write config.yaml, whole at any moment: resolved, and read back by `load_config`."""
    replace_text(path, OmegaConf.to_yaml(OmegaConf.create(to_values(config))))


def load_config(path: str | Path) -> Config:
    """Read what save_config wrote. ValueError naming the file if it is damaged or does not fit this
    version's schema.
    """
    try:
        loaded = OmegaConf.load(path)
    except YAMLError as error:
        cause = " ".join(str(error).split())
        raise ValueError(
            f"{path}: damaged, not YAML ({cause}); "
            "the config is also in each checkpoint's controller part"
        ) from error
    try:
        return to_config(loaded)
    except ConfigError as error:
        first, *more = error.problems
        others = f", and {len(more)} more" if more else ""
        what = f"damaged, or of another version of llamarl: {first.where}: {first.what}{others}"
        raise ConfigError([Problem(str(path), what)]) from error


def config_differences(old: Config, new: Config) -> dict[str, tuple[object, object]]:
    """key -> (old value, new value), for every key whose value is not the same."""
    return value_differences(to_values(old), to_values(new))


def value_differences(
    old: Mapping[str, object], new: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """The same of what to_values gave, also in another version. None for what one of them lacks."""
    before, after = flat(old), flat(new)
    changed = {}
    for key in {**before, **after}:
        pair = (before.get(key), after.get(key))
        if pair[0] != pair[1]:
            changed[key] = pair
    return changed


def flat(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested values by their whole keys: {"loss": {"fn": "tb"}} is {"loss.fn": "tb"}."""
    pairs = {}
    for name, value in values.items():
        key = prefix + name
        if isinstance(value, dict):
            pairs.update(flat(value, f"{key}."))
        else:
            pairs[key] = value
    return pairs
