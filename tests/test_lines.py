"""Lines are plain: one thought a statement, records by keyword, few nodes.

Each rule is a function from a syntax tree to the places that break it.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.house import ROOT, python_files

CODE = ("llamarl", "executors")
# Where lines are plain too, but records of few fields may be made by place, as a table is.
BESIDE = ("benchmarks", "tests")
MAX_NODES = 6.0  # syntax nodes a line of code, over all rooms
MAX_POSITIONAL = 4  # arguments into a record
MAX_TUPLE = 2  # names that one statement gives values

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@cache
def trees() -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text()) for file in python_files(*CODE)}


# --- The rules ---


def many_at_once(tree: ast.AST) -> Iterable[ast.AST]:
    """a, b, c = x, y, z"""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            is_unpacked = isinstance(node.targets[0], ast.Tuple)
            if is_unpacked and len(node.value.elts) > MAX_TUPLE:
                yield node


def nested_conditionals(tree: ast.AST) -> Iterable[ast.AST]:
    """a if p else b if q else c"""
    return nested(tree, (ast.IfExp,))


def deep_comprehensions(tree: ast.AST) -> Iterable[ast.AST]:
    """[x for row in rows for x in row]; [[y for y in x] for x in rows]"""
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS) and len(node.generators) > 1:
            yield node
    yield from nested(tree, COMPREHENSIONS)


def nested(tree: ast.AST, kinds: tuple[type, ...]) -> Iterable[ast.AST]:
    for outer in ast.walk(tree):
        if isinstance(outer, kinds):
            inner = [node for node in ast.walk(outer) if node is not outer]
            if any(isinstance(node, kinds) for node in inner):
                yield outer


def is_dataclass_of_ours(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any(
        "dataclass" in ast.unparse(decorator) for decorator in node.decorator_list
    )


@cache
def records() -> frozenset[str]:
    """Names of the dataclasses of llamarl and the executors."""
    nodes = []
    for tree in trees().values():
        nodes += ast.walk(tree)
    return frozenset(node.name for node in nodes if is_dataclass_of_ours(node))


def nameless_fields(tree: ast.AST) -> Iterable[ast.AST]:
    """Record(a, b, c, d, e), or Record(*values)"""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[-1]
        starred = any(isinstance(value, ast.Starred) for value in node.args)
        if name in records() and (starred or len(node.args) > MAX_POSITIONAL):
            yield node


RULES = {
    many_at_once: "a, b, c = x, y, z",
    nested_conditionals: "a if p else b if q else c",
    deep_comprehensions: "[x for row in rows for x in row]",
    nameless_fields: "RunSettings(a, b, c, d, e)",
}


@cache
def trees_beside() -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text()) for file in python_files(*BESIDE)}


def lines_of_code(source: str, tree: ast.AST) -> set[int]:
    """Numbers of the lines that hold code: no blank ones, no comments, no docstrings."""
    prose: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                prose |= set(range(node.lineno, node.end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines - prose


def num_nodes(tree: ast.AST) -> int:
    """Nodes of a syntax tree, but the mark on each name whether it is read or written."""
    return sum(not isinstance(node, ast.expr_context) for node in ast.walk(tree))


# --- What they say ---


@pytest.mark.parametrize(
    "rule, example", RULES.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_lines_are_plain(rule, example):
    assert list(rule(ast.parse(example)))  # such a line is seen
    found = []
    for file, tree in trees().items():
        found += [f"{file.relative_to(ROOT)}:{node.lineno}" for node in rule(tree)]
    assert not found, f"{example} is no plain line: {found}"


@pytest.mark.parametrize("rule", [many_at_once, nested_conditionals, deep_comprehensions])
def test_lines_of_tests_and_benchmarks_are_plain(rule):
    found = []
    for file, tree in trees_beside().items():
        found += [f"{file.relative_to(ROOT)}:{node.lineno}" for node in rule(tree)]
    assert not found, f"{RULES[rule]} is no plain line: {found}"


def test_lines_are_light():
    nodes = 0
    lines = 0
    for file, tree in trees().items():
        nodes += num_nodes(tree)
        lines += len(lines_of_code(file.read_text(), tree))
    assert nodes / lines <= MAX_NODES


def test_what_is_counted():
    source = '"""Prose."""\n\nx = 1  # why\n'
    tree = ast.parse(source)
    assert lines_of_code(source, tree) == {3}
    # Module, Expr, Constant; Assign, Name, Constant.
    assert num_nodes(tree) == 6
