"""Every file of conf/experiment makes a config that a run would accept, given the user's own model
and data.
"""

import dataclasses

import pytest

from executors.build_trainer import options_at
from llamarl.config.command_line import (
    CONF_DIR,
    RED_TEAM,
    ConfigError,
    check_command_line,
    compose_config,
)
from llamarl.models.config import read_config
from tests.loss_problems import SECTIONS
from tests.recipes.experiments import (
    MODEL_REWARDS,
    NAMES,
    directory,
    given,
    given_of,
    settings,
)

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


@pytest.mark.parametrize("max_steps", [20, 1])
@pytest.mark.parametrize("name", NAMES)
def test_a_shorter_run_of_it_is_accepted_with_shorter_schedules(
    name, max_steps, settings, directory
):
    overrides = [f"+experiment={name}", *given_of(name, directory), f"max_steps={max_steps}"]
    check_command_line(overrides, world_size=4)
    config = settings(name, f"max_steps={max_steps}")
    assert config.max_steps == max_steps
    for schedule in config.loss.schedules.values():
        assert schedule.end_step <= max_steps
    assert config.trainer.warmup_steps + (config.trainer.decay_steps or 0) <= max_steps


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
