"""Defaults that belong to a model: the embedded one's, and those of a directory."""

import json
import shutil

import pytest
import yaml

from llamarl.config.by_model import told
from llamarl.config.command_line import (
    CONF_DIR,
    RED_TEAM,
    ConfigError,
    check_command_line,
    compose_config,
)
from llamarl.config.conversion import load_config, save_config, to_values
from llamarl.config.evaluation import EVALUATION
from llamarl.models.config import tiny_directory
from tests.build.rows import write_rows

# Shapes of published config.json files, with the number of parameters that their authors print.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
SIZES = {
    "135 M": (1e-5, {"tie_word_embeddings": True}, (576, 1536, 30, 9, 3, 49152)),
    "8,030 M": (3e-6, {}, (4096, 14336, 32, 32, 8, 128256)),
    "70,554 M": (1e-6, {}, (8192, 28672, 80, 64, 8, 128256)),
}


def model_of(size, folder):
    _, more, sizes = SIZES[size]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | more | dict(zip(KEYS, sizes))))
    return folder


def rows_file(folder):
    row = {"prompt": "1+1=", "question": "1+1=", "answer": "#### 2"}
    return write_rows(folder / "rows.jsonl", *[row] * 20)


@pytest.fixture
def small(tmp_path):
    return model_of("135 M", tmp_path / "small")


def test_the_first_command_has_the_values_that_its_figures_were_measured_with():
    config = compose_config([])
    assert (config.groups_per_step, config.group_size, config.max_new_tokens) == (64, 8, 6)
    assert (config.lr, config.model.dtype, config.generator.max_slots) == (5e-5, "float32", 512)
    assert (config.trainer.warmup_steps, config.eval.num_prompts) == (0, 500)
    assert (config.trainer.microbatch_tokens, config.task.max_prompt_tokens) == (8192, 16)


def test_no_value_of_the_tiny_job_is_a_default_of_every_job():
    values = yaml.safe_load((CONF_DIR / "config.yaml").read_text())
    assert values.keys().isdisjoint({"groups_per_step", "max_new_tokens", "lr"})


@pytest.mark.parametrize("size", SIZES)
def test_the_rate_is_that_of_the_number_of_parameters_and_the_first_lines_say_so(size, tmp_path):
    path = model_of(size, tmp_path / "model")
    config = compose_config([f"model.path={path}", "task=questions"])
    assert config.lr == SIZES[size][0]
    (line,) = told(config, path)
    assert f"lr {config.lr:g} for {size} parameters" in line
    assert "warm-up 5 steps, bfloat16 in native modules, 64 slots" in line


@pytest.mark.parametrize("kind", [None, RED_TEAM, EVALUATION])
def test_a_directory_alone_is_a_model_of_hugging_face(small, kind):
    words = [f"model.path={small}", *(["task=questions"] if kind is None else [])]
    kinds = () if kind is None else (kind,)
    alone = compose_config(words, *kinds)
    assert to_values(alone) == to_values(compose_config(["model=hf", *words], *kinds))
    assert alone.model.dtype == alone.trainer.compute_dtype == "bfloat16"
    assert (alone.lr, alone.groups_per_step, alone.generator.max_slots) == (1e-5, 8, 64)


def test_what_is_given_and_an_experiment_win_over_what_follows_from_the_model(small, tmp_path):
    given = ("lr=3e-5", "model.dtype=float32", "trainer.warmup_steps=1", "eval.num_prompts=7")
    config = compose_config([f"model.path={small}", *given, "generator.max_slots=9"])
    assert (config.lr, config.model.dtype, config.generator.max_slots) == (3e-5, "float32", 9)
    assert (config.trainer.warmup_steps, config.eval.num_prompts) == (1, 7)
    assert "lr 3e-05 (by default 1e-05 for 135 M parameters)" in told(config, small)[0]
    words = [f"model.path={small}", f"task.path={rows_file(tmp_path)}", f"reward.path={small}"]
    config = compose_config(["+experiment=tba_table3", *words])
    assert (config.lr, config.trainer.warmup_steps, config.eval.num_prompts) == (3e-6, 0, 500)


