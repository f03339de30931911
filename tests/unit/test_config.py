"""What llamarl.config.command_line says of a command line, and when."""

import dataclasses
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from llamarl.config.command_line import (
    CONF_DIR,
    RED_TEAM,
    RL,
    ConfigError,
    check_command_line,
    compose_config,
    default_config,
    idle_ranks,
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
from llamarl.config.placement import TINY_MODEL, placement_of
from llamarl.config.sections.loss import LOSS_OPTIONS, declares
from llamarl.config.sections.placement import PlacementSettings
from llamarl.config.sft import SFT
from tests.launching import ROOT

LINE = "{kind: linear, final: 5, end_step: 5}"  # a schedule
RECIPE = """
from llamarl.config.command_line import main
from llamarl.models.config import tiny_directory

@main
def run(config):
    assert "torch" not in __import__("sys").modules
    print("ran", config.lr, config.dry_run, config.loss.options["ratio_cap"])

run()
"""


def config_of(*overrides):
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_config(compose("config", list(overrides)))


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


# --- values ---


def test_the_defaults_are_a_synchronous_or_asynchronous_addition_run_that_nothing_is_wrong_with():
    assert complaints() == {}
    assert complaints("max_lag=0", "overcommit=0") == {}
    config = config_of()
    assert (config.task.kind, config.model.path, config.overcommit) == ("addition", None, "auto")


@pytest.mark.parametrize(
    "group",
    sorted(path.name for path in CONF_DIR.iterdir() if path.is_dir() and path.name != "experiment"),
)
def test_every_choice_of_every_group_fits_the_schema_and_has_the_name_of_its_kind(
    group, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "llamarl.inference.vllm_engine.vllm_problem", lambda: None
    )  # it need not be installed
    (tmp_path / "config.json").touch()
    data = [f"task.path={tmp_path}"]
    judge = ["reward.url=http://127.0.0.1:8000/v1", "reward.model=m"]
    needed = {"jsonl": data, "gsm8k": data, "hf_dataset": data, "judge": judge}
    needed |= dict.fromkeys(("model", "encoder"), [f"reward.path={tmp_path}"])
    needed |= {"parts": ["reward.parts={brief: {kind: function}}"]}
    needed |= {"python": ["task.fn=m:f"], "mixture": ["task.parts={a: {kind: addition}}"]}
    played = ["task.environment=m:C"]
    needed |= {"environment": played if group == "task" else ["task=environment", *played]}
    needed |= {"adapters_off": ["trainer.lora.rank=4"]}
    needed |= {"rows": [f"task.path={tmp_path / 'config.json'}"]}
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
    assert (
        config_of("task=gsm8k", "task.path=x", "max_new_tokens=9").max_new_tokens == 9
    )  # the command line wins


# Of one key several.
WRONG_VALUES = [
    ("groups_per_step=0", "need a whole number of at least 1"),
    ("group_size=2.5", "need a whole number of at least 1"),
    ("max_steps=many", "need a whole number of at least 0"),
    ("max_steps=true", "need a whole number of at least 0"),
    ("lr=0", "need a number above 0"),
    ("lr=nan", "need a number above 0"),
    ("lr=inf", "need a number above 0"),
    ("max_steps=inf", "need a whole number of at least 0"),
    ("overcommit=some", "need a whole number of at least 0 or auto or oppo or window"),
    ("overcommit=-1", "need a whole number of at least 0 or auto or oppo or window"),
    (
        "overcommit=opo",
        "need a whole number of at least 0 or auto or oppo or window; did you mean oppo?",
    ),
    ("on_deadline=trunkate", "need wait or truncate; did you mean truncate?"),
    ("straggler_factor=0.5", "need a number of at least 1"),
    ("generator.max_seconds=0", "need a number above 0 or null"),
    ("governor.window=0", "need a whole number of at least 1"),
    ("threads=0", "need a whole number of at least 1 or null"),
    ("generator.prefill_chunk=0", "need a whole number of at least 1"),
    ("generator.cache_tokens=0", "need a whole number of at least 1 or null"),
    ("eval.num_samples=-1", "need a whole number of at least 0"),
    ("generator.top_p=1.5", "need a number between 0 and 1, 0 excluded"),
    ("reward.max_error_rate=-0.1", "need a number between 0 and 1"),
    ("reward.num_workers=0", "need a whole number of at least 1"),
    ("reward.timeout_s=0", "need a number above 0"),
    ("model.dtype=float16", "need float32 or bfloat16; did you mean bfloat16?"),
    *(
        (
            f"generator.temperature={value}",
            "need two numbers above 0: the lowest and the highest, such as [0.7,2.0] or null",
        )
        for value in ("[2.0,0.7]", "[0.7]", "[0,1]", "0.7")
    ),
    ("dry_run=1", "need true or false"),
    ("placement.trainer=[a]", "need a list of ranks such as [0,1] or null"),
    ("placement.trainer=0", "need a list of ranks such as [0,1] or null"),
    ("task.system_prompt=[q]", "need a text or null"),
    ("task.chat=[a]", "need true or false"),
    (
        "reference.kind=frosen",
        "need none or adapters_off or sharded or frozen or reset; did you mean frozen?",
    ),
    ("buffer.kind=null", "need fifo or replay"),
    ("buffer.kind=[fifo]", "need fifo or replay"),
    ("seed=9223372036854775808", "need a whole number between 0 and 9223372036854775807"),
    ("eval=3", "this is a section; set its keys, such as eval.every"),
    ("run_dir=nan", "need a text or null"),
    ("resume=inf", "need a text"),
    ("generator.stop=[nan]", "need a list of texts such as [a,b]"),
    ("reward.options={1: 2}", "need a section of your own keys"),
]


def test_a_value_of_the_wrong_type_or_out_of_range_is_refused():
    """Several on a command line, of each key one, so that each of them is told by its own words."""
    rounds = []
    for override, need in WRONG_VALUES:
        key = override.partition("=")[0]
        number = len([one for one in rounds if key in one])
        if number == len(rounds):
            rounds.append({})
        rounds[number][key] = (override, need)
    for number, of_keys in enumerate(rounds):
        given = dict(of_keys.values())
        assert complaints(*given) == given


@pytest.mark.parametrize(
    "override, value",
    [("max_steps=1e3", 1000), ("run_dir=5", "5"), ("lr=1", 1.0), ("overcommit=16", 16)],
)
def test_a_value_that_means_the_right_type_is_taken(override, value):
    key = override.partition("=")[0]
    taken = getattr(config_of(override), key)
    assert taken == value and type(taken) is type(value)


# --- names ---


@pytest.mark.parametrize("prefix", ["", "+", "++"])
@pytest.mark.parametrize(
    "override, key, suggestion",
    [
        ("loss.ratio_kap=4", "loss.ratio_kap", "loss.ratio_cap"),
        ("ratio_cap=4", "ratio_cap", "loss.ratio_cap"),
        ("trainer.lr=1", "trainer.lr", "lr"),
        ("group_sise=4", "group_sise", "group_size"),
        ("eval={evry: 4}", "eval.evry", "eval.every"),
        ("buffer.max_sise=4", "buffer.max_sise", "buffer.max_size"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one_whatever_its_prefix(
    prefix, override, key, suggestion
):
    assert complaints(prefix + override) == {key: f"unknown key; did you mean {suggestion}?"}


def test_what_is_wrong_in_a_section_that_a_number_names_is_told():
    assert complaints("eval.sets={1: {kind: addition, num_prompts: 0, bogus: 3}}") == {
        "eval.sets.1.num_prompts=0": "need a whole number of at least 1",
        "eval.sets.1.bogus": "unknown key",
    }
    assert "eval.sets.1=2" in complaints("eval.sets={1: 2}")


def test_a_key_that_is_a_number_is_unknown():
    with pytest.raises(ConfigError, match=r"buffer.5 +unknown key"):
        to_config({**to_values(default_config()), "buffer": {"kind": "fifo", 5: 1}})


def test_an_unknown_key_like_no_other_gets_no_suggestion():
    assert complaints("+typo=1") == {"typo": "unknown key"}


def test_an_unknown_choice_of_a_group_is_refused_with_the_choices():
    assert complaints("model=tny") == {"model=tny": "need hf or tiny; did you mean tiny?"}


def test_a_known_key_may_be_written_with_a_plus():
    assert check_command_line(["+dry_run=true", "++max_lag=1"]) == ["dry_run=true", "max_lag=1"]


def test_nothing_can_be_removed_and_several_values_need_multirun():
    found = complaints("~lr", "max_lag=1,2", "seed=")
    assert found["~lr"].startswith("a key cannot be removed")
    assert found["max_lag"].startswith("several values need --multirun")
    assert complaints("max_lag=1,2", multirun=True) == {}


def test_every_point_of_a_sweep_is_checked():
    assert list(complaints("max_lag=0,1", "overcommit=0,8", multirun=True)) == [
        "overcommit=8 max_lag=0"
    ]


def test_what_cannot_be_parsed_is_one_problem_among_the_others():
    assert set(complaints("task.name=[1", "lr=x")) == {"task.name=[1", "lr=x"}


def test_a_config_file_that_is_absent_is_refused_with_the_way_to_give_ones_own():
    with pytest.raises(ConfigError, match=r"--config-name mine +no such file; write .*config-dir"):
        check_command_line([], config_name="mine")


def test_keys_of_a_users_own_config_directory_are_checked_too(tmp_path):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "mine.yaml").write_text("kind: addition\npromt_key: q\n")
    assert complaints("task=mine", config_dir=str(tmp_path)) == {
        "max_new_tokens": "missing; need a whole number of at least 1",
        "task.promt_key": "unknown key; did you mean task.prompt_key?",
        "task.kind=addition": "needs chat, system_prompt, max_prompt_tokens too; "
        "choose it with its keys: task=addition",
    }


def test_all_problems_are_told_at_once_wrong_values_hide_no_combination():
    found = complaints(
        "typo=1", "lr=x", "model=tny", "overcommit=4", "max_lag=0", "eval.every=-1", "task=jsonl"
    )
    assert set(found) == {
        "typo",
        "lr=x",
        "model=tny",
        "overcommit=4 max_lag=0",
        "eval.every=-1",
        "task.path",
    }


# --- combinations ---


@pytest.mark.parametrize(
    "overrides, where",
    [
        (["overcommit=8", "max_lag=0"], "overcommit=8 max_lag=0"),
        (["overcommit=oppo", "max_lag=0"], "overcommit=oppo max_lag=0"),
        (["on_deadline=truncate", "max_lag=0"], "on_deadline=truncate max_lag=0"),
        (["on_deadline=truncate", "overcommit=0"], "on_deadline=truncate overcommit=0"),
        (["governor.least=5", "governor.most=4"], "governor.least=5 governor.most=4"),
        (["governor.least=5", "governor.start=4"], "governor.start=4 governor.least=5"),
        (["governor.most=3", "governor.start=4"], "governor.start=4 governor.most=3"),
        (["group_size=1"], "group_size=1 trainer.advantages=group_mean"),
        (["group_size=8", "generator.max_slots=4"], "group_size=8 generator.max_slots=4"),
        (["generator.min_new_tokens=7"], "generator.min_new_tokens=7 max_new_tokens=6"),
        (["generator.top_p=0.9"], "generator.top_p=0.9"),
        (["generator.top_k=20"], "generator.top_k=20"),
        (["loss.kl_coef=0.1"], "loss.kl_coef=0.1 reference.kind=none"),
        (["generator.cache_tokens=21"], "generator.cache_tokens=21"),  # 16 + 6
        (["generator.recompute_kv=true", "max_lag=0"], "generator.recompute_kv=true"),
        (
            ["generator.resume_partials=true", "max_lag=0"],
            "generator.resume_partials=true max_lag=0",
        ),
        (
            ["generator.resume_partials=true", "generator.in_flight_updates=false"],
            "generator.resume_partials=true generator.in_flight_updates=false",
        ),
        (["trainer.warmup_steps=100"], "trainer.warmup_steps=100 max_steps=100"),
        (["task=jsonl"], "task.path"),
        (["task.kind=jsonl"], "task.kind=jsonl"),
        (["task=jsonl", "task.path=null"], "task.path=null"),
        (["task=reasoning_gym", "task.name=null"], "task.name=null"),
        (["model=hf"], "model.path"),
        (["model.path=nowhere"], "model.path=nowhere"),
        (["task=jsonl", "task.path=nowhere"], "task.path=nowhere"),
        (
            ["task=jsonl", "task.path=.", "task.answer_key=null"],
            "task.answer_key=null reward.fn=null",
        ),
        (["reward=judge", "reward.url=http://h/v1"], "reward.model"),
        (
            ["reward=judge", "reward.url=http://h/v1", "reward.model=m", "reward.template=nowhere"],
            "reward.template=nowhere",
        ),
        (["eval.target=0.9", "eval.every=0"], "eval.target=0.9 eval.every=0"),
        (["eval.target=0.9", "eval.num_prompts=0"], "eval.target=0.9 eval.num_prompts=0"),
        (
            ["loss=ppo", "trainer.advantages=gae", "trainer.filter_groups=true"],
            "trainer.filter_groups=true trainer.advantages=gae",
        ),
        (
            ["loss=ppo", "trainer.advantages=gae", "trainer.whiten=completions"],
            "trainer.whiten=completions trainer.advantages=gae",
        ),
        (["resume=auto"], "resume=auto run_dir=null"),
        (["resume=nowhere"], "resume=nowhere"),
        (["loss.fn=apio"], "loss.fn=apio"),
    ],
)
def test_what_cannot_work_together_is_refused(overrides, where):
    assert list(complaints(*overrides)) == [where]


@pytest.mark.parametrize(
    "given, said",
    [
        (("generator=vllm",), "only the native engine goes on"),
        (("generator.tensor_parallel=2",), "environments answer one rank"),
        (("task.eval_path=x",), "makes its own prompts holds some of them out"),
        (("trainer.advantages=turns", "loss=rloo"), "turns gives each token its own advantage"),
        (("trainer.advantages=turns", "trainer.whiten=completions"), "turns gives advantages to"),
        (("trainer.advantages=turns", "trainer.filter_groups=true"), "may have turns that differ"),
    ],
)
def test_what_dialogues_cannot_go_together_with_is_refused(given, said, monkeypatch):
    monkeypatch.setattr("llamarl.inference.vllm_engine.vllm_problem", lambda: None)
    played = ("task=environment", "task.environment=m:C")
    assert complaints(*played) == {}
    assert said in " ".join(complaints(*played, *given).values())


FILE_TASKS = "task=jsonl or hf_dataset or gsm8k or environment"


@pytest.mark.parametrize(
    "chosen, override, kinds",
    [
        ("task=addition", "task.path=nowhere", FILE_TASKS),
        ("task=addition", "task.eval_path=nowhere", FILE_TASKS),
        ("task=addition", "task.name=chain_sum", "task=questions or reasoning_gym"),
        ("task=reasoning_gym", "task.path=nowhere", FILE_TASKS),
        ("task=gsm8k", "task.prompt_key=q", "task=jsonl or hf_dataset or environment"),
        ("task=gsm8k", "task.answer_key=gold", "task=jsonl or hf_dataset"),
        ("task=jsonl", "task.name=chain_sum", "task=questions or reasoning_gym"),
        ("buffer=fifo", "buffer.max_size=100", "buffer=replay"),
        ("buffer=fifo", "+buffer={max_size: 100}", "buffer=replay"),
        ("reference=none", "reference.reset_every=50", "reference=reset"),
        ("reference=frozen", "reference.reset_every=50", "reference=reset"),
    ],
)
def test_a_key_of_another_kind_is_refused_with_the_kinds_that_have_it(chosen, override, kinds):
    data = ["task.path=."] if chosen in ("task=jsonl", "task=gsm8k") else []
    key = override.strip("+}").replace("={", ".").replace(":", "=").partition("=")[0]
    assert complaints(chosen, *data, override) == {key: f"only {kinds} has it"}


def test_a_null_takes_back_what_an_experiment_sets_for_another_kind(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    beta = "loss.schedules.beta"
    given = [f"model.path={tmp_path}", f"task.path={tmp_path}", f"{beta}.kind=linear"]
    given.append("reward=function")
    found = complaints("+experiment=tba_table3", *given)
    assert found == {f"{beta}.cut_step": f"only {beta}.kind=cut has it"}
    assert complaints("+experiment=tba_table3", *given, f"{beta}.cut_step=null") == {}


def test_a_kind_without_its_keys_is_refused_with_the_choice_that_has_them():
    assert complaints("buffer.kind=replay", "buffer.max_size=9") == {
        "buffer.kind=replay": "needs draw, sync_period, most_on_policy, priority, temperature, "
        "completions_per_prompt, grow_until, good_reward, initial_completions too; "
        "choose it with its keys: buffer=replay"
    }


def test_a_kind_without_its_keys_is_told_beside_a_key_that_is_required():
    told = complaints("task.kind=python", kind=SFT)
    assert "needs max_prompt_tokens, fn, options too" in told["task.kind=python"]
    assert set(told) == {"task.kind=python", "model.path"}


def test_an_option_of_a_loss_that_is_a_section_is_told_like_another_value(tmp_path):
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "mine.yaml").write_text("fn: best_of_n\nlength_normalize: {a: 1}\n")
    assert complaints("loss=mine", config_dir=str(tmp_path)) == {
        "loss.length_normalize={'a': 1}": "need true or false"
    }


def test_every_point_of_a_sweep_over_kinds_is_checked():
    swept = ["buffer=fifo,replay", "buffer.max_size=600,700"]
    assert complaints(*swept, multirun=True) == {"buffer.max_size": "only buffer=replay has it"}
    assert complaints("buffer=replay", swept[1], multirun=True) == {}


JUDGE = ("reward=judge", "reward.url=http://127.0.0.1:8000/v1", "reward.model=m")


@pytest.mark.parametrize(
    "given, where, what",
    [
        (["reward.url=http://me:secret@h/v1"], "reward.url", "holds a user name"),
        (["reward.url=file:///x"], "reward.url", "needs the form http://HOST:PORT/v1"),
        (
            ["reward.api_key_env=sk-secret"],
            "reward.api_key_env",
            "need the name of an environment variable",
        ),
        (
            ["reward.highest=1"],
            "reward.lowest=1.0 reward.highest=1.0",
            "no score lies between these",
        ),
        (
            ["reward.ask=group", "eval.every=0", "group_size=1"],
            "reward.ask=group group_size=1",
            "group_size=2 or more",
        ),
        (["reward.ask=group"], "reward.ask=group eval.num_samples=0", "eval.num_samples=1"),
        (
            ["reward.ask=reference", "task=jsonl", "task.path=.", "task.answer_key=null"],
            "reward.ask=reference task.answer_key=null",
            "task.answer_key=answer",
        ),
    ],
)
def test_a_judge_that_cannot_judge_is_refused_and_no_credentials_are_shown(given, where, what):
    found = complaints(*JUDGE, *given)
    assert what in found[where]
    assert "secret" not in str(found)


def test_a_judge_asks_as_it_is_told():
    assert not complaints(*JUDGE)
    assert not complaints(*JUDGE, "reward.ask=group", "eval.num_samples=1")
    assert not complaints(*JUDGE, "reward.ask=reference", "reward.api_key_env=MY_KEY")
    # A number for each completion needs no answer.
    assert not complaints(*JUDGE, "task=jsonl", "task.path=.", "task.answer_key=null")


def test_data_without_answers_needs_a_reward_of_its_own():
    given = ["task=jsonl", "task.path=.", "task.answer_key=null", "reward.fn=my_module:my_reward"]
    assert complaints(*given) == {} and config_of(*given).task.answer_key is None


@pytest.mark.parametrize(
    "overrides, where",
    [
        (["placement.trainer=[0,1,2]"], "groups_per_step=64"),
        (["overcommit=3"], "overcommit=3"),
        (["placement.generator=[4]"], "placement.generator=[4]"),
        (["placement.reward=[]"], "placement.reward=[]"),
        (["placement.reward=[1,1]"], "placement.reward=[1,1]"),
    ],
)
def test_what_four_ranks_cannot_host_is_refused(overrides, where):
    assert list(complaints(*overrides, world_size=4)) == [where]


def test_ranks_on_several_hosts_share_no_memory():
    assert complaints("weights.transport=shm", world_size=4, local_world_size=4) == {}
    assert list(complaints("weights.transport=shm", world_size=4, local_world_size=2)) == [
        "weights.transport=shm"
    ]


def test_options_of_a_loss_of_ones_own_are_those_that_it_takes(tmp_path, monkeypatch):
    source = "def mine(inputs, *, tau=1.0): ..."
    (tmp_path / "my_loss.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert complaints("loss.fn=my_loss:mine", "loss.ratio_cap=null", "loss.tau=0.5") == {}
    config = config_of("loss.fn=my_loss:mine", "loss.ratio_cap=null", "++loss.tau=0.5")
    assert config.loss.options_for({"tau"}) == {"tau": 0.5}
    refused = complaints("loss.fn=my_loss:mine", "loss.tua=0.5")
    assert (
        "tua" in refused["loss.fn=my_loss:mine"]
        and "ratio_cap" not in refused["loss.fn=my_loss:mine"]
    )
    # What the chosen file in conf/loss has is left out; what the user gives is not ignored.
    assert complaints("loss.fn=my_loss:mine", "loss.ratio_cap=3") == {
        "loss.ratio_cap=3": "my_loss:mine does not take it"
    }


def test_a_loss_of_ones_own_leaves_the_kl_to_the_run(tmp_path, monkeypatch):
    (tmp_path / "my_kl_loss.py").write_text("def mine(inputs, *, kl_coef=0.0): ...")
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        "added around every loss"
        in complaints("loss.fn=my_kl_loss:mine")["loss.fn=my_kl_loss:mine"]
    )


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
    assert (config.loss.kl_coef, config.loss.kl_estimator, config.loss.entropy_coef) == (
        0.0,
        "k3",
        0.0,
    )
    assert (
        complaints(
            f"loss={file.stem}",
            "trainer.advantages=group_mean",
            "loss.kl_coef=0.1",
            "reference=frozen",
        )
        == {}
    )


@pytest.mark.parametrize(
    "overrides, name",
    [
        ([], "aipo"),
        (["loss.ratio_cap=8"], "aipo"),
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


def test_a_preset_of_the_users_own_is_called_by_its_function_unless_it_has_a_name(tmp_path):
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "plain.yaml").write_text("fn: rloo")
    search = f"hydra.searchpath=[file://{tmp_path}]"
    assert config_of(search, "loss=plain").loss.name == "rloo"


def test_a_function_that_is_no_text_is_told_once():
    assert complaints("loss.fn=null") == {"loss.fn=null": "need a text"}


@pytest.mark.parametrize(
    "overrides, problem",
    [
        (["loss.ratio_cap=0"], {"loss.ratio_cap=0": "need a number above 0 or null"}),
        (["loss.ratio_cap=inf"], {"loss.ratio_cap=inf": "need a number above 0 or null"}),
        (
            ["loss.ratio_level=tokn"],
            {
                "loss.ratio_level=tokn": (
                    "need token or sequence or sequence_mean; did you mean token?"
                )
            },
        ),
        (["loss=tb", "loss.beta=0"], {"loss.beta=0": "need a number above 0"}),
        (
            ["loss=grpo", "loss.clip_low=1.5"],
            {"loss.clip_low=1.5": "need a number between 0 and 1"},
        ),
        (
            ["loss=best_of_n", "loss.length_normalize=1"],
            {"loss.length_normalize=1": "need true or false"},
        ),
        (["loss.kl_estimator=k4"], {"loss.kl_estimator=k4": "need k1 or k2 or k3"}),
        (["loss.entropy_coef=-1"], {"loss.entropy_coef=-1": "need a number of at least 0"}),
        (
            ["loss=rloo", "loss.ratio_cap=2"],
            {"loss.ratio_cap": "unknown key; rloo does not take it"},
        ),
        (["loss=tba", "loss.bta=2"], {"loss.bta": "unknown key; did you mean loss.beta?"}),
        (
            ["loss.fn=grpo"],
            {"loss.fn=grpo": "has options of its own; choose it with them: loss=grpo"},
        ),
        (
            ["loss.fn=cispo"],
            {"loss.fn=cispo": "has options of its own; choose it with them: loss=cispo"},
        ),
        (
            ["loss.fn=clipped"],
            {"loss.fn=clipped": "has options of its own; choose it with them: loss=grpo or ppo"},
        ),
        (
            ["loss=dr_grpo", "loss.max_tokens=5", "loss.normalize=groups"],
            {
                "loss.max_tokens=5 loss.normalize=groups": (
                    "max_tokens is a constant to divide by, so normalize has no use; "
                    "normalize=tokens, or max_tokens=null"
                )
            },
        ),
        (
            ["loss.ratio_mask_low=2", "loss.ratio_mask_high=1"],
            {
                "loss.ratio_mask_low=2 loss.ratio_mask_high=1": (
                    "these bounds mask every ratio; the low bound must be below the high one"
                )
            },
        ),
        (
            ["loss=ppo", "loss.ratio_cap=1.1"],
            {
                "loss.ratio_cap=1.1 loss.clip_high=0.2": (
                    "a cap at or below 1 + clip_high = 1.2 leaves nothing to clip; raise it, or "
                    "null"
                )
            },
        ),
        (
            ["loss=tb", "reference=none"],
            {
                "loss.fn=tb reference.kind=none": (
                    "this loss compares with a reference; reference=frozen"
                )
            },
        ),
    ],
)
def test_an_option_of_a_loss_that_cannot_be_is_refused_before_anything_starts(overrides, problem):
    assert complaints(*overrides) == problem


@pytest.mark.parametrize("name", ["aipo", "dr_grpo", "grpo", "ppo", "reinforce"])
def test_advantages_of_a_token_are_for_the_losses_that_use_them(name):
    assert complaints(f"loss={name}", "trainer.advantages=gae") == {}


def test_a_loss_of_whole_completions_refuses_advantages_of_a_token():
    (refused,) = complaints("loss=rloo", "trainer.advantages=gae").values()
    assert refused.startswith(
        "gae gives each token its own advantage, which this loss does not use;"
    )
    assert refused.endswith(
        "loss=aipo or cispo or dr_grpo or grpo or icepop or ppo or proximal_rloo or reinforce"
    )


def test_the_constant_of_dr_grpo_may_be_that_of_the_run():
    assert complaints("loss=dr_grpo", "loss.max_tokens=${max_new_tokens}") == {}
    assert (
        config_of("loss=dr_grpo", "loss.max_tokens=${max_new_tokens}").loss.options["max_tokens"]
        == 6
    )


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


def test_a_cache_of_one_sequence_is_enough():
    assert complaints("generator.cache_tokens=22") == {}


def test_a_script_gets_the_checked_config_of_its_overrides():
    assert compose_config(["max_lag=3", "run_dir='a b'"]).max_lag == 3
    with pytest.raises(ConfigError, match="max_lags"):
        compose_config(["max_lags=3"])


# --- placement ---

AUTO = PlacementSettings(
    trainer=None,
    generator=None,
    reward=None,
    reference=None,
    victim=None,
    colocate=None,
    sheet=None,
)


def placed_by(placement, world_size, groups_per_step=64, tensor_parallel=1, split_into=None):
    """The ranks of a run with a reference that gives these alone. split_into: completions of each
    prompt that all trainer ranks share.
    """
    config = SimpleNamespace(
        placement=placement,
        groups_per_step=groups_per_step,
        trained_per_prompt=split_into,
        splits_prompts=split_into is not None,
        generator=SimpleNamespace(tensor_parallel=tensor_parallel),
        reference=SimpleNamespace(kind="frozen", placed=True),
        victim=SimpleNamespace(placed=False),
    )
    return placement_of(config, world_size)


@pytest.mark.parametrize(
    "world_size, trainer, generator, reward",
    [
        (1, (0,), (0,), (0,)),
        (2, (0,), (1,), (1,)),
        (3, (0,), (1, 2), (2,)),
        (4, (0, 1), (2, 3), (3,)),
        (6, (0, 1), (2, 3, 4, 5), (5,)),  # three trainers cannot share 64 groups
    ],
)
def test_ranks_are_halved_between_trainers_and_generators(world_size, trainer, generator, reward):
    placed = placed_by(AUTO, world_size, groups_per_step=64)
    assert (placed["trainer"], placed["generator"], placed["reward"]) == (
        trainer,
        generator,
        reward,
    )


def test_what_is_given_stays_and_the_rest_is_filled_in_around_it():
    placed = placed_by(dataclasses.replace(AUTO, generator=[0]), 4, groups_per_step=64)
    assert placed == {"trainer": (1, 2), "generator": (0,), "reward": (3,), "reference": (3,)}
    placed = placed_by(dataclasses.replace(AUTO, generator=[0, 1, 2, 3, 4]), 8, groups_per_step=64)
    assert placed["trainer"] == (5, 6)  # three are free, but cannot share 64 groups


def test_trainers_that_split_prompts_are_as_many_as_share_the_completions():
    assert placed_by(AUTO, 6, groups_per_step=1, split_into=9)["trainer"] == (0, 1, 2)
    assert placed_by(AUTO, 6, groups_per_step=3, split_into=4)["trainer"] == (0, 1)


@given(st.integers(1, 40), st.integers(1, 40))
def test_automatic_placement_leaves_no_rank_idle_and_splits_the_batch(world_size, groups_per_step):
    placed = placed_by(AUTO, world_size, groups_per_step=groups_per_step)
    assert groups_per_step % len(placed["trainer"]) == 0
    assert set(placed["trainer"]) | set(placed["generator"]) == set(range(world_size))
    assert world_size == 1 or not set(placed["trainer"]) & set(placed["generator"])


def test_colocated_executors_share_what_is_given_for_one_of_them_or_everything():
    both = dataclasses.replace(AUTO, colocate=["trainer", "generator"])
    assert (
        placed_by(both, 4, groups_per_step=64)["trainer"]
        == (0, 1, 2, 3)
        == placed_by(both, 4)["generator"]
    )
    given = dataclasses.replace(both, generator=[1, 2])
    placed = placed_by(given, 4, groups_per_step=64)
    assert (placed["trainer"], placed["generator"], placed["reward"]) == ((1, 2), (1, 2), (3,))


def test_offload_is_refused_with_its_reason():
    together = "placement.colocate=[trainer,generator]"
    assert complaints("offload=true", together, "max_lag=0") == {}
    assert (
        "neither can leave the device"
        in complaints("offload=true", together)["offload=true max_lag=1"]
    )
    assert (
        "placement.colocate=[trainer,generator]"
        in complaints("offload=true", "max_lag=0")["offload=true placement.colocate=null"]
    )
    assert (
        "need two or more of trainer"
        in complaints("placement.colocate=[trainer]")["placement.colocate=[trainer]"]
    )
    clash = complaints(together, "placement.trainer=[0]", "placement.generator=[1]", world_size=2)
    assert ["must name the same ranks" in what for what in clash.values()] == [True]


def test_a_draw_that_is_split_gives_every_trainer_rank_as_many_completions():
    given = ("buffer=replay", "buffer.draw=split", "loss=tb", "reference=frozen", "group_size=9")
    assert complaints(*given, "buffer.completions_per_prompt=6", world_size=4) == {}
    keys = "buffer.completions_per_prompt=null group_size=9"
    placed = ("placement.trainer=[0,1]", "placement.generator=[2,3]", "groups_per_step=1")
    (what,) = complaints(*given, *placed, world_size=4).values()
    assert "2 trainer ranks cannot share 9 evenly; need a multiple of 2" in what
    assert keys in complaints(*given, *placed, world_size=4)
    six = "buffer.completions_per_prompt=6"
    assert complaints(*given, *placed, six, world_size=4) == {}, "the ranks share one group"
    cut = complaints(*given, *placed, six, "trainer.minibatches_per_step=2", world_size=4)
    assert "need a multiple of 2 groups" in "".join(cut.values())


@pytest.mark.parametrize(
    "world_size, size, groups, trainer, generator, reward",
    [
        (3, 2, 64, (0,), (1, 2), (2,)),
        (4, 2, 64, (0, 1), (2, 3), (3,)),
        (8, 3, 64, (0, 1), (2, 3, 4, 5, 6, 7), (7,)),  # four trainers would leave no whole replicas
        (4, 2, 1, (0,), (1, 2), (3,)),  # one is left over, for the reward
        (9, 8, 64, (0,), tuple(range(1, 9)), (8,)),
    ],
)
def test_automatic_placement_makes_whole_replicas(
    world_size, size, groups, trainer, generator, reward
):
    placed = placed_by(AUTO, world_size, groups_per_step=groups, tensor_parallel=size)
    assert (placed["trainer"], placed["generator"], placed["reward"]) == (
        trainer,
        generator,
        reward,
    )


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 8))
def test_automatic_placement_makes_whole_replicas_wherever_it_can(
    world_size, groups_per_step, size
):
    placed = placed_by(AUTO, world_size, groups_per_step=groups_per_step, tensor_parallel=size)
    assert len(placed["generator"]) % size == 0 or world_size <= size
    assert groups_per_step % len(placed["trainer"]) == 0 and (
        world_size == 1 or not set(placed["trainer"]) & set(placed["generator"])
    )


def test_replicas_that_cannot_be_are_refused_with_what_to_set():
    key = "generator.tensor_parallel"
    assert complaints(f"{key}=2", "max_lag=1", world_size=3) == {}
    assert (
        complaints(f"{key}=2", "placement.trainer=[0]", "placement.generator=[0,1]", world_size=2)
        == {}
    )
    assert "start at least 3 ranks" in complaints(f"{key}=2", world_size=2)[f"{key}=2"]
    uneven = complaints(f"{key}=2", "placement.generator=[1,2,3]", world_size=4)[f"{key}=2"]
    assert "[1,2,3] cannot be split into replicas of 2" in uneven and "such as [2,3]" in uneven
    heads = complaints(f"{key}=5", world_size=6)[f"{key}=5"]
    assert "4 query heads" in heads
    both = (f"{key}=2", "placement.colocate=[trainer,generator]")
    assert complaints(*both, "max_lag=0", world_size=2) == {}
    assert complaints(*both, "max_lag=0", world_size=4) == {}  # two replicas
    led_from_elsewhere = ("placement.trainer=[0,1]", "placement.generator=[2,1,0,3]", "max_lag=0")
    (what,) = complaints(f"{key}=4", *led_from_elsewhere, world_size=4).values()
    assert "begin the replica with rank 1" in what
    (what,) = complaints(*both, "max_lag=1", world_size=2).values()
    assert "one rank could wait in the first and another in the second" in what


def test_a_rank_that_hosts_nothing_is_known():
    config = config_of("placement.trainer=[0]", "placement.generator=[1]", "placement.reward=[1]")
    assert idle_ranks(config, 4) == [2, 3]


# --- files ---


def test_a_saved_config_is_the_config_that_is_loaded(tmp_path):
    config = config_of(
        "++loss.tau=0.5",
        "placement.trainer=[0,1]",
        "lr=1e-7",
        'task.system_prompt="a: b, c"',
        "run_dir=5",
    )
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert OmegaConf.load(tmp_path / "config.yaml").trainer.compute_dtype == "float32"  # resolved


@pytest.mark.parametrize("text", ["pay ${5}", "${seed}", r"\${seed}", "${", "${{x}}", "a\\"])
def test_a_text_of_a_saved_config_is_read_back_as_it_was(text, tmp_path):
    config = config_of()
    task = dataclasses.replace(config.task, system_prompt=text)
    config = dataclasses.replace(config, task=task)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


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


def test_a_bad_command_line_ends_with_2_and_one_aligned_message(recipe):
    ended = recipe("groups_per_step=0", "loss.ratio_kap=3")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines() == [
        "bad config, nothing started:",
        "  groups_per_step=0   need a whole number of at least 1",
        "  loss.ratio_kap      unknown key; did you mean loss.ratio_cap?",
    ]


def test_other_ranks_refuse_in_silence(recipe):
    ended = recipe("lr=x", RANK="1", WORLD_SIZE="2")
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "")


def test_a_recipe_runs_typed_without_torch_and_without_files_left_behind(recipe, tmp_path):
    ended = recipe("+dry_run=true", "lr=3")
    assert (ended.returncode, ended.stdout) == (0, "ran 3.0 True 4.0\n"), ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.py"]


def test_help_has_every_key_and_cfg_the_composed_config(recipe):
    helped, shown = recipe("--help"), recipe("--cfg", "job", "max_lag=7")
    assert "model: hf, tiny" in helped.stdout and helped.returncode == 0
    assert "`buffer.max_size` = `100000`" in helped.stdout
    assert OmegaConf.create(shown.stdout).max_lag == 7
    assert recipe("--cfg", "job", "max_lug=7").returncode == 2


def test_a_published_setting_is_shown_without_the_files_that_its_run_needs():
    words = [str(ROOT / "recipes" / "llama_async.py"), "--cfg", "job", "+experiment=magistral"]
    shown = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    assert OmegaConf.create(shown.stdout).max_lag == 8
    assert "model.path   required" in shown.stderr


def test_multirun_runs_every_point(recipe):
    assert [line.split()[1] for line in recipe("--multirun", "lr=1,2").stdout.splitlines()] == [
        "1.0",
        "2.0",
    ]


@pytest.mark.parametrize(
    "overrides, where, remedy",
    [
        (["max_lag=null"], "max_lag=null buffer.kind=fifo", "buffer=replay"),
        (["buffer=replay", "governor.start=4"], "governor.start=4 max_lag=null", "no rule changes"),
        (["buffer=replay", "governor.most=4"], "governor.most=4 max_lag=null", "no rule changes"),
        (
            ["buffer=replay", "overcommit=oppo"],
            "overcommit=oppo max_lag=null",
            "auto, which keeps two batches",
        ),
        (
            ["buffer=replay", "on_deadline=truncate"],
            "on_deadline=truncate max_lag=null",
            "generator.max_seconds",
        ),
        (
            ["buffer=replay", "buffer.max_size=100"],
            "buffer.max_size=100 groups_per_step=64",
            "512 completions",
        ),
        (
            ["buffer=replay", "buffer.completions_per_prompt=9"],
            "buffer.completions_per_prompt=9 group_size=8",
            "S >= K",
        ),
        (
            ["buffer=replay", "buffer.draw=split", "loss=tba", "reference=frozen"],
            "buffer.draw=split loss.fn=tba",
            "buffer.draw=shared, or loss=tb",
        ),
        (
            [
                "buffer=replay",
                "buffer.draw=split",
                "loss=tb",
                "reference=frozen",
                "trainer.filter_groups=true",
            ],
            "buffer.draw=split trainer.filter_groups=true",
            "trainer.filter_groups=false",
        ),
        (
            ["buffer=replay", "max_lag=2", "buffer.initial_completions=1000"],
            "buffer.initial_completions=1000 max_lag=2",
            "one batch",
        ),
        (
            ["buffer=replay", "buffer.initial_completions=100001"],
            "buffer.initial_completions=100001 buffer.max_size=100000",
            "initial fill",
        ),
        (["buffer=replay", "buffer.priority=null"], "buffer.priority=null", "softmax or uniform"),
        (["buffer.sync_period=2"], "buffer.sync_period", "buffer=replay"),
        (
            ["buffer=replay", "reference=reset"],
            "reference.reset_every=50 buffer.kind=replay",
            "buffer=fifo",
        ),
        (["reference.reset_every=50"], "reference.reset_every", "reference=reset"),
        (
            [f"loss.schedules.beta={LINE}"],
            "loss.schedules.beta.kind=linear loss.fn=policy_gradient",
            "loss=NAME loss.beta=NUMBER",
        ),
        (
            ["loss=tba", f"loss.schedules.reference_temperature={LINE}"],
            "loss.schedules.reference_temperature.kind=linear loss.fn=tba",
            "loss.reference_temperature",
        ),
        (
            [f"loss.schedules.ratio_mask_low={LINE}"],  # which is null
            "loss.schedules.ratio_mask_low.kind=linear loss.fn=policy_gradient",
            "leave the schedule out",
        ),
        (
            [f"loss.schedules.normalize={LINE}"],
            "loss.schedules.normalize.kind=linear loss.fn=policy_gradient",
            "the number in loss.normalize, and this loss has none",
        ),
        (
            ["loss.max_tokens=6", f"loss.schedules.max_tokens={LINE}"],
            "loss.schedules.max_tokens.kind=linear",
            "must stay a whole number",
        ),
        (
            ["loss=tb", f"loss.schedules.beta={LINE}", "loss.schedules.beta.final=0"],
            "loss.schedules.beta.final=0.0",
            "need a number above 0",
        ),
        (
            ["loss=tb", "loss.schedules.beta.kind=linear"],
            "loss.schedules.beta.kind=linear",
            "needs final, end_step too",
        ),
        (
            ["loss.schedules.beta=0.5"],
            "loss.schedules.beta=0.5",
            "such as loss.schedules.beta.kind",
        ),
        (["trainer.decay_steps=5"], "trainer.decay_steps=5 trainer.schedule=constant", "wsd"),
        (
            ["trainer.schedule=wsd", "trainer.decay_steps=101"],
            "trainer.decay_steps=101 trainer.warmup_steps=0 max_steps=100",
            "longer than the run",
        ),
    ],
)
def test_what_replay_reset_and_schedules_cannot_go_with_is_told_with_the_remedy(
    overrides, where, remedy
):
    found = complaints(*overrides)
    assert where in found and remedy in found[where]


HOT = "generator.temperature=[0.7,2.0]"


@pytest.mark.parametrize(
    "overrides, where",
    [
        (["loss=ppo"], "loss.fn=clipped"),
        (["loss=proximal_rloo"], "loss.fn=proximal_rloo"),
        (["loss=kimi_k2"], "loss.fn=kimi_k2"),
        (["reference=frozen", "trainer.reward_kl_coef=0.1"], "trainer.reward_kl_coef=0.1"),
    ],
)
def test_temperatures_of_their_own_are_refused_where_the_policy_is_held_to_what_sampled(
    overrides, where
):
    found = complaints(*overrides, HOT)
    assert f"{HOT} {where}" in found
    assert "generator.temperature=null" in found[f"{HOT} {where}"]
    same = "generator.temperature=[1,1]"
    assert complaints(*overrides, same) == {}


@pytest.mark.parametrize("loss", ["tb", "tba", "aipo", "reinforce", "rloo", "online_dpo", "copg"])
def test_other_losses_take_completions_of_any_temperature(loss):
    assert complaints(f"loss={loss}", HOT) == {}


def test_a_cut_needs_its_step_and_what_fits_is_accepted():
    line = [
        "loss.fn=tests.launching:with_beta",
        "loss.beta=1.0",
        "loss.schedules.beta.kind=cut",
        "loss.schedules.beta.final=0.1",
        "loss.schedules.beta.end_step=9",
    ]
    assert complaints(*line) == {"loss.schedules.beta.kind=cut": "needs cut_step too"}
    assert complaints(*line, "loss.schedules.beta.cut_step=3") == {}
    for accepted in (
        ["buffer=replay"],
        ["buffer=replay", "max_lag=0"],
        ["buffer=replay", "overcommit=30"],
        ["reference=reset", "loss.kl_coef=0.1"],
    ):
        assert complaints(*accepted) == {}
    config = config_of("buffer=replay")
    assert (
        config.max_lag is None
        and config.updates_in_flight
        and config.resumes_partials
        and config.trained_per_prompt == config.group_size
    )


def test_what_is_wrong_with_a_key_is_not_said_again_of_one_that_follows_it():
    words = ["trainer.microbatch_tokens=few", "reward=model", f"reward.path={TINY_MODEL}"]
    with pytest.raises(ConfigError) as refused:
        compose_config(words)
    (problem,) = refused.value.problems
    assert problem.where == "trainer.microbatch_tokens=few"
    config = compose_config(["trainer.microbatch_tokens=77", *words[1:]])
    assert config.reward.scorer.microbatch_tokens == 77
