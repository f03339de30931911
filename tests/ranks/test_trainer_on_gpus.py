"""A step of the trainer on four ranks with a GPU each that is not there: sharded, replicated and
split, over gloo. All ranks call the same collectives, and the step comes to what one CPU makes of
it.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from executors.build_trainer import build_trainer
from llamarl.comm.groups import RankInfo, World, executor_group
from llamarl.config.command_line import RL, read_all
from llamarl.executor import ExecutorGroup
from llamarl.launch.job import Job
from llamarl.launch.run_directory import RunDirectory
from llamarl.models.config import read_config, tiny_directory
from llamarl.types import Policy
from tests.build.group import build_group
from tests.imagined_gpu import CPU, GPU, OnGpu, imagined_gpu
from tests.ranks.topologies import TOPOLOGIES, WORLD
from tests.tolerances import rounding

TINY = read_config(tiny_directory())
DEADLINE_S = 120


def group(ticket):
    return build_group(ticket, [5, 6], [1.0, 0.0], vocab_size=TINY.vocab_size)


def trainer_on(place, world, overrides):
    placed = [f"placement.trainer={list(place.ranks)}", "eval.every=0", "checkpoint.every=0"]
    usual = ["trainer.parity_tolerance=1000", "lr=1e-3"]
    _, (config,) = read_all([*placed, *usual, *overrides], RL, ranks=(world.size, world.size))
    nothing = SimpleNamespace(bind=lambda *_: None)
    trainer = build_trainer(config, Job(config, world, RunDirectory(Path(), None)))
    trainer.attach(place, [], [(Policy, nothing)], *[nothing] * 4)
    trainer.setup()
    return trainer


def step_on(rank: int, topology: str) -> dict:
    """What a rank's step came to, and the collectives that it called."""
    replicate, tensor_parallel = TOPOLOGIES[topology]
    # NCCL is absent here, and refuses ranks that share a GPU anyway.
    infos = tuple(RankInfo(r, "host", "one GPU") for r in range(WORLD))
    world = World(rank, WORLD, GPU, infos)
    overrides = [f"trainer.replicate={replicate}", f"trainer.tensor_parallel={tensor_parallel}"]
    with imagined_gpu() as gpu:
        ranks = tuple(range(WORLD))
        shape = {"replicate": replicate, "tensor_parallel": tensor_parallel}
        place = executor_group("trainer", ranks, world, DEADLINE_S, **shape)
        trainer = trainer_on(place, world, overrides)
        held = [getattr(p, "_local_tensor", p) for p in trainer.model.decoder.parameters()]
        assert all(isinstance(p, OnGpu) for p in held)
        gpu.collectives.clear()
        mine = [group(ticket) for ticket in range(WORLD) if _takes(place, ticket)]
        result = trainer._update.run(mine, 1, lambda: False)
    return {
        "grad_norm": result["grad_norm"],
        "loss": result["loss/value"],
        "collectives": [list(one) for one in gpu.collectives],
    }


def _takes(place, ticket):
    return ticket % place.data_size == place.data_index


@pytest.fixture(scope="module")
def alone():
    """What one rank makes of the same groups, on a CPU."""
    place = ExecutorGroup("trainer", (0,), 0, CPU, None)
    trainer = trainer_on(place, World(0, 1, CPU), [])
    return trainer._update.run([group(t) for t in range(WORLD)], 1, lambda: False)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["fsdp4", "hsdp2x2", "fsdp2_tp2"])
def test_every_rank_calls_the_same_collectives_and_the_step_is_that_of_one_rank(
    pool, alone, topology
):
    call = {"ranks": WORLD, "timeout_s": DEADLINE_S, "topology": topology}
    first, *others = pool.call(__file__, "step_on", **call)
    names = " ".join(name for name, _ in first["collectives"])
    assert "allgather" in names and "reduce_scatter" in names
    for other in others:
        assert other["collectives"] == first["collectives"]
        assert other["grad_norm"] == pytest.approx(first["grad_norm"])
    same = rounding(terms=TINY.hidden_size, depth=4 * TINY.num_hidden_layers)
    assert first["grad_norm"] == pytest.approx(alone["grad_norm"], rel=same)
    assert first["loss"] == pytest.approx(alone["loss/value"], abs=same)
