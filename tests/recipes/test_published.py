"""Published settings beyond TBA's: what the papers' tables say, sweeps that keep what a study holds
fixed, and reduced runs.
"""

import pytest
from omegaconf import OmegaConf

from llamarl.config.command_line import CONF_DIR, ConfigError
from tests.launching import ForkedJob
from tests.recipes.experiments import NAMES as ALL
from tests.recipes.experiments import OWN_CRITICS, directory, given, reward_of, settings
from tests.scorers import write_scorer

__all__ = ["directory", "given", "settings"]  # fixtures

# TBA's have runs of their own in test_replay_runs.py.
NAMES = [name for name in ALL if not name.startswith("tba_")]
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


def own_trainer_keys(name):
    """What the file itself says of the trainer."""
    return OmegaConf.load(CONF_DIR / "experiment" / f"{name}.yaml").trainer


@pytest.mark.parametrize("name", ALL)
def test_every_file_says_how_gradients_are_clipped(name, settings):
    """The authors' loops of RLOO and TBA, and TRL's of PPO, do not clip; those of Online DPO and of
    their PPO do.
    """
    unclipped = name.endswith("_rloo") or name in ("tba_table2", "tba_table3", "oppo")
    assert own_trainer_keys(name).max_grad_norm == (None if unclipped else 1.0)
    assert settings(name).trainer.max_grad_norm == own_trainer_keys(name).max_grad_norm


@pytest.mark.parametrize("name", ALL)
def test_every_file_with_a_value_head_says_its_rate(name, settings):
    has_head = settings(name).trainer.advantages == "gae"
    assert ("value_lr" in own_trainer_keys(name)) == has_head


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
@pytest.mark.parametrize("n", [1, 4, 64])
def test_n_minibatches_keep_minibatch_updates_and_episodes(settings, name, n):
    c = settings(name, f"trainer.minibatches_per_step={n}")
    assert completions(c) / n == 512
    assert (c.max_steps * n, completions(c) * c.max_steps) == (256, 131_072)


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
@pytest.mark.parametrize("name", NAMES)
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
    with ForkedJob(f"+experiment={name}", *small, run_dir=tmp_path / "run") as job:
        assert job.wait() == 0, job.output
        rows = job.rows
    assert [row["step"] for row in rows] == [0, 1, 2] and any(
        row["grad_norm"] > 0 for row in rows[1:]
    )
    # Null also in a step whose groups are each of one reward, which by chance some are.
    assert all(row["kl/ref"] is None for row in rows[1:]) == (name in ("llamarl_aipo", "magistral"))
