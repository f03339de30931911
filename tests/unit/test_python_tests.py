"""python_tests: programs that are right, wrong and hostile; what a row may hold; where there is no
sandbox.
"""

import dataclasses
import errno
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from llamarl.scoring.pool import RewardPool, check_reward
from llamarl.scoring.scorer import score_all, text_item
from llamarl.tasks import programs
from llamarl.tasks.forms import WorkerLimits
from llamarl.tasks.programs import check_row, python_tests
from llamarl.workers import sandbox, sandbox_init
from llamarl.workers.sandbox import Ran, Walls

ADD = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"
ASSERTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
PRINTS = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5\n", "output": "10"}]
SUM = "print(sum(map(int, input().split())))\n"
FIRST = "print(3)\n"  # right on the first of PRINTS alone
LIMITS = WorkerLimits(timeout_s=5.0, memory_mb=2048)
PATIENT = {"timeout_s": 60.0, "memory_mb": 2048}
HANG = "while True:\n    pass\n"


@pytest.fixture(scope="module")
def walls():
    """Return the default walls; skip where they cannot be made."""
    try:
        sandbox.check(Walls())
    except sandbox.NoSandbox as error:
        pytest.skip(f"no sandbox here: {error}")
    return Walls()


def ran(source, walls, *, seconds=20.0, **more):
    """Run a program whose time on the clock ends before its CPU time does."""
    return sandbox.run(source, walls, until=time.monotonic() + seconds, cpu_s=seconds + 60, **more)


def printed(source, walls, **more):
    """Return what a program prints that ends well."""
    end = ran(source, walls, **more)
    assert (end.end, end.code) == ("exit", 0), end
    return end.printed.decode()


# --- what is right and wrong ---


@pytest.mark.parametrize(
    "completion, tests, share",
    [
        (WRONG, ASSERTS, 0.5),
        (WRONG, "\n".join(ASSERTS), 0.0),
        (FIRST, PRINTS, 0.5),
        (f"```python\n{WRONG}```\nor rather\n```\n{ADD}```\n", ASSERTS, 1.0),
        (f"```json\n{{}}\n```\n```py\n{ADD}```\n```json\n{{}}\n```", ASSERTS, 1.0),
        ("That I do not know.", ASSERTS, 0.0),
        (f"{ADD}if __name__ == '__main__':\n    raise SystemExit(1)\n", ASSERTS, 1.0),
        (f"{SUM}raise SystemExit(1)\n", PRINTS, 0.0),
    ],
)
def test_the_share_of_tests_that_pass(walls, completion, tests, share):
    meta = {"tests": tests}
    assert python_tests("", completion, meta, partial=True, timeout_s=20.0) == share
    assert python_tests("", completion, meta, timeout_s=20.0) == float(share == 1.0)


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos._exit(0)\n",
        "raise SystemExit(0)\n",
        "import builtins\nbuiltins.exec = lambda *_: None\n" + WRONG,
        "print('passed')\n" + WRONG,
    ],
)
def test_an_early_end_passes_no_test(walls, program):
    assert python_tests("", program, {"tests": ASSERTS[:1]}, timeout_s=20.0) == 0.0


def test_thoughts_are_no_program(walls):
    meta = {"tests": ASSERTS}
    right = f"<think>\n```\n{WRONG}```\n</think>\n```\n{ADD}```\n"
    assert python_tests("", right, meta, thinking="opens", timeout_s=20.0) == 1.0
    assert python_tests("", f"```\n{ADD}```\n", meta, thinking="opens") == 0.0


def test_a_program_has_the_same_order_of_sets_each_time(walls):
    source = "print(list({str(n) for n in range(50)}))"
    assert printed(source, walls) == printed(source, walls)


def test_another_key_of_the_row_and_installed_packages(walls):
    meta = {"checks": "import numpy\nassert add(numpy.int64(1), 2) == 3"}
    options = {"tests": "checks", "timeout_s": 60.0, "memory_mb": 2048}
    assert python_tests("", ADD, meta, site_packages=True, **options) == 1.0
    assert python_tests("", ADD, meta, **options) == 0.0


@pytest.mark.parametrize("tests", [None, [], [3], {"input": "1"}])
def test_a_row_without_tests_is_an_error(tests):
    with pytest.raises(ValueError, match="the row's 'tests'"):
        python_tests("", ADD, {"tests": tests})
    with pytest.raises(ValueError, match="not there"):
        python_tests("", ADD, {})


