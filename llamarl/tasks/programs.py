"""The reward python_tests: runs the program of a completion against the tests of its row.

    completion --last fenced block--> program --a sandbox for each test--> right or wrong

program_tests.py has the forms of a row's tests. Each runs in a process of its own. Printed text is
compared apart from white space at the ends of lines and of the whole, and what a function returns
as JSON. The outputs that are asked for never come near the program. Tests that are code share its
process, so a program that means to can forge their success: see docs/rewards.md.

Tests that an empty program passes can tell nothing. They are an error of their row: before a run
where that looks at the row (check_row), else where a program passes them.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import time
from typing import Any

from llamarl.tasks.forms import Limits, checked_by
from llamarl.tasks.marked import THINKING, Thinking, answer_of, last_program
from llamarl.tasks.options import need_count, need_flag, need_positive, need_text, need_word
from llamarl.tasks.program_tests import Calling, Printing, Test, tests_of
from llamarl.workers import sandbox
from llamarl.workers.sandbox import Isolation, Walls

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
    limits: Limits,
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
) -> None:
    """Raise ValueError for options that cannot be used, or where no sandbox can be made."""
    need_text("tests", tests)
    need_flag("partial", partial)
    need_word("thinking", thinking, THINKING)
    need_positive("timeout_s", timeout_s)
    need_word("isolation", isolation, sandbox.ISOLATIONS)
    need_count("memory_mb", memory_mb)
    need_count("processes", processes)
    need_count("files_mb", files_mb)
    need_count("output_kb", output_kb)
    need_flag("site_packages", site_packages)
    if timeout_s + _KILL_S > limits.timeout_s:
        what = f"its worker is killed after reward.timeout_s={limits.timeout_s:g}"
        remedy = f"at most {limits.timeout_s - _KILL_S:g}, or a larger reward.timeout_s"
        raise ValueError(f"option timeout_s={timeout_s:g}: {what}, so need {remedy}")
    most_mb = memory_mb * processes + files_mb + _OWN_MB
    if isolation == "namespaces" and most_mb > limits.memory_mb:
        what = f"memory_mb={memory_mb} for each of processes={processes}, files and the worker"
        remedy = (
            f"need reward.memory_mb of at least {most_mb}, not {limits.memory_mb}, or less here"
        )
        raise ValueError(f"options {what}: {remedy}")
    walls = Walls(
        isolation=isolation,
        memory_mb=memory_mb,
        processes=processes,
        files_mb=files_mb,
        output_kb=output_kb,
        site_packages=site_packages,
    )
    try:
        sandbox.check(walls)
    except sandbox.NoSandbox as error:
        remedy = "run where user namespaces are allowed (sysctl kernel, or the container's options)"
        if isolation == "namespaces":
            remedy += ", or leave network and files open to programs: option isolation=limits"
        raise ValueError(f"no sandbox: {error}; {remedy}") from error
    if isolation == "limits":
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
    if share:
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
    digest = hashlib.sha256(repr((wanted, partial)).encode()).digest()
    if digest in _able_to_fail:
        return
    share = _share_passed("", wanted, walls, until=until, partial=partial)
    if share:
        what = f"{share:.0%} of the row's {len(wanted)} tests"
        remedy = "let each of them call the program and look at what comes of it"
        raise ValueError(f"an empty program passes {what}, so they can tell nothing; {remedy}")
    if time.monotonic() < until:
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
