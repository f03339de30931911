"""What is wrong with a configuration: problems, each with the keys that it is about. What pydantic
finds is told here in our words, in a line for each key.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from llamarl.words.fields import (
    Key,
    all_keys,
    bare,
    by_kind,
    flat_of,
    hints_of,
    is_by_kind,
    is_named,
    keys_of_kind,
    schemas_of,
)
from llamarl.words.names import nearest


@dataclass(frozen=True, slots=True)
class Problem:
    where: str  # a key, or key=value
    what: str
    keys: tuple[str, ...] = ()  # the keys that it is about


def keys_of(problems: Iterable[Problem]) -> set[str]:
    """Return the keys that any of these problems is about."""
    return set().union(*(problem.keys for problem in problems))


class ConfigError(ValueError):
    """All problems of a config, each on an aligned line."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        width = min(max(len(p.where) for p in problems), 50)
        lines = [f"  {p.where:<{width}}   {p.what}" for p in problems]
        super().__init__("\n".join(["bad config, nothing started:", *lines]))


class Findings:
    """Collects the problems of a config that fits the schema, with the values that they are
    about.
    """

    def __init__(self, values: Mapping[str, object]):
        self.problems: list[Problem] = []
        self._values = values

    def add(self, what: str, *keys: str) -> None:
        """Add a problem of these keys. The message shows key=value of each, then `what`: the reason
        and the remedy.
        """
        shown = []
        for key in keys:
            value: object = self._values
            for name in key.split("."):
                assert isinstance(value, Mapping), f"{key}: there is no such section"
                value = value[name]
            shown.append(f"{key}={show(value)}")
        self.problems.append(Problem(" ".join(shown), what, keys))

    def add_unless_file(self, path: str | Path | None, key: str) -> None:
        """Add a problem unless there is something at the path, or a file that it is a pattern of;
        None is no path.
        """
        if not path or Path(path).exists():
            return
        if not any(Path(path).parent.glob(Path(path).name)):
            self.add(f"no such file: {Path(path)}", key)

    def add_unless_model(self, directory: str | None, key: str) -> None:
        """Add a problem unless a model's config.json is in the directory; None is no directory."""
        if not directory:
            return
        path = Path(directory)
        if not path.exists() and not path.is_absolute() and len(path.parts) == 2:
            what = (
                f"no such file: {path / 'config.json'}; a model is a directory on this machine, "
                f"so fetch one of the Hugging Face Hub first: hf download {path} --local-dir DIR"
            )
            self.add(what, key)
            return
        self.add_unless_file(path / "config.json", key)


def show(value: object) -> str:
    """Write a value as it is written on a command line."""
    if isinstance(value, list):
        return "[" + ",".join(map(show, value)) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


def did_you_mean(key: str, names: Collection[str]) -> str:
    """Return "; did you mean NAME?" for the nearest name, by its last part or as a whole; "" if
    none is near.
    """
    last = {name.rpartition(".")[2]: name for name in reversed(list(names))}
    tail = key.rpartition(".")[2]
    if tail in last:
        return f"; did you mean {last[tail]}?"
    near = nearest(key, names, cutoff=0.75)
    if near is None:
        alike = nearest(tail, last, cutoff=0.7)
        near = None if alike is None else last[alike]
    return "" if near is None else f"; did you mean {near}?"


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "null",
}


def need(value: object, hint: Any) -> str:
    """Say what a value that does not fit should have been: "need X", with the nearest word."""
    near = did_you_mean(value, _names_of(hint)) if isinstance(value, str) else ""
    return f"need {describe(hint)}{near}"


def describe(hint: Any) -> str:
    """Say what a value must be."""
    for one in getattr(hint, "__metadata__", ()):
        if getattr(one, "description", None):
            return one.description
    hint = bare(hint)
    if hint in _WORDS:
        return _WORDS[hint]
    if get_origin(hint) is Literal:
        return " or ".join(get_args(hint))
    if get_origin(hint) is list:
        names = _names_of(hint)
        return f"a list of some of {', '.join(names)}" if names else "a list such as [a,b]"
    return " or ".join(map(describe, get_args(hint)))