@pytest.mark.parametrize(
    "words, slots, warmup, asked",
    [
        # 4 prompts of 4 completions: 2 batches in flight, evaluations of 2 steps.
        (("groups_per_step=4", "group_size=4"), 32, 5, 32),
        (("groups_per_step=4", "group_size=4", "max_lag=0"), 16, 5, 32),
        # A group has its slots, whatever the bound.
        (("groups_per_step=1", "group_size=128"), 128, 5, 256),
        (("groups_per_step=64",), 64, 5, 500),
        # A step follows the warm-up.
        (("max_steps=1",), 64, 0, 128),
        (("max_steps=9", "trainer.schedule=wsd", "trainer.decay_steps=7"), 64, 2, 128),
    ],
)
def test_slots_warm_up_and_evaluations_follow_from_the_batch(small, words, slots, warmup, asked):
    config = compose_config([f"model.path={small}", *words])
    assert config.generator.max_slots == slots
    assert (config.trainer.warmup_steps, config.eval.num_prompts) == (warmup, asked)


def test_a_directory_of_the_tiny_models_shape_has_its_defaults_and_so_has_any_by_request(
    small, tmp_path
):
    copy = shutil.copytree(tiny_directory(), tmp_path / "trained")
    assert compose_config([f"model.path={copy}"]).lr == 5e-5
    config = compose_config(["model=tiny", f"model.path={small}"])
    assert (config.lr, config.groups_per_step, config.model.dtype) == (5e-5, 64, "float32")


def test_hydra_composes_what_was_checked(small):
    assert check_command_line([f"model.path={small}", "seed=1"])[2:] == ["model=hf"]
    assert check_command_line([f"model.path={tiny_directory()}"])[1:] == []
    assert check_command_line([f"model.path={small}", "model=tiny"])[2:] == []
    sweep = [f"model.path={small},null"]
    with pytest.raises(ConfigError, match="write model=hf or model=tiny"):
        check_command_line(sweep, multirun=True)
    assert check_command_line([*sweep, "model=tiny"], multirun=True)


def test_a_runs_config_has_the_numbers_and_reads_back(small, tmp_path):
    config = compose_config([f"model.path={small}"])
    save_config(config, tmp_path / "config.yaml")
    assert "${" not in (tmp_path / "config.yaml").read_text()
    assert load_config(tmp_path / "config.yaml") == config


def test_a_task_of_the_tiny_model_is_named_for_another(small):
    lines = told(compose_config([f"model.path={small}"]), small)
    assert any("addition" in line and "made for the tiny model" in line for line in lines)
    assert told(compose_config([]), tiny_directory()) == []


@pytest.mark.parametrize("task", ["jsonl", "hf_dataset"])
def test_prompts_are_as_long_as_the_context_allows_and_the_first_lines_say_so(task, tmp_path):
    words = [f"task={task}", f"task.path={rows_file(tmp_path)}"]
    config = compose_config(words)
    assert config.longest == 256 + 256 == 512  # the tiny model's context
    (line,) = told(config, tiny_directory())
    assert "task.max_prompt_tokens=256: the model's context of 512" in line
    assert compose_config([*words, "max_new_tokens=500"]).task.max_prompt_tokens == 12
    # Given, or without room for any prompt: refused as ever, where the model is read.
    assert compose_config([*words, "task.max_prompt_tokens=512"]).longest == 768
    assert compose_config([*words, "max_new_tokens=512"]).longest == 1024


def test_parts_and_held_out_sets_fit_the_context_too(small, tmp_path):
    file = rows_file(tmp_path)
    part = f"task.parts={{a: {{kind: addition}}, b: {{kind: jsonl, path: {file}}}}}"
    own = [f"eval.sets.mine.path={file}", "eval.sets.mine.kind=jsonl"]
    config = compose_config(["task=mixture", part, *own])
    assert config.longest == config.longest_asked == 512
    longer = compose_config(["task=mixture", part, *own, f"model.path={small}"])
    assert longer.longest == longer.longest_asked == 512 + 256


def test_one_prompt_attacks_by_numbers_with_the_tiny_model_alone(small):
    tiny = compose_config([], RED_TEAM)
    assert (tiny.lr, tiny.max_new_tokens) == (3e-4, 6)
    other = compose_config([f"model.path={small}"], RED_TEAM)
    assert (other.lr, other.max_new_tokens) == (1e-5, 24)
