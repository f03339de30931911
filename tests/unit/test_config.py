"""What llamarl.config.command_line says of a command line, and when."""

import dataclasses
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra._internal.config_repository import ConfigRepository
from omegaconf import OmegaConf

from llamarl.config.command_line import (
    CONF_DIR,
    RED_TEAM,
    RL,
    Config,
    ConfigError,
    check_command_line,
    compose_config,
    default_config,
    to_config,
)
from llamarl.config.conversion import (
    known_keys,
    load_config,
    save_config,
    sections_of_kinds,
    to_values,
    value_differences,
)
from llamarl.config.placement import TINY_MODEL
from llamarl.config.recipe import _problems_of_flags, _rewritten, main
from llamarl.config.sections.loss import LOSS_OPTIONS, declares
from llamarl.config.supervised import SFT
from tests.build import composing
from tests.build.composing import compose, quick_compose
from tests.build.model_directory import copy_tiny
from tests.build.user_module import write_modules
from tests.golden import refused
from tests.launching import ROOT

OWN_LOSSES = """
from llamarl.learning.losses.common import holds_to_generator, needs_reference

def mine(inputs, *, tau=1.0): ...

def with_kl(inputs, *, kl_coef=0.0): ...

@holds_to_generator
def held(inputs): ...

@needs_reference
def compared(inputs): ...
"""
RECIPE = """
from llamarl.config import main
from llamarl.models.config import tiny_directory

@main
def run(config):
    assert "torch" not in __import__("sys").modules
    print("ran", config.lr, config.dry_run, config.loss.options["ratio_cap"])

run()
"""


def config_of(*overrides):
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_config(quick_compose("config", list(overrides)))


def complaints(*overrides, world_size=1, **options):
    """{where: what} of a refused command line; {} if it is accepted."""
    try:
        check_command_line(list(overrides), world_size=world_size, **options)
    except ConfigError as error:
        return {problem.where: problem.what for problem in error.problems}
    return {}


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "recipe.py").write_text(RECIPE)

    def run(*arguments, **env):
        return subprocess.run(
            [sys.executable, "recipe.py", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, **env},
        )

    return run


# --- refusals, in tests/golden ---


@pytest.mark.parametrize("line, keys", [pytest.param(*row, id=row[0]) for row in refused.rows()])
def test_a_command_line_is_refused_for_these_keys_or_accepted(line, keys):
    """What is said of it somebody has read: python -m tests.golden.refused >
    tests/golden/refusals.txt, and read the difference.
    """
    assert refused.keys_of(line) == keys
    assert refused.wording_of(line) == refused.read_wordings().get(line, "")


def test_the_wordings_are_those_of_the_refused_lines_and_show_no_key():
    lines = [line for line, keys in refused.rows() if keys != "ok"]
    assert list(refused.read_wordings()) == lines
    said = [entry.partition("\n")[2] for entry in refused.read_wordings().values()]
    assert not [one for one in said if "secret" in one]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("max_lag=2", "buffer=replay"),
        (f"model.path={TINY_MODEL}", f"task.path={ROOT}/setup.cfg", "+experiment=magistral"),
        ("++loss.ratio_cap=3", "loss=grpo", "++lr=1e-5"),
        ("generator.max_slots=4", "generator={max_slots: 8}", "buffer=replay", "max_lag=2"),
    ],
)
def test_tests_compose_what_hydra_composes(words, monkeypatch):
    words = check_command_line([*words])  # as Hydra is given them
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        ours = quick_compose("config", words, return_hydra_config=True)
        monkeypatch.setattr(ConfigRepository, "load_config", composing.load_config)
        hydras = compose("config", words, return_hydra_config=True)
    assert ours.hydra.runtime.choices == hydras.hydra.runtime.choices
    del ours.hydra, hydras.hydra
    assert ours == hydras


# --- values ---


