"""Every file of conf/experiment makes a config that a run would accept, given the user's own model
and data.
"""

import dataclasses

import pytest
from omegaconf import OmegaConf

from executors.build_trainer import options_at
from llamarl.config.command_line import (
    CONF_DIR,
    RED_TEAM,
    ConfigError,
    check_command_line,
    compose_config,
)
from llamarl.models.config import read_config
from tests.build.job import finished_job
from tests.loss_problems import SECTIONS
from tests.recipes.experiments import (
    MODEL_REWARDS,
    NAMES,
    OWN_CRITICS,
    directory,
    given,
    given_of,
    reward_of,
    settings,
)
from tests.scorers import write_scorer

__all__ = ["directory", "given", "settings"]  # fixtures


def loss_of(name):
    return next(
        line.split("/loss:")[1].strip()
        for line in (CONF_DIR / "experiment" / f"{name}.yaml").read_text().splitlines()
        if "/loss:" in line
    )


@pytest.mark.parametrize("name", NAMES)
def test_it_is_accepted_on_ranks_and_fits_its_model(name, settings, given, directory):
    config = settings(name)
    overrides = [f"+experiment={name}", *given_of(name, directory)]
    check_command_line(overrides, world_size=4)
    longest = config.task.max_prompt_tokens + config.max_new_tokens
    assert longest <= read_config(config.model.path).max_position_embeddings
    assert config.loss.fn == SECTIONS[loss_of(name)]["fn"]


@pytest.mark.parametrize("name", NAMES)
def test_its_shortest_run_is_accepted_with_shorter_schedules(name, settings, directory):
    overrides = [f"+experiment={name}", *given_of(name, directory), "max_steps=1"]
    check_command_line(overrides, world_size=4)
    config = settings(name, "max_steps=1")
    for schedule in config.loss.schedules.values():
        assert schedule.end_step <= 1
    assert config.trainer.warmup_steps + (config.trainer.decay_steps or 0) <= 1


def test_schedules_keep_their_share_of_a_shorter_run(settings):
    short = settings("tba_table2", "max_steps=20")
    two = short.trainer
    assert (two.warmup_steps, two.decay_steps, short.loss.schedules["beta"].end_step) == (1, 10, 10)
    three = settings("tba_table3", "max_steps=64").loss.schedules["beta"]
    assert (three.end_step, three.cut_step) == (32, 8)
    llama = settings("tba_red_team_llama", "max_steps=50").loss.schedules
    ends = {option: schedule.end_step for option, schedule in llama.items()}
    assert ends == {"log_reward_temperature": 10, "reference_temperature": 20}
    short = settings("tba_red_team_gpt2", "max_steps=50")
    (schedule,) = short.loss.schedules.values()
    assert (short.buffer.grow_until, schedule.end_step) == (40, 5)
    assert settings("tba_red_team_gpt2").buffer.grow_until == 4000


def test_the_papers_rewards_are_models(settings):
    assert len(MODEL_REWARDS) == 8
    for name in NAMES:
        assert (settings(name).reward.kind == "model") == (name in MODEL_REWARDS)


def of(config, key):
    """Return the value of a dotted key; completions and trained: of a step."""
    sizes = {"completions": config.group_size, "trained": config.trained_per_prompt}
    if key in sizes:
        return config.groups_per_step * sizes[key]
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


