"""Process groups of ranks with GPUs, on meshes whose other ranks are not there: every rank makes
the same groups in the same order, with NCCL where each has a GPU of its own, and weights go by the
nearest way.
"""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from executors.build import build_executors
from llamarl.comm.channel import ConnectContext
from llamarl.comm.groups import RankInfo, World, executor_group
from llamarl.config.command_line import RL, read_all
from llamarl.ddma.channel import Weights
from llamarl.launch.graph import channels_between
from llamarl.launch.job import Job
from llamarl.launch.run_directory import RunDirectory
from tests.build.routes import control_of
from tests.imagined_gpu import GPU

NEW_GROUP = dist.new_group


def infos_of(size, *, per_host, per_gpu=1):
    """Ranks in hosts of so many, of which so many in a row share a GPU."""
    infos = []
    for rank in range(size):
        gpu = f"GPU {rank // per_gpu}"
        infos.append(RankInfo(rank, f"host {rank // per_host}", gpu, nccl=True))
    return infos


@contextmanager
def rank_of(rank, size):
    """This process as one rank of a world whose others are not there. Yields the groups that it
    makes: (ranks, backend).
    """
    made = []

    def new_group(ranks=None, timeout=None, backend=None, **options):
        made.append((tuple(ranks), backend))
        return NEW_GROUP(ranks, timeout, "fake", **options)

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    seen = mock.patch.object(dist, "new_group", new_group)
    seen_inside = mock.patch.object(dist.distributed_c10d, "new_group", new_group)
    try:
        with seen, seen_inside:
            yield made
    finally:
        dist.destroy_process_group()


PLACEMENTS = {
    "halves": [],
    "shared layers": ["trainer.tensor_parallel=2", "generator.tensor_parallel=2"],
    "replicas": ["trainer.replicate=2"],
}
# Ranks of a host, and of a GPU.
ON = {"two hosts": (4, 1), "one host": (8, 1), "two ranks on a GPU": (4, 2), "a host each": (1, 1)}


def config_of(overrides, size):
    """The config of a command line for so many ranks."""
    _, (config,) = read_all(overrides, RL, ranks=(size, size))
    return config


def groups_of(rank, overrides, infos):
    """The groups of a job on this rank, in the order in which they are made, and its routes."""
    size = len(infos)
    with rank_of(rank, size) as made:
        config = config_of(["generator.quantize=fp8", "model.dtype=bfloat16", *overrides], size)
        world = World(rank, size, GPU, tuple(infos))
        job = Job(config, world, RunDirectory(Path(), None))
        generator, reward, references, trainer = build_executors(config, job)
        executors = [generator, reward, *references, trainer]
        control = control_of(rank, size)
        for one in executors:
            mesh = {"replicate": one.replicate, "tensor_parallel": one.tensor_parallel}
            executor_group(one.name, job.placement[one.name], world, 30.0, **mesh)
        context = ConnectContext(control, job.placement, infos, timeout_s=30.0)
        ends = []
        for channel in channels_between(executors):
            if isinstance(channel, Weights):
                ends += channel.connect(context)
            else:
                channel.link_group(context)
        routes = [end._route for end in ends if end is not None]
        return list(made), routes, job.placement


WAYS = [("halves", on) for on in ON] + [(placed, "two hosts") for placed in PLACEMENTS]


@pytest.mark.slow
@pytest.mark.parametrize("placed, on", sorted(set(WAYS)))
def test_all_ranks_make_the_same_groups_in_the_same_order(placed, on):
    overrides = PLACEMENTS[placed]
    per_host, per_gpu = ON[on]
    infos = infos_of(8, per_host=per_host, per_gpu=per_gpu)
    first, *others = [groups_of(rank, overrides, infos) for rank in range(8)]
    made, _, placement = first
    assert all(other[0] == made for other in others)
    has_own = per_gpu == 1
    assert dict(made)[placement["trainer"]] == ("cpu:gloo,cuda:nccl" if has_own else "gloo")
    between = tuple(sorted({*placement["trainer"], *placement["generator"]}))
    kinds = [backend for ranks, backend in made if ranks == between]
    assert ("nccl" in kinds) is has_own and "gloo" in kinds


def test_a_torch_without_nccl_makes_no_group_of_it():
    infos = [dataclasses.replace(info, nccl=False) for info in infos_of(4, per_host=4)]
    made, (route,), _ = groups_of(0, [], infos)
    assert {backend for _, backend in made} == {"gloo"}
    assert route.device_group is None


@pytest.mark.parametrize("on", ["two hosts", "one host", "two ranks on a GPU"])
def test_weights_go_by_the_nearest_way_that_joins_two_gpus(on):
    per_host, per_gpu = ON[on]
    infos = infos_of(8, per_host=per_host, per_gpu=per_gpu)
    _, routes, placement = groups_of(0, [], infos)
    (route,) = routes
    assert route.on_device is (per_gpu == 1)
    for peer in placement["generator"]:
        link = route.link_to(peer)
        together = infos[peer].host == infos[0].host
        if per_gpu == 1:
            assert link.transport == ("cuda_ipc" if together else "nccl")
            assert (link._payload_group is route.device_group) is (not together)
        else:
            assert link.transport == ("shm" if together else "gloo"), "NCCL cannot join them all"
