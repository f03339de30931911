"""The trainer on a GPU that is not there: every operation of a step has its tensors on one device,
in dtypes and layouts that a GPU takes, and the step comes to what a CPU's does.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from executors.build_trainer import build_trainer
from llamarl.checkpoint.checkpointer import _split
from llamarl.comm.groups import World
from llamarl.config.command_line import compose_config
from llamarl.executor import ExecutorGroup
from llamarl.launch.job import Job
from llamarl.launch.run_directory import RunDirectory
from llamarl.learning import logprobs
from llamarl.learning.logprobs import canary_of
from llamarl.machine.offload import DeviceSharing
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.loading import frozen_decoder
from llamarl.models.lora import travelling
from llamarl.models.parity import Sequence
from llamarl.types import Policy
from tests.build.group import build_group
from tests.imagined_gpu import CPU, GPU, OnGpu, imagined_gpu
from tests.imagined_streams import HOST
from tests.tolerances import rounding

TINY = read_config(tiny_directory())
VERSION = 5
# Of the norm of all gradients: sums over the width and the tokens, forward and back.
DEPTH = 2 * 2 * TINY.num_hidden_layers


def groups(reference):
    found = []
    for ticket, lengths, rewards in ((4, [6, 2, 9], [1.0, 0.5, 0.0]), (1, [3, 4], [1.0, 0.0])):
        known = {"ref_logprobs": torch.full((sum(lengths),), -3.1)} if reference else {}
        fields = {"vocab_size": TINY.vocab_size, "version": VERSION - 1, **known}
        found.append(build_group(ticket, lengths, rewards, **fields))
    return found


def trainer_on(device, *overrides, process_group=None):
    """The executor of a command line, set up."""
    usual = ["eval.every=0", "checkpoint.every=0", "trainer.microbatch_tokens=24", "lr=1e-3"]
    config = compose_config([*usual, *overrides])
    nothing = SimpleNamespace(bind=lambda *_: None, reconcile=set)
    job = Job(config, World(0, 1, device), RunDirectory(Path(), None))
    trainer = build_trainer(config, job)
    place = ExecutorGroup("trainer", (0,), 0, device, process_group, shard_group=process_group)
    trainer.attach(place, [], [(Policy, nothing)], *[nothing] * 4)
    trainer.setup()
    return trainer


def step(trainer, *, reference=False):
    return trainer._update.run(groups(reference), VERSION, lambda: False)


@pytest.fixture
def gpu():
    with imagined_gpu() as made:
        yield made


@pytest.fixture
def lone_group():
    """The process group of a rank alone, whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


FLOAT32 = {
    "whole": [],
    "activations computed again": ["trainer.activation_checkpointing=true"],
    "adapters": ["trainer.lora.rank=2", "trainer.ema_decay=0.9"],
    "a critic on the trunk": ["loss=ppo", "trainer.advantages=gae"],
    "a critic beside it": ["loss=ppo", "trainer.advantages=gae", "trainer.critic.trunk=own"],
    "several updates": ["trainer.minibatches_per_step=2", "trainer.updates_per_batch=2"],
    "entropy and reference": ["reference=frozen", "loss.kl_coef=0.1", "loss.entropy_coef=0.01"],
}


def kinds_of_steps():
    """Each kind of a step; all but the plain one are slow tests."""
    for name, overrides in FLOAT32.items():
        marks = [pytest.mark.slow] if overrides else []
        yield pytest.param(overrides, id=name, marks=marks)


@pytest.mark.parametrize("overrides", list(kinds_of_steps()))
def test_a_step_on_a_gpu_comes_to_what_it_does_on_a_cpu(overrides):
    kept = any("reference" in override for override in overrides)
    cpu = step(trainer_on(CPU, *overrides), reference=kept)
    with imagined_gpu():
        trainer = trainer_on(GPU, *overrides)
        assert {type(p) for p in trainer.model.decoder.parameters()} == {OnGpu}
        trained = [p for p in trainer.model.decoder.parameters() if p.requires_grad]
        before = [p.detach().cpu() for p in trained]
        found = step(trainer, reference=kept)
        after = [p.detach().cpu() for p in trained]
    # Each update after the first begins from weights that differ by the rounding before it.
    num_updates = 4 if "trainer.updates_per_batch=2" in overrides else 1
    same = num_updates * rounding(terms=TINY.hidden_size, depth=DEPTH)
    assert found["grad_norm"] == pytest.approx(cpu["grad_norm"], rel=same)
    assert found.keys() == cpu.keys()
    assert found["loss/value"] == pytest.approx(cpu["loss/value"], abs=same)
    assert not all(map(torch.equal, before, after))


BFLOAT16 = {
    "whole": [],
    "activations computed again": ["trainer.activation_checkpointing=true"],
    "adapters": ["trainer.lora.rank=2", "model.dtype=bfloat16"],
}