TABLE_4 = ("async_rlhf_table4", "async_rlhf_table4_rloo", "async_rlhf_table4_online_dpo")
# Of 131,072 episodes.
OF_TABLE_4 = """
lr=3e-6 trainer.schedule=linear temperature=0.7 completions=512 max_steps=256
task.max_prompt_tokens=512 max_new_tokens=128 trainer.missing_eos_penalty=-1.0 task.chat=False
trainer.updates_per_batch=1 max_lag=1 updates_in_flight=False reference.kind=frozen
"""
# Of 100,000 episodes.
OF_TABLE_7 = """
lr=8e-7 trainer.schedule=linear temperature=0.7 completions=256 max_steps=391
task.max_prompt_tokens=512 max_new_tokens=1024 trainer.missing_eos_penalty=-10.0
"""
OF_TABLE_10 = """
lr=3e-6 trainer.schedule=constant temperature=0.7 group_size=4 task.max_prompt_tokens=512
max_new_tokens=512
"""
# One log Z over all trainer ranks: draw=split.
OF_RED_TEAMS = """
max_steps=5000 trained=128 loss.fn=tb loss.options.beta=0.05 reference.kind=frozen
buffer.sync_period=10 max_lag=None eval.num_samples=1024 eval.num_prompts=1 eval.embedder=start
task.kind=one_prompt task.chat=False buffer.draw=split
"""
NUMBERS = {"3e-6": "3e-06", "8e-7": "8e-07"}  # as Python writes them
PAPERS = {
    "tba_table2": "trained=140 max_steps=1000 group_size=24 max_lag=None trainer.warmup_steps=50 "
    "trainer.decay_steps=500",
    "tba_table3": "trained=160 max_steps=256 max_lag=None loss.schedules.beta.end_step=128 "
    "loss.schedules.beta.cut_step=32",
    "tba_table4": "trained=512 max_steps=400 reference.reset_every=50 buffer.kind=fifo",
    "tba_red_team_gpt2": f"{OF_RED_TEAMS} buffer.most_on_policy=0.5 buffer.max_size=100000 "
    "buffer.grow_until=4000 generator.temperature=[0.5,2.0]",
    "tba_red_team_llama": f"{OF_RED_TEAMS} buffer.most_on_policy=0.6 buffer.max_size=130000 "
    "buffer.grow_until=None generator.temperature=[0.7,2.0]",
    TABLE_4[0]: f"{OF_TABLE_4} trainer.reward_kl_coef=0.05 group_size=1 overcommit=512 "
    "trainer.advantages=gae",
    TABLE_4[1]: f"{OF_TABLE_4} trainer.reward_kl_coef=0.05 group_size=2 overcommit=256 "
    "loss.fn=proximal_rloo",
    TABLE_4[2]: f"{OF_TABLE_4} trainer.reward_kl_coef=0.0 group_size=2 overcommit=256 "
    "loss.options.beta=0.1",
    "async_rlhf_table7": f"{OF_TABLE_7} loss.options.beta=0.03",
    "async_rlhf_table7_ppo": f"{OF_TABLE_7} trainer.reward_kl_coef=0.01",
    # The authors' code counts the batch of 252 in prompts for Online DPO, and in completions for
    # RLOO: 516,096 of either.
    "async_rlhf_table10": f"{OF_TABLE_10} groups_per_step=252 max_steps=512 loss.options.beta=0.05",
    "async_rlhf_table10_rloo": f"{OF_TABLE_10} completions=252 max_steps=2048 "
    "trainer.reward_kl_coef=0.05",
    "oppo": "completions=112 overcommit=oppo trainer.advantages=gae loss.fn=clipped "
    "trainer.schedule=linear trainer.updates_per_batch=4 governor.increase=1 governor.decrease=1 "
    "governor.least=0",
    # A cap from 2 to 10.
    "llamarl_aipo": "loss.fn=policy_gradient trainer.advantages=group_mean completions=2048 "
    "updates_in_flight=True loss.options.ratio_cap=4.0",
    # clip_high from 0.26 to 0.28; pending/batch of at most 2.
    "magistral": "completions=2048 updates_in_flight=True generator.recompute_kv=False "
    "reference.kind=none loss.options.clip_high=0.28 loss.options.normalize=groups "
    "trainer.advantages=group_mean trainer.whiten=completions trainer.filter_groups=True "
    "trainer.minibatches_per_step=1 trainer.updates_per_batch=1 groups_per_step=128 overcommit=128",
}


@pytest.mark.parametrize("name", PAPERS)
def test_what_the_papers_say(name, settings):
    given = dict(word.split("=") for word in PAPERS[name].split())
    found = {key: str(of(settings(name), key)).replace(" ", "") for key in given}
    assert found == {key: NUMBERS.get(value, value) for key, value in given.items()}


@pytest.mark.parametrize("name", ["tba_red_team_gpt2", "tba_red_team_llama"])
def test_a_published_attack_has_a_victim_in_its_own_recipe(name, given, directory):
    words = [f"+experiment={name}", *given_of(name, directory)]
    victim = ("victim=hf", f"victim.path={directory}")
    config = compose_config([*words, *victim], RED_TEAM)
    assert (config.victim.template, config.victim.path) == ("{attack}", str(directory))
    alone = compose_config(words)
    assert (config.eval.save_samples, config.reward.max_error_rate) == (True, 0.5)
    of_recipe = {
        "victim": alone.victim,
        "eval": dataclasses.replace(config.eval, save_samples=False),
        "reward": dataclasses.replace(config.reward, max_error_rate=alone.reward.max_error_rate),
    }
    assert dataclasses.replace(config, **of_recipe) == alone


def test_temperatures_of_published_attacks_fall(settings):
    target, reference = "log_reward_temperature", "reference_temperature"
    gpt2, llama = settings("tba_red_team_gpt2"), settings("tba_red_team_llama")
    assert options_at(0, config=llama) == {target: 2.0, reference: 1.0}
    assert options_at(1000, config=llama) == {target: 1.0, reference: pytest.approx(1.1)}
    assert options_at(2000, config=llama)[reference] == 1.2
    assert options_at(250, config=gpt2) == {target: 1.5}


