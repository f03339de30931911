"""Reads the tests of a row for python_tests (programs.py), in the forms that data sets have.

    "assert add(1, 2) == 3"                          Code: follows the program in its process
    ["assert add(1, 2) == 3", ...]                   several of those
    "def check(candidate): ..." + entry_point        Code that ends in check(entry_point)
    "class T(unittest.TestCase): ..."                Code that ends in running its test cases
    "def test_one(): ..."                            Code that ends in calling its test functions
    [{"input": "1 2\\n", "output": "3\\n"}, ...]       Printing
    [{"input": "1\\n2", "output": "3", "testtype": "functional"}] + metadata.func_name    Calling
    {"inputs": [...], "outputs": [...]}              Printing; with fn_name Calling

Any of them may be a JSON text. Standard library only.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

_CHECK = "check"  # HumanEval's name for the function that tests a candidate
_STDIN = ("stdin", "stdin_stdout")
_FUNCTION = ("functional", "function_call")
# Runs a class of tests. It follows the tests' own text, in their process.
_RUN_CLASS = """
def _run_tests_of(one):
    import unittest
    class Result(unittest.TestResult):
        passed = False
        def addSuccess(self, test):
            self.passed = True
    if issubclass(one, unittest.TestCase):
        result = Result()
        unittest.defaultTestLoader.loadTestsFromTestCase(one).run(result)
        assert result.wasSuccessful() and (result.passed or result.expectedFailures)
        return
    for name in dir(one):
        if name.startswith("test"):
            made = one()
            getattr(made, "setup_method", lambda *_: None)(None)
            getattr(made, name)()
"""


@dataclass(frozen=True, slots=True)
class Code:
    """A test that follows the program in its process. It fails if it raises."""

    text: str


@dataclass(frozen=True, slots=True)
class Printing:
    """A test of what a program prints."""

    given: str  # on its standard input
    wanted: str


@dataclass(frozen=True, slots=True)
class Calling:
    """A test of what a function of the program returns."""

    function: str  # its name, or that of a method of the program's class Solution
    arguments: str  # a JSON list
    wanted: str  # a JSON list of the values that are right


Test = Code | Printing | Calling


def tests_of(meta: Mapping[str, object], key: str) -> tuple[Test, ...]:
    """Return the tests of a row. ValueError if they have none of the forms, or call nothing."""
    found = meta.get(key)
    if isinstance(found, str):
        found = _parsed(found)
    if isinstance(found, str) and found.strip():
        return (_code(found, meta, key),)
    if isinstance(found, Mapping):
        tests = tuple(_of_columns(found, meta, key))
        if tests:
            return tests
    elif isinstance(found, Sequence) and not isinstance(found, str) and found:
        return tuple(_test_of(one, meta, key) for one in found)
    shown = f"{found!r:.60}" if key in meta else "not there"
    need = (
        "a text of code, a list of those, a list of {input, output}, "
        "or {inputs: [...], outputs: [...]}"
    )
    raise ValueError(f"the row's {key!r} is {shown}; need {need}")


def _parsed(text: str) -> object:
    """Return the value of a JSON text; the text itself where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _test_of(one: object, meta: Mapping[str, object], key: str) -> Test:
    """Return one test of a list."""
    if isinstance(one, str):
        return _code(one, meta, key)
    if not isinstance(one, Mapping) or "input" not in one or "output" not in one:
        need = "code, or input and output"
        raise ValueError(f"a test of the row's {key!r} is {one!r:.60}; need {need}")
    kind = one.get("testtype") or one.get("type") or _STDIN[0]
    if kind in _STDIN:
        return _printing(one["input"], one["output"], key)
    if kind not in _FUNCTION:
        known = ", ".join((*_STDIN, *_FUNCTION))
        raise ValueError(f"a test of the row's {key!r} is of type {kind!r}; known are {known}")
    name = one.get("fn_name") or _function_of(meta)
    if name is None:
        need = "metadata.func_name, fn_name or entry_point beside it"
        raise ValueError(
            f"a test of the row's {key!r} calls a function without a name; need {need}"
        )
    given, wanted = one["input"], one["output"]
    if isinstance(given, str):
        given = [_json_of(line, key) for line in given.split("\n")]
        wanted = _json_of(wanted, key) if isinstance(wanted, str) else wanted
    return _calling(name, given, [wanted], key)


def _of_columns(found: Mapping, meta: Mapping[str, object], key: str) -> Iterator[Test]:
    """Yield the tests of a mapping with a list of inputs and one of outputs."""
    found = {name: value for name, value in found.items() if value is not None}
    inputs = found.get("inputs", found.get("input"))
    outputs = found.get("outputs", found.get("output"))
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        return
    if len(inputs) != len(outputs):
        raise ValueError(
            f"the row's {key!r} has {len(inputs)} inputs and {len(outputs)} outputs; need as many"
        )
    name = found.get("fn_name")
    for given, wanted in zip(inputs, outputs):
        if not name:
            yield _printing(given, wanted, key)
            continue
        right = [wanted]
        if isinstance(wanted, list) and len(wanted) == 1:
            right.append(wanted[0])  # a part of the data sets puts the value into a list
        yield _calling(name, given, right, key)


