"""A restore reads from the disk each rank's own part of the trainer's state, and no more."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from llamarl.checkpoint import parts as stored
from llamarl.checkpoint.checkpointer import TOPIC, Checkpointer
from llamarl.checkpoint.parts import SavedPart, load_parts
from llamarl.learning.optim import build_optimizer
from llamarl.models.build import build_decoder
from llamarl.models.fsdp import held_box, local, wrap
from llamarl.models.hf import named_parameters_hf
from llamarl.models.sharded_state import Shard, load_shards
from llamarl.models.sharding import parameter_shapes
from tests.build.control import lone_control
from tests.build.model_config import model_config

DEADLINE_S = 120
BETA = 0.9
NAMES = {"weights": "model/", "moments": "adam/"}

CONFIG = model_config(
    vocab_size=40, intermediate_size=32, num_key_value_heads=4, tie_word_embeddings=True
)


def shards_here() -> tuple[list[Shard], torch.optim.Optimizer]:
    """Return this rank's shards of the model under FSDP2, and an optimizer that has made a step."""
    torch.manual_seed(0)
    decoder = build_decoder(CONFIG, device="cpu")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrap(decoder, mesh, torch.float32, torch.device("cpu"), cpu_offload=False)
    named = list(named_parameters_hf(decoder))
    shards = [Shard(name, p, held_box(decoder, name, p)) for name, p in named]
    parameters = [p for _, p in named]
    optimizer = build_optimizer(parameters, lr=0.1, betas=(BETA, 0.99), eps=1e-8, weight_decay=0.0)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return shards, optimizer


def save(rank: int, folder: str) -> int:
    """Save a rank's part of a checkpoint, which rank 0 seals; returns the bytes of its tensors."""
    shards, optimizer = shards_here()
    ranks = dist.get_world_size()
    # Each rank's control is of a world of its own: what they tell it is brought together here.
    control = lone_control()
    expected = [("trainer", index) for index in range(ranks)]
    writer = Checkpointer(folder, keep=1, control=control, expected=expected)
    dist.barrier()  # rank 0 has tidied up
    state = {"boxes": {}}
    for shard in shards:
        state["boxes"][shard.name] = [shard.box.offsets, shard.box.lengths]
        state |= shard.state(optimizer, **NAMES)
    writer.save_part(1, "trainer", rank, state)
    ((_, told),) = control.take(TOPIC)
    (Path(folder) / f"told{rank}").write_text(json.dumps(told))
    dist.barrier()
    if rank == 0:
        for other in range(ranks):
            control.post(0, TOPIC, json.loads((Path(folder) / f"told{other}").read_text()))
        writer.pump()
    dist.barrier()
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))


class Watched(SavedPart):
    """A part that counts the bytes of tensors that are read of all of them."""

    read = 0

    def box(self, name, index):
        found = super().box(name, index)
        Watched.read += found.nbytes
        return found

    def __getitem__(self, name):
        found = super().__getitem__(name)
        Watched.read += found.nbytes if isinstance(found, torch.Tensor) else 0
        return found


def restore(rank: int, folder: str) -> dict:
    """Load a rank's shards from the checkpoint; returns what it read."""
    shards, optimizer = shards_here()
    for kept in optimizer.state.values():
        kept["exp_avg"].zero_()
    path = Path(folder) / "checkpoints" / "step_1"
    stored.SavedPart = Watched
    Watched.read = 0
    parts = load_parts(path, "trainer")
    assert all(isinstance(part, Watched) for part in parts)
    load_shards(
        shards,
        parts,
        shapes=parameter_shapes(CONFIG),
        take=lambda shard, part, theirs: shard.load(part, theirs, optimizer, **NAMES),
    )
    own = 3 * sum(local(shard.parameter).nbytes for shard in shards)
    stored.SavedPart = SavedPart
    first = shards[0]
    step = local(optimizer.state[first.parameter]["exp_avg"])
    assert torch.equal(step, torch.full_like(step, 1 - BETA)), "as it was saved"
    opened = [part for part in parts if "_file" in vars(part)]
    return {"read": Watched.read, "own": own, "opened": len(opened)}


@pytest.mark.parametrize("saved_by, loaded_by", [(4, 4), (2, 4), (4, 2)])
def test_a_rank_reads_its_own_part_of_the_weights_and_moments(pool, tmp_path, saved_by, loaded_by):
    where = {"timeout_s": DEADLINE_S, "folder": str(tmp_path)}
    saved = pool.call(__file__, "save", ranks=saved_by, **where)
    found = pool.call(__file__, "restore", ranks=loaded_by, **where)
    assert sum(one["own"] for one in found) == sum(saved)
    assert [one["read"] for one in found] == [one["own"] for one in found]
    assert {one["opened"] for one in found} == {-(-saved_by // loaded_by)}
