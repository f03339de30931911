"""What sections of the configuration are made of: a frozen record that pydantic checks when it is
read, the numbers and texts that a field may be, and what a field decides beyond its own value.

    @settings_dataclass
    class CheckpointSettings:
        every: Natural
        \"\"\"Steps between checkpoints; 0: one at the end.\"\"\"
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    Strict,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import CoreSchema, core_schema

# What a key, or every key of a section, decides beyond its own value.
Mark = Literal[
    "identity",  # another value makes another run, which cannot resume a checkpoint
    "data",  # which prompts there are
    "answers",  # how held-out prompts are answered and scored: recipes/evaluate.py keeps it
    "outward",  # does not change what is learned: runs that differ in it alone are compared as one
]

# A number may be meant as a text, such as a run_dir of 5.
_CHECKS = ConfigDict(extra="forbid", coerce_numbers_to_str=True)


def marked(*marks: Mark):
    """Return a field with these marks."""
    return field(metadata={"marks": frozenset(marks)})


@dataclass_transform(frozen_default=True, field_specifiers=(marked,))
def settings_dataclass(section: type) -> type:
    """Make a class a section of the configuration, or one kind of it."""
    record: Any = dataclass(frozen=True, slots=True)(section)
    record.__pydantic_config__ = _CHECKS
    return record


def _number(value: object) -> object:
    """Refuse a text and a truth value, of which pydantic would make a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("no number")
    return value


def _finite(value: object) -> object:
    """Refuse nan and the infinities, of which pydantic would make a text."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("no text")
    return value


def _ordered(values: list[float]) -> list[float]:
    if len(values) != 2 or values[0] > values[1]:
        raise ValueError("no interval")
    return values


# The description of a type is what an error message says that a key needs.
Flag = Annotated[bool, Strict()]
Whole = Annotated[int, BeforeValidator(_number)]  # 1e3 is one
Number = Annotated[float, BeforeValidator(_number), AllowInfNan(False)]
AnyText = Annotated[str, BeforeValidator(_finite)]
Text = Annotated[AnyText, Field(min_length=1, description="a text that is not empty")]
Texts = Annotated[list[AnyText], Field(description="a list of texts such as [a,b]")]
Options = Annotated[
    dict[Annotated[str, Strict()], object], Field(description="a section of your own keys")
]
Paths = Annotated[
    dict[Annotated[str, Strict()], Text], Field(description="directories by name such as {a: DIR}")
]
RankList = Annotated[list[Whole], Field(description="a list of ranks such as [0,1]")]
Count = Annotated[Whole, Field(ge=1, description="a whole number of at least 1")]
Natural = Annotated[Whole, Field(ge=0, description="a whole number of at least 0")]
Positive = Annotated[Number, Field(gt=0, description="a number above 0")]
NonNegative = Annotated[Number, Field(ge=0, description="a number of at least 0")]
AtLeastOne = Annotated[Number, Field(ge=1, description="a number of at least 1")]
Share = Annotated[Number, Field(ge=0, le=1, description="a number between 0 and 1")]
PositiveShare = Annotated[
    Number, Field(gt=0, le=1, description="a number between 0 and 1, 0 excluded")
]
BelowOne = Annotated[Number, Field(ge=0, lt=1, description="a number of at least 0, below 1")]
PositiveInterval = Annotated[
    list[Positive],
    AfterValidator(_ordered),
    Field(description="two numbers above 0: the lowest and the highest, such as [0.7,2.0]"),
]
# What torch and the counters of sampling hold.
Seed = Annotated[
    Whole, Field(ge=0, le=2**63 - 1, description=f"a whole number between 0 and {2**63 - 1}")
]


@dataclass(frozen=True, slots=True)
class Flat:
    """In the annotation of a field: its keys lie beside the other keys of the section.

        class PartSettings:
            scorer: Annotated[KindSettings, Flat()]
            weight: Number

    is read from {"kind": "function", "fn": None, ..., "weight": 1.0}. known: the keys that we
    know, if the field takes any.
    """

    known: type | None = None


@dataclass(frozen=True, slots=True)
class ByKind:
    """In the annotation of a union of sections: the key `kind` says which of them it is.

    arms: the sections, where the annotation is their base class.
    """

    arms: tuple[type, ...] = ()

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return pydantic's schema of the union."""
        arms = by_kind(*(self.arms or schemas_of(source)))
        made = {arm: handler.generate_schema(arm) for arm in dict.fromkeys(arms.values())}
        choices: dict[Hashable, CoreSchema] = {}
        for kind, arm in arms.items():
            prepare = functools.partial(_of_kind, arms, kind)
            choices[kind] = core_schema.no_info_before_validator_function(prepare, made[arm])
        return core_schema.tagged_union_schema(choices, "kind")


