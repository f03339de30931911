"""What a reward function starts and prints: it ends with the item, the worker or the rank, and is
bounded.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from llamarl.scoring.pool import RewardPool
from llamarl.workers import guard
from llamarl.workers import process as process_module
from tests.build.user_module import write_modules

DEADLINE_S = 30.0  # for waits that must end; never reached unless something is broken
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
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whose a child is")


@pytest.fixture(autouse=True)
def user_directory(tmp_path, monkeypatch):
    # A first call has timeout_s, as others.
    monkeypatch.setattr("llamarl.scoring.pool.FIRST_CALL_S", 0.0)
    write_modules(tmp_path, monkeypatch, my_rewards=USER_MODULE, served=SERVED, pooled=POOLS)


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
