"""Adapters and averaged weights on several ranks: the same as on one, saved and resumed bit for
bit.

Each rank trains on every topology, resumes from what others saved, and leaves what it held.
"""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from executors.build_trainer import build_trainer
from executors.trainer import FSDPTrainer
from llamarl.comm.groups import World
from llamarl.config.command_line import compose_config
from llamarl.ddma.layout import Source, parameters_to_send
from llamarl.executor import ExecutorGroup
from llamarl.launch.job import Job
from llamarl.launch.run_directory import RunDirectory
from llamarl.models.config import read_config
from llamarl.models.fsdp import local
from llamarl.models.shape import Lora
from tests.build.model_directory import write_model
from tests.ranks.topologies import DEADLINE_S, TOPOLOGIES, WORLD, alone, groups_on
from tests.ranks.trainers import (
    MODEL,
    Peers,
    attached,
    group_of,
    learn,
    leave,
    load_states,
    save_state,
)
from tests.tolerances import rounding

pytestmark = pytest.mark.slow

STEPS = 2
TRAINED = {name: TOPOLOGIES[name] for name in ("fsdp4", "hsdp2x2", "fsdp2_tp2", "tp4")}
BY_ROWS = {"fsdp4": WORLD, "hsdp2x2": 2}  # shards that lie end to end
LORA = [
    "trainer.lora.rank=3",
    "trainer.lora.targets=[q_proj,v_proj,o_proj,down_proj]",
    "trainer.lora.alpha=6",
]  # rank 3: none on one of 4 shards
OWN_REFERENCE = ["reference=adapters_off", "loss.kl_coef=0.1"]
SETTINGS = ["eval.every=0", "checkpoint.every=0", "metrics.samples=0", "group_size=4"]
SETTINGS += ["lr=0.02", "trainer.eps=1e-4", "trainer.microbatch_tokens=30"]
CASES = {
    "lora": [*LORA, *OWN_REFERENCE, "trainer.ema_decay=0.5"],
    "whole": ["reference=sharded", "loss.kl_coef=0.1", "trainer.ema_decay=0.5"],
}
# Of the largest. A weight's gradient is a sum over the trained tokens of a step, some 54, which are
# more than the width; then come the layers there and back, in each step.
VALUES = rounding(terms=54, depth=2 * 2 * 2 * STEPS)
TARGET = re.compile("q_proj|v_proj|o_proj|down_proj")


def trainer_of(model: Path, group: ExecutorGroup, case: str) -> tuple[FSDPTrainer, Peers]:
    config = compose_config([*SETTINGS, *CASES[case]])
    # One process would be refused a second replica.
    topology = {"replicate": group.replicate, "tensor_parallel": group.tensor_parallel}
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, **topology))
    job = Job(config, World(0, WORLD, group.device), RunDirectory(Path(), None))
    job.inputs.model_path, job.inputs.prompts = model, [group_of(i) for i in range(99)]
    trainer = build_trainer(config, job)
    return trainer, attached(trainer, group)


def held(trainer: FSDPTrainer, peers: Peers) -> dict[str, torch.Tensor]:
    trained = [(shard.name, shard.parameter) for shard in trainer.model.shards]
    out = {f"sent/{name}": p for name, p in peers.published.items()}
    for name, p in trained:
        out[f"weight/{name}"] = local(p)
        out[f"ema/{name}"] = local(trainer.model.average.of(p))
        out[f"exp_avg/{name}"] = local(trainer.model.optimizer.state[p]["exp_avg"])
    return out


def run(root: Path, group: ExecutorGroup, case: str, name: str, rank: int) -> None:
    """Train, leave what is held, save, export, go on."""
    trainer, peers = trainer_of(root / "model", group, case)
    for step in range(STEPS):
        learn(trainer, step)
    leave(held(trainer, peers), root / f"{case}.{name}.rank{rank}")
    save_state(trainer, root / f"{case}.{name}.state.rank{rank}")
    trainer.export(str(root / f"{case}.{name}" / "hf"))
    learn(trainer, STEPS)
    leave(held(trainer, peers), root / f"{case}.{name}.after.rank{rank}")


def resume(root: Path, group: ExecutorGroup, case: str, name: str, ranks: int, rank: int) -> None:
    trainer, peers = trainer_of(root / "model", group, case)
    trainer.load_state_dict(load_states(root, f"{case}.{name}", ranks))
    learn(trainer, STEPS)
    leave(held(trainer, peers), root / f"{case}.{name}.resumed.rank{rank}")


def train_and_resume(rank: int, root: str) -> None:
    """What one rank of the pool runs."""
    root = Path(root)
    groups = groups_on(rank, TRAINED)
    for case in CASES:
        for name, group in groups.items():
            if case == "lora" or name in BY_ROWS:
                run(root, group, case, name, rank)
        dist.barrier()
        resume(root, groups["fsdp4"], case, "fsdp4", WORLD, rank)
        if case == "lora":
            resume(root, groups["fsdp2_tp2"], case, "fsdp2_tp2", WORLD, rank)


