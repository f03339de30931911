"""The reward python_tests: runs the program of a completion against the tests of its row.

    completion --last fenced block--> program --a sandbox for each test--> right or wrong

The forms of a row's tests, each of which may be a JSON text:

    "assert add(1, 2) == 3"                          Code: follows the program in its process
    ["assert add(1, 2) == 3", ...]                   several of those
    "def check(candidate): ..." + entry_point        Code that ends in check(entry_point)
    "class T(unittest.TestCase): ..."                Code that ends in running its test cases
    "def test_one(): ..."                            Code that ends in calling its test functions
    [{"input": "1 2\\n", "output": "3\\n"}, ...]       Printing
    [{"input": "1\\n2", "output": "3", "testtype": "functional"}] + metadata.func_name    Calling
    {"inputs": [...], "outputs": [...]}              Printing; with fn_name Calling

Printed texts are compared without white space at the ends of lines and of the whole; returned
values are compared as JSON. Expected outputs never come near the program. Tests that are code share
its process, so a program can forge their success if it means to (docs/rewards.md).
"""

from __future__ import annotations

import ast
import hashlib
import json
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from llamarl.tasks.forms import (
    WorkerLimits,
    checked_by,
    need_count,
    need_flag,
    need_positive,
    need_text,
    need_word,
)
from llamarl.tasks.thinking import THINKING, Thinking, answer_of, last_program
from llamarl.workers import sandbox
from llamarl.workers.sandbox import Isolation, Walls

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


_OWN_MB = 128  # MiB that the worker and the sandbox's first processes hold themselves
_KILL_S = 0.5  # for a program that is at its end to be killed, before its worker is
# The program's text is run under another name than __main__, so that what it does when it is run
# alone stays out. The word is read only when all is done: a program that exits early has not said
# it.
_WITH_TESTS = """
import os, sys
run, write, end, word = exec, os.write, os._exit, sys.stdin.buffer
solution = compile(open("solution.py", encoding="utf-8").read(), "solution.py", "exec")
tests = compile(open("tests.py", encoding="utf-8").read(), "tests.py", "exec")
told = os.dup(1)
nothing = os.open(os.devnull, os.O_WRONLY)
os.dup2(nothing, 1)
names = {"__name__": "solution", "__builtins__": __builtins__}
run(solution, names)
run(tests, names)
write(told, word.read())
end(0)
"""


# The call is read before the program can change a thing, and prints of the program go nowhere. A
# data set that asks for a function shows its parameters with the names of `typing`.
_WITH_CALL = """
import json, os, sys
run, write, end, dumps = exec, os.write, os._exit, json.dumps
name, arguments = json.load(sys.stdin)
solution = compile(open("solution.py", encoding="utf-8").read(), "solution.py", "exec")
told = os.dup(1)
nothing = os.open(os.devnull, os.O_WRONLY)
os.dup2(nothing, 1)
names = {"__name__": "solution", "__builtins__": __builtins__}
run("from typing import *", names)
run(solution, names)
function = names[name] if name in names else getattr(names["Solution"](), name)
text = dumps(function(*arguments)).encode()
while text:
    text = text[write(told, text):]
end(0)
"""


def _check(
    limits: WorkerLimits,
    *,
    tests: str = "tests",
    partial: bool = False,
    thinking: Thinking = "none",
    timeout_s: float = 4.0,
    **options: Any,
) -> None:
    """Raise ValueError for options that cannot be used, or where no sandbox can be made. options:
    those of Walls.
    """
    walls = Walls(**options)
    need_text("tests", tests)
    need_flag("partial", partial)
    need_word("thinking", thinking, THINKING)
    need_positive("timeout_s", timeout_s)
    need_word("isolation", walls.isolation, sandbox.ISOLATIONS)
    for name in ("memory_mb", "processes", "files_mb", "output_kb"):
        need_count(name, getattr(walls, name))
    need_flag("site_packages", walls.site_packages)
    if timeout_s + _KILL_S > limits.timeout_s:
        what = f"its worker is killed after reward.timeout_s={limits.timeout_s:g}"
        remedy = f"at most {limits.timeout_s - _KILL_S:g}, or a larger reward.timeout_s"
        raise ValueError(f"option timeout_s={timeout_s:g}: {what}, so need {remedy}")
    most_mb = walls.memory_mb * walls.processes + walls.files_mb + _OWN_MB
    if walls.isolation == "namespaces" and most_mb > limits.memory_mb:
        what = f"memory_mb={walls.memory_mb} for each of processes={walls.processes}"
        remedy = f"need reward.memory_mb of at least {most_mb}, not {limits.memory_mb}"
        raise ValueError(f"options {what}, files and the worker: {remedy}, or less here")
    try:
        sandbox.check(walls)
    except sandbox.NoSandbox as error:
        remedy = "run where user namespaces are allowed (sysctl kernel, or the container's options)"
        if walls.isolation == "namespaces":
            remedy += ", or leave network and files open to programs: option isolation=limits"
        raise ValueError(f"no sandbox: {error}; {remedy}") from error
    if walls.isolation == "limits":
        what = "programs of completions may use the network and this user's files"
        print(f"llamarl: python_tests with isolation=limits: {what}", file=sys.stderr)