@pytest.mark.parametrize(
    "group",
    # Losses and experiments have tests of their own.
    sorted({path.name for path in CONF_DIR.iterdir() if path.is_dir()} - {"experiment", "loss"}),
)
def test_every_choice_of_every_group_fits_the_schema_and_has_the_name_of_its_kind(
    group, tmp_path, monkeypatch
):
    vllm_problem = "llamarl.inference.vllm_engine.vllm_problem"
    monkeypatch.setattr(vllm_problem, lambda: None)  # it need not be installed
    (tmp_path / "config.json").touch()
    data = [f"task.path={tmp_path}"]
    played = ["task.environment=m:C"]
    needed = {
        **dict.fromkeys(("jsonl", "gsm8k", "hf_dataset"), data),
        **dict.fromkeys(("model", "encoder"), [f"reward.path={tmp_path}"]),
        "judge": ["reward.url=http://127.0.0.1:8000/v1", "reward.model=m"],
        "parts": ["reward.parts={brief: {kind: function}}"],
        "python": ["task.fn=m:f"],
        "mixture": ["task.parts={a: {kind: addition}}"],
        "environment": played if group == "task" else ["task=environment", *played],
        "adapters_off": ["trainer.lora.rank=4"],
        "torchtune": ["model.builder=m.f"],
        "rows": [f"task.path={tmp_path / 'config.json'}"],
    }
    for file in (CONF_DIR / group).glob("*.yaml"):
        given = [f"model.path={tmp_path}", *needed.get(file.stem, ())]
        kind = RED_TEAM if group == "victim" and file.stem != "none" else RL
        if file.stem == "rows":
            kind = SFT  # the main job has prompts
        config = compose_config([f"{group}={file.stem}", *given], kind)
        if group in sections_of_kinds():
            name = "hf" if file.stem == "tiny" else file.stem  # a model's directory as any other
            assert getattr(config, group).kind == name


def test_conf_has_no_key_that_the_schema_lacks_and_the_other_way_round():
    assert set(to_values(config_of())) == {key for key in known_keys() if "." not in key}


def test_a_task_and_a_model_may_set_values_of_the_run(tmp_path):
    config = config_of("task=gsm8k", "task.path=train.jsonl", "model=hf", "model.path=DIR")
    assert (config.max_new_tokens, config.groups_per_step, config.lr) == (256, 8, 1e-5)
    assert config.trainer.compute_dtype == config.model.dtype == "bfloat16"
    given = config_of("task=gsm8k", "task.path=x", "max_new_tokens=9")
    assert given.max_new_tokens == 9, "the command line wins"


@pytest.mark.parametrize(
    "override, value",
    [("max_steps=1e3", 1000), ("run_dir=5", "5"), ("lr=1", 1.0), ("overcommit=16", 16)],
)
def test_a_value_that_means_the_right_type_is_taken(override, value):
    key = override.partition("=")[0]
    taken = getattr(config_of(override), key)
    assert taken == value and type(taken) is type(value)


# --- names ---


def test_a_key_that_is_a_number_is_unknown():
    with pytest.raises(ConfigError, match=r"buffer.5 +unknown key"):
        to_config({**to_values(default_config()), "buffer": {"kind": "fifo", 5: 1}})


def test_a_known_key_may_be_written_with_a_plus():
    assert check_command_line(["+dry_run=true", "++max_lag=1"]) == ["dry_run=true", "max_lag=1"]


def test_every_point_of_a_sweep_is_checked():
    swept = ("max_lag=0,1", "overcommit=0,8")
    assert list(complaints(*swept, multirun=True)) == ["overcommit=8 max_lag=0"]
    swept = ("buffer=fifo,replay", "buffer.max_size=600,700")
    assert complaints(*swept, multirun=True) == {"buffer.max_size": "only buffer=replay has it"}
    assert complaints("buffer=replay", swept[1], multirun=True) == {}


@pytest.fixture
def own(tmp_path):
    """own(choice, text): the directory of a user's own conf, with this choice such as loss/mine."""

    def write(choice, text):
        file = tmp_path / f"{choice}.yaml"
        file.parent.mkdir()
        file.write_text(text)
        return str(tmp_path)

    return write


def test_a_preset_of_the_users_own_is_called_by_its_function_unless_it_has_a_name(own):
    search = f"hydra.searchpath=[file://{own('loss/plain', 'fn: rloo')}]"
    assert config_of(search, "loss=plain").loss.name == "rloo"


