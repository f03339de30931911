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

from tests.test_house import ROOT, python_files

CODE = ("llamarl", "executors", "recipes")
# A property is a thing, so that "The bytes of a version." describes it.
PROPERTIES = ("property", "cached_property", "functools.cached_property")
THINGS = frozenset(
    "The A An All Each Every None One Both What Which Who Whom Whose How Where When Why "
    "That Those These This There It Its Their As At By For From In With Without So".split()
)

# Files whose functions do not yet obey. Take a line away once its file does.
OPEN = frozenset(
    {
        "executors/build.py",
        "executors/build_supervised.py",
        "executors/reference.py",
        "executors/supervised.py",
        "llamarl/comm/channel.py",
        "llamarl/config/command_line.py",
        "llamarl/config/conversion.py",
        "llamarl/config/eval_rules.py",
        "llamarl/config/files.py",
        "llamarl/config/loss_options.py",
        "llamarl/config/marks.py",
        "llamarl/config/placement.py",
        "llamarl/config/preferences.py",
        "llamarl/config/rules.py",
        "llamarl/config/schema.py",
        "llamarl/config/search_rules.py",
        "llamarl/config/supervised.py",
        "llamarl/executor.py",
        "llamarl/inference/build.py",
        "llamarl/inference/cache.py",
        "llamarl/inference/decode.py",
        "llamarl/inference/engine.py",
        "llamarl/inference/evaluation.py",
        "llamarl/inference/graph.py",
        "llamarl/inference/partials.py",
        "llamarl/inference/protocol.py",
        "llamarl/inference/rows.py",
        "llamarl/inference/runner.py",
        "llamarl/inference/sampler.py",
        "llamarl/inference/slots.py",
        "llamarl/inference/stop_strings.py",
        "llamarl/inference/vllm_engine.py",
        "llamarl/inference/vllm_worker.py",
        "llamarl/launch/dry_run.py",
        "llamarl/launch/gold.py",
        "llamarl/launch/identity.py",
        "llamarl/launch/inputs.py",
        "llamarl/launch/job.py",
        "llamarl/launch/memory.py",
        "llamarl/launch/outcome.py",
        "llamarl/launch/preferences.py",
        "llamarl/launch/reading.py",
        "llamarl/launch/run_directory.py",
        "llamarl/launch/scorers.py",
        "llamarl/launch/sources.py",
        "llamarl/launch/start.py",
        "llamarl/launch/supervised.py",
        "llamarl/launch/templates.py",
        "llamarl/learning/sft.py",
        "llamarl/learning/sft_data.py",
        "llamarl/learning/supervised.py",
        "llamarl/scoring/ahead.py",
        "llamarl/scoring/assembly.py",
        "llamarl/scoring/by_set.py",
        "llamarl/scoring/calls.py",
        "llamarl/scoring/chunk_search.py",
        "llamarl/scoring/classifier.py",
        "llamarl/scoring/embedding.py",
        "llamarl/scoring/endpoint.py",
        "llamarl/scoring/evaluation.py",
        "llamarl/scoring/growing.py",
        "llamarl/scoring/judge.py",
        "llamarl/scoring/logprobs.py",
        "llamarl/scoring/memory.py",
        "llamarl/scoring/model.py",
        "llamarl/scoring/novelty.py",
        "llamarl/scoring/packed.py",
        "llamarl/scoring/pairing.py",
        "llamarl/scoring/pairs.py",
        "llamarl/scoring/pieces.py",
        "llamarl/scoring/pool.py",
        "llamarl/scoring/replies.py",
        "llamarl/scoring/resets.py",
        "llamarl/scoring/scorer.py",
        "llamarl/scoring/sharded.py",
        "llamarl/scoring/together.py",
        "llamarl/scoring/transcript.py",
        "llamarl/scoring/trial.py",
        "llamarl/scoring/worker.py",
        "recipes/compare.py",
        "recipes/evaluate.py",
        "recipes/facts_data.py",
        "recipes/fetch_smollm2.py",
        "recipes/rlhf.py",
        "recipes/rlhf_report.py",
        "recipes/sft.py",
        "recipes/tldr.py",
    }
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
        if openings and name_of(file) not in OPEN:
            found[name_of(file)] = openings
    assert not found


def test_docstrings_of_functions_begin_with_a_verb():
    found = {}
    for file in python_files(*CODE):
        openings = without_verb(ast.parse(file.read_text()))
        if openings and name_of(file) not in OPEN:
            found[name_of(file)] = openings
    assert not found
