"""Ranks of a start meet under one fresh name, whatever earlier starts left in the store and
whatever their agents count.
"""

import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from llamarl.comm import meeting
from llamarl.comm.meeting import Exchange, meet, reaching
from llamarl.errors import PeerDied, TimedOut
from tests.launching import environment

LONG_S = 120.0


@pytest.fixture
def server():
    """The launcher's store, and connections to it as every process has one of its own."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connect():
        return dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)

    yield connect


def until(holds):
    """Look again and again until holds()."""
    ends = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < ends
        threading.Event().wait(0.01)


def start(connect, pool, ranks, size, timeout_s=LONG_S):
    """Processes that say that they are these ranks; the futures of the names that they
    go on under.
    """
    return [
        pool.submit(meet, connect(), rank=rank, size=size, timeout_s=timeout_s) for rank in ranks
    ]


def test_every_start_has_a_name_of_its_own_which_all_its_ranks_have(server):
    with ThreadPoolExecutor(3) as pool:
        names = []
        for _ in range(3):
            names.append({future.result() for future in start(server, pool, range(3), 3)})
    assert [len(name) for name in names] == [1, 1, 1] and len(set.union(*names)) == 3


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_restart_waits_for_all_new_processes_though_the_old_ones_hellos_are_there(server, first):
    """One of the new processes comes long before the others and finds a whole set of hellos, calls
    and answers of the old start.
    """
    with ThreadPoolExecutor(6) as pool:
        (old,) = {future.result() for future in start(server, pool, range(3), 3)}
        early = start(server, pool, [first], 3)
        said = dist.PrefixStore("meeting", server())
        if first == 0:  # it calls the dead, who do not answer
            dead = said.get("hello/1").decode()
            until(lambda: said.get(f"call/{dead}").decode() != old)
        assert not early[0].done()
        late = start(server, pool, [rank for rank in range(3) if rank != first], 3)
        (new,) = {future.result() for future in early + late}
        assert new != old


def test_a_process_that_was_called_and_dies_is_replaced_in_a_new_meeting(server):
    said = dist.PrefixStore("meeting", server())
    said.set("hello/1", "one-that-is-dying")
    with ThreadPoolExecutor(3) as pool:
        others = start(server, pool, [0, 2], 3)
        until(lambda: said.check(["call/one-that-is-dying"]))
        first = said.get("call/one-that-is-dying").decode()
        others += start(server, pool, [1], 3)
        (name,) = {future.result() for future in others}
    assert name != first


class Clock:
    """Time for llamarl.comm.meeting: it passes only when somebody sleeps, and then the others do
    what they are to do.
    """

    def __init__(self, others=lambda: None):
        self.now, self.others = 0.0, others

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.others()


@pytest.fixture
def alone(monkeypatch):
    """(a store, the others' corner of it, the clock) for one rank whose peers the test plays."""
    store, clock = dist.HashStore(), Clock()
    monkeypatch.setattr(meeting, "time", clock)
    return store, dist.PrefixStore("meeting", store), clock


def refusal(store, rank, size):
    with pytest.raises((TimedOut, PeerDied)) as refused:
        meet(store, rank=rank, size=size, timeout_s=60.0)
    return str(refused.value)


@pytest.mark.parametrize("rank", [0, 2])
def test_ranks_that_do_not_come_are_named_by_all_others(alone, rank):
    store, said, _ = alone
    said.set(f"hello/{2 - rank}", "the other")
    assert f"rank {rank} waited 60 s at the start for ranks 1, 3 of 4" in refusal(store, rank, 4)


def test_rank_0_names_those_that_left_a_hello_and_do_not_answer(alone):
    store, said, clock = alone
    said.set("hello/1", "one")
    said.set("hello/2", "a dead process")

    def one_answers():
        if said.check(["call/one"]):
            said.set(f"here/{said.get('call/one').decode()}/1", "")

    clock.others = one_answers
    assert "rank 0 waited 60 s at the start for ranks 2 of 3" in refusal(store, 0, 3)


def test_the_others_name_those_that_do_not_answer_and_rank_0_if_it_does_not_call(alone):
    store, said, clock = alone
    said.set("hello/0", "zero")
    said.set("hello/2", "a dead process")
    assert "rank 1 waited 60 s at the start for ranks 0 of 3" in refusal(store, 1, 3)
    clock.others = lambda: said.set(f"call/{said.get('hello/1').decode()}", "here we meet")
    assert "rank 1 waited 60 s at the start for ranks 2 of 3" in refusal(store, 1, 3)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_whose_place_was_taken_ends(alone, rank):
    store, said, clock = alone
    said.set(f"hello/{1 - rank}", "the other")
    clock.others = lambda: said.set(f"hello/{rank}", "another")
    assert f"rank {rank}: another process has taken its place" in refusal(store, rank, 2)


def test_who_waits_is_patient_with_progress_and_passes_it_on(alone):
    """Rank 1 waits for rank 0, which works for a hundred times the deadline; whoever waits for rank
    1 sees that it goes on.
    """
    store, _, clock = alone
    seen = set()

    def rank_0_works():
        store.set("progress/0", str(int(clock.now)))
        if store.check(["progress/1"]):
            seen.add(store.get("progress/1"))
        if clock.now > 1_000:
            Exchange(store, rank=0, timeout_s=10.0).tell("run", {"path": "there"})

    clock.others = rank_0_works
    told = Exchange(store, rank=1, timeout_s=10.0).hear("run", source=0, what="which run this is")
    assert told == {"path": "there"}
    assert clock.now > 1_000 and len(seen) > 100


def test_who_waits_for_a_rank_without_progress_names_it(alone):
    store, _, clock = alone
    store.set("progress/1", "7")
    with pytest.raises(
        TimedOut, match="rank 3 waited 10 s at the start for rank 1 to say which run this is"
    ):
        Exchange(store, rank=3, timeout_s=10.0).hear("run", source=1, what="which run this is")
    assert 10 < clock.now < 11


def test_what_the_store_raises_names_the_rank_and_what_it_tried(server):
    with pytest.raises(
        PeerDied, match=r"rank 2 could not reach the others \(DistStoreError: wait timeout"
    ):
        with reaching("the others", rank=2):
            server().wait(["never"], timedelta(milliseconds=50))


JOIN = """
import torch.distributed as dist
from llamarl.comm.groups import init_world
for job in range(2):
    world = init_world(threads=1, timeout_s={timeout_s}, reproducible=True)
    world.store().set(f"is/{{world.rank}}", str(job))
    assert [int(world.store().get(f"is/{{r}}")) for r in range(2)] == [job, job]
    dist.barrier()
    dist.destroy_process_group()
print("met")
"""


def environment_of(rank, port, agents_count, of_torchrun):
    return environment(
        RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RESTART_COUNT=str(agents_count),
        TORCHELASTIC_USE_AGENT_STORE=str(of_torchrun),
    )


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def join(port, counts, of_torchrun, timeout_s=60.0):
    """Processes that each take part in two starts, as agents with these counts start them: (exit
    code, output) of each.
    """
    started = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN.format(timeout_s=timeout_s)],
            env=environment_of(rank, port, count, of_torchrun),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, count in counts.items()
    ]
    outputs = [process.communicate(timeout=LONG_S)[0] for process in started]
    return [(process.returncode, output) for process, output in zip(started, outputs)]


@pytest.mark.slow
def test_processes_whose_agents_count_restarts_differently_meet_on_torchruns_store():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for counts in ({0: 0, 1: 0}, {0: 0, 1: 1}):  # the second start finds what the first left
        for code, output in join(store.port, counts, of_torchrun=True):
            assert code == 0 and output.endswith("met\n"), output


@pytest.mark.slow
def test_without_torchrun_rank_0_hosts_the_store_for_all_jobs_of_the_process():
    port = free_port()
    for code, output in join(port, {0: 0, 1: 0}, of_torchrun=False):
        assert code == 0 and output.endswith("met\n"), output


@pytest.mark.slow
def test_a_rank_alone_names_the_store_that_it_cannot_reach():
    port = free_port()
    ((code, output),) = join(port, {1: 0}, of_torchrun=True, timeout_s=1.0)
    assert code != 0 and f"rank 1 could not reach the store at 127.0.0.1:{port}" in output