# --- tests as data sets have them ---

SOLUTION = (
    "class Solution:\n    def add(self, a: List[int], b: int) -> int:\n        return a[0] + b\n"
)
WRONG_SOLUTION = SOLUTION.replace("+ b", "- b")
PAIRS = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
CALLS = [{"input": "[1]\n2", "output": "3", "testtype": "functional"}]
TYPED = [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": 3}]
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
CASES = (
    "import unittest\nclass TestAdd(unittest.TestCase):\n"
    "    def test_one(self):\n        self.assertEqual(add(1, 2), 3)\n"
)
# As Python 3.12.1 does.
LOWERS_ITS_COUNT = (
    "import unittest\ndef add_skip(self, test, reason):\n"
    "    self.skipped.append((test, reason))\n    self.testsRun -= 1\n"
    "unittest.TestResult.addSkip = add_skip\n"
)
ENDS_ALONE = f"{CASES}if __name__ == '__main__':\n    unittest.main()\n"
OF_CLASS = (
    "class TestAdd:\n    def setup_method(self, method):\n        self.wanted = 3\n"
    "    def test_one(self):\n        assert add(1, 2) == self.wanted\n"
)


def form(tests, right=ADD, wrong=WRONG, **row):
    """Tests of a row with these other columns, a program that passes them and one that does not."""
    return {"tests": tests, **row}, right, wrong


FORMS = {
    "LiveCodeBench, printing": form(json.dumps(PAIRS), SUM, "print(4)"),
    "LiveCodeBench, a function": form(
        json.dumps(CALLS), SOLUTION, WRONG_SOLUTION, metadata=json.dumps({"func_name": "add"})
    ),
    "APPS": form(json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]}), SUM, "print(4)"),
    "APPS, a function": form({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}),
    "lines in lists": form({"inputs": [["1 2"]], "outputs": [["3"]]}, SUM, "print(4)"),
    "types by name": form(TYPED),
    "HumanEval": form(CHECK, entry_point="add"),
    "HumanEval, called by itself": form(f"{CHECK}check(add)\n"),
    "a method as candidate": form(
        "def check(candidate):\n    assert candidate([1], 2) == 3\n",
        f"from typing import List\n{SOLUTION}",
        f"from typing import List\n{WRONG_SOLUTION}",
        entry_point="Solution().add",
    ),
    "unittest": form(CASES),
    "unittest that runs itself": form(ENDS_ALONE),
    "unittest, main at the end": form(f"{CASES}unittest.main()\n"),
    "pytest functions": form("def test_one():\n    assert add(1, 2) == 3\n"),
    "pytest class": form(OF_CLASS),
    "HumanEval, called in a function": form(f"{CHECK}def test_check():\n    check(add)\n"),
    "a test that calls itself": form(
        "def test_one(n=2):\n    assert add(n, 2) == n + 2\n    n and test_one(n - 1)\n"
    ),
    "HumanEval with a helper": form(
        "def test_help(f, wanted):\n    assert f(1, 2) == wanted\n"
        "def check(candidate):\n    test_help(candidate, 3)\n",
        entry_point="add",
    ),
    "absent keys are null": form([{**PRINTS[0], "testtype": None, "type": None}], SUM, "print(4)"),
    "columns of code_contests": form({"input": ["1 2\n"], "output": ["3\n"]}, SUM, "print(4)"),
    "absent columns are null": form(
        {"inputs": None, "outputs": None, "input": ["1 2\n"], "output": ["3\n"]}, SUM, "print(4)"
    ),
    "unittest, one is skipped": form(
        f"{LOWERS_ITS_COUNT}{CASES}"
        "    @unittest.skip('no')\n    def test_two(self):\n        pass\n"
    ),
}


@pytest.mark.parametrize("meta, right, wrong", FORMS.values(), ids=FORMS)
def test_a_right_program_passes_tests_of_a_data_set_and_a_wrong_one_does_not(
    walls, meta, right, wrong
):
    got = [python_tests("", f"```\n{one}\n```", meta, timeout_s=60.0) for one in (right, wrong)]
    assert got == [1.0, 0.0]


