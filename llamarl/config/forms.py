"""The keys that a section of the schema is read from.

A section is a dataclass, and its keys are the fields. Where a field is Flat
(llamarl/config/marks.py), the keys of its record stand in its place, so that the section has a form
for each class of that record:

    PartSettings kind=function: kind, fn, num_workers, timeout_s, memory_mb, weight
                    kind=model:    kind, path, label, ..., shift, weight
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import get_args, get_type_hints

from llamarl.config.marks import Flat, Mark


@functools.cache
def hints_of(schema: type) -> dict[str, object]:
    """Return the type of each field of a dataclass."""
    hints = get_type_hints(schema, include_extras=True)
    return {field.name: hints[field.name] for field in fields(schema)}


def flat_of(hint: object) -> Flat | None:
    """Return the mark of a flat field; None for any other."""
    marks = [mark for mark in get_args(hint) if isinstance(mark, Flat)]
    return marks[0] if marks else None


@dataclass(frozen=True, slots=True)
class Form:
    """The keys of a section whose flat field has a known class.

    hints, marks: of each key. schema: the dataclass of the section. flat: its flat field and
    the class of the record there; None: it has none.
    """

    schema: type
    hints: Mapping[str, object]
    marks: Mapping[str, frozenset[Mark]]
    flat: tuple[str, type] | None = None

    def make(self, values: Mapping[str, object]) -> object:
        """Return the section. values: of all keys."""
        if self.flat is None:
            return self.schema(**values)
        name, inner = self.flat
        own = hints_of(inner)
        record = inner(**{key: values[key] for key in own})
        others = {key: value for key, value in values.items() if key not in own}
        return self.schema(**{name: record}, **others)


def forms_of(*schemas: type) -> list[Form]:
    """Return the forms of these dataclasses, in their order."""
    found: list[Form] = []
    for schema in schemas:
        found += _forms(schema)
    return found


@functools.cache
def _forms(schema: type) -> tuple[Form, ...]:
    for name, hint in hints_of(schema).items():
        flat = flat_of(hint)
        if flat is not None:
            return tuple(_form(schema, name, arm) for arm in flat.arms)
    return (_form(schema),)


def _form(schema: type, flat: str | None = None, inner: type | None = None) -> Form:
    """Return the form of a dataclass. flat: its field whose record is an `inner`."""
    hints: dict[str, object] = {}
    marks: dict[str, frozenset[Mark]] = {}
    for field in fields(schema):
        keys = {field.name: hints_of(schema)[field.name]}
        their_marks = {field.name: field.metadata.get("marks", frozenset())}
        if inner is not None and field.name == flat:
            (form,) = forms_of(inner)
            keys = dict(form.hints)
            their_marks = dict(form.marks)
        twice = hints.keys() & keys.keys()
        assert not twice, f"{schema.__name__}: {', '.join(twice)} of its own and of {inner}"
        hints |= keys
        marks |= their_marks
    if flat is None or inner is None:
        return Form(schema, hints, marks)
    return Form(schema, hints, marks, (flat, inner))
