"""Plain values to the schema of llamarl.config.schema and back: strictly, and everything that does
not fit is reported at once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, overload

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from llamarl.config.files import sections, with_whole_parts
from llamarl.config.findings import ConfigError, Problem, keys_of, show
from llamarl.config.forms import Form, flat_of, forms_of, hints_of
from llamarl.config.hints import convert, describe, did_you_mean, is_union, need
from llamarl.config.loss_options import LOSS_OPTIONS
from llamarl.config.marks import Mark
from llamarl.config.schema import Config
from llamarl.config.sections.loss import LossSettings
from llamarl.disk.files import FORMAT, other_format, replace_text

_REFERENCE = re.compile(r"(\\*)\$\{")  # and the backslashes before it, which then are signs too


Schema = TypeVar("Schema")  # the dataclass of a kind of job's whole configuration


def schemas_of(hint: object) -> tuple[type, ...]:
    """Return the dataclasses that a section may be: several if it has kinds; () if it is no
    section.
    """
    arms = get_args(hint) if is_union(hint) else (hint,)
    return arms if all(map(is_dataclass, arms)) else ()


def _marks_below(schema: type, prefix: str) -> dict[str, frozenset[Mark]]:
    """Return the marks of every key of a dataclass, sections before what is in them."""
    marks = {}
    for form in forms_of(schema):
        for name, hint in form.hints.items():
            key = prefix + name
            marks[key] = form.marks[name]
            for inner in schemas_of(hint):
                marks.update(_marks_below(inner, f"{key}."))
    return marks


@functools.cache
def known_keys(schema: type = Config) -> dict[str, frozenset[Mark]]:
    """Return every key of a schema with its marks, sections included: "max_steps", ..., "loss",
    "loss.fn", ... The options of all losses stand for what a loss may have.
    """
    marks = _marks_below(schema, "")
    if marks.pop("loss.options", None) is None:
        return marks
    options = [f"loss.{name}" for name in LOSS_OPTIONS]
    return marks | dict.fromkeys(options, frozenset())


@functools.cache
def sections_of_kinds(schema: type = Config) -> tuple[str, ...]:
    """Return the sections whose keys depend on their kind: ("generator", "task", ...)."""
    hints = hints_of(schema).items()
    return tuple(name for name, hint in hints if len(forms_of(*schemas_of(hint))) > 1)


def is_marked(key: str, mark: Mark, schema: type = Config) -> bool:
    """Whether a key bears a mark of the schema: by itself, or by a section that it is in."""
    marks = known_keys(schema)
    within = itertools.accumulate(key.split("."), "{}.{}".format)
    return any(mark in marks.get(name, ()) for name in within)


def _is_named(hint: object) -> bool:
    """Whether a section holds sections by names that the user gives them."""
    return get_origin(hint) is dict and bool(schemas_of(get_args(hint)[1]))


class _Reader:
    """Reads nested values into a schema; what does not fit is added to `problems`."""

    def __init__(self, schema: type):
        self.problems: list[Problem] = []
        self._keys = known_keys(schema)

    def _refuse(self, key: str, what: str, *given: object) -> None:
        """Add a problem. given: the value that does not fit, if a value is what is wrong."""
        shown = [f"={show(value)}" for value in given]
        self.problems.append(Problem("".join([key, *shown]), what, (key,)))

    def section(self, values: object, schemas: Sequence[type], prefix: str) -> object | None:
        """Read a section whose keys begin with prefix, as one of these dataclasses; None if it
        cannot be read.
        """
        forms = forms_of(*schemas)
        if not isinstance(values, Mapping):
            example = prefix + next(iter(forms[0].hints))
            what = f"this is a section; set its keys, such as {example}"
            self._refuse(prefix.removesuffix("."), what, values)
            return None
        if len(forms) == 1:
            return self._fill(values, forms[0], prefix)
        # Read the kind that is asked for. A null for another kind's key is no error, because it
        # sets nothing.
        key = f"{prefix}kind"
        # A section has files in conf/ to choose from, unless the user gave it its name.
        is_chosen = prefix.count(".") == 1
        chooser = prefix.removesuffix(".") if is_chosen else key
        by_kind: dict[str, Form] = {}
        for form in forms:
            by_kind.update(dict.fromkeys(get_args(form.hints["kind"]), form))
        kinds = tuple(by_kind)
        if "kind" not in values:
            self._refuse(key, f"missing; need {' or '.join(kinds)}")
            return None
        kind = values["kind"]
        if kind not in kinds:
            self._refuse(key, need(kind, Literal[kinds]), kind)
            return None
        own = by_kind[kind].hints
        missing = [name for name in own if name not in values]
        kept = {}
        for name, value in values.items():
            having = [other for other in kinds if name in by_kind[other].hints]
            if kind in having or not having:
                kept[name] = value
            elif value is not None and not missing:
                self._refuse(prefix + name, f"only {chooser}={' or '.join(having)} has it")
        if not missing:
            return self._fill(kept, by_kind[kind], prefix)
        what = f"needs {', '.join(missing)} too"
        if is_chosen:
            what += f"; choose it with its keys: {chooser}={kind}"
        given = tuple(f"{prefix}{name}" for name in values)
        self.problems.append(Problem(f"{key}={kind}", what, given))
        self._refuse_unknown([name for name in kept if name not in own], prefix, own)
        return None

    def _fill(self, values: Mapping[str, object], form: Form, prefix: str) -> object | None:
        """Make the dataclass of these values; None if a key is missing or does not fit."""
        left = dict(values)
        read: dict[str, object] = {}
        for name, hint in form.hints.items():
            key = prefix + name
            schemas = schemas_of(hint)
            is_named = _is_named(hint)
            if form.schema is LossSettings and name == "options":
                read[name] = left
                left = {}
            elif name not in left:
                needed = "a section" if schemas or is_named else describe(hint)
                self._refuse(key, f"missing; need {needed}")
            elif schemas:
                read[name] = self.section(left.pop(name), schemas, f"{key}.")
            elif is_named:
                _, inner = get_args(hint)
                read[name] = self._named(left.pop(name), schemas_of(inner), key)
            elif left[name] == "???":
                del left[name]
                self._refuse(key, f"required: set {key}={name.upper()}")
            else:
                value = left.pop(name)
                try:
                    read[name] = convert(value, hint)
                except ValueError:
                    self._refuse(key, need(value, hint), value)
        self._refuse_unknown(left, prefix, form.hints)
        return form.make(read) if len(read) == len(form.hints) else None

    def _named(self, values: object, schemas: Sequence[type], key: str) -> dict[str, object]:
        """Read sections by name, each as one of these dataclasses."""
        if not isinstance(values, Mapping):
            self._refuse(
                key, f"this holds sections by name; set their keys, such as {key}.NAME.kind", values
            )
            return {}
        read = {}
        for name, section in values.items():
            read[str(name)] = self.section(section, schemas, f"{key}.{name}.")
        return read

    def _refuse_unknown(self, names: Iterable[object], prefix: str, own: Collection[str]) -> None:
        """Refuse these keys of a section that has other keys of its own."""
        known = [*(f"{prefix}{name}" for name in own), *self._keys]
        for name in names:
            key = f"{prefix}{name}"
            self._refuse(key, "unknown key" + did_you_mean(key, known))


@overload
def to_config(composed: DictConfig | Mapping[str, object]) -> Config: ...


@overload
def to_config(composed: DictConfig | Mapping[str, object], schema: type[Schema]) -> Schema: ...


def to_config(composed: DictConfig | Mapping[str, object], schema: type = Config) -> object:
    """Make the typed config. ConfigError names every unknown key, wrong type and value out of range
    at once.
    """
    reader = _Reader(schema)
    if isinstance(composed, DictConfig):
        written = with_whole_parts(sections(composed))
        values = _resolved(written, reader.problems)
    else:
        values = written = dict(composed)
    config = reader.section(values, (schema,), "")
    if reader.problems:
        echoes = echoing(written, keys_of(reader.problems))
        own = [p for p in reader.problems if not (p.keys and p.keys[0] in echoes)]
        raise ConfigError(own or reader.problems)
    return config


def _resolved(written: dict, problems: list[Problem]) -> dict:
    """Fill in the values that refer to each other ("${model.dtype}"). A reference that cannot be
    filled in is a problem, and stays as it is written.
    """
    config = OmegaConf.create(written)
    try:
        return sections(config, resolve=True)
    except OmegaConfBaseException:
        pass  # told below, key by key
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
    values = _plain(config)
    if isinstance(config, Config):
        values["loss"].update(values["loss"].pop("options"))
    return values


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
