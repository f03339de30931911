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


def test_what_the_papers_tables_say(settings):
    two, three, four = (settings(f"tba_table{number}") for number in (2, 3, 4))
    batches = [c.groups_per_step * c.trained_per_prompt for c in (two, three, four)]
    assert batches == [140, 160, 512] and [c.max_steps for c in (two, three, four)] == [
        1000,
        256,
        400,
    ]
    episodes = [batch * c.max_steps for batch, c in zip(batches, (two, three, four))]
    assert episodes == [140_000, 40_960, 204_800]
    assert two.trainer.warmup_steps + 450 + two.trainer.decay_steps == 1000 and two.group_size == 24
    beta = three.loss.schedules["beta"]
    assert (beta.end_step, beta.cut_step) == (256 // 2, 256 // 8)
    assert (two.max_lag, three.max_lag, four.reference.reset_every, four.buffer.kind) == (
        None,
        None,
        50,
        "fifo",
    )


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


def test_what_the_red_teaming_appendix_says(settings):
    gpt2, llama = settings("tba_red_team_gpt2"), settings("tba_red_team_llama")
    for c in (gpt2, llama):
        assert (c.max_steps, c.groups_per_step * c.trained_per_prompt) == (5000, 128)
        assert (c.loss.fn, c.loss.options["beta"], c.reference.kind) == ("tb", 0.05, "frozen")
        assert (c.buffer.sync_period, c.max_lag, c.eval.num_samples) == (10, None, 1024)
        assert (c.eval.num_prompts, c.eval.embedder) == (1, "start")
        assert (c.task.kind, c.task.chat) == ("one_prompt", False)
        assert c.buffer.draw == "split", "one log Z over all trainer ranks"
    assert (gpt2.buffer.most_on_policy, gpt2.buffer.max_size) == (0.5, 100_000)
    assert (gpt2.buffer.grow_until, llama.buffer.grow_until) == (4000, None)
    assert (llama.buffer.most_on_policy, llama.buffer.max_size) == (0.6, 130_000)
    assert (gpt2.generator.temperature, llama.generator.temperature) == ([0.5, 2.0], [0.7, 2.0])
    assert options_at(0, config=llama) == {
        "log_reward_temperature": 2.0,
        "reference_temperature": 1.0,
    }
    assert options_at(1000, config=llama) == {
        "log_reward_temperature": 1.0,
        "reference_temperature": pytest.approx(1.1),
    }
    assert options_at(2000, config=llama)["reference_temperature"] == 1.2
    assert options_at(250, config=gpt2) == {"log_reward_temperature": 1.5}


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
    config = compose_config(
        [
            "task=reasoning_gym",
            "max_steps=700",
            given[0],
            "+experiment=tba_table2",
            "loss.beta=0.014",
        ]
    )
    assert (config.task.kind, config.max_steps, config.loss.options["beta"]) == (
        "reasoning_gym",
        700,
        0.014,
    )


# --- What the papers' tables say, and reduced runs ---

# TBA's have runs of their own in test_replay_runs.py.
RUN_HERE = [name for name in NAMES if not name.startswith("tba_")]
# The tiny model never thinks. That a completion of three tokens is too long tells them apart.
SIGNAL = {"magistral": ("reward.parts.length.options.max_tokens=3",)}
TABLE_4 = ("async_rlhf_table4", "async_rlhf_table4_rloo", "async_rlhf_table4_online_dpo")


def completions(config):
    return config.groups_per_step * config.group_size


def test_table_4_of_async_rlhf(settings):
    ppo, rloo, dpo = (settings(name) for name in TABLE_4)
    for c in (ppo, rloo, dpo):
        assert (c.lr, c.trainer.schedule, c.temperature) == (3e-6, "linear", 0.7)
        assert completions(c) == 512 and completions(c) * c.max_steps == 131_072
        assert (c.task.max_prompt_tokens, c.max_new_tokens, c.trainer.missing_eos_penalty) == (
            512,
            128,
            -1,
        )
        assert (c.trainer.updates_per_batch, c.max_lag, c.overcommit) == (1, 1, c.groups_per_step)
        assert not c.updates_in_flight and c.reference.kind != "none"
    assert (
        ppo.trainer.reward_kl_coef,
        rloo.trainer.reward_kl_coef,
        dpo.trainer.reward_kl_coef,
    ) == (0.05, 0.05, 0)
    assert (ppo.group_size, rloo.group_size, dpo.group_size) == (1, 2, 2)
    assert (ppo.trainer.advantages, rloo.loss.fn, dpo.loss.options["beta"]) == (
        "gae",
        "proximal_rloo",
        0.1,
    )
    assert [c.task.chat for c in (ppo, rloo, dpo)] == [False] * 3


def test_tables_7_and_10_of_async_rlhf(settings):
    dpo, ppo = settings("async_rlhf_table7"), settings("async_rlhf_table7_ppo")
    for c in (dpo, ppo):
        assert (c.lr, c.trainer.schedule, c.temperature) == (8e-7, "linear", 0.7)
        assert (completions(c), c.max_steps) == (256, -(-100_000 // 256))
        assert (c.task.max_prompt_tokens, c.max_new_tokens, c.trainer.missing_eos_penalty) == (
            512,
            1024,
            -10,
        )
    assert (dpo.loss.options["beta"], ppo.trainer.reward_kl_coef) == (0.03, 0.01)
    dpo, rloo = settings("async_rlhf_table10"), settings("async_rlhf_table10_rloo")
    for c in (dpo, rloo):
        assert (c.lr, c.trainer.schedule, c.temperature) == (3e-6, "constant", 0.7)
        assert (c.group_size, c.task.max_prompt_tokens, c.max_new_tokens) == (4, 512, 512)
        assert completions(c) * c.max_steps == 516_096
    # The authors' code counts the batch of 252 in prompts for Online DPO, and in completions for
    # RLOO.
    assert (dpo.groups_per_step, dpo.max_steps) == (252, 512)
    assert (completions(rloo), rloo.max_steps) == (252, 2048)
    assert dpo.loss.options["beta"] == rloo.trainer.reward_kl_coef == 0.05


def test_table_3_of_tba_keeps_the_baselines_settings(settings):
    """TBA 5.1: those of Async RLHF's table 4, but for what table 3 changes."""
    tba, baseline = settings("tba_table3"), settings("async_rlhf_table4_online_dpo")
    kept = ("lr", "temperature", "max_new_tokens", "max_steps")
    assert [getattr(tba, key) for key in kept] == [getattr(baseline, key) for key in kept]
    for key in ("schedule", "missing_eos_penalty"):
        assert getattr(tba.trainer, key) == getattr(baseline.trainer, key)
    for key in ("chat", "max_prompt_tokens"):
        assert getattr(tba.task, key) == getattr(baseline.task, key)
    assert (tba.trainer.missing_eos_penalty, tba.task.chat) == (-1.0, False)


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


def test_oppo_llamarl_and_magistral(settings):
    oppo, aipo, magistral = (settings(name) for name in ("oppo", "llamarl_aipo", "magistral"))
    assert (completions(oppo), oppo.overcommit, oppo.trainer.advantages, oppo.loss.fn) == (
        112,
        "oppo",
        "gae",
        "clipped",
    )
    assert (oppo.trainer.schedule, oppo.trainer.updates_per_batch) == ("linear", 4)
    assert (oppo.governor.increase, oppo.governor.decrease, oppo.governor.least) == (1, 1, 0)
    assert (aipo.loss.fn, aipo.trainer.advantages) == (
        "policy_gradient",
        "group_mean",
    ) and 2 <= aipo.loss.options["ratio_cap"] <= 10
    assert completions(aipo) == completions(magistral) == 2048
    assert (
        aipo.updates_in_flight
        and magistral.updates_in_flight
        and not magistral.generator.recompute_kv
    )
    assert (
        0.26 <= magistral.loss.options["clip_high"] <= 0.28 and magistral.reference.kind == "none"
    )
    assert (
        magistral.loss.options["normalize"] == "groups"
        and magistral.trainer.advantages == "group_mean"
    )
    assert (magistral.trainer.whiten, magistral.trainer.filter_groups) == ("completions", True)
    assert (
        magistral.overcommit + magistral.groups_per_step <= 2 * magistral.groups_per_step
    )  # pending/batch of at most 2
    assert magistral.trainer.minibatches_per_step == magistral.trainer.updates_per_batch == 1


@pytest.mark.parametrize("name", TABLE_4)
def test_minibatches_keep_minibatch_updates_and_episodes(settings, name):
    c = settings(name, "trainer.minibatches_per_step=4")
    assert completions(c) / 4 == 512
    assert (c.max_steps * 4, completions(c) * c.max_steps) == (256, 131_072)


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
    small = (
        *SIGNAL.get(name, ()),
        *reward_of(name, tmp_path),
        "model=tiny",
        "task=addition",
        "task.max_prompt_tokens=16",
        "task.chat=false",
        "groups_per_step=8",
        "max_new_tokens=6",
        "threads=1",
        "max_steps=2",
        "eval.num_prompts=20",
        "eval.every=2",
        "checkpoint.every=0",
    )
    rows = finished_job(f"+experiment={name}", *small, run_dir=tmp_path / "run").rows
    assert [row["step"] for row in rows] == [0, 1, 2] and any(
        row["grad_norm"] > 0 for row in rows[1:]
    )
    # Null also in a step whose groups are each of one reward, which by chance some are.
    assert all(row["kl/ref"] is None for row in rows[1:]) == (name in ("llamarl_aipo", "magistral"))
