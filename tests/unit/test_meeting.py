"""What ranks make together at the start waits without end, so they meet before it, within a
deadline.
"""

import os
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from llamarl.comm import meeting
from llamarl.comm.groups import threads_per_rank
from llamarl.controller import ExecutorController
from llamarl.errors import BadNetwork, TimedOut


def rank_of(rank, store, timeout_s, check=lambda: None):
    world = SimpleNamespace(rank=rank, size=3, store=lambda: store)
    names = ["trainer", "generator", "reward"]
    settings = SimpleNamespace(timeout_s=timeout_s)
    return SimpleNamespace(
        world=world, settings=settings, control=SimpleNamespace(check=check, names=names)
    )


def test_ranks_that_do_not_come_are_named():
    store = dist.HashStore()
    store.set("met/channel policy/1", "")
    message = (
        r"rank 0 waited 1 s at the start for ranks 2 \(reward\), which must join channel policy"
    )
    with pytest.raises(TimedOut, match=message):
        ExecutorController._meet(rank_of(0, store, 1.0), "channel policy")


def test_a_rank_that_dies_meanwhile_ends_the_wait():
    def dead():
        raise RuntimeError("rank 2 has not been heard of")

    with pytest.raises(RuntimeError, match="not been heard of"):
        ExecutorController._meet(rank_of(0, dist.HashStore(), 60.0, check=dead), "start")


def test_all_go_on_when_the_last_has_come():
    store = dist.HashStore()
    threads = [
        threading.Thread(target=ExecutorController._meet, args=(rank_of(r, store, 60.0), "start"))
        for r in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("ranks", [2, 1000])
@pytest.mark.parametrize("waited_s", [0.004, 0.1, 1.0, 60.0])
def test_a_wait_is_hardly_longer_than_it_must_be_with_few_looks(monkeypatch, waited_s, ranks):
    clock = [100.0]

    def sleep(seconds):
        clock[0] += seconds

    fake = SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    monkeypatch.setattr(meeting, "time", fake)
    for number, now in enumerate(meeting._looks(ranks)):
        if now - 100.0 >= waited_s:
            break
    most_s = max(min(0.05, 0.001 * ranks), waited_s / 8)
    assert now - 100.0 - waited_s <= min(0.2, most_s) * 1.001
    assert number < 50 + 6 * waited_s
    assert number <= 1 + waited_s / min(0.05, 0.001 * ranks) + 1e-6


THREADS = {  # the environment, and the threads of an asynchronous rank
    "nothing is set": ({}, 4),
    "the user asks for two": ({"OMP_NUM_THREADS": "2"}, 2),
    "the user asks for one, in one process": ({"OMP_NUM_THREADS": "1"}, 1),
    "torchrun's own one": ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, 2),
    "the user asks for three, under torchrun": (
        {"OMP_NUM_THREADS": "3", "LOCAL_WORLD_SIZE": "2"},
        3,
    ),
    "a number a nesting level": ({"OMP_NUM_THREADS": "3,1"}, 3),
    "no number": ({"OMP_NUM_THREADS": "many"}, 4),
}


@pytest.mark.parametrize("variables, wanted", THREADS.values(), ids=THREADS)
def test_omp_num_threads_is_honoured_where_the_user_has_set_it(monkeypatch, variables, wanted):
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(4))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert threads_per_rank(None, synchronous=False) == wanted
    assert threads_per_rank(7, synchronous=False) == 7, "the config comes first"
    assert threads_per_rank(None, synchronous=True) == 1, "its bits depend on the count"


def test_half_of_a_launchers_variables_is_named(monkeypatch):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(BadNetwork, match="WORLD_SIZE=8 .*RANK, MASTER_ADDR, MASTER_PORT are not"):
        meeting.launcher_store(1.0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(BadNetwork, match="MASTER_PORT is not set; start with torchrun"):
        meeting.launcher_store(1.0)
