"""One of the ranks that llamarl.planner.probe_ranks starts: it makes updates with the other one,
and the first prints the seconds of the shortest.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from llamarl.machine.allocator import keep_freed_memory
from llamarl.machine.precision import use_float32_products
from llamarl.models.build import build_decoder, random_weights
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.fsdp import wrap
from llamarl.planner.probe import policy_update, short_groups
from llamarl.planner.probe_ranks import LONGEST_S, RANKS

_TIMES = 4  # updates that are timed, after one that warms up; as many on each rank


def _main(store: str, rank: int, path: str, dtype: str, number: int) -> None:
    """Be one of these ranks, and print the seconds on the first."""
    torch.set_num_threads(1)
    keep_freed_memory()
    use_float32_products(reproducible=True)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=LONGEST_S),
    )
    config = read_config(path or tiny_directory())
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard"))
    with torch.no_grad():
        decoder = random_weights(build_decoder(config, dtype=torch.float32), seed=0)
    wrap(decoder, mesh, getattr(torch, dtype), cpu_offload=False, pin_memory=False)
    decoder.train()
    groups, size = short_groups(number, config.vocab_size)
    update = policy_update(decoder, budget=size, device=torch.device("cpu"), group=dist.group.WORLD)
    found = []
    for _ in range(1 + _TIMES):
        dist.barrier()
        began = time.perf_counter()
        update.run(groups, 1, lambda: False)
        found.append(time.perf_counter() - began)
    if rank == 0:
        print(min(found[1:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    file, of, where, kind, many = sys.argv[1:]
    _main(file, int(of), where, kind, int(many))