@pytest.mark.parametrize(
    "tests, named",
    [
        (CHECK, "entry_point"),
        ("def test_one(tmp_path):\n    assert add(1, 2) == 3\n", "test_one takes parameters"),
        ("eJx9kM9Kw0AQ+==", "neither JSON nor Python"),
        ([{"input": "1", "output": "2", "testtype": "special"}], "special"),
        (CALLS, "func_name"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [1], "outputs": ["1"]}, "need a text"),
        ([{"input": "one", "output": "3", "type": "functional", "fn_name": "f"}], "no JSON"),
    ],
)
def test_tests_that_nothing_could_run_are_an_error_that_names_the_cause(tests, named):
    with pytest.raises(ValueError, match=named):
        python_tests("", ADD, {"tests": tests})


@pytest.mark.parametrize(
    "tests",
    [
        "# tests follow",
        "try:\n    assert add(1, 2) == 3\nexcept Exception:\n    pass\n",
        [{"input": "1 2", "output": "\n"}],
        "class TestNone:\n    pass\n",
        f"{CHECK}def helper():\n    check(add)\n",
    ],
)
def test_tests_that_an_empty_program_passes_are_an_error_of_their_row(walls, tests):
    with pytest.raises(ValueError, match="empty program passes 100%"):
        check_row("", "", {"tests": tests}, timeout_s=60.0)
    with pytest.raises(ValueError, match="empty program passes 100%"):
        python_tests("", "pass", {"tests": tests}, timeout_s=60.0)


def test_a_share_counts_no_test_that_an_empty_program_passes(walls):
    meta = {"tests": [ASSERTS[0], "import math"]}
    assert check_row("", "", meta, timeout_s=60.0) == 1.0
    with pytest.raises(ValueError, match="empty program passes 50% of the row's 2 tests"):
        check_row("", "", meta, partial=True, timeout_s=60.0)


# --- hostile programs ---

HOSTILE = {
    "fork bomb": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    ),
    "threads": "import threading\nwhile True:\n    threading.Thread(target=input).start()\n",
    "10 GB": "held = []\nwhile True:\n    held.append(bytearray(1 << 20))\n",
    "endless loop": HANG,
    "endless wait": "import signal\nwhile True:\n    signal.pause()\n",
    "name of a host": "import socket\nsocket.getaddrinfo('example.org', 80)\n",
    "file outside": "open('/etc/passwd').read()\n",
    "full disk": "with open('big', 'wb') as f:\n    while True:\n        f.write(bytes(1 << 20))\n",
    "many files": "import itertools\nfor n in itertools.count():\n    open(str(n), 'w')\n",
    "endless print": "while True:\n    print('x' * 1000)\n",
    "kill all": "import os\nos.kill(-1, 9)\nos.kill(1, 9)\nos.kill(os.getppid(), 9)\n" + HANG,
    "crash": "import ctypes\nctypes.string_at(0)\n",
    "deep recursion": "import sys\nsys.setrecursionlimit(1 << 30)\nf = lambda: f()\nf()\n",
}


def test_hostile_programs_are_wrong_ones_and_their_worker_lives(walls):
    """Their score is 0, which is trained on, and not an error. Right programs are right after
    them.
    """
    meta = {"tests": ASSERTS}
    hostile = [text_item("", source + ADD, meta) for source in HOSTILE.values()]
    with RewardPool("rewards:python_tests", options={"timeout_s": 1.0}, **PATIENT) as pool:
        workers = list(pool._workers)
        outcomes = score_all(pool, hostile)
        assert pool._workers == workers
    found = {name: (one.kind, one.value) for name, one in zip(HOSTILE, outcomes, strict=True)}
    assert found == dict.fromkeys(HOSTILE, ("score", 0.0))
    assert python_tests("", ADD, meta, timeout_s=20.0) == 1.0


def test_a_program_sees_libraries_and_its_own_folder_alone(walls):
    seen = printed("import os\nprint(sorted(os.listdir('/')), os.listdir('.'))", walls)
    assert "home" not in seen and "proc" not in seen
    assert "program.py" in seen
    hidden = [str(Path.home() / ".ssh"), str(Path(__file__).resolve())]
    source = f"import os\nprint([os.path.exists(p) for p in {hidden!r}])"
    assert printed(source, walls) == "[False, False]\n"


def test_a_program_changes_nothing_outside_its_folder(walls):
    source = (
        "import os\n"
        "for top, folders, files in os.walk('/'):\n"
        "    if os.access(top, os.W_OK) and not top.startswith('/tmp'):\n"
        "        try:\n"
        "            open(os.path.join(top, 'x'), 'w')\n"
        "            print(top)\n"
        "        except OSError:\n"
        "            pass\n"
        "open('mine', 'w').write('x')\n"
        "print('done')\n"
    )
    assert printed(source, walls, seconds=60.0) == "done\n"
    assert "mine" not in printed("import os\nprint(os.listdir('.'))", walls)


