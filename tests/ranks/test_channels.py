"""Channels between real processes over gloo, which connects the ranks that exchange something and
no others.

Each rank is a function of this file: called in a process of the pool, or, where one of them ends in
the middle, in a process forked for it.
"""

import os
import sys
import time
from pathlib import Path

import psutil
import torch.distributed as dist
from torch.distributed import TCPStore

from llamarl.comm.channel import Broadcast, ConnectContext, Gather, Scatter, dp_rank_of
from llamarl.comm.control import Control
from llamarl.comm.groups import connect_peers, link_group
from llamarl.errors import TimedOut
from llamarl.types import Completion
from tests.build.completion import build_completion
from tests.build.routes import control_of
from tests.forkery import the_forkery
from tests.launching import ROOT, environment
from tests.ranks.topologies import groups_on

RANKS = 3
POOLED = 4
RECORDS = 40  # a producer and channel
DEADLINE_S = 240
LISTENER = 1  # a group's own socket, where its other ranks reach this one


def run(scenario: str, folder: Path) -> tuple[list[int], list[str]]:
    """The exit code and the words of each rank."""
    # It outlives every rank, as a launcher's does: none is told of its end before a peer's.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = environment(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS),
    )
    logs = [folder / f"{rank}.log" for rank in range(RANKS)]
    processes = []
    for rank, log in enumerate(logs):
        # Each by itself: a launcher of all would end the others when one has failed.
        own = {**shared, "RANK": str(rank)}
        given = {"ranks": None, "environment": own, "log": log, "cwd": ROOT}
        processes.append(the_forkery().start([__file__, scenario], **given))
    try:
        codes = [process.wait(DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.end()
    return codes, [log.read_text() for log in logs]


def test_every_kind_of_channel_delivers_every_record_once_in_order_per_producer(tmp_path):
    codes, outputs = run("exchange_records", tmp_path)
    assert codes == [0] * RANKS, "\n".join(outputs)


def test_a_peer_that_ends_before_its_first_record_is_named_at_once(tmp_path):
    codes, outputs = run("end_before_the_first_record", tmp_path)
    assert codes[2] == 9
    for rank in (0, 1):
        assert "the link with rank 2 (executor 2) broke" in outputs[rank], outputs[rank]


def test_only_ranks_that_exchange_something_are_connected(pool):
    """A channel's producers with its consumers; the weights' ranks not before it is known who feeds
    whom; an executor's once at its start: of copies of one rank each, the group over the copies is
    that of the executor.
    """
    opened = pool.call(__file__, "open_connections", ranks=POOLED, timeout_s=DEADLINE_S)
    of_channel, of_weights, of_executor = zip(*opened, strict=True)
    producer, consumer = LISTENER + 1, LISTENER + 3
    assert of_channel == (producer, producer, producer, consumer)
    assert of_weights == (LISTENER,) * POOLED
    of_shards = LISTENER  # of each rank alone
    assert of_executor == (LISTENER + 3 + of_shards,) * POOLED


def test_a_peer_that_does_not_come_is_named_and_a_failure_ends_the_wait(pool):
    said = pool.call(__file__, "connect_too_early", ranks=2, timeout_s=DEADLINE_S)[0]
    assert said == [
        "RuntimeError: a failure elsewhere",
        "TimedOut: rank 0 waited 0 s for a connection with ranks 1. One hangs, or no network "
        "leads there: see what each rank said last",
    ]


# --- what a rank runs ---


class Endpoint:
    tensor_parallel = 1
    first_takes = False

    def __init__(self, name):
        self.name = name


def connected(control, kind, sources, destinations, **options):
    """Collective: (sender, receiver), as this rank has them."""
    context = ConnectContext(
        control=control,
        placement={"from": sources, "to": destinations},
        ranks=[],  # which only the channel of weights asks about
        timeout_s=DEADLINE_S,
    )
    ends = Endpoint("from"), Endpoint("to")
    return kind(*ends, carries=Completion, **options).connect(context)


def until(control, predicate):
    deadline = time.monotonic() + DEADLINE_S / 2
    while not predicate():
        control.check()
        assert time.monotonic() < deadline, "too late"
        control.wait(0.01)


def exchange_records(control) -> None:
    sources, destinations = (0, 1), (1, 2)  # rank 1 is on both sides
    ends = {}
    for kind in (Gather, Scatter, Broadcast):
        ends[kind] = connected(control, kind, sources, destinations, capacity=4)
    control.start()
    for kind, (sender, receiver) in ends.items():
        sent, got = 0, []
        me = destinations.index(control.rank) if receiver is not None else None
        is_mine = {
            Gather: lambda t: t % 2 == me,
            Scatter: lambda t: dp_rank_of(t, 2) == me,
            Broadcast: lambda t: True,
        }[kind]
        want = [t for t in range(RECORDS) if receiver is not None and is_mine(t)]

        def turn():
            nonlocal sent
            if sender is not None and sent < RECORDS and sender.has_room():
                sender.put(build_completion(sent, control.rank, range(sent % 7)))
                sent += 1
            if receiver is not None:
                got.extend(receiver.take(limit=3))
            return (sender is None or sent == RECORDS) and len(got) == 2 * len(want)

        until(control, turn)
        for producer in sources if receiver is not None else ():
            assert [r.ticket for r in got if r.sample_index == producer] == want
        assert all(r.token_ids.numel() == r.ticket % 7 for r in got)
    senders, receivers = zip(*ends.values(), strict=True)
    for end in (*senders, *receivers):
        if end is not None:
            end.close()


def end_before_the_first_record(control) -> None:
    connected(control, Gather, (2,), (0, 1))
    control.start()
    if control.rank == 2:
        time.sleep(0.5)  # the others wait for its records by then
        os._exit(9)
    until(control, lambda: False)


def open_connections(rank: int) -> list[int]:
    """How many sockets a channel, a group of weights and an executor open."""
    makes = (
        lambda: connected(control_of(rank, POOLED), Gather, (0, 1, 2), (3,)),
        lambda: link_group((0, 1), (2, 3)),
        lambda: groups_on(rank, {"copies": (POOLED, 1)})["copies"],
    )
    opened, made = [], []
    for make in makes:
        before = len(psutil.Process().net_connections())
        made.append(make())
        dist.barrier()
        opened.append(len(psutil.Process().net_connections()) - before)
        dist.barrier()  # nobody closes, or goes on, while others count
    for end in made[0]:
        if end is not None:
            end.close()
    return opened


def connect_too_early(rank: int) -> list[str]:
    """Rank 1 connects once rank 0 has given up twice."""

    def nothing() -> None:
        pass

    def fails() -> None:
        raise RuntimeError("a failure elsewhere")

    said = []
    groups = [link_group((0,), (1,)), link_group((0,), (1,))]
    for group, check in zip(groups, (fails, nothing)):
        if rank == 0:
            try:
                connect_peers([1], group, timeout_s=0.2, check=check)
            except (RuntimeError, TimedOut) as error:
                said.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    if rank == 1:  # so that the threads of rank 0 end
        for group in groups:
            connect_peers([0], group, timeout_s=DEADLINE_S, check=nothing)
    return said


def join() -> Control:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    store = dist.PrefixStore("llamarl", dist.distributed_c10d._get_default_store())
    return Control(
        store,
        rank=rank,
        world_size=RANKS,
        leader=0,
        names=[f"executor {r}" for r in range(RANKS)],
        heartbeat_timeout_s=DEADLINE_S,  # no rank is given up for its heartbeat
    )


def main() -> None:
    control = join()
    globals()[sys.argv[1]](control)
    dist.barrier()
    control.close()
    os._exit(0)  # gloo's threads of the links need no farewell


if __name__ == "__main__":
    main()
