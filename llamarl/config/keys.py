"""The reference of keys: what each may be, its default, and the sentence under its field.

python -m llamarl.config > docs/keys.md
python recipes/llama_async.py --help
"""

from __future__ import annotations

import ast
import functools
import sys
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from llamarl.config.conversion import REQUIRED, flat
from llamarl.config.files import defaults_of
from llamarl.words.fields import Key, by_kind, is_named, keys_of_kind, schemas_of
from llamarl.words.findings import describe, show

_WIDTH = 126


def key_lines(schema: type, values: Mapping[str, object], told: Collection[str] = ()) -> list[str]:
    """Return the reference of a kind of job in Markdown, an item for each key. values: its
    defaults, by section. told: items that are left out.
    """
    return _section_lines((schema,), "", flat(values), told)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A key of a section. values: the defaults of the first kind that has it."""

    key: Key
    values: Mapping[str, object]
    kinds: list[str | None]


def _section_lines(
    arms: tuple[type, ...], prefix: str, values: Mapping[str, object], told: Collection[str]
) -> list[str]:
    """Return an item for each key of a section, and then its own sections under headings."""
    kinds = by_kind(*arms)
    entries: dict[tuple[str, str], _Entry] = {}  # kinds may have a key with other sentences
    for kind, arm in kinds.items() if kinds else ((None, arms[0]),):
        defaults = values
        if len(kinds) > 1 and values.get(f"{prefix}kind") != kind:
            defaults = flat(defaults_of(prefix[:-1], kind), prefix)
        for name, key in keys_of_kind(arm, kind).items():
            sentence = sentence_of(key.schema, name)
            entry = entries.setdefault((name, sentence), _Entry(key, defaults, []))
            entry.kinds.append(kind)
    items: list[str] = []
    below: list[str] = []
    for (name, sentence), entry in entries.items():
        path = f"{prefix}{name}"
        inner = schemas_of(entry.key.hint)
        if inner:
            lines = _section_lines(inner, f"{path}.", entry.values, told)
            if lines:
                below += [*_heading(path, by_kind(*inner), sentence), *lines]
        elif name != "kind":
            only = _only(entry.kinds, kinds)
            items.append(_item(path, entry.key, sentence, only, entry.values))
    return [item for item in items if item not in told] + below


def _heading(path: str, kinds: Collection[str], sentence: str) -> list[str]:
    """Return the lines above a section's keys."""
    lines = ["", f"## `{path}`", ""]
    choices = ", ".join(f"`{path}={kind}`" for kind in kinds)
    about = f"{sentence} {choices}".strip()
    if about:
        lines += [*textwrap.wrap(about, _WIDTH), ""]
    return lines


def _only(having: Collection[str | None], kinds: Collection[str]) -> str:
    """Say which kinds of a section have a key; "" if all have it."""
    others = [kind for kind in kinds if kind not in having]
    if kinds and 0 < len(others) < len(having):
        return f"; not {', '.join(others)}"
    return f"; {', '.join(filter(None, having))}" if others else ""


def _item(path: str, key: Key, sentence: str, only: str, defaults: Mapping[str, object]) -> str:
    """Return an item of a list. only: the kinds that have the key."""
    need = "sections by name" if is_named(key.hint) else describe(key.hint)
    default = ""
    if path in defaults and defaults[path] != "":
        default = f" = `{show(defaults[path])}`"
    if defaults.get(path) == REQUIRED:
        default = ", required"
    text = f"- `{path}`{default} ({need}{only}): {sentence}"
    return "\n".join(textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def sentence_of(schema: type, field: str) -> str:
    """Return the sentence under a field of a section; "" if there is none."""
    for one in schema.__mro__[:-1]:
        sentence = _sentences(one.__module__).get((one.__name__, field))
        if sentence is not None:
            return sentence
    return ""


@functools.cache
def _sentences(module: str) -> dict[tuple[str, str], str]:
    """Return the sentences of a module, by class and field."""
    file = sys.modules[module].__file__
    assert file is not None, f"{module} has no source"
    found: dict[tuple[str, str], str] = {}
    for section in ast.parse(Path(file).read_text()).body:
        if not isinstance(section, ast.ClassDef):
            continue
        for field, below in zip(section.body, section.body[1:]):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(sentence))),
                ):
                    found[section.name, name] = " ".join(sentence.split())
    return found