def test_a_program_has_no_rights_and_can_get_none(walls):
    source = (
        "import ctypes, os\n"
        "c = ctypes.CDLL(None)\n"
        "made = [c.unshare(0x10000000), c.ptrace(0, 0, 0, 0)]\n"
        "made += [c.shmget(0, 4096, 0o1600), c.setuid(0)]\n"
        "made += [c.memfd_create(b'x', 0), c.mount(b'x', b'/tmp', b'tmpfs', 0, None)]\n"
        "made += [c.chroot(b'/tmp'), c.syscall(425, 1, None)]\n"
        "print(os.getuid(), made)\n"
    )
    assert printed(source, walls) == f"1000 {[-1] * 8}\n"


def test_a_program_reaches_no_server_of_this_machine(walls):
    """With isolation "limits", which shuts off no network, the same program does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        source = f"import socket\nprint(socket.socket().connect_ex({address!r}) == 0)"
        assert printed(source, walls) == "False\n"
        assert printed(source, Walls(isolation="limits")) == "True\n"


def test_a_program_opens_sockets_of_its_own_network_alone(walls):
    source = """
import errno, socket
for family in range(64):
    refused = set()
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        try:
            socket.socket(family, kind).close()
            print(family)
        except OSError as error:
            refused.add(error.errno)
    if family not in (1, 2, 10):
        assert refused == {errno.EAFNOSUPPORT}, (family, refused)
"""
    opened = set(printed(source, walls).split())
    assert {"1", "2"} <= opened <= {"1", "2", "10"}


def answer_of(lines, machine, number, argument=0):
    """What a filter of seccomp says of a call: 0 to let it through, an errno, or "kill"."""
    loaded = {0: number, 4: sandbox_init._AUDIT_ARCH[machine], 16: argument}
    at = value = 0
    while True:
        code, if_true, if_false, constant = lines[at]
        at += 1
        if code == 0x06:  # return
            kind = {0x7FFF0000: 0, 0x80000000: "kill"}
            return kind.get(constant, constant & 0xFFFF)
        if code == 0x20:  # load
            value = loaded[constant]
            continue
        holds = {0x15: value == constant, 0x35: value >= constant, 0x45: value & constant != 0}
        at += if_true if holds[code] else if_false


@pytest.mark.parametrize(
    "machine, socket, socketpair, fanotify_init, read, clone",
    [("x86_64", 41, 53, 300, 0, 56), ("aarch64", 198, 199, 262, 63, 220)],
)
def test_what_the_filter_of_each_machine_says_of_calls(
    machine, socket, socketpair, fanotify_init, read, clone
):
    """Numbers of arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h."""
    lines = sandbox_init._filters(machine)
    for family, number in itertools.product(range(64), (socket, socketpair)):
        want = 0 if family in (1, 2, 10) else errno.EAFNOSUPPORT
        assert answer_of(lines, machine, number, family) == want
    assert answer_of(lines, machine, fanotify_init) == errno.EPERM
    assert answer_of(lines, machine, read, 40) == 0
    assert answer_of(lines, machine, clone, 0x11) == 0
    assert answer_of(lines, machine, clone, 0x40000000) == errno.EPERM


# A GiB that is never written to, so that no memory is used without a limit.
MAPS_A_GIB = """
import mmap
try:
    held = mmap.mmap(-1, 1 << 30)
    print("given")
except (MemoryError, OSError):
    print("refused")
"""
FORKS = """
import os, signal
made = 0
try:
    while made < 50:
        if os.fork() == 0:
            signal.pause()
        made += 1
except OSError:
    pass
print(made)
"""


@pytest.mark.parametrize(
    "source, limits, said",
    [
        (MAPS_A_GIB, {}, "refused"),
        (MAPS_A_GIB, {"memory_mb": 2048}, "given"),
        (FORKS, {"processes": 4}, "3"),
        (FORKS, {"processes": 1}, "0"),
    ],
)
def test_the_memory_and_the_processes_of_a_program_are_limited(walls, source, limits, said):
    assert printed(source, dataclasses.replace(walls, **limits)) == f"{said}\n"


def test_what_a_program_starts_ends_with_it(walls):
    """The child holds the write end of the program's output, so that its end is seen."""
    source = (
        "import os, signal\n"
        "if os.fork() == 0:\n    os.setsid()\n    signal.pause()\n"
        "print('parent')\n"
    )
    assert printed(source, walls) == "parent\n"