def test_a_reward_model_that_is_not_given_is_told_once(given):
    """The value model's path, and all else that is written as it, is not told again."""
    with pytest.raises(ConfigError) as error:
        compose_config(["+experiment=async_rlhf_table4", *given])
    assert [problem.where for problem in error.value.problems] == ["reward.path"]
    with pytest.raises(ConfigError) as error:
        compose_config(["+experiment=async_rlhf_table4", "reward=function", *given])
    assert [problem.where for problem in error.value.problems] == ["trainer.critic.path"]
    policys = ("reward=function", "trainer.critic.path=null")
    compose_config(["+experiment=async_rlhf_table4", *policys, *given])


def test_the_command_line_still_changes_an_experiment(given):
    words = ["task=reasoning_gym", "max_steps=700", given[0], "+experiment=tba_table2"]
    config = compose_config([*words, "loss.beta=0.014"])
    assert (config.task.kind, config.max_steps) == ("reasoning_gym", 700)
    assert config.loss.options["beta"] == 0.014


def test_table_3_of_tba_keeps_the_baselines_settings(settings):
    """TBA 5.1: those of Async RLHF's table 4, but for what table 3 changes."""
    tba, baseline = settings("tba_table3"), settings("async_rlhf_table4_online_dpo")
    of_trainer = ("trainer.schedule", "trainer.missing_eos_penalty")
    of_task = ("task.chat", "task.max_prompt_tokens", "max_new_tokens")
    for key in ("lr", "temperature", "max_steps", *of_trainer, *of_task):
        assert of(tba, key) == of(baseline, key)


@pytest.mark.parametrize("name", NAMES)
def test_every_file_says_how_gradients_are_clipped_and_the_rate_of_a_value_head(name, settings):
    """The authors' loops of RLOO and TBA, and TRL's of PPO, do not clip; those of Online DPO and of
    their PPO do.
    """
    own = OmegaConf.load(CONF_DIR / "experiment" / f"{name}.yaml").trainer
    unclipped = name.endswith("_rloo") or name in ("tba_table2", "tba_table3", "oppo")
    assert own.max_grad_norm == (None if unclipped else 1.0)
    trainer = settings(name).trainer
    assert trainer.max_grad_norm == own.max_grad_norm
    assert ("value_lr" in own) == (trainer.advantages == "gae")


@pytest.mark.parametrize("name", OWN_CRITICS)
def test_ppo_of_async_rlhf_has_a_value_model_that_starts_as_the_reward_model(name, settings):
    c = settings(name)
    assert (c.trainer.critic.trunk, c.trainer.critic.path) == ("own", c.reward.scorer.path)
    assert c.critic_lr == c.lr  # one rate for both


# --- reduced runs ---

# TBA's have runs of their own in test_replay_runs.py.
RUN_HERE = [name for name in NAMES if not name.startswith("tba_")]
# The tiny model never thinks. That a completion of three tokens is too long tells them apart.
SIGNAL = {"magistral": ("reward.parts.length.options.max_tokens=3",)}
SMALL = """
model=tiny task=addition task.max_prompt_tokens=16 task.chat=false groups_per_step=8
max_new_tokens=6 threads=1 max_steps=2 eval.num_prompts=20 eval.every=2 checkpoint.every=0
""".split()


@pytest.mark.parametrize("name", TABLE_4)
def test_minibatches_keep_minibatch_updates_and_episodes(settings, name):
    c = settings(name, "trainer.minibatches_per_step=4")
    assert of(c, "completions") / 4 == 512
    assert (c.max_steps * 4, of(c, "completions") * c.max_steps) == (256, 131_072)


def test_a_number_of_steps_that_does_not_divide_is_rounded_up(settings):
    assert settings(TABLE_4[0], "trainer.minibatches_per_step=3").max_steps == 86


@pytest.mark.parametrize("lag", [0, 1])
def test_max_lag_alone_tells_synchronous_from_cleanba(settings, lag):
    c = settings("async_rlhf_table10", f"max_lag={lag}")
    assert (c.max_lag, c.overcommit) == (lag, 252 * lag)


def test_a_value_that_others_are_made_from_must_be_right_itself(settings):
    with pytest.raises(ConfigError, match="trainer.minibatches_per_step=x"):
        settings(TABLE_4[0], "trainer.minibatches_per_step=x")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN_HERE)
def test_it_runs_at_a_reduced_size(name, tmp_path):
    write_scorer(tmp_path)
    if name == "magistral":
        for package in ("math_verify", "py3langid"):
            pytest.importorskip(package, reason="its reward needs the extras math and language")
    given = (*SIGNAL.get(name, ()), *reward_of(name, tmp_path), *SMALL)
    rows = finished_job(f"+experiment={name}", *given, run_dir=tmp_path / "run").rows
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert any(row["grad_norm"] > 0 for row in rows[1:])
    # Null also in a step whose groups are each of one reward, which by chance some are.
    assert all(row["kl/ref"] is None for row in rows[1:]) == (name in ("llamarl_aipo", "magistral"))
