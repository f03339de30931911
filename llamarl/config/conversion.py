"""Plain values to the schema of llamarl.config.schema and back: strict, and everything that does
not fit told at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from llamarl.config.loss_options import LOSS_OPTIONS
from llamarl.config.schema import Config, LossSettings
from llamarl.native.files import replace_text
from llamarl.tasks.names import nearest

# Keys of earlier releases -> today's.
RENAMED = {
    "deadline_s": "timeout_s",
    "generator.quantize_keep": "generator.quantize_exclude",
    "loss.length_normalise": "loss.length_normalize",
    "loss.normalise": "loss.normalize",
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
        super().__init__(
            "\n".join(
                ["bad config, nothing started:"]
                + [f"  {p.where:<{width}}   {p.what}" for p in problems]
            )
        )


@functools.cache
def _hints(schema: type) -> dict[str, object]:
    return get_type_hints(schema, include_extras=True)


@functools.cache
def known_keys() -> tuple[str, ...]:
    """Every key of the schema, sections and the options of all losses included: ("max_steps", ...,
    "loss", "loss.fn", ...).
    """

    def below(schema: type, prefix: str) -> list[str]:
        keys = []
        for name, hint in _hints(schema).items():
            if schema is not LossSettings or name != "options":
                keys += [
                    prefix + name,
                    *(below(hint, f"{prefix}{name}.") if is_dataclass(hint) else ()),
                ]
        return keys

    return (*below(Config, ""), *(f"loss.{name}" for name in LOSS_OPTIONS))


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


def describe(hint: object) -> str:
    """What a value must be, in words."""
    if get_origin(hint) is Annotated:
        base, bounds = get_args(hint)
        return f"{describe(base)} {bounds}"
    if get_origin(hint) is Literal:
        return " or ".join(get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
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
    origin = get_origin(hint)
    if origin is Annotated:
        base, bounds = get_args(hint)
        converted = convert(value, base)
        if converted not in bounds:
            raise ValueError
        return converted
    if origin in (Union, types.UnionType):
        for arm in get_args(hint):
            try:
                return convert(value, arm)
            except ValueError:
                continue
        raise ValueError
    if origin is Literal and value in get_args(hint):
        return value
    if origin is list and isinstance(value, list):
        return [convert(item, get_args(hint)[0]) for item in value]
    number = (
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    )
    if hint is int and number and value == int(value):
        return int(value)
    if hint is float and number:
        return float(value)
    if hint is str and (isinstance(value, str) or number):
        return str(value)
    if (hint is bool and isinstance(value, bool)) or (hint is type(None) and value is None):
        return value
    raise ValueError


def _read(values: object, schema: type, prefix: str, problems: list[Problem]):
    """Build a schema from a mapping; what does not fit is added to problems (and left None)."""
    if not isinstance(values, Mapping):
        section = prefix[:-1]
        what = f"a section; set its keys, such as {prefix}{fields(schema)[0].name}"
        problems.append(Problem(f"{section}={show(values)}", what, (section,)))
        return None
    values, read = dict(values), {}
    for name, hint in _hints(schema).items():
        key = prefix + name
        if schema is LossSettings and name == "options":
            read[name], values = values, {}
        elif name not in values:
            problems.append(
                Problem(
                    key,
                    f"missing; need {'a section' if is_dataclass(hint) else describe(hint)}",
                    (key,),
                )
            )
        elif is_dataclass(hint):
            read[name] = _read(values.pop(name), hint, f"{key}.", problems)
        elif (value := values.pop(name)) == "???":
            problems.append(Problem(key, f"required: set {key}={name.upper()}", (key,)))
        else:
            try:
                read[name] = convert(value, hint)
            except ValueError:
                nearest = did_you_mean(value, names_of(hint)) if isinstance(value, str) else ""
                problems.append(
                    Problem(f"{key}={show(value)}", f"need {describe(hint)}{nearest}", (key,))
                )
    for name in values:
        problems.append(
            Problem(
                prefix + str(name), "unknown key" + did_you_mean(prefix + str(name), known_keys())
            )
        )
    return schema(**read) if len(read) == len(fields(schema)) else None


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
    problems: list[Problem] = []
    values = composed
    if isinstance(composed, DictConfig):
        try:
            values = OmegaConf.to_container(composed, resolve=True)
        except OmegaConfBaseException as error:
            problems.append(Problem(str(error.full_key), str(error).splitlines()[0]))
            values = OmegaConf.to_container(composed, resolve=False)
    config = _read(values, Config, "", problems)
    if problems:
        wrong = {key for problem in problems for key in problem.keys}
        # A value that is another's by reference is wrong with it; one line says so.
        raise ConfigError(
            [p for p in problems if not (p.keys and _source(composed, p.keys[0]) in wrong)]
        )
    return config


def _source(composed: DictConfig | Mapping[str, object], key: str) -> str | None:
    """The key that a value refers to ("${model.dtype}"), None for a plain one."""
    section, _, name = key.rpartition(".")
    node = (
        OmegaConf.select(composed, section)
        if section and isinstance(composed, DictConfig)
        else composed
    )
    if (
        not isinstance(node, DictConfig)
        or name not in node
        or not OmegaConf.is_interpolation(node, name)
    ):
        return None
    return OmegaConf.to_container(node, resolve=False)[name][2:-1]


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
            f"{path}: damaged, not YAML ({cause}); the config is also in each checkpoint's controller part"
        ) from error
    try:
        return to_config(loaded)
    except ConfigError as error:
        first, more = error.problems[0], len(error.problems) - 1
        others = f", and {more} more" if more else ""
        what = f"damaged, or of another version of llamarl: {first.where}: {first.what}{others}"
        raise ConfigError([Problem(str(path), what)]) from error


def config_differences(old: Config, new: Config) -> dict[str, tuple[object, object]]:
    """key -> (old value, new value), for every key whose value is not the same."""
    return value_differences(to_values(old), to_values(new))


def value_differences(
    old: Mapping[str, object], new: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """The same for what to_values gave, also in another version. None for what one of them lacks."""

    def flat(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
        pairs = {}
        for key, value in values.items():
            pairs.update(
                flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
            )
        return pairs

    before, after = flat(old), flat(new)
    return {
        key: (before.get(key), after.get(key))
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    }