def _function_of(meta: Mapping[str, object]) -> object:
    """Return the name of the function that a row asks for; None if it names none."""
    about = meta.get("metadata")
    if isinstance(about, str):
        about = _parsed(about)
    if isinstance(about, Mapping) and about.get("func_name"):
        return about["func_name"]
    return meta.get("fn_name") or meta.get("entry_point")


def _json_of(text: str, key: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        what = "an argument or a result of a function that is no JSON"
        raise ValueError(f"the row's {key!r} has {what}: {text!r:.60}") from error


def _printing(given: object, wanted: object, key: str) -> Printing:
    texts = []
    for value in (given, wanted):
        if isinstance(value, list) and all(isinstance(line, str) for line in value):
            value = "\n".join(value)
        if not isinstance(value, str):
            what = f"input or output {value!r:.60}; need a text, or a list of lines"
            raise ValueError(f"a test of the row's {key!r} has {what}")
        texts.append(value)
    return Printing(given=texts[0], wanted=texts[1])


def _calling(name: object, arguments: object, right: list, key: str) -> Calling:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"a test of the row's {key!r} calls {name!r:.60}; need a function's name")
    if not isinstance(arguments, list):
        what = f"arguments {arguments!r:.60}; need a list of them"
        raise ValueError(f"a test of the row's {key!r} has {what}")
    return Calling(function=name, arguments=json.dumps(arguments), wanted=json.dumps(right))


# --- Tests that are code ---


def _code(text: str, meta: Mapping[str, object], key: str) -> Code:
    """Return a test that is code, with calls of what it defines for others to call. ValueError if
    it is no Python, or if a definition cannot be called.
    """
    where = f"the row's {key!r}"
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{where} is neither JSON nor Python: {error}: {text!r:.60}") from error
    acting = [statement for statement in tree.body if not _runs_all(statement)]
    if len(acting) < len(tree.body):  # unittest.main() ends the process without a word
        text = ast.unparse(ast.Module(acting, []))
    called = set(chain.from_iterable(map(_calls_of, acting)))
    calls = []
    for statement in acting:
        if isinstance(statement, ast.ClassDef) and _is_of_tests(statement):
            calls.append(f"_run_tests_of({statement.name})")
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        elif statement.name in called:
            continue
        elif statement.name == _CHECK:
            calls.append(f"{_CHECK}({_candidate(meta, where)})")
        elif statement.name.startswith("test"):
            if _num_required(statement) or isinstance(statement, ast.AsyncFunctionDef):
                what = f"{statement.name} takes parameters or is async, which needs pytest"
                raise ValueError(f"{where}: {what}; python_tests calls functions without any")
            calls.append(f"{statement.name}()")
    if not calls:
        return Code(text)
    return Code("\n".join([text, _RUN_CLASS, *calls, ""]))


def _runs_all(statement: ast.stmt) -> bool:
    """Whether a statement is unittest.main() or pytest.main(), or only for a file that is run."""
    if isinstance(statement, ast.If):
        test = statement.test
        return isinstance(test, ast.Compare) and ast.unparse(test.left) == "__name__"
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return False
    return ast.unparse(statement.value.func) in ("unittest.main", "pytest.main")


def _calls_of(statement: ast.stmt) -> Iterator[str]:
    """Yield the names of the functions that a statement calls, or that the body of a definition
    calls, without the definition's own.
    """
    own = getattr(statement, "name", None)
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id != own:
            yield node.func.id


def _is_of_tests(statement: ast.ClassDef) -> bool:
    """Whether unittest or pytest would look for tests in a class."""
    bases = [ast.unparse(base) for base in statement.bases]
    is_case = any(base.endswith("TestCase") for base in bases)
    return is_case or statement.name.startswith("Test")


def _num_required(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many parameters a call must give."""
    given = function.args
    by_place = len(given.posonlyargs) + len(given.args) - len(given.defaults)
    return by_place + sum(default is None for default in given.kw_defaults)


def _candidate(meta: Mapping[str, object], where: str) -> str:
    """Return the expression for what `check` is given."""
    name = meta.get("entry_point")
    if not isinstance(name, str) or not name.strip():
        what = f"defines {_CHECK}, which nobody calls"
        remedy = "name the function in the row's entry_point, or end the tests in a call"
        raise ValueError(f"{where} {what}; {remedy}")
    try:
        ast.parse(name, mode="eval")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the row's entry_point {name!r:.60} is no name of a function") from error
    return name
