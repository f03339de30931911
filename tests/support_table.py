"""The table of docs/models.md: which families of transformers' models are proven, and in what.

    python -m tests.support_table        prints it

A test proves a column of the table for each family that it is run with: it has the marker
`proves(column)` and a parameter `family`, which is a model_type of transformers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

FILES = (
    "tests.parity.test_transformers_models",
    "tests.parity.test_transformers_ranks",
    "tests.recipes.test_family_runs",
    "tests.vllm.test_vllm_families",
)
COLUMNS = ("logits, files", "gradients", "adapters", "routes", "sampling", "a run", "split", "vLLM")


def table() -> str:
    """Return the table: a row for the families that are proven in the same columns."""
    columns_of = defaultdict(set)
    for file in FILES:
        for family, column in _proven(import_module(file)):
            assert column in COLUMNS, f"{file}: proves({column!r})"
            columns_of[family].add(column)
    families_of = defaultdict(list)
    for family in sorted(columns_of):
        families_of[tuple(c in columns_of[family] for c in COLUMNS)].append(family)
    lines = ["| " + " | ".join(("model_type", *COLUMNS)) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    for proven in sorted(families_of, reverse=True):
        cells = ["yes" if is_proven else "" for is_proven in proven]
        # Lines of a document are short, and a cell is one line.
        for names in _in_lines(families_of[proven]):
            lines.append("| " + " | ".join((names, *cells)) + " |")
    return "\n".join(lines) + "\n"


def _proven(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Yield (family, column) of a module's tests."""
    for name, test in vars(module).items():
        marks = getattr(test, "pytestmark", []) if name.startswith("test_") else []
        families = []
        for mark in marks:
            if mark.name == "parametrize" and mark.args[0].startswith("family"):
                families = [_first(value) for value in mark.args[1]]
        for mark in marks:
            if mark.name == "proves":
                yield from ((family, mark.args[0]) for family in families)


def _first(value: Any) -> str:
    """Return the first parameter of a case: a text, a tuple, or what pytest.param makes."""
    if isinstance(value, str):
        return value
    return getattr(value, "values", value)[0]


def _in_lines(names: list[str]) -> Iterator[str]:
    """Yield names, some eighty characters of them at once."""
    line = ""
    for name in names:
        if len(line) + len(name) > 80:
            yield line
            line = ""
        line += f", {name}" if line else name
    yield line


if __name__ == "__main__":
    print(table(), end="")