@checked_by(_check)
def python_tests(
    prompt: str,
    completion_text: str,
    meta: dict,
    *,
    tests: str = "tests",
    partial: bool = False,
    thinking: Thinking = "none",
    timeout_s: float = 4.0,
    isolation: Isolation = "namespaces",
    memory_mb: int = 384,
    processes: int = 4,
    files_mb: int = 16,
    output_kb: int = 256,
    site_packages: bool = False,
) -> float:
    """Return 1 if the program of a completion passes all tests of its row, else 0; with `partial`
    the share that it passes.

    A program that crashes, hangs, or runs into a limit fails the test. Tests that no time is left
    for have failed too. A completion without a fenced block is a program as a whole.

    tests: the row's key. thinking: how the completion marks its thoughts, which are no part of it.
    timeout_s: by the clock, for all tests of a completion together. The others are of each program
    (sandbox.Walls). ValueError for a row without tests.
    """
    wanted = tests_of(meta, tests)
    answer = answer_of(completion_text, meta, thinking)
    if answer is None:
        return 0.0
    program = last_program(answer)
    if program is None:
        program = answer
    walls = Walls(
        isolation=isolation,
        memory_mb=memory_mb,
        processes=processes,
        files_mb=files_mb,
        output_kb=output_kb,
        site_packages=site_packages,
    )
    until = time.monotonic() + timeout_s
    share = _share_passed(program, wanted, walls, until=until, partial=partial)
    if share:  # a program that fails proves that the tests can fail
        _check_can_fail(wanted, walls, until=until, partial=partial)
    return share


def check_row(
    prompt: str,
    completion_text: str,
    meta: dict,
    *,
    tests: str = "tests",
    partial: bool = False,
    thinking: Thinking = "none",
    timeout_s: float = 4.0,
    **walls: Any,
) -> float:
    """Return 1 for a row whose tests can tell a right program from an empty one, whatever the
    completion is. ValueError says what is wrong with the row.

    The options are those of python_tests.
    """
    until = time.monotonic() + timeout_s
    _check_can_fail(tests_of(meta, tests), Walls(**walls), until=until, partial=partial)
    return 1.0


_able_to_fail: set[bytes] = set()  # digests of tests that an empty program was seen not to pass


def _check_can_fail(wanted: tuple[Test, ...], walls: Walls, *, until: float, partial: bool) -> None:
    """Raise ValueError for tests that an empty program passes; with `partial`, for one of them."""
    # Such tests can tell nothing, so they are an error of their row and no reward. check_row finds
    # them before a run; a task that makes its rows later meets them where a program passes.
    digest = hashlib.sha256(repr((wanted, partial)).encode()).digest()
    if digest in _able_to_fail:
        return
    share = _share_passed("", wanted, walls, until=until, partial=partial)
    if share:
        what = f"{share:.0%} of the row's {len(wanted)} tests"
        remedy = "let each of them call the program and look at what comes of it"
        raise ValueError(f"an empty program passes {what}, so they can tell nothing; {remedy}")
    if time.monotonic() < until:  # otherwise a test may have failed for want of time alone
        _able_to_fail.add(digest)


def _share_passed(
    program: str, tests: tuple[Test, ...], walls: Walls, *, until: float, partial: bool
) -> float:
    """Return 1 for a program that passes all tests, else 0; with `partial` the share it passes."""
    num_passed = 0
    for test in tests:
        if _passes(program, test, walls, until):
            num_passed += 1
        elif not partial:
            return 0.0
    return num_passed / len(tests)


def _passes(program: str, test: Test, walls: Walls, until: float) -> bool:
    """Whether a program passes one test."""
    left_s = until - time.monotonic()
    if left_s <= 0:
        return False
    if isinstance(test, Printing):
        ran = sandbox.run(program, walls, until=until, cpu_s=left_s, stdin=test.given)
        printed = ran.printed.decode("utf-8", "replace")
        return ran.end == "exit" and ran.code == 0 and _lines(printed) == _lines(test.wanted)
    if isinstance(test, Calling):
        call = json.dumps([test.function, json.loads(test.arguments)])
        files = {"solution.py": program}
        ran = sandbox.run(_WITH_CALL, walls, until=until, cpu_s=left_s, stdin=call, files=files)
        is_whole = ran.end == "exit" and ran.code == 0
        return is_whole and _value_of(ran.printed) in json.loads(test.wanted)
    word = secrets.token_hex(16)
    files = {"solution.py": program, "tests.py": test.text}
    ran = sandbox.run(_WITH_TESTS, walls, until=until, cpu_s=left_s, stdin=word, files=files)
    return ran.end == "exit" and ran.code == 0 and ran.printed == word.encode()


def _value_of(printed: bytes) -> object:
    """Return the value that a program wrote as JSON; an object that equals nothing for no JSON."""
    try:
        return json.loads(printed)
    except (ValueError, RecursionError):
        return object()


def _lines(text: str) -> list[str]:
    """Return the lines of a text without white space at their ends, nor empty ones at its end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