BUSY = """
import os, signal, time
from llamarl.workers import sandbox

def ran(self, *_):
    os.read(self.told, 100)
    self.map_user()
    os.read(self.printed.fileno(), 1)
    print(self.process.pid, flush=True)
    signal.pause()

sandbox._Started.ran = ran
source = "print(1, flush=True)\\nwhile True:\\n    pass\\n"
sandbox.run(source, sandbox.Walls(), until=time.monotonic() + 600, cpu_s=600)
"""


def test_a_sandbox_ends_with_its_worker(walls):
    """Three processes are there once the program runs: this side's, init and the program."""
    popen = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    with popen:
        outer = psutil.Process(int(popen.stdout.readline()))
        family = [outer, *outer.children(recursive=True)]
        assert len(family) == 3
        descriptors = [os.pidfd_open(process.pid) for process in family]
        popen.kill()
    for descriptor in descriptors:
        ended, _, _ = select.select([descriptor], [], [], 60.0)
        assert ended
        os.close(descriptor)


def test_an_end_by_a_limit_says_which(walls):
    assert ran(HANG, walls, seconds=1.0) == Ran(end="time")
    assert ran("while True:\n    print('x' * 1000)\n", walls).end == "output"
    assert ran("raise SystemExit(7)", walls) == Ran(end="exit", code=7)
    killed = sandbox.run(HANG, walls, until=time.monotonic() + 60.0, cpu_s=1.0)
    assert (killed.end, killed.code) in (("exit", -9), ("exit", -24))


# --- options, and where there is no sandbox ---


@pytest.mark.parametrize(
    "options, message",
    [
        ({"timeout_s": 5}, "its worker is killed after reward.timeout_s=5, so need at most 4.5"),
        ({"memory_mb": 1024}, "need reward.memory_mb of at least 4240, not 2048"),
        ({"memory_mb": "512"}, "option memory_mb='512': need a whole number of at least 1"),
        ({"isolation": "namespace"}, "did you mean namespaces?"),
        ({"memory": 512}, "python_tests has no option memory; did you mean memory_mb?"),
    ],
)
def test_wrong_options_end_the_start(options, message):
    with pytest.raises(ValueError) as refused:
        check_reward("rewards:python_tests", [], options=options, timeout_s=5.0, memory_mb=2048)
    assert message in str(refused.value)


def test_where_there_are_no_namespaces_the_start_ends(monkeypatch):
    """As in a container that forbids them: the first process of the sandbox is refused."""

    def refused(walls):
        if walls.isolation == "namespaces":
            raise sandbox.NoSandbox("unshare: no user namespaces (Operation not permitted)")

    monkeypatch.setattr(sandbox, "check", refused)
    with pytest.raises(ValueError, match="no user namespaces.*option isolation=limits"):
        programs._check(LIMITS)
    programs._check(LIMITS, isolation="limits")


def test_a_wall_that_cannot_be_made_is_no_wrong_program(walls, monkeypatch):
    """What ends the sandbox itself is an error, and never a score of 0."""
    monkeypatch.setattr(sandbox, "_shown", lambda _: ["/not/there"])
    with pytest.raises(sandbox.NoSandbox, match="/not/there"):
        python_tests("", ADD, {"tests": ASSERTS})


def test_without_namespaces_only_limits_hold_and_it_says_so(capfd):
    walls = Walls(isolation="limits")
    assert ran("bytearray(10 << 30)", walls).code == 1
    assert ran(HANG, walls, seconds=1.0) == Ran(end="time")
    assert printed("print(input())", walls, stdin="given\n") == "given\n"
    folder = printed("import os\nprint(os.getcwd())", walls).strip()
    assert not Path(folder).exists()
    items = [text_item("", program, {"tests": ASSERTS}) for program in (ADD, WRONG)]
    options = {"isolation": "limits"}
    outcomes = check_reward("rewards:python_tests", items, options=options, **PATIENT)
    assert [outcome.value for outcome in outcomes] == [1.0, 0.0]
    assert "may use the network and this user's files" in capfd.readouterr().err
