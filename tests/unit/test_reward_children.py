"""What a reward function starts, prints and holds: what it starts ends with the item, the worker or
the rank; prints are bounded; of memory what is resident counts, not what is mapped, and an error of
memory says so however it came about.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from llamarl.errors import RewardError
from llamarl.scoring.pool import RewardPool
from llamarl.workers import guard
from llamarl.workers import process as process_module
from llamarl.workers.memory_limit import Note, Watch, too_much
from tests.build.user_module import write_modules
from tests.launching import ROOT

DEADLINE_S = 60.0  # for waits that must end; never reached unless something is broken
USER_MODULE = '''
import os, signal, subprocess, sys, time

def start(session=False):
    """A process that outlives everybody, and its id among those in the file `pids`."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=session)
    with open("pids", "a") as file:
        file.write(f"{child.pid}\\n")
    return child

def orphan():
    """One whose parent has ended, in a session of its own: nothing but its memory tells
    whose it is.
    """
    if os.fork():
        os.wait()
    else:
        start(session=True)
        os._exit(0)

def score(prompt, completion, meta):
    if completion == "print":
        print("x" * meta["bytes"])
        return 1.0
    if completion == "print without end":
        while True:
            os.write(2, b"y" * 4096)
    if completion == "none":
        return 1.0
    start()
    start(session=True)
    orphan()
    if completion == "hang":
        with open("pids", "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(1000)
    if completion == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "raise":
        raise ValueError("no score")
    return 1.0
'''

SERVED = """
from my_rewards import start
server = start()
def score(prompt, completion, meta):
    return float(server.poll() is None)
"""
POOLS = """
import multiprocessing, time
from concurrent.futures import ProcessPoolExecutor
from my_rewards import start

executor = ProcessPoolExecutor(1)  # its process starts at the first call
kept = None

def of_executor(prompt, completion, meta):
    return float(executor.submit(abs, -2).result())

def of_pool(prompt, completion, meta):
    global kept
    kept = kept or multiprocessing.Pool(1)
    return float(sum(kept.map(abs, [-2])))

def of_forkserver(prompt, completion, meta):
    with multiprocessing.get_context("forkserver").Pool(1) as own:
        return float(sum(own.map(abs, [-2])))

def left(prompt, completion, meta):
    start()
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,)).start()
    return 2.0
"""
RANK = """
import time
from llamarl.scoring.pool import RewardPool
from llamarl.scoring.scorer import text_item
pool = RewardPool("my_rewards:score", timeout_s=1000)
pool.start()
pool.submit(0, text_item("", "hang", {}))
pool.poll()
print("at work", flush=True)
time.sleep(1000)
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells this")


@pytest.fixture(autouse=True)
def user_directory(tmp_path, monkeypatch):
    # A first call has timeout_s, as others.
    monkeypatch.setattr("llamarl.scoring.pool.FIRST_CALL_S", 0.0)
    own = {"my_rewards": USER_MODULE, "served": SERVED, "pooled": POOLS}
    write_modules(tmp_path, monkeypatch, **own, my_memory=HOLDS, with_torch=WITH_TORCH)


def started():
    """The ids of what was started so far."""
    with open("pids") as file:
        return [int(line) for line in file]


def lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_all_end(pids, count):
    assert len(pids) == count
    give_up = time.monotonic() + DEADLINE_S
    while survivors := [pid for pid in pids if lives(pid)]:
        if time.monotonic() > give_up:
            for pid in survivors:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"{len(survivors)} of {count} processes live on")
        time.sleep(0.02)


@pytest.mark.parametrize("what, kind", [("value", "score"), ("raise", "error")])
def test_what_an_item_leaves_running_ends_with_the_item(what, kind):
    with RewardPool("my_rewards:score", timeout_s=DEADLINE_S) as pool:
        outcomes = pool.score([("", what, {})] * 3)
        assert [outcome.kind for outcome in outcomes] == [kind] * 3
        assert_all_end(started(), 9)
        assert pool.score([("", "none", {})])[0].kind == "score"  # by the same worker


@pytest.mark.parametrize("what, timeout_s, count", [("die", DEADLINE_S, 3), ("hang", 2.0, 4)])
def test_what_an_item_started_ends_with_a_worker_that_dies_or_is_killed(what, timeout_s, count):
    with RewardPool("my_rewards:score", timeout_s=timeout_s) as pool:
        assert pool.score([("", what, {})])[0].kind == "error"
        assert_all_end(started(), count)


def test_a_hanging_worker_and_what_it_started_end_with_the_rank():
    command = [sys.executable, "-c", RANK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        try:
            assert rank.stdout.readline() == "at work\n"
            give_up = time.monotonic() + DEADLINE_S
            while not os.path.exists("pids") or len(started()) < 4:
                assert time.monotonic() < give_up
                time.sleep(0.02)
        finally:
            rank.kill()
    assert_all_end(started(), 4)


def test_what_was_started_while_the_module_was_imported_serves_all_items():
    with RewardPool("served:score", timeout_s=DEADLINE_S) as pool:
        assert [outcome.value for outcome in pool.score([("", "", {})] * 3)] == [1.0, 1.0, 1.0]
    assert_all_end(started(), 1)


@pytest.mark.parametrize("name", ["of_executor", "of_pool", "of_forkserver", "left"])
def test_pools_that_a_function_keeps_serve_all_its_calls(name):
    with RewardPool(f"pooled:{name}", timeout_s=DEADLINE_S, memory_mb=2048) as pool:
        outcomes = pool.score([("", "", {})] * 3)
    assert [(one.kind, one.value) for one in outcomes] == [("score", 2.0)] * 3
    if name == "left":  # what no pool holds is ended all the same
        assert_all_end(started(), 3)


def test_prints_are_passed_on_up_to_a_limit_and_then_dropped_with_one_note(capfd):
    size = guard.MAX_PRINTED_BYTES
    with RewardPool("my_rewards:score", timeout_s=DEADLINE_S) as pool:
        few = pool.score([("", "print", {"bytes": 9})])
        many = pool.score([("", "print", {"bytes": size})] * 5)
    assert {outcome.kind for outcome in few + many} == {"score"}
    printed = capfd.readouterr().err
    assert printed.count("x") >= size - 100
    assert len(printed) < size + 200
    assert printed.count("llamarl: a worker printed") == 1


def test_who_prints_without_end_is_killed_like_any_other(capfd):
    with RewardPool("my_rewards:score", timeout_s=1.0) as pool:
        outcomes = pool.score([("", "print without end", {}), ("", "none", {})])
    assert [outcome.kind for outcome in outcomes] == ["error", "score"]
    assert "reward.timeout_s=1" in outcomes[0].reason
    assert len(capfd.readouterr().err) < guard.MAX_PRINTED_BYTES + 200


def test_a_guard_that_does_not_answer_is_killed(monkeypatch):
    monkeypatch.setattr(process_module, "KILL_S", 0.2)
    pool = RewardPool("my_rewards:score")
    pool.start()
    (process,) = (w._process for w in pool._workers)
    os.kill(process.pid, signal.SIGSTOP)
    pool.close()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_worker_that_the_kernel_holds_is_left_behind_and_told_of(monkeypatch, caplog):
    monkeypatch.setattr(process_module, "KILL_S", 0.1)
    pool = RewardPool("my_rewards:score", timeout_s=3.0)
    pool.start()
    (process,) = (w._process for w in pool._workers)
    waits, timeouts = process.wait, []

    def never(timeout=None):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its guard has done its work
        timeouts.append(timeout)
        raise subprocess.TimeoutExpired("worker", timeout)

    monkeypatch.setattr(process, "wait", never)
    outcomes = pool.score([("", "hang", {}), ("", "none", {})])
    assert [outcome.kind for outcome in outcomes] == ["error", "score"]
    assert "has not ended in 0.1 s" in caplog.text
    assert timeouts == [0.1, 0.1]
    pool.close()
    assert waits(DEADLINE_S) is not None
    assert_all_end(started(), 4)


MB = 1 << 20
LIMIT_MB = 256
HOLDS = """
import mmap, os, subprocess, sys

if "MAPPED_GB" in os.environ:
    size = int(os.environ["MAPPED_GB"]) << 30
    MAP_NORESERVE = 0x4000  # so that a machine of less memory maps it too
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    mapped = mmap.mmap(-1, size, flags=flags)
    mapped[size // 2] = 1

def fill(mb):
    return b"x" * (mb << 20)

kept = fill(int(os.environ.get("AT_IMPORT_MB", 0)))

def score(prompt, completion, meta):
    what, _, argument = completion.partition(" ")
    if what == "fill":
        return float(len(fill(int(argument))) >> 20)
    if what == "child":
        code = "import time; x = b'x' * (%s << 20); time.sleep(1000)" % argument
        subprocess.run([sys.executable, "-c", code])
    if what == "refused":
        return float(len(bytearray(1 << 60)))
    if what == "words":
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")
    return 1.0
"""

WITH_TORCH = """
import torch
def score(prompt, completion, meta):
    return torch.tensor([1.0, 2.0]).sum().item()
"""
KILLED = "out of memory: the worker and what it started held some "


def outcomes_of(*completions, memory_mb=LIMIT_MB, **options):
    options = {"timeout_s": DEADLINE_S} | options
    with RewardPool("my_memory:score", memory_mb=memory_mb, **options) as pool:
        return pool.score([("", completion, {}) for completion in completions])


# --- A reward ---


def test_what_is_mapped_and_not_touched_does_not_count(monkeypatch):
    monkeypatch.setenv("MAPPED_GB", "6")
    (outcome,) = outcomes_of("value", memory_mb=64)
    assert (outcome.kind, outcome.value) == ("score", 1.0)


def test_a_module_that_imports_torch_scores_within_the_usual_limit():
    with RewardPool("with_torch:score", memory_mb=2048, timeout_s=DEADLINE_S) as pool:
        (outcome,) = pool.score([("", "", {})])
    assert outcome.value == 3.0, outcome.reason


@pytest.mark.parametrize("what", ["fill 700", "child 700"])
def test_what_fills_more_than_the_limit_is_ended_and_costs_one_item(what):
    outcomes = outcomes_of("value", what, "value", "fill 64")
    assert [outcome.kind for outcome in outcomes] == ["score", "error", "score", "score"]
    assert outcomes[1].reason.startswith(KILLED)
    assert f"reward.memory_mb={LIMIT_MB} (raise it" in outcomes[1].reason


def test_an_import_that_fills_more_than_the_limit_ends_the_start(monkeypatch):
    monkeypatch.setenv("AT_IMPORT_MB", "700")
    with pytest.raises(RewardError, match=KILLED + r".*reward\.memory_mb=256 .*3 times in a row"):
        outcomes_of("value")


def test_memory_that_the_machine_refuses_is_an_error_of_memory():
    *refused, other = outcomes_of("refused", "words", "value")
    assert other.kind == "score"
    for outcome, said in zip(refused, ("MemoryError", "DefaultCPUAll"), strict=True):
        assert outcome.kind == "error"
        assert outcome.reason.startswith("out of memory: ") and said in outcome.reason
        assert "the machine refused it, not the limit memory_mb" in outcome.reason


def test_a_limit_that_is_no_setting_is_not_said_to_be_one():
    outcomes = outcomes_of("value", "fill 700", fn_key="eval.gold")
    assert outcomes[1].reason.endswith(f"more than memory_mb={LIMIT_MB}")


# --- A look ---


def process_that(code):
    """A Python that has run `code` and waits for the end of its input."""
    program = f"import sys\n{code}\nprint('ready', flush=True)\nsys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def note():
    made = Note()
    yield made
    made.hand_over()
    made.close()


def is_too_much(process, limit_mb, note):
    """Whether one of two looks finds too much."""
    watch = Watch(process.pid, limit_mb * MB, note.writer)
    with process:
        try:
            for _ in range(2):
                time.sleep(watch.wait_s())
                if watch.is_too_much():
                    return True
            return False
        finally:
            process.kill()


@pytest.mark.parametrize("limit_mb, expected", [(300, True), (500, False)])
def test_a_look_adds_up_a_process_and_its_descendants(note, limit_mb, expected):
    held = "import subprocess, sys\nheld = b'x' * (200 << 20)\n"
    grandchild = f"{held}print('ready', flush=True)\nsys.stdin.read()"
    child = (
        f"{held}child = subprocess.Popen([sys.executable, '-c', {grandchild!r}], "
        "stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "assert child.stdout.readline()"
    )
    assert is_too_much(process_that(child), limit_mb, note) is expected
    most = note.read()
    assert 400 * MB < most < 500 * MB if expected else most is None
    assert note.read() is None, "it is read once"


def test_the_next_look_comes_the_sooner_the_less_is_left(note):
    with process_that("held = b'x' * (100 << 20)") as process:
        near, far = (Watch(process.pid, limit_mb * MB, note.writer) for limit_mb in (200, 5000))
        assert not far.is_too_much() and not near.is_too_much()  # the far one is looked at first
        assert near.wait_s() < far.wait_s()
        process.kill()


@pytest.mark.parametrize("limit_mb, expected", [(280, True), (500, False)])
def test_what_forked_children_share_counts_once(note, limit_mb, expected):
    # Five processes of 300 MiB each, by their sums 1,500: but the pages are the same.
    forking = """
import os
held = b"x" * (300 << 20)
for _ in range(4):
    ready, told = os.pipe()
    if not os.fork():
        os.write(told, b".")
        sys.stdin.read()
        os._exit(0)
    os.read(ready, 1)
"""
    assert is_too_much(process_that(forking), limit_mb, note) is expected


def test_a_process_that_is_being_started_has_no_memory_of_its_own(note, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    # The child opens its input before it becomes another program, and waits there for a writer.
    starting = f"""
import os
held = b"x" * (200 << 20)
files = [(os.POSIX_SPAWN_OPEN, 0, {str(tmp_path / "fifo")!r}, os.O_RDONLY, 0)]
print("ready", flush=True)
os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ, file_actions=files)
"""
    process = process_that(starting)
    until = time.monotonic() + DEADLINE_S
    children = []
    while not children and time.monotonic() < until:
        time.sleep(0.01)
        children = psutil.Process(process.pid).children()
    try:
        assert len(children) == 1
        assert not is_too_much(process, 300, note)
    finally:
        for child in children:
            child.kill()


@pytest.mark.parametrize("way", ["dies", "frees"])
def test_what_no_look_saw_is_known_by_the_peak(note, way):
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from llamarl.workers.memory_limit import Watch, peak_bytes, write_note
worker = os.fork()
if not worker:
    held = b"x" * (200 << 20)
    if {way!r} == "dies":
        os.kill(os.getpid(), 9)
    del held
    write_note({note.writer}, peak_bytes())
    os._exit(0)
watch = Watch(worker, 100 << 20, {note.writer})
os.waitpid(worker, 0)
if {way!r} == "dies":
    watch.check_peak()
"""
    subprocess.run([sys.executable, "-c", code], pass_fds=[note.writer], check=True, timeout=120)
    assert 200 * MB < note.read() < 300 * MB


def test_failures_of_one_kind_have_one_text():
    # 560 and 600 MiB are some 600, 601 some 700.
    texts = [too_much(held * MB, 512, "reward.") for held in (560, 600, 601)]
    assert texts[0] == texts[1] != texts[2]
    assert "some 600 MiB, more than reward.memory_mb=512 (raise it" in texts[0]
