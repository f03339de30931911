"""Plain values to the schema of llamarl.config.schema and back: strictly, and everything that does
not fit is reported at once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from llamarl.config.files import sections, with_whole_parts
from llamarl.config.schema import Config
from llamarl.disk.files import FORMAT, other_format, replace_text
from llamarl.words.fields import Mark, adapter, all_keys, by_kind, flat_of, hints_of, schemas_of
from llamarl.words.findings import ConfigError, Problem, keys_of, problems_of, show

REQUIRED = "???"  # the value of a key that has no default
_REFERENCE = re.compile(r"(\\*)\$\{")  # and the backslashes before it, which then are signs too


Schema = TypeVar("Schema")  # the dataclass of a kind of job's whole configuration


@functools.cache
def known_keys(schema: type = Config) -> dict[str, frozenset[Mark]]:
    """Return every key of a schema with its marks, sections included: "max_steps", ..., "loss",
    "loss.fn", ... The options of all losses stand for what a loss may have.
    """
    return {key: one.marks for key, one in all_keys(schema).items()}


@functools.cache
def sections_of_kinds(schema: type = Config) -> tuple[str, ...]:
    """Return the sections whose keys depend on their kind: ("generator", "task", ...)."""
    hints = hints_of(schema).items()
    return tuple(name for name, hint in hints if len(by_kind(*schemas_of(hint))) > 1)


def is_marked(key: str, mark: Mark, schema: type = Config) -> bool:
    """Whether a key bears a mark of the schema: by itself, or by a section that it is in."""
    marks = known_keys(schema)
    within = itertools.accumulate(key.split("."), "{}.{}".format)
    return any(mark in marks.get(name, ()) for name in within)


@overload
def to_config(composed: DictConfig | Mapping[str, object]) -> Config: ...


@overload
def to_config(composed: DictConfig | Mapping[str, object], schema: type[Schema]) -> Schema: ...


def to_config(composed: DictConfig | Mapping[str, object], schema: type = Config) -> object:
    """Make the typed config. ConfigError names every unknown key, wrong type and value out of range
    at once.
    """
    problems: list[Problem] = []
    if isinstance(composed, DictConfig):
        written = with_whole_parts(sections(composed))
        values = _resolved(composed, written, problems)
    else:
        values = written = dict(composed)
    required = [key for key, value in flat(values).items() if value == REQUIRED]
    refused: list[Problem] = []
    try:
        config = adapter(schema).validate_python(values)
    except ValidationError as error:
        known = {*required, *keys_of(problems)}
        refused = [one for one in problems_of(error, schema, values) if not {*one.keys} <= known]
    problems += refused
    for key in required:
        section, _, name = key.rpartition(".")
        if f"{section}.kind" not in keys_of(refused):  # else the section may have no such key
            problems.append(Problem(key, f"required: set {key}={name.upper()}", (key,)))
    if problems:
        echoes = echoing(written, keys_of(problems))
        own = [p for p in problems if not (p.keys and p.keys[0] in echoes)]
        raise ConfigError(own or problems)
    return config


def _resolved(composed: DictConfig, written: dict, problems: list[Problem]) -> dict:
    """Fill in the values that refer to each other ("${model.dtype}"). A reference that cannot be
    filled in is a problem, and stays as it is written.

    written: the values of `composed`, perhaps with whole parts.
    """
    try:
        if written == sections(composed):  # to make another config of them takes ten times as long
            return sections(composed, resolve=True)
        return sections(OmegaConf.create(written), resolve=True)
    except OmegaConfBaseException:
        pass  # told below, key by key
    config = OmegaConf.create(written)
    for key, value in flat(written).items():
        if "${" not in str(value):
            continue
        try:
            OmegaConf.update(config, key, OmegaConf.select(config, key))
        except OmegaConfBaseException as error:
            what = f"{show(value)}: {str(error).splitlines()[0]}"
            problems.append(Problem(key, what, (key,)))
    return sections(config)


def echoing(written: Mapping[str, object], keys: Iterable[str]) -> set[str]:
    """Return the keys whose values refer to these keys, and so are wrong with them."""
    references = []
    for key in keys:
        references += ["${" + key + "}", "${oc.select:" + key + ","]
    echoes = set()
    for key, value in flat(written).items():
        if any(reference in str(value) for reference in references):
            echoes.add(key)
    return echoes


def to_values(config: object) -> dict[str, Any]:
    """Return nested plain values under the keys of the command line (the inverse of to_config)."""
    assert dataclasses.is_dataclass(config) and not isinstance(config, type), "a schema's config"
    return _plain(config)


def _plain(value: Any) -> Any:
    """Return a dataclass and all in it as plain values. Keys of a flat field join the others."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if not dataclasses.is_dataclass(value):
        return value
    values = {}
    schema: type = type(value)
    for name, hint in hints_of(schema).items():
        inner = _plain(getattr(value, name))
        if flat_of(hint) is None:
            values[name] = inner
        else:
            values.update(inner)
    return values


def save_config(config: object, path: str | Path) -> None:
    """Write config.yaml, whole at any moment: resolved, and read back by `load_config`."""
    values = {key: escaped(value) for key, value in to_values(config).items()}
    replace_text(path, OmegaConf.to_yaml(OmegaConf.create({"format": FORMAT, **values})))


def escaped(value: object) -> object:
    """Escape resolved values for OmegaConf, so that a "${" in a text refers to nothing."""
    if isinstance(value, str):
        return _REFERENCE.sub(r"\1\1\${", value)
    if isinstance(value, dict):
        return {key: escaped(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(inner) for inner in value]
    return value


def load_config(path: str | Path) -> Config:
    """Read what save_config wrote. ValueError naming the file if it is damaged, of another format,
    or does not fit the schema.
    """
    try:
        composed = OmegaConf.load(path)
        if not isinstance(composed, DictConfig):
            raise ConfigError([Problem(str(path), "damaged: a list, not sections")])
        values = sections(composed)
        refusal = other_format(values)
        if not refusal:
            del values["format"]
            return to_config(OmegaConf.create(values))
    except YAMLError as error:
        cause = " ".join(str(error).split())
        raise ValueError(
            f"{path}: damaged, not YAML ({cause}); "
            "the config is also in each checkpoint's controller part"
        ) from error
    except ConfigError as error:
        first, *more = error.problems
        others = f", and {len(more)} more" if more else ""
        what = f"damaged, or of another commit of llamarl: {first.where}: {first.what}{others}"
        raise ConfigError([Problem(str(path), what)]) from error
    raise ConfigError([Problem(str(path), refusal)])


def value_differences(
    old: Mapping[str, object], new: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """Return key -> (old value, new value) for every key whose values differ; None for a key that
    one side lacks. Both sides come from to_values, perhaps of another commit.
    """
    before, after = flat(old), flat(new)
    pairs = {key: (before.get(key), after.get(key)) for key in before | after}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def flat(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested values by whole keys: {"loss": {"fn": "tb"}} becomes {"loss.fn": "tb"}."""
    pairs = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            pairs.update(flat(value, f"{key}."))
        else:
            pairs[key] = value
    return pairs