# --- combinations ---


def test_a_null_takes_back_what_an_experiment_sets_for_another_kind(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    beta = "loss.schedules.beta"
    given = [f"model.path={tmp_path}", f"task.path={tmp_path}", f"{beta}.kind=linear"]
    given.append("reward=function")
    found = complaints("+experiment=tba_table3", *given)
    assert found == {f"{beta}.cut_step": f"only {beta}.kind=cut has it"}
    assert complaints("+experiment=tba_table3", *given, f"{beta}.cut_step=null") == {}


@pytest.fixture
def own_losses(tmp_path, monkeypatch):
    write_modules(tmp_path, monkeypatch, my_losses=OWN_LOSSES)


def test_options_of_a_loss_of_ones_own_are_those_that_it_takes(own_losses):
    mine = "loss.fn=my_losses:mine"
    assert complaints(mine, "loss.ratio_cap=null", "loss.tau=0.5") == {}
    config = config_of(mine, "loss.ratio_cap=null", "++loss.tau=0.5")
    assert config.loss.options_for({"tau"}) == {"tau": 0.5}
    (said,) = complaints(mine, "loss.tua=0.5").values()
    assert "tua" in said and "ratio_cap" not in said
    # What the chosen file in conf/loss has is left out; what the user gives is not ignored.
    assert list(complaints(mine, "loss.ratio_cap=3")) == ["loss.ratio_cap=3"]
    (said,) = complaints("loss.fn=my_losses:with_kl").values()
    assert "added around every loss" in said


def test_a_loss_of_ones_own_declares_what_it_needs(own_losses):
    others = ("buffer=replay", "generator.temperature=[0.5,2]")
    held, compared = "loss.fn=my_losses:held", "loss.fn=my_losses:compared"
    assert not complaints("loss.fn=my_losses:mine", *others)
    assert not complaints(held)
    assert list(complaints(held, *others)) == ["generator.temperature=[0.5,2.0] " + held]
    assert not complaints(compared, "reference=frozen")
    assert list(complaints(compared)) == [f"{compared} reference.kind=none"]


LOSS_FILES = sorted((CONF_DIR / "loss").glob("*.yaml"))


@pytest.mark.parametrize("file", LOSS_FILES, ids=[file.stem for file in LOSS_FILES])
def test_a_loss_is_chosen_with_its_published_options_advantages_and_reference(file):
    written = OmegaConf.load(file)
    config = config_of(f"loss={file.stem}")
    assert (config.loss.fn, config.loss.name) == (written.loss.fn, file.stem)
    options = written.loss.keys() - {"fn", "name"}
    assert config.loss.options.keys() == options <= LOSS_OPTIONS.keys()
    assert config.trainer.advantages == written.trainer.advantages
    assert (config.reference.kind != "none") is declares(written.loss.fn, "needs_reference")
    loss = config.loss
    assert (loss.kl_coef, loss.kl_estimator, loss.entropy_coef) == (0.0, "k3", 0.0)
    others = ["trainer.advantages=group_mean", "loss.kl_coef=0.1", "reference=frozen"]
    others += [f"reference.path={TINY_MODEL}"] if file.stem == "distill" else []
    assert complaints(f"loss={file.stem}", *others) == {}


@pytest.mark.parametrize(
    "overrides, name",
    [
        ([], "aipo"),
        (["loss=cispo", "loss.fn=policy_gradient"], "cispo"),
        (["loss.fn=my_module:my_loss"], "my_module:my_loss"),
        (["loss=ppo", "loss.fn=policy_gradient"], "policy_gradient"),
        (["loss.fn=my_module:my_loss", "loss.name=mine"], "mine"),
    ],
)
def test_a_run_is_called_by_its_preset_or_by_the_function_that_took_its_place(
    overrides, name, tmp_path
):
    config = config_of(*overrides)
    assert config.loss.name == name
    save_config(config, tmp_path / "config.yaml")
    assert OmegaConf.load(tmp_path / "config.yaml").loss.name == name


def test_the_constant_of_dr_grpo_may_be_that_of_the_run():
    config = config_of("loss=dr_grpo", "loss.max_tokens=${max_new_tokens}")
    assert config.loss.options["max_tokens"] == 6


@pytest.mark.parametrize(
    "overrides, goes_on",
    [
        ([], True),
        (["max_lag=0"], False),
        (["max_lag=0", "generator.in_flight_updates=true"], False),
        (["generator.in_flight_updates=false"], False),
        (["generator.resume_partials=false"], False),
    ],
)
def test_unfinished_completions_go_on_where_they_may_mix_versions(overrides, goes_on):
    assert complaints(*overrides) == {} and config_of(*overrides).resumes_partials is goes_on


# --- files ---


@pytest.mark.parametrize(
    "text", ["a: b, c", "pay ${5}", "${seed}", r"\${seed}", "${", "${{x}}", "a\\"]
)
def test_a_saved_config_is_the_config_that_is_loaded(text, tmp_path):
    given = ("++loss.tau=0.5", "placement.trainer=[0,1]", "lr=1e-7", "run_dir=5")
    config = config_of(*given)
    task = dataclasses.replace(config.task, system_prompt=text)
    config = dataclasses.replace(config, task=task)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert OmegaConf.load(tmp_path / "config.yaml").trainer.compute_dtype == "float32"  # resolved


@pytest.mark.parametrize("first_line, said", [("format: 4\n", "format 4"), ("", "no format")])
def test_a_config_of_another_format_is_refused(tmp_path, first_line, said):
    file = tmp_path / "config.yaml"
    save_config(config_of(), file)
    text = file.read_text()
    assert text.startswith("format: 1\n")
    file.write_text(text.replace("format: 1\n", first_line))
    with pytest.raises(ConfigError, match=f"{said}, where this commit .* reads format 1; finish"):
        load_config(file)


def test_differences_name_exactly_the_keys_that_changed():
    old = to_values(config_of("++loss.tau=1"))
    new = to_values(config_of("lr=1e-3", "eval.every=7"))
    assert value_differences(old, new) == {
        "lr": (5e-5, 1e-3),
        "eval.every": (old["eval"]["every"], 7),
        "loss.tau": (1, None),
    }
    assert value_differences(old, old) == {}


# --- the process ---


def test_a_bad_command_line_ends_with_2_and_one_aligned_message_of_the_first_rank(recipe):
    ended = recipe("groups_per_step=0", "loss.ratio_kap=3")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines() == [
        "bad config, nothing started:",
        "  groups_per_step=0   need a whole number of at least 1",
        "  loss.ratio_kap      unknown key; did you mean loss.ratio_cap?",
    ]
    ended = recipe("lr=x", RANK="1", WORLD_SIZE="2")
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "")