def _names_of(hint: Any) -> tuple[str, ...]:
    """Return the words among the allowed values."""
    arms = get_args(bare(hint))
    if get_origin(bare(hint)) is Literal:
        return arms
    return tuple(itertools.chain.from_iterable(map(_names_of, arms)))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an error is.

    section: the path of the section that has the key. schemas: what the section may be. key: the
    key's path. hint: what it may be; None: it is unknown.
    """

    section: tuple[str, ...]
    schemas: tuple[type, ...]
    key: tuple[str, ...]
    hint: Any

    @property
    def kinds(self) -> Mapping[str, type]:
        """The kinds of the section, each with its dataclass; {} if it has none."""
        return by_kind(*self.schemas)


def _place_of(loc: Iterable[object], root: type) -> _Place:
    """Return where in a schema pydantic found an error. Its path has the kind of each union, and
    Flat fields, which no key has.
    """
    section: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    hint: Any = root
    schemas: tuple[type, ...] = ()
    whole: Any = root  # the type of what has the path `key`
    for part in map(str, loc):
        if is_by_kind(hint):
            hint = by_kind(*schemas_of(hint))[part]
            continue
        if schemas_of(hint):
            hint = hints_of(*schemas_of(hint)).get(part)
            if flat_of(hint) is not None:
                continue
        elif is_named(hint):
            hint = get_args(bare(hint))[1]
        else:
            break
        schemas = schemas_of(whole)
        section = key
        key = (*key, part)
        whole = hint
    return _Place(section, schemas, key, whole)


def problems_of(error: ValidationError, root: type, values: Mapping[str, object]) -> list[Problem]:
    """Return a problem for each key that pydantic refused in these values of a schema."""
    found: dict[str, Problem] = {}
    places = [(one, _place_of(one["loc"], root)) for one in error.errors()]
    lacking: dict[tuple[str, ...], list[str]] = {}  # section with kinds -> keys of its kind
    for one, place in places:
        if one["type"] == "missing" and len(place.kinds) > 1:
            lacking.setdefault(place.section, []).append(place.key[-1])
    for one, place in places:
        key = ".".join(place.key)
        section = _at(values, place.section)
        assert isinstance(section, Mapping), f"{key} is in no section"
        if one["type"] in ("unexpected_keyword_argument", "invalid_key"):
            having = _having(place)
            if not having:
                found[key] = Problem(key, "unknown key" + _near(place, section, root), (key,))
            elif place.section not in lacking:
                # A section has files in conf/ to choose from, unless the user gave it its name.
                named = place.section if len(place.section) == 1 else (*place.section, "kind")
                what = f"only {'.'.join(named)}={' or '.join(having)} has it"
                found[key] = Problem(key, what, (key,))
        elif one["type"] == "value_error" and _is_of_one_kind(place.hint):
            found[key] = Problem(key, str(one["ctx"]["error"]), (key,))
        elif place.section in lacking:
            problem = _too_few(place.section, section, lacking[place.section])
            found[problem.where] = problem
        else:
            found.setdefault(key, _wrong(one["type"], place, _at(values, place.key)))
    return list(found.values())


def _is_of_one_kind(hint: Any) -> bool:
    """Whether a hint is of a section without kinds."""
    return bool(schemas_of(hint)) and not by_kind(*schemas_of(hint))


def _at(values: object, path: Iterable[str]) -> object:
    """Return the value of a path; None if there is none."""
    for name in path:
        if not isinstance(values, Mapping):
            return None
        # A name may be a number: eval.sets={1: {kind: addition}}.
        values = {str(key): value for key, value in values.items()}.get(name)
    return values


def _having(place: _Place) -> list[str]:
    """Return the kinds of the section that have the key."""
    kinds = place.kinds.items() if len(place.kinds) > 1 else ()
    return [kind for kind, arm in kinds if place.key[-1] in keys_of_kind(arm, kind)]


def _near(place: _Place, section: Mapping, root: type) -> str:
    """Return the end of a message about an unknown key: the nearest that is known. Keys of the
    section itself come first, which may be in a part that the user named.
    """
    own: Mapping[str, Key] = {}
    kind = section.get("kind")
    if isinstance(kind, str) and kind in place.kinds:
        own = keys_of_kind(place.kinds[kind], kind)
    elif not place.kinds and len(place.schemas) == 1:
        own = keys_of_kind(place.schemas[0])
    names = [".".join((*place.section, name)) for name in own]
    return did_you_mean(".".join(place.key), [*names, *all_keys(root)])


def _too_few(path: tuple[str, ...], section: Mapping, lacking: list[str]) -> Problem:
    """Return the problem of a section that has a kind without all of its keys."""
    kind = section["kind"]
    what = f"needs {', '.join(lacking)} too"
    if len(path) == 1:
        what += f"; choose it with its keys: {path[0]}={kind}"
    prefix = ".".join(path)
    given = tuple(f"{prefix}.{name}" for name in section)
    return Problem(f"{prefix}.kind={kind}", what, given)


def _wrong(error: str, place: _Place, value: object) -> Problem:
    """Return the problem of a key with this value."""
    key = ".".join(place.key)
    schemas = schemas_of(place.hint)
    kinds = by_kind(*schemas)
    shown = f"{key}={show(value)}"
    if error == "missing":
        is_section = schemas or is_named(place.hint)
        needed = "a section" if is_section else describe(place.hint)
        return Problem(key, f"missing; need {needed}", (key,))
    if is_named(place.hint):
        what = f"this holds sections by name; set their keys, such as {key}.NAME.kind"
        return Problem(shown, what, (key,))
    if not schemas:
        return Problem(shown, need(value, place.hint), (key,))
    if not isinstance(value, Mapping):
        example = next(iter(kinds and ["kind"] or hints_of(*schemas)))
        what = f"this is a section; set its keys, such as {key}.{example}"
        return Problem(shown, what, (key,))
    chooser = f"{key}.kind"
    if "kind" not in value:
        return Problem(chooser, f"missing; need {' or '.join(kinds)}", (chooser,))
    kind = value["kind"]
    near = did_you_mean(kind, kinds) if isinstance(kind, str) else ""
    return Problem(f"{chooser}={show(kind)}", f"need {' or '.join(kinds)}{near}", (chooser,))
