"""Channels between real processes over gloo. Each rank is this file run as a script, in a process
forked for it.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch.distributed import TCPStore

from tests.forkery import the_forkery
from tests.launching import ROOT, environment

RANKS = 3
RECORDS = 40  # a producer and channel
DEADLINE_S = 240


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
    codes, outputs = run("records", tmp_path)
    assert codes == [0] * RANKS, "\n".join(outputs)


def test_a_peer_that_ends_before_its_first_record_is_named_at_once(tmp_path):
    codes, outputs = run("silence", tmp_path)
    assert codes[2] == 9
    for rank in (0, 1):
        assert "the link with rank 2 (executor 2) broke" in outputs[rank], outputs[rank]


# --- what a rank runs ---


class Endpoint:
    tensor_parallel = 1
    first_takes = False

    def __init__(self, name):
        self.name = name


def join():
    import torch.distributed as dist

    from llamarl.comm.control import Control

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    store = dist.PrefixStore("llamarl", dist.distributed_c10d._get_default_store())
    names = [f"executor {r}" for r in range(RANKS)]
    return Control(
        store,
        rank=rank,
        world_size=RANKS,
        leader=0,
        names=names,
        heartbeat_timeout_s=DEADLINE_S,  # no rank is given up for its heartbeat
    )


def until(control, predicate):
    deadline = time.monotonic() + DEADLINE_S / 2
    while not predicate():
        control.check()
        assert time.monotonic() < deadline, "too late"
        control.wait(0.01)


def record(ticket: int, sender: int):
    from llamarl.types import Completion

    length = ticket % 7
    return Completion(
        ticket=ticket,
        sample_index=sender,
        prompt_ids=torch.arange(3),
        token_ids=torch.arange(length),
        generator_logprobs=torch.zeros(length),
        policy_versions=torch.full((length,), sender),
        finish_reason="stop",
    )


def exchange_records(control) -> None:
    from llamarl.comm.channel import Broadcast, ConnectContext, Gather, Scatter, dp_rank_of
    from llamarl.types import Completion

    sources, destinations = (0, 1), (1, 2)  # rank 1 is on both sides
    context = ConnectContext(
        control=control,
        placement={"from": sources, "to": destinations},
        ranks=[],  # which only the channel of weights asks about
        timeout_s=DEADLINE_S,
    )
    ends = {}
    for kind in (Gather, Scatter, Broadcast):
        channel = kind(Endpoint("from"), Endpoint("to"), carries=Completion, capacity=4)
        ends[kind] = channel.connect(context)
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
                sender.put(record(sent, control.rank))
                sent += 1
            if receiver is not None:
                got.extend(receiver.take(limit=3))
            return (sender is None or sent == RECORDS) and len(got) == 2 * len(want)

        until(control, turn)
        for producer in sources if receiver is not None else ():
            assert [r.ticket for r in got if r.sample_index == producer] == want
        assert all(r.token_ids.numel() == r.ticket % 7 for r in got)
    for sender, receiver in ends.values():
        if sender is not None:
            sender.close()
    for sender, receiver in ends.values():
        if receiver is not None:
            receiver.close()


def end_before_the_first_record(control) -> None:
    from llamarl.comm.channel import ConnectContext, Gather
    from llamarl.types import Completion

    context = ConnectContext(
        control=control,
        placement={"from": (2,), "to": (0, 1)},
        ranks=[],  # which only the channel of weights asks about
        timeout_s=DEADLINE_S,
    )
    Gather(Endpoint("from"), Endpoint("to"), carries=Completion).connect(context)
    control.start()
    if control.rank == 2:
        time.sleep(0.5)  # the others wait for its records by then
        os._exit(9)
    until(control, lambda: False)


def main() -> None:
    scenario = sys.argv[1]
    control = join()
    if scenario == "records":
        exchange_records(control)
    else:
        end_before_the_first_record(control)
    import torch.distributed as dist

    dist.barrier()
    control.close()
    os._exit(0)  # gloo's threads of the links need no farewell


if __name__ == "__main__":
    main()