def test_a_recipe_runs_typed_without_torch_and_without_files_left_behind(recipe, tmp_path):
    ended = recipe("+dry_run=true", "lr=3")
    assert (ended.returncode, ended.stdout) == (0, "ran 3.0 True 4.0\n"), ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.py"]


def test_help_has_every_key_and_cfg_the_composed_config(recipe, tmp_path):
    helped = recipe("--help")
    assert "model: hf, tiny" in helped.stdout and helped.returncode == 0
    assert "`buffer.max_size` = `100000`" in helped.stdout
    model = copy_tiny(tmp_path / "model", num_hidden_layers=1)
    shown = OmegaConf.create(recipe(f"model.path={model}", "max_lag=7", "--cfg", "job").stdout)
    assert (shown.max_lag, shown.model.dtype) == (7, "bfloat16")
    assert recipe("--cfg", "job", "max_lug=7").returncode == 2


def test_a_published_setting_is_shown_without_the_files_that_its_run_needs():
    words = [str(ROOT / "recipes" / "llama_async.py"), "--cfg", "job", "+experiment=magistral"]
    shown = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    assert OmegaConf.create(shown.stdout).max_lag == 8
    assert "model.path   required" in shown.stderr


def test_multirun_runs_every_point(recipe):
    lines = recipe("--multirun", "lr=1,2").stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["1.0", "2.0"]


