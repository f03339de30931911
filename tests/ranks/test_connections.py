"""gloo connects the ranks that exchange something, and no others.

Each rank is a function of this file, called in a process of the pool.
"""

import psutil

RANKS = 4
DEADLINE_S = 120
LISTENER = 1  # a group's own socket, where its other ranks reach this one


def test_a_channel_connects_each_producer_with_each_consumer_alone(pool):
    opened = pool.call(__file__, "connect_a_channel", ranks=RANKS, timeout_s=DEADLINE_S)
    producer = LISTENER + 1
    consumer = LISTENER + 3
    assert opened == [producer, producer, producer, consumer]


def test_the_weights_connect_no_ranks_before_it_is_known_who_feeds_whom(pool):
    opened = pool.call(__file__, "make_a_link_group", ranks=RANKS, timeout_s=DEADLINE_S)
    assert opened == [LISTENER] * RANKS


def test_ranks_of_an_executor_are_connected_once_at_its_start(pool):
    """Copies of one rank each: the group over the copies is that of the executor."""
    opened = pool.call(__file__, "make_copies", ranks=RANKS, timeout_s=DEADLINE_S)
    of_executor = LISTENER + 3
    of_shards = LISTENER  # of this rank alone
    assert opened == [of_executor + of_shards] * RANKS


def test_a_peer_that_does_not_come_is_named_and_a_failure_ends_the_wait(pool):
    said = pool.call(__file__, "connect_too_early", ranks=2, timeout_s=DEADLINE_S)[0]
    assert said == [
        "RuntimeError: a failure elsewhere",
        "TimedOut: rank 0 waited 0 s for a connection with ranks 1. One hangs, or no network "
        "leads there: see what each rank said last",
    ]


# --- what a rank runs ---


def open_sockets() -> int:
    return len(psutil.Process().net_connections())


class Endpoint:
    first_takes = False

    def __init__(self, name):
        self.name = name


def connect_a_channel(rank: int) -> int:
    import torch.distributed as dist

    from llamarl.comm.channel import ConnectContext, Gather
    from llamarl.comm.control import Control
    from llamarl.types import Completion

    names = [f"executor {number}" for number in range(RANKS)]
    context = ConnectContext(
        control=Control(None, rank=rank, world_size=RANKS, leader=0, names=names),
        placement={"from": (0, 1, 2), "to": (3,)},
        ranks=[],  # which only the channel of weights asks about
        timeout_s=DEADLINE_S,
    )
    before = open_sockets()
    ends = Gather(Endpoint("from"), Endpoint("to"), carries=Completion).connect(context)
    dist.barrier()
    opened = open_sockets() - before
    for end in ends:
        if end is not None:
            end.close()
    return opened


def make_a_link_group(rank: int) -> int:
    import torch.distributed as dist

    from llamarl.comm.groups import link_group

    before = open_sockets()
    group = link_group((0, 1), (2, 3))
    dist.barrier()
    assert group is not None
    return open_sockets() - before


def make_copies(rank: int) -> int:
    import torch
    import torch.distributed as dist

    from llamarl.comm.groups import World, executor_group

    world = World(rank=rank, size=RANKS, device=torch.device("cpu"))
    before = open_sockets()
    group = executor_group("trainer", (0, 1, 2, 3), world, DEADLINE_S, replicate=RANKS)
    dist.barrier()
    assert group is not None
    return open_sockets() - before


def connect_too_early(rank: int) -> list[str]:
    """Rank 1 connects once rank 0 has given up twice."""
    import torch.distributed as dist

    from llamarl.comm.groups import connect_peers, link_group
    from llamarl.errors import TimedOut

    def nothing() -> None:
        pass

    def fails() -> None:
        raise RuntimeError("a failure elsewhere")

    said = []
    groups = [link_group((0,), (1,)), link_group((0,), (1,))]
    checks = [fails, nothing]
    for group, check in zip(groups, checks):
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
