"""A job of 512 ranks in one process: where its executors are, the plan of its weights, and FSDP2
around the trainer's model on the mesh of its ranks.

Collectives are torch's `fake` backend's, which move nothing. So this says which rank holds what,
not that anything arrives; tests/ranks has few ranks with real ones.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from llamarl.comm.groups import RankInfo, World, executor_group
from llamarl.config.command_line import RL, compose_config
from llamarl.config.placement import placement_of
from llamarl.ddma.layout import Destination, Source, parameters_to_send
from llamarl.ddma.plan import make_plan
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.fsdp import held_box, local
from llamarl.models.hf import named_parameters_hf
from llamarl.models.loading import training_decoder
from llamarl.models.sharding import Box, overlap
from llamarl.models.tp import TensorParallel

RANKS = 512
CPU = torch.device("cpu")
TOPOLOGIES = {
    "hsdp": {"trainer.replicate": 4},
    "hsdp of tensor-parallel": {"trainer.replicate": 2, "trainer.tensor_parallel": 2},
}


@pytest.fixture
def as_rank(monkeypatch):
    """Make this process a rank of a world of fakes."""
    new_group = c10d.new_group

    def fake_group(ranks=None, timeout=None, backend=None, **more):
        return new_group(ranks, timeout, backend="fake", **more)

    monkeypatch.setattr(c10d, "new_group", fake_group)
    monkeypatch.setattr(dist, "new_group", fake_group)

    def start(rank: int) -> World:
        if dist.is_initialized():
            dist.destroy_process_group()
        # DTensor keeps what it worked out for a mesh; it knows no process that was another rank.
        _clear_sharding_prop_cache()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        infos = tuple(RankInfo(rank=one, host="here", gpu=None) for one in range(RANKS))
        return World(rank=rank, size=RANKS, device=CPU, infos=infos)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def of_placement(**keys) -> tuple[dict[str, tuple[int, ...]], Source, Destination]:
    """Return where the executors of a job of 512 are, and the two topologies of its weights."""
    overrides = [f"{key}={value}" for key, value in keys.items()]
    job = ["+dry_run=true", f"+ranks={RANKS}", "groups_per_step=256"]
    config = compose_config([*job, *overrides], RL)
    placement = placement_of(config, RANKS)
    t = config.trainer
    shards = len(placement["trainer"]) // (t.replicate * t.tensor_parallel)
    tp = config.generator.tensor_parallel
    destination = Destination(tp, len(placement["generator"]) // tp)
    return placement, Source(shards, t.replicate, t.tensor_parallel), destination


@pytest.mark.parametrize("keys", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_fsdp_gives_each_rank_of_512_what_the_plan_says_that_it_sends(as_rank, keys):
    path = tiny_directory()
    config = read_config(path)
    parameters = parameters_to_send(config, torch.float32)
    placement, source, destination = of_placement(**keys)
    plan = make_plan(config, parameters, source, destination)
    whole = training_decoder(path, mesh=None, device=CPU, compute_dtype=torch.float32)
    weights = {name: local(p) for name, p in named_parameters_hf(whole)}
    for rank in (1, 127, 255):
        world = as_rank(rank)
        group = executor_group(
            "trainer",
            placement["trainer"],
            world,
            timeout_s=1.0,
            replicate=source.replicate,
            tensor_parallel=source.tp,
        )
        assert group.index == rank and group.size == 256
        mesh = group.data_mesh()
        assert mesh.size() == 256 // source.tp
        decoder = training_decoder(
            path,
            mesh=mesh,
            device=CPU,
            compute_dtype=torch.float32,
            tensor_parallel=TensorParallel.of(group, split_vocabulary=False),
        )
        sent = {}
        for part in range(destination.parts):
            for region in plan.regions(rank, part):
                sent.setdefault(region.name, []).append(region.box)
        held = dict(named_parameters_hf(decoder))
        for p in parameters:
            box = held_box(decoder, p.name, held[p.name])
            assert box == source.box(config, p, rank), f"rank {rank}: {p.name}"
            expected = weights[p.name][box.within(Box.whole(p.shape))]
            assert torch.equal(local(held[p.name]), expected), f"rank {rank}: {p.name}"
            for one in sent.get(p.name, []):
                assert overlap(box, one) == one, f"rank {rank} sends more: {p.name}"