def test_replay_has_no_bound_on_lag_by_default():
    config = config_of("buffer=replay")
    assert config.max_lag is None and config.updates_in_flight and config.resumes_partials
    assert config.trained_per_prompt == config.group_size


def test_what_is_wrong_with_a_key_is_not_said_again_of_one_that_follows_it():
    words = ["trainer.microbatch_tokens=few", "reward=model", f"reward.path={TINY_MODEL}"]
    assert list(complaints(*words)) == ["trainer.microbatch_tokens=few"]
    config = compose_config(["trainer.microbatch_tokens=77", *words[1:]])
    assert config.reward.scorer.microbatch_tokens == 77


# --- slips of a first command line ---


def test_keys_typed_as_flags_and_words_beside_help_are_answered(recipe):
    words = ["--max_steps", "10", "--lr=1e-5", "--config-file", "x", "--config-dir=y"]
    flags = _problems_of_flags(words, Config)
    said = " ".join(problem.what for problem in flags)
    assert "write max_steps=10" in said and "write lr=1e-5" in said
    assert "start with --config FILE" in said
    ended = recipe("--help", "trainr")
    assert ended.returncode == 2 and "did you mean trainer?" in ended.stderr


LORA_KEYS = ("path", "rank", "alpha", "targets")


def test_help_about_a_key_tells_of_it_and_of_those_in_it(recipe, monkeypatch, capsys):
    ended = recipe("trainer.lora", "--help")
    shown = [line.split("`")[1] for line in ended.stdout.splitlines() if line[0] in "-#"]
    assert shown == ["trainer.lora", *(f"trainer.lora.{name}" for name in LORA_KEYS)]
    monkeypatch.setattr(sys, "argv", ["recipe.py", "max_steps=3", "trainer.lora.rank=?"])
    main(lambda config: None)()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("- `trainer.lora.rank` = `0`")


def test_a_recipe_called_with_a_config_runs_it_and_reads_no_command_line(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "argv", ["notebook", "-f", "kernel.json"])
    main(seen.append)(config_of("max_steps=7"))
    assert [config.max_steps for config in seen] == [7]


def test_values_of_a_file_stand_before_the_words_of_the_command_line(recipe, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("lr: 2\ndry_run: true\nloss: {ratio_cap: 5.0}\n")
    ended = recipe("--config", str(file), "lr=3")
    assert (ended.returncode, ended.stdout) == (0, "ran 3.0 True 5.0\n"), ended.stderr
    file.write_text("lrr: 2\n")
    ended = recipe(f"--config={file}")
    assert ended.returncode == 2 and "lrr   unknown key; did you mean lr?" in ended.stderr
    ended = recipe("--config")
    assert ended.returncode == 2 and "name a file" in ended.stderr


def test_a_run_directory_that_cannot_be_made_is_said_before_anything_is_loaded(
    tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    for run_dir in (tmp_path / "file", tmp_path / "file" / "run"):
        (said,) = complaints(f"run_dir={run_dir}").values()
        assert said.startswith(f"{tmp_path / 'file'} is a file") and "run_dir=DIR" in said
    assert not complaints(f"run_dir={tmp_path / 'new' / 'run'}")
    with monkeypatch.context() as patch:
        exists = Path.exists

        def refuse(path):
            if path.parts[1] == "closed":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return exists(path)

        patch.setattr(Path, "exists", refuse)
        (said,) = complaints("run_dir=/closed/run").values()
    assert said.startswith("/closed/run cannot be looked into")
    monkeypatch.chdir(tmp_path)
    assert not complaints()
    (tmp_path / "runs").touch()
    (said,) = complaints().values()
    assert "runs is a file" in said


def test_words_that_are_added_stand_before_the_flags_that_follow_words():
    argv = ["recipe.py", "--experimental-rerun", "mine", "model.path=D", "lr=1", "--cfg", "job"]
    made = _rewritten(argv, ["model.path=D", "lr=1"], ["model.path=D", "++lr=1", "model=hf"])
    assert made == [*argv[:4], "++lr=1", "model=hf", "--cfg", "job"]
