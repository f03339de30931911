"""Converts a value to a type, or says in words what the type needs."""

from __future__ import annotations

import contextlib
import itertools
import math
import types
from collections.abc import Collection, Mapping
from typing import Annotated, Literal, Union, get_args, get_origin

from llamarl.config.ranges import Positive
from llamarl.words.names import nearest

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "null",
    list[int]: "a list of ranks such as [0,1]",
    list[str]: "a list of texts such as [a,b]",
    list[Positive]: "two numbers above 0:",
}


def is_union(hint: object) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


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


def need(value: object, hint: object) -> str:
    """Say what a value that does not fit should have been: "need X", with the nearest word."""
    near = did_you_mean(value, names_of(hint)) if isinstance(value, str) else ""
    return f"need {describe(hint)}{near}"


def describe(hint: object) -> str:
    """Say what a value must be."""
    if hint in _WORDS:
        return _WORDS[hint]
    origin, arms = get_origin(hint), get_args(hint)
    if origin is Annotated:
        base, bounds = arms
        return f"{describe(base)} {bounds}"
    if origin is Literal:
        return " or ".join(arms)
    if origin is dict:
        return "a section of your own keys"
    if origin is list:
        return f"a list of some of {', '.join(names_of(hint))}"
    return " or ".join(map(describe, arms))


def names_of(hint: object) -> tuple[str, ...]:
    """Return the words among the allowed values."""
    arms = get_args(hint)
    if get_origin(hint) is Literal:
        return arms
    return tuple(itertools.chain.from_iterable(map(names_of, arms)))


def convert(value: object, hint: object) -> object:
    """Convert a value to the hint's type. ValueError, without words, if it does not fit."""
    if is_union(hint):
        for arm in get_args(hint):
            with contextlib.suppress(ValueError):
                return convert(value, arm)
        raise ValueError
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
    elif origin is dict:
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            return dict(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        # A number may be meant as a text, and as a whole number if it is whole.
        for kind in (float, str, int):
            fits = hint is kind and (kind is not int or value % 1 == 0)
            if fits and math.isfinite(value):
                return kind(value)
    elif type(value) is hint:
        return value
    raise ValueError
