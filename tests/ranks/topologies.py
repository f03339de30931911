"""The ways in which four ranks may share a model."""

from __future__ import annotations

import torch

from llamarl.comm.groups import World, executor_group
from llamarl.executor import ExecutorGroup

WORLD = 4
DEADLINE_S = 240  # of a group for its ranks
TOPOLOGIES = {  # replicate, tensor_parallel; the rest are shards
    "fsdp4": (1, 1),
    "hsdp2x2": (2, 1),
    "replicas4": (4, 1),
    "fsdp2_tp2": (1, 2),
    "hsdp2_tp2": (2, 2),
    "tp4": (1, 4),
}


def groups_on(rank: int, topologies=TOPOLOGIES, num_ranks: int = WORLD) -> dict[str, ExecutorGroup]:
    """Collective: the group of all ranks in each topology, as one of them has it."""
    world = World(rank, num_ranks, torch.device("cpu"))
    found = {}
    for name, (replicate, tensor_parallel) in topologies.items():
        shape = {"replicate": replicate, "tensor_parallel": tensor_parallel}
        ranks = tuple(range(num_ranks))
        found[name] = executor_group("shared", ranks, world, DEADLINE_S, **shape)
    return found


def alone(rank: int = 0) -> ExecutorGroup:
    """The group of one rank that holds everything."""
    return ExecutorGroup("alone", (rank,), rank, torch.device("cpu"))