@pytest.mark.slow
@pytest.mark.parametrize("more", BFLOAT16.values(), ids=BFLOAT16)
def test_a_step_in_bfloat16_runs_on_a_gpu(more):
    overrides = ["trainer.compute_dtype=bfloat16", *more]
    cpu = step(trainer_on(CPU, *overrides))
    with imagined_gpu():
        trainer = trainer_on(GPU, *overrides)
        found = step(trainer)
    same = rounding(torch.bfloat16, terms=TINY.num_hidden_layers, depth=4)
    assert found["grad_norm"] == pytest.approx(cpu["grad_norm"], rel=same)
    trained = [p for p in trainer.model.decoder.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    assert {p.grad.dtype for p in trained} == {torch.float32}


@pytest.mark.slow
def test_logits_that_are_not_kept_are_multiplied_in_chunks_on_a_gpu(monkeypatch):
    cpu = step(trainer_on(CPU))
    monkeypatch.setattr(logprobs, "KEEP_LOGITS", 0)
    monkeypatch.setattr(logprobs, "KEEP_BYTES", 0)
    monkeypatch.setattr(logprobs.make_head, "__kwdefaults__", _chunks_of(3))
    with imagined_gpu():
        found = step(trainer_on(GPU))
    same = rounding(terms=TINY.hidden_size, depth=DEPTH)
    assert found["grad_norm"] == pytest.approx(cpu["grad_norm"], rel=same)


def _chunks_of(tokens):
    return {**logprobs.make_head.__kwdefaults__, "chunk_tokens": tokens}


@pytest.mark.slow
def test_what_is_published_saved_and_exported_is_found_on_a_gpu(gpu, tmp_path):
    trainer = trainer_on(GPU, "trainer.lora.rank=2", "trainer.ema_decay=0.9")
    step(trainer)
    assert all(weight.device == GPU for _, weight in travelling(trainer.model.decoder))
    sequences = [Sequence((5, 6, 7, 8), given=2)]
    canary = canary_of(trainer.model.decoder, sequences, GPU, temperature=1.0, top=3)
    assert len(canary.logprobs) == 2 and len(canary.top_ids[0]) == 3
    state = trainer.state_dict()
    tensors, _ = _split("trainer", state)
    assert tensors and not any(isinstance(t, OnGpu) for t in tensors.values())
    other = trainer_on(GPU, "trainer.lora.rank=2", "trainer.ema_decay=0.9")
    other.load_state_dict([{**state, **tensors}])
    for shard, its in zip(trainer.model.shards, other.model.shards, strict=True):
        assert torch.equal(shard.parameter, its.parameter)
    trainer.export(str(tmp_path / "out"))
    assert (tmp_path / "out_ema" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_trainer_in_host_memory_trains_on_a_gpu_with_its_copies_in_order(lone_group):
    """FSDP2's streams for copies and the AdamW on the CPU."""
    overrides = ["trainer.compute_dtype=bfloat16"]
    cpu = step(trainer_on(CPU, *overrides))
    with imagined_gpu() as gpu:
        offload = "trainer.cpu_offload=true"
        trainer = trainer_on(GPU, *overrides, offload, process_group=lone_group)
        assert trainer.group.data_mesh().device_type == "cuda"
        found = step(trainer)
        held = [p.to_local() for p in trainer.model.all_parameters]
        assert not any(isinstance(p, OnGpu) for p in held)
    same = rounding(torch.bfloat16, terms=TINY.num_hidden_layers, depth=4)
    assert found["grad_norm"] == pytest.approx(cpu["grad_norm"], rel=same)
    assert {done.who for done in gpu.streams.log} > {HOST, "default"}


def test_the_8_bit_optimizer_keeps_its_moments_on_the_gpu(gpu):
    """torchao compiles its step there, which needs the GPU itself."""
    trainer = trainer_on(GPU, "trainer.optimizer=adamw8bit")
    weight = trainer.model.decoder.layers[0].attn.q_proj.weight
    moments = trainer.model.optimizer._new_buffer(weight, signed=True)
    assert moments.codes.device == moments.scale.device == moments.qmap.device == GPU
    assert moments.codes.dtype == torch.uint8
    assert "step" not in vars(trainer.model.optimizer)


@pytest.mark.slow
def test_executors_that_take_turns_copy_before_memory_is_given_back(gpu):
    trainer = trainer_on(GPU)
    step(trainer)
    before = [p.detach().cpu() for p in trainer.model.decoder.parameters()]
    turns = DeviceSharing(["trainer", "generator"])
    began = len(gpu.streams.log)
    turns.join("trainer", trainer.offloadable)
    said = [done.what for done in gpu.streams.log[began:]]
    copies = said.count("copy of a storage")
    assert copies > 2 * len(before)
    in_order = ["copy of a storage"] * copies + ["synchronize"] + ["resize"] * copies
    assert said == in_order
    held = [p.untyped_storage().nbytes() for p in trainer.model.decoder.parameters()]
    assert set(held) == {0}
    began = len(gpu.streams.log)
    turns.claim("trainer")
    said = [done.what for done in gpu.streams.log[began:]]
    assert said == ["resize", "copy of a storage"] * copies + ["synchronize"]
    after = [p.detach().cpu() for p in trainer.model.decoder.parameters()]
    assert all(map(torch.equal, before, after))


@pytest.mark.slow
def test_a_reference_is_asked_on_a_gpu(gpu):
    asked = ["reference=frozen", "loss.kl_coef=0.1"]
    assert step(trainer_on(GPU, *asked), reference=True)["loss/value"] is not None
    reference = frozen_decoder(tiny_directory(), mesh=None, device=GPU, dtype=torch.bfloat16)
    assert {p.device for p in reference.parameters()} == {GPU}
