"""What pydantic finds wrong with the values of a configuration, in a line for each key."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
from llamarl.words.findings import Problem, did_you_mean, show

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
                what = f"only {_chooser(place.section)}={' or '.join(having)} has it"
                found[key] = Problem(key, what, (key,))
        elif place.section in lacking:
            problem = _too_few(place.section, section, lacking[place.section])
            found[problem.where] = problem
        else:
            found.setdefault(key, _wrong(one["type"], place, _at(values, place.key)))
    return list(found.values())


def _at(values: object, path: Iterable[str]) -> object:
    """Return the value of a path; None if there is none."""
    for name in path:
        if not isinstance(values, Mapping):
            return None
        # A name may be a number: eval.sets={1: {kind: addition}}.
        values = {str(key): value for key, value in values.items()}.get(name)
    return values


def _chooser(section: tuple[str, ...]) -> str:
    """Return the key that chooses a section's kind. A section has files in conf/ to choose from,
    unless the user gave it its name.
    """
    return ".".join(section if len(section) == 1 else (*section, "kind"))


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