@pytest.fixture(scope="module")
def root(pool, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    write_model(root / "model", MODEL | {"architectures": ["LlamaForCausalLM"]})
    for case in CASES:
        run(root, alone(), case, "one", 0)
        resume(root, alone(), case, "one", 1, 0)
    pool.call(__file__, "train_and_resume", ranks=WORLD, timeout_s=DEADLINE_S, root=str(root))
    return root


@pytest.fixture(params=list(CASES))
def case(request) -> str:
    return request.param


def whole(root: Path, stem: str, shards: int) -> dict[str, torch.Tensor]:
    """Tensors of the first replica's shards, joined by rows."""
    parts = [load_file(root / f"{stem}.rank{r}.safetensors") for r in range(shards)]
    found = {}
    for name in parts[0]:
        found[name] = torch.cat([part[name] for part in parts])
    return found


@pytest.mark.parametrize("name", BY_ROWS)
def test_ranks_learn_and_send_what_one_rank_does(root, case, name):
    got, want = whole(root, f"{case}.{name}", BY_ROWS[name]), whole(root, f"{case}.one", 1)
    assert got.keys() == want.keys()
    for kind in ("weight", "ema", "exp_avg", "sent"):
        names = [key for key in want if key.startswith(kind)]
        largest = max(want[key].abs().max() for key in names)
        for key in names:
            assert (got[key] - want[key]).abs().max() <= VALUES * largest, key


@pytest.mark.parametrize("name", TRAINED)
def test_adapters_of_every_topology_are_those_of_one_rank(root, name):
    for suffix in ("", "_ema"):
        got, want = (exported_adapters(root, f"lora.{n}", suffix) for n in (name, "one"))
        assert got.keys() == want.keys()
        largest = max(value.abs().max() for value in want.values())
        for key in want:
            assert (got[key] - want[key]).abs().max() <= VALUES * largest, key


def exported_adapters(root: Path, stem: str, suffix: str = "") -> dict[str, torch.Tensor]:
    return load_file(root / stem / f"adapter{suffix}" / "adapter_model.safetensors")


def test_adapters_alone_are_sent_and_all_weights_without_them(root):
    start = load_file(root / "model" / "model.safetensors")
    adapted = [name.removesuffix("weight") for name in start if TARGET.search(name)]
    wanted = {
        "whole": {f"sent/{name}" for name in start},
        "lora": {f"sent/{name}lora_{x}" for name, x in itertools.product(adapted, "ab")},
    }
    for case, names in wanted.items():
        left = whole(root, f"{case}.one", 1)
        assert {key for key in left if key.startswith("sent/")} == names


@pytest.mark.parametrize("name", ["one", *BY_ROWS])
def test_exports_are_the_weights_and_their_average(root, case, name):
    left = whole(root, f"{case}.{name}", BY_ROWS.get(name, 1))
    start = load_file(root / "model" / "model.safetensors")
    for suffix, kind in (("", "weight"), ("_ema", "ema")):
        exported = load_file(root / f"{case}.{name}" / f"hf{suffix}" / "model.safetensors")
        assert exported.keys() == start.keys()
        for key, value in exported.items():
            stem = key.removesuffix("weight")
            want = left.get(f"{kind}/{key}", start[key])
            if f"{kind}/{stem}lora_a" in left:
                product = left[f"{kind}/{stem}lora_b"] @ left[f"{kind}/{stem}lora_a"]
                want = start[key] + 2.0 * product
            assert (value - want).abs().max() <= VALUES, key
    weights = [key.removeprefix("weight/") for key in left if key.startswith("weight/")]
    assert any(not torch.equal(left[f"ema/{key}"], left[f"weight/{key}"]) for key in weights)


@pytest.mark.bitwise("a resumed trainer goes on as the one that was not stopped")
@pytest.mark.parametrize("name, ranks", [("one", 1), ("fsdp4", WORLD), ("fsdp2_tp2", WORLD)])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(root, case, name, ranks):
    if case == "whole" and name not in BY_ROWS and ranks > 1:
        pytest.skip("tests/ranks/test_topologies.py has it")
    for rank in range(ranks):
        ends = (".resumed", ".after", "")
        files = [root / f"{case}.{name}{end}.rank{rank}.safetensors" for end in ends]
        got, want, before = map(load_file, files)
        assert all(torch.equal(got[key], want[key]) for key in want)
        averages = [key for key in want if key.startswith("ema/")]
        assert any(not torch.equal(before[key], want[key]) for key in averages)


def test_a_checkpoint_holds_adapters_and_no_frozen_weights(root):
    for name, ranks in (("one", 1), *((name, WORLD) for name in TRAINED)):
        names = set().union(*load_states(root, f"lora.{name}", ranks))
        assert {key for key in names if key.startswith("model/")}
        assert not any(key.endswith(".weight") for key in names)


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_sent_is_held_as_the_plan_says(root, name):
    config = read_config(root / "model")
    lora = Lora(3, 6.0, ("q_proj", "v_proj", "o_proj", "down_proj"))
    config = dataclasses.replace(config, lora=lora)
    replicate, tp = TOPOLOGIES[name]
    source = Source(WORLD // (replicate * tp), replicate, tp)
    for rank in range(WORLD):
        left = load_file(root / f"lora.{name}.rank{rank}.safetensors")
        for p in parameters_to_send(config, torch.float32):
            assert tuple(left[f"sent/{p.name}"].shape) == source.box(config, p, rank).lengths


def test_other_adapters_than_were_saved_are_refused(root):
    state = load_states(root, "lora.one", 1)
    for case in ("whole", "lora"):
        trainer, _ = trainer_of(root / "model", alone(), case)
        if case == "lora":
            state[0]["lora"]["alpha"] = 5.0
        with pytest.raises(ValueError, match="was saved with trainer.lora="):
            trainer.load_state_dict(state)


def test_a_checkpoint_without_an_average_starts_one_anew(root, caplog):
    state = load_states(root, "whole.one", 1)
    plain = [{key: value for key, value in state[0].items() if not key.startswith("ema/")}]
    trainer, _ = trainer_of(root / "model", alone(), "whole")
    trainer.load_state_dict(plain)
    assert "starts again from the weights of version 2" in caplog.text
    for shard in trainer.model.shards:
        assert torch.equal(trainer.model.average.of(shard.parameter), shard.parameter)
