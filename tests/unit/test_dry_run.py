"""A dry run before anything is downloaded but config.json and the tokenizer, for ranks that are not
there, and what it says of the memory of each.
"""

import json
import logging
import re
from pathlib import Path

import pytest
import torch

from llamarl.comm.groups import World
from llamarl.config.command_line import RED_TEAM, RL, compose_config
from llamarl.errors import BadInput, NoWeights
from llamarl.launch import launch
from llamarl.launch.checks import check_inputs
from llamarl.launch.dry_run import dry_run
from llamarl.launch.job import Job
from llamarl.launch.memory import (
    bytes_by_rank,
    checkpoint_bytes_of,
    prices,
    warn_of_disk,
    warn_of_memory,
)
from llamarl.launch.run_directory import RunDirectory
from llamarl.memory import MicrobatchSize
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.sharding import num_parameters
from tests.build.model_directory import copy_tiny
from tests.scorers import write_encoder, write_scorer
from tests.unit.refusals import complaint

pytestmark = pytest.mark.timeout(120)

ENCODER = ("reward=encoder", "reward.label=mild", "reward.max_tokens=32")
PPO = ("loss=ppo", "trainer.advantages=gae", "trainer.critic.trunk=own")
LLAMA_405B = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def without_weights(path: Path, **fields) -> Path:
    """The tiny model's tokenizer and a config.json with these fields."""
    copy_tiny(path, **fields)
    (path / "model.safetensors").unlink()
    return path


def job_of(*overrides: str, ranks: int = 1, kind=RL) -> Job:
    world = World(0, 1, torch.device("cpu"))
    if ranks > 1:
        overrides = ("+dry_run=true", f"+ranks={ranks}", *overrides)
        world = world.imagined(ranks)
    config = compose_config(list(dict.fromkeys(overrides)), kind)
    return Job(config, world, RunDirectory(Path("."), None))


def said(capsys, *overrides: str, ranks: int = 1, kind=RL) -> str:
    job = job_of("+dry_run=true", *overrides, ranks=ranks, kind=kind)
    check_inputs(job.inputs)
    dry_run(job)
    return capsys.readouterr().out


def test_405b_on_512_ranks_is_priced_by_its_config_alone(tmp_path, capsys):
    model = without_weights(tmp_path / "405b", **LLAMA_405B)
    given = (f"model.path={model}", "groups_per_step=256", "model.dtype=bfloat16")
    output = said(capsys, *given, ranks=512)
    # Twice the embedding; of a layer q and o, k and v, three of the MLP, and two norms; a norm.
    d = 16384
    f = 53248
    kv = 1024
    layer = 2 * d * d + 2 * kv * d + 3 * f * d + 2 * d
    parameters = 2 * 128256 * d + 126 * layer + d
    assert f"{parameters:,} parameters" in output and "ranks 256-510: generator, " in output
    assert "bytes a sync" in output and "with trainer.activation_checkpointing=true" in output
    assert f"weights  not there yet: {model / 'model.safetensors'}" in output
    lines = re.findall(r"^ranks? \d.*", output, re.MULTILINE)
    assert len(lines) == 3, "a line for all that are alike"
    assert "rank 511 generator, reward, " in output
    assert "ranks    trainer 0-255  generator 256-511  reward 511" in output
    with pytest.raises(BadInput, match=r"model\.safetensors: no such file"):
        check_inputs(job_of(*given).inputs)


@pytest.mark.parametrize(
    "write, overrides",
    [
        (write_scorer, ("reward=model", "reward.path={}")),
        (write_scorer, ("eval.gold={}",)),
        (write_encoder, (*ENCODER, "reward.path={}")),
        (write_encoder, ("eval.embedder={}", "eval.num_samples=2")),
        (copy_tiny, ("eval.base={}",)),
        (copy_tiny, (*PPO, "trainer.critic.path={}")),
        (write_scorer, (*PPO, "trainer.critic.path={}")),
    ],
    ids=["scorer", "gold", "encoder", "embedder", "base", "critic", "reward model as critic"],
)
def test_models_beside_the_policy_need_no_weights_either(tmp_path, capsys, write, overrides):
    write(tmp_path / "beside")
    (tmp_path / "beside" / "model.safetensors").unlink()
    given = [override.format(tmp_path / "beside") for override in overrides]
    assert f"weights  not there yet: {tmp_path / 'beside'}" in said(capsys, *given)
    with pytest.raises(BadInput, match="no model.safetensors|no such file"):
        check_inputs(job_of(*given).inputs)


