"""Makes sections of the schema: frozen records, whose fields may decide more than their own value
and say so by a Mark.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, dataclass_transform

# What a key, or every key of a section, decides beyond its own value.
Mark = Literal[
    "identity",  # another value makes another run, which cannot resume a checkpoint
    "data",  # which prompts there are
    "answers",  # how held-out prompts are answered and scored: recipes/evaluate.py keeps it
    "outward",  # does not change what is learned: runs that differ in it alone are compared as one
]


@dataclass(frozen=True, slots=True)
class Flat:
    """In an annotation of a field: its record's keys lie beside the keys of the record around it.

        class PartSettings:
            scorer: Annotated[KindSettings, Flat((FunctionKindSettings, ...))]
            weight: float

    is read from {"kind": "function", "fn": None, ..., "weight": 1.0}. arms: what the record may be;
    its key `kind` says which.
    """

    arms: tuple[type, ...]


def marked(*marks: Mark):
    """Return a field with these marks."""
    return field(metadata={"marks": frozenset(marks)})


@dataclass_transform(frozen_default=True, field_specifiers=(marked,))
def settings_dataclass(section: type) -> type:
    """Make a class a section of the configuration, or one kind of it: a record that stays as it was
    read.
    """
    return dataclass(frozen=True, slots=True)(section)
