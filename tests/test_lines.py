"""Lines are plain: one thought a statement, records by keyword, few nodes.

Each rule is a function from the syntax nodes of a file to those that break it.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterable
from functools import cache

import pytest

from tests.house import ROOT, parts_of_code, python_files, tree_of

CODE = ("llamarl", "executors")
# Where lines are plain too, but records of few fields may be made by place, as a table is.
BESIDE = ("benchmarks", "tests")
MAX_NODES = 6.0  # syntax nodes a line of code, over all rooms
MAX_POSITIONAL = 4  # arguments into a record
MAX_TUPLE = 2  # names that one statement gives values

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@cache
def nodes_of(*folders: str) -> dict[str, list[ast.AST]]:
    """File -> its syntax nodes, in ast.walk's order."""
    nodes = {}
    for file in python_files(*folders):
        nodes[str(file.relative_to(ROOT))] = list(ast.walk(tree_of(file)))
    return nodes


# --- The rules ---


def many_at_once(nodes: list[ast.AST]) -> Iterable[ast.AST]:
    """a, b, c = x, y, z"""
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            is_unpacked = isinstance(node.targets[0], ast.Tuple)
            if is_unpacked and len(node.value.elts) > MAX_TUPLE:
                yield node


def nested_conditionals(nodes: list[ast.AST]) -> Iterable[ast.AST]:
    """a if p else b if q else c"""
    return nested(nodes, (ast.IfExp,))


def deep_comprehensions(nodes: list[ast.AST]) -> Iterable[ast.AST]:
    """[x for row in rows for x in row]; [[y for y in x] for x in rows]"""
    for node in nodes:
        if isinstance(node, COMPREHENSIONS) and len(node.generators) > 1:
            yield node
    yield from nested(nodes, COMPREHENSIONS)


def nested(nodes: list[ast.AST], kinds: tuple[type, ...]) -> Iterable[ast.AST]:
    for outer in nodes:
        if isinstance(outer, kinds):
            inner = [node for node in ast.walk(outer) if node is not outer]
            if any(isinstance(node, kinds) for node in inner):
                yield outer


@cache
def records() -> frozenset[str]:
    """Names of the dataclasses of llamarl and the executors."""
    found = set()
    for node in itertools.chain.from_iterable(nodes_of(*CODE).values()):
        if isinstance(node, ast.ClassDef):
            if any("dataclass" in ast.unparse(one) for one in node.decorator_list):
                found.add(node.name)
    return frozenset(found)


def nameless_fields(nodes: list[ast.AST]) -> Iterable[ast.AST]:
    """Record(a, b, c, d, e), or Record(*values)"""
    for node in nodes:
        if isinstance(node, ast.Call):
            starred = any(isinstance(value, ast.Starred) for value in node.args)
            if starred or len(node.args) > MAX_POSITIONAL:
                if ast.unparse(node.func).rpartition(".")[-1] in records():
                    yield node


RULES = {
    many_at_once: "a, b, c = x, y, z",
    nested_conditionals: "a if p else b if q else c",
    deep_comprehensions: "[x for row in rows for x in row]",
    nameless_fields: "RunSettings(a, b, c, d, e)",
}


# --- What they say ---


def broken(rule: Callable[[list[ast.AST]], Iterable[ast.AST]], *folders: str) -> list[str]:
    """Return FILE:LINE of every line in these folders that breaks a rule."""
    found = []
    for name, nodes in nodes_of(*folders).items():
        found += [f"{name}:{node.lineno}" for node in rule(nodes)]
    return found


@pytest.mark.parametrize(
    "rule, example", RULES.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_lines_are_plain(rule, example):
    assert list(rule(list(ast.walk(ast.parse(example)))))  # such a line is seen
    assert not broken(rule, *CODE), f"{example} is no plain line"


@pytest.mark.parametrize("rule", [many_at_once, nested_conditionals, deep_comprehensions])
def test_lines_of_tests_and_benchmarks_are_plain(rule):
    assert not broken(rule, *BESIDE), f"{RULES[rule]} is no plain line"


def num_nodes(nodes: list[ast.AST]) -> int:
    """Syntax nodes, but the mark on each name whether it is read or written."""
    return sum(not isinstance(node, ast.expr_context) for node in nodes)


def test_lines_are_light():
    nodes = sum(num_nodes(found) for found in nodes_of(*CODE).values())
    lines = 0
    for file in python_files(*CODE):
        code, _ = parts_of_code(file.read_text())
        lines += sum(bool(line.strip()) for line in code.splitlines())
    assert nodes / lines <= MAX_NODES


def test_what_is_counted():
    source = '"""Prose."""\n\nx = 1  # why\n'
    code, prose = parts_of_code(source)
    assert code.split() == ["x", "=", "1"]
    assert prose == [(1, '"""Prose."""'), (3, "# why")]
    # Module, Expr, Constant; Assign, Name, Constant.
    assert num_nodes(list(ast.walk(ast.parse(source)))) == 6