def test_a_shard_that_is_missing_is_named_and_a_broken_one_still_refused(tmp_path, capsys):
    model = without_weights(tmp_path / "model")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "not there yet: " in said(capsys, f"model.path={model}")
    (model / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(BadInput, match="not a whole safetensors file"):
        check_inputs(job_of("+dry_run=true", f"model.path={model}").inputs)
    assert issubclass(NoWeights, FileNotFoundError)


def test_a_victim_needs_no_weights_either(tmp_path, capsys):
    victim = without_weights(tmp_path / "victim")
    output = said(capsys, f"victim.path={victim}", kind=RED_TEAM)
    assert f"weights  not there yet: {victim}" in output and "memory   victim: " in output
    with pytest.raises(BadInput, match="no such file"):
        check_inputs(job_of(f"victim.path={victim}", kind=RED_TEAM).inputs)


# --- Ranks that are not there ---


@pytest.mark.parametrize(
    "ranks, word, said",
    [
        (0, "", "a whole number from 1 to"),
        (4, "placement.trainer=[4]", "ranks are 0 to 3"),
        (3, "generator.tensor_parallel=4", "cannot be split"),
    ],
)
def test_ranks_that_make_no_sense_are_refused_in_words(ranks, word, said):
    assert said in complaint("+dry_run=true", f"+ranks={ranks}", *word.split())


def test_one_process_shows_the_layout_of_many_ranks(launch_here, tmp_path):
    code, output = launch_here("+dry_run=true", "+ranks=8", f"run_dir={tmp_path / 'run'}")
    assert code == 0, output.err
    assert re.search(r"^ranks 0-3: trainer, 0\.\d\d GiB each$", output.out, re.MULTILINE)
    assert re.search(r"^rank 7   generator, reward, ", output.out, re.MULTILINE)
    assert "bytes a sync" in output.out and not (tmp_path / "run").exists()


# --- Memory of each rank ---


POLICY = num_parameters(read_config(tiny_directory()))


def by_name(job: Job) -> dict:
    return {price.name: price for price in prices(job)}


def test_every_model_is_priced_on_the_ranks_that_hold_it_in_its_dtype(tmp_path):
    """The tiny model's parameters times bytes: two halves of the reference and of each scorer."""
    write_scorer(tmp_path / "rm")
    job = job_of(
        "reference=frozen",
        "reward=model",
        f"reward.path={tmp_path / 'rm'}",
        "reward.dtype=bfloat16",
        f"eval.gold={tmp_path / 'rm'}",
        f"eval.base={tiny_directory()}",
        "placement.trainer=[0,1]",
        "placement.generator=[2]",
        "placement.reward=[3,4]",
        "placement.reference=[5,6]",
        ranks=7,
    )
    found = by_name(job)
    scorer = num_parameters(read_config(tmp_path / "rm"))
    for name, ranks, of_both in (
        ("reference", (5, 6), 4 * POLICY),
        ("reward (model)", (3, 4), 2 * scorer),
        ("eval.gold (model)", (3, 4), 4 * scorer),
        ("eval.base", (3, 4), 4 * POLICY),
        # Masters, two moments, and two slots of weights on their way.
        ("trainer", (0, 1), (4 + 8 + 2 * 4) * POLICY),
    ):
        assert found[name].ranks == ranks, name
        assert found[name].held == pytest.approx(of_both / 2, rel=0.02), name
    by_rank = bytes_by_rank(job, prices(job))
    # They work in turn: of what comes and goes the largest counts.
    names = ("reward (model)", "eval.gold (model)", "eval.base")
    most = max(found[name].working for name in names)
    held = sum(found[name].held for name in names)
    assert most > found["reward (model)"].working
    assert by_rank[3] == by_rank[4] == held + most


def test_each_teacher_is_priced_once_by_its_own_size(tmp_path, capsys):
    small = copy_tiny(tmp_path / "small", num_hidden_layers=1)
    parts = "task.parts={a: {kind: addition}, b: {kind: addition}, c: {kind: questions}}"
    by_part = {"a": small, "b": small, "c": tiny_directory()}
    teachers = [f"reference.teachers.{part}={path}" for part, path in by_part.items()]
    job = job_of(
        "loss=distill", "task=mixture", parts, "placement.reference=[1]", *teachers, ranks=2
    )
    found = by_name(job)
    assert {name for name in found if name.startswith("reference")} == {
        f"reference {small}",
        f"reference {tiny_directory()}",
    }
    for path in (small, tiny_directory()):
        price = found[f"reference {path}"]
        assert price.ranks == (1,) and price.held == 4 * num_parameters(read_config(path))
    assert found[f"reference {small}"].held < 0.5 * 4 * POLICY


def test_a_critic_of_its_own_costs_what_a_policy_does():
    several = "trainer.microbatch_tokens=100"  # in an update
    shared = job_of("loss=ppo", "trainer.advantages=gae", several)
    own = job_of(*PPO, several)
    assert "critic" not in by_name(shared)
    assert by_name(own)["critic"].held == pytest.approx(12 * POLICY, rel=0.02)
    more = by_name(own)["trainer"].working - by_name(shared)["trainer"].working
    assert more >= 4 * 0.98 * POLICY, "its gradients, while the policy goes backward"


def test_a_sharded_reference_is_priced_on_the_trainers_ranks_and_a_victim_on_its_own(tmp_path):
    sharded = by_name(job_of("reference=sharded", "model.dtype=bfloat16"))["reference"]
    assert sharded.held == 2 * POLICY and sharded.ranks == (0,)
    placed = ("placement.victim=[1]", "victim.dtype=bfloat16", "victim.max_slots=16")
    victim = by_name(job_of(*placed, ranks=3, kind=RED_TEAM))["victim"]
    config = read_config(tiny_directory())
    token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    # Laid out for the kernels once more; 22 tokens are two blocks of 16 in each slot.
    assert (victim.ranks, victim.held) == ((1,), 2 * 2 * POLICY + 16 * 32 * token)


def test_a_loss_that_needs_whole_groups_is_priced_with_whole_groups():
    given = ("task.max_prompt_tokens=60", "max_new_tokens=40", "trainer.microbatch_tokens=120")
    assert job_of(*given).placement.longest_microbatch == MicrobatchSize(1, 1, 60, 40)
    whole = job_of(*given, "loss=tba").placement.longest_microbatch
    assert whole == MicrobatchSize(1, 8, 60, 40)


@pytest.mark.parametrize(
    "overrides, free, names",
    [
        ((), 1 << 30, None),
        ((), 1 << 10, "trainer.activation_checkpointing=true"),
        (("trainer.activation_checkpointing=true",), 1 << 10, "trainer.microbatch_tokens"),
        (("generator.max_slots=100000",), 1 << 10, "generator.max_slots"),
    ],
)
def test_memory_that_will_not_do_is_warned_of_with_the_knob(
    monkeypatch, tmp_path, caplog, overrides, free, names
):
    (tmp_path / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {free >> 10} kB\n")
    monkeypatch.setattr("llamarl.machine.free_memory.MEMINFO", tmp_path / "meminfo")
    job = job_of(*overrides)
    with caplog.at_level(logging.WARNING, logger="llamarl"):
        warn_of_memory(job, prices(job))
    assert [names in message for message in caplog.messages] == ([] if names is None else [True])


def test_ranks_that_are_not_there_are_not_compared_with_this_machine(monkeypatch, caplog):
    monkeypatch.setattr("llamarl.launch.memory.memory_of", lambda device: 0)
    job = job_of("+dry_run=true", "+ranks=2", ranks=2)
    warn_of_memory(job, prices(job))
    assert not caplog.messages


@pytest.mark.parametrize(
    ("overrides", "there", "needed"),
    [
        # The tiny model's numbers times 12 bytes, and 4 of the export.
        (("checkpoint.keep=2", "checkpoint.every=5"), 0, 3 * 16),
        (("checkpoint.keep=2", "checkpoint.every=5"), 3, 16),
        (("checkpoint.keep=2", "checkpoint.every=0"), 0, 16),
        (("checkpoint.keep=1", "checkpoint.every=5", "trainer.ema_decay=0.9"), 0, 2 * 24),
    ],
)
def test_a_disk_without_room_for_the_checkpoints_is_warned_of(
    monkeypatch, tmp_path, caplog, overrides, there, needed
):
    for step in range(there):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
    job = job_of(*overrides)
    job.files.directory = RunDirectory(tmp_path, None)
    needed *= POLICY
    for free, is_warned in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr("llamarl.launch.memory.free_bytes", lambda path, free=free: free)
        caplog.clear()
        warn_of_disk(job)
        found = ["lower checkpoint.keep" in message for message in caplog.messages]
        assert found == [True] * is_warned


def test_a_checkpoint_takes_what_was_predicted(synchronous_run):
    files = [file for file in synchronous_run.checkpoint.rglob("*") if file.is_file()]
    taken = sum(file.stat().st_size for file in files)
    assert checkpoint_bytes_of(job_of()) == pytest.approx(taken, rel=0.02)


def test_a_start_says_what_sequences_beyond_the_budget_take(run_here, tmp_path):
    given = ("threads=1", "trainer.microbatch_tokens=8", f"run_dir={tmp_path / 'run'}")

    def begin() -> None:
        with launch(compose_config(list(given))):
            raise SystemExit(0)

    code, output = run_here(begin)
    assert code == 0, output.err
    (line,) = [line for line in output.out.splitlines() if line.startswith("memory ")]
    longest = compose_config(list(given)).longest
    assert f"up to {longest} tokens, beyond trainer.microbatch_tokens=8" in line


def test_it_lists_what_evaluations_ask_where_there_are_sets(capsys):
    given = ("eval.num_prompts=6", "eval.sets={sums: {kind: addition, num_prompts: 4}}")
    output = said(capsys, *given)
    assert "held out the task's own: 6 prompts of addition, the first '25+60='" in output
    assert "held out sums: 4 prompts of addition, the first '25+60='" in output
    assert "held out sums: never completed, because eval.every=0" in said(
        capsys, *given, "eval.every=0"
    )
    assert "held out " not in said(capsys, "eval.num_prompts=6")
