"""Docstrings are sentences for someone who was not there: each begins with its verb.

A function is described by what it does ("Return ...", "Load ...", "Whether ..."). A docstring that
begins with the thing instead ("The keys of ...", "What a rank holds") has no verb, and one that
begins with a genitive or a pronoun ("Of its loss all know", "The same with ...") has no subject.
Words of English cannot be sorted into verbs and others by a short program. So the rule looks at
the first word alone, and refuses those that begin a phrase without a verb. An equation, a shape,
"Collective: ..." and "On the leader: ..." may stand in front.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.house import ROOT, python_files

CODE = ("llamarl", "executors", "recipes")
# A property is a thing, so that "The bytes of a version." describes it.
PROPERTIES = ("property", "cached_property", "functools.cached_property")
THINGS = frozenset(
    "The A An All Each Every None One Both What Which Who Whom Whose How Where When Why "
    "That Those These This There It Its Their As At By For From In With Without So".split()
)

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def first_word(docstring: str) -> str:
    return docstring.split()[0].rstrip(".,:;")


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator) in PROPERTIES for decorator in node.decorator_list)


def docstrings(tree: ast.AST) -> Iterable[tuple[Documented, str]]:
    for node in ast.walk(tree):
        if isinstance(node, Documented):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node, docstring


def without_subject(tree: ast.AST) -> list[str]:
    """Return the docstrings that begin with a genitive, or with a thing that was not named."""
    found = []
    for _, docstring in docstrings(tree):
        if first_word(docstring) == "Of" or docstring.startswith("The same"):
            found.append(docstring.splitlines()[0])
    return found


def without_verb(tree: ast.AST) -> list[str]:
    """Return the docstrings of functions that begin with a thing."""
    found = []
    for node, docstring in docstrings(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node):
            if first_word(docstring) in THINGS:
                found.append(f"{node.name}: {docstring.splitlines()[0]}")
    return found


def comments_without_subject(source: str) -> list[str]:
    """Return the comments on lines of their own that begin like such a docstring."""
    lines = [line.strip() for line in source.splitlines()]
    return [line for line in lines if line.startswith(("# Of ", "# The same "))]


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "docstring, has_subject, has_verb",
    [
        ("Return the keys.", True, True),
        ("Whether a key is known.", True, True),
        ("Collective over the ranks: return the sum.", True, True),
        ("[T] bool: the tokens that are trained on.", True, True),
        ("The keys of a row.", True, False),
        ("What a rank holds.", True, False),
        ("Of its loss all know.", False, True),
        ("The same with references.", False, False),
    ],
)
def test_what_is_seen(docstring, has_subject, has_verb):
    tree = ast.parse(f'def f():\n    """{docstring}"""')
    assert (not without_subject(tree), not without_verb(tree)) == (has_subject, has_verb)


def test_a_property_and_a_class_may_be_things():
    source = 'class A:\n    """A thing."""\n    @property\n    def b(self):\n        """The b."""'
    assert not without_verb(ast.parse(source))


def test_docstrings_and_comments_have_a_subject():
    assert comments_without_subject("x = 1\n    # Of all ranks.\n") == ["# Of all ranks."]
    found = {}
    for file in python_files(*CODE):
        source = file.read_text()
        openings = without_subject(ast.parse(source)) + comments_without_subject(source)
        if openings:
            found[name_of(file)] = openings
    assert not found


def test_docstrings_of_functions_begin_with_a_verb():
    found = {}
    for file in python_files(*CODE):
        openings = without_verb(ast.parse(file.read_text()))
        if openings:
            found[name_of(file)] = openings
    assert not found