def nested(schema: type, values: object) -> object:
    """Return the values of a section as pydantic reads them: those of its Flat field in a dict."""
    if not isinstance(values, Mapping):
        return values
    flat = [name for name, hint in hints_of(schema).items() if flat_of(hint) is not None]
    own = hints_of(schema).keys() - set(flat)
    found: dict[str, object] = {key: value for key, value in values.items() if key in own}
    inner = {key: value for key, value in values.items() if key not in own}
    return found | dict.fromkeys(flat, inner) if flat else values


def _of_kind(arms: Mapping[str, type], kind: str, values: Mapping[str, object]) -> object:
    """Return the values of a section of this kind. Nulls for keys that only other kinds have are
    left out: they set nothing.
    """
    others: set[str] = set()
    for name, arm in arms.items():
        others |= keys_of_kind(arm, name).keys()
    others -= keys_of_kind(arms[kind], kind).keys()
    kept = {key: value for key, value in values.items() if value is not None or key not in others}
    return nested(arms[kind], kept)


@functools.cache
def hints_of(schema: type) -> dict[str, Any]:
    """Return the type of each field of a section."""
    hints = get_type_hints(schema, include_extras=True)
    return {one.name: hints[one.name] for one in fields(schema)}


def flat_of(hint: object) -> Flat | None:
    """Return the annotation of a Flat field; None for any other."""
    found = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Flat)]
    return found[0] if found else None


def is_by_kind(hint: object) -> bool:
    return any(isinstance(one, ByKind) for one in getattr(hint, "__metadata__", ()))


def is_named(hint: Any) -> bool:
    """Whether a field holds sections by names that the user gives them."""
    return get_origin(bare(hint)) is dict and bool(schemas_of(get_args(bare(hint))[1]))


def bare(hint: Any) -> Any:
    """Return a type without its annotations."""
    return hint.__origin__ if get_origin(hint) is Annotated else hint


def schemas_of(hint: object) -> tuple[type, ...]:
    """Return the sections that a field may be: several if it has kinds; () if it is a value."""
    for one in getattr(hint, "__metadata__", ()):
        if isinstance(one, ByKind) and one.arms:
            return one.arms
    is_union = get_origin(bare(hint)) in (Union, UnionType)
    arms = get_args(bare(hint)) if is_union else (bare(hint),)
    sections = tuple(arm for arm in arms if arm is not NoneType)  # which may be left out
    return sections if all(map(is_dataclass, sections)) else ()


def by_kind(*schemas: type) -> dict[str, type]:
    """Return the section of each kind."""
    found = {}
    for schema in schemas:
        for name, hint in hints_of(schema).items():
            if name == "kind":
                found.update(dict.fromkeys(get_args(hint), schema))
            elif flat_of(hint) is not None:
                found.update(dict.fromkeys(by_kind(*schemas_of(hint)), schema))
    return found


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a section. schema: the class whose field it is."""

    hint: Any
    marks: frozenset[Mark]
    schema: type


@functools.cache
def keys_of_kind(schema: type, kind: str | None = None) -> dict[str, Key]:
    """Return the keys of a section, without those that the user names. kind: which of the kinds
    of its Flat field, if it has one.
    """
    found: dict[str, Key] = {}
    for one in fields(schema):
        hint = hints_of(schema)[one.name]
        flat = flat_of(hint)
        if flat is None:
            marks = one.metadata.get("marks", frozenset())
            found[one.name] = Key(hint, marks, schema)
        elif schemas_of(hint):
            assert kind is not None, f"{schema.__name__} has kinds"
            found |= keys_of_kind(by_kind(*schemas_of(hint))[kind], kind)
        elif flat.known is not None:
            found |= keys_of_kind(flat.known)
    return found


def all_keys(schema: type, prefix: str = "") -> dict[str, Key]:
    """Return every key of a schema, sections before what is in them."""
    found: dict[str, Key] = {}
    for kind in tuple(by_kind(schema)) or (None,):
        for name, one in keys_of_kind(schema, kind).items():
            key = f"{prefix}{name}"
            found[key] = one
            for inner in schemas_of(one.hint):
                found |= all_keys(inner, f"{key}.")
    return found


@functools.cache
def adapter(hint: Any) -> TypeAdapter:
    """Return pydantic's reader of a section or a value."""
    return TypeAdapter(hint)


def fits(value: object, hint: Any) -> bool:
    """Whether a value may be given for a type."""
    try:
        adapter(hint).validate_python(value)
    except ValidationError:
        return False
    return True
