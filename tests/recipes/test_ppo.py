"""PPO through the main job: value head, shaped rewards, several minibatches and passes; and going
on from a checkpoint.
"""

import pytest
import torch
from safetensors.torch import load_file

from llamarl.config.command_line import ConfigError, compose_config
from tests.build.job import finished_job
from tests.launching import SMALL, untimed

PPO = (
    "loss=ppo",
    "trainer.advantages=gae",
    "reference=frozen",
    "trainer.reward_kl_coef=0.05",
    "trainer.missing_eos_penalty=-1",
    "trainer.whiten=advantages",
    "trainer.minibatches_per_step=2",
    "trainer.updates_per_batch=2",
    "max_lag=0",
    "lr=2e-5",
)
OWN = ("loss=ppo", "trainer.advantages=gae", "trainer.critic.trunk=own")


def saved(checkpoint, rank=0):
    return load_file(checkpoint / f"trainer.rank{rank}.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, 2])
def test_ppo_runs_and_its_head_is_in_checkpoints_alone(tmp_path, ranks):
    job = finished_job(*SMALL, *PPO, "max_steps=2", run_dir=tmp_path / "run", ranks=ranks)
    rows, state = job.rows[1:], saved(job.checkpoint)
    exported = load_file(job.checkpoint / "hf" / "model.safetensors")
    assert [row["step"] for row in rows] == [1, 2]
    assert (
        rows[0]["value/mean"] != 0 and rows[0]["value/loss"] > 0
    )  # the head learns within the first step
    assert rows[0]["value/explained_variance"] == pytest.approx(
        0.0
    )  # of the old values, which were 0
    assert rows[0]["ratio/max"] > 1 + 1e-3  # later updates of a step are off-policy
    assert all(
        row["parity/logprob_diff_max"] <= 1e-4 for row in rows
    )  # and the first is compared alone
    assert rows[0]["reward/shaped_mean"] != rows[0]["reward/mean"]
    assert state["value/weight"].abs().sum() > 0 and state["value/exp_avg/weight"].abs().sum() > 0
    assert not [name for name in exported if "value" in name]


@pytest.mark.slow
def test_a_value_model_of_its_own_is_in_checkpoints_and_not_in_what_is_exported(tmp_path):
    overrides = (*SMALL, *PPO, "trainer.critic.trunk=own", "max_steps=1")
    job = finished_job(*overrides, run_dir=tmp_path / "run")
    row, state = job.rows[1], saved(job.checkpoint)
    exported = load_file(job.checkpoint / "hf" / "model.safetensors")
    assert row["value/loss"] > 0 and row["value/grad_norm"] > 0
    trunk = {name.removeprefix("model/") for name in state if name.startswith("model/")}
    own = {f"value/{name}" for name in (*trunk, "score.weight")}
    assert own | {"value/exp_avg/score.weight"} <= state.keys()
    assert exported.keys() == trunk


FSDP2 = ("placement.trainer=[0,1]",)
TP2 = (*FSDP2, "trainer.tensor_parallel=2")


@pytest.mark.bitwise("a synchronous run that was resumed is the one that was not")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("trunk", "topology", "ranks"),
    [
        ("shared", (), None),
        ("own", (), None),
        ("own", FSDP2, 2),
        ("own", TP2, 2),
    ],
    ids=["shared", "own", "own_fsdp2", "own_tp2"],
)
def test_a_resumed_ppo_run_has_the_bits_of_one_that_was_not_interrupted(
    tmp_path, trunk, topology, ranks
):
    settings = (*SMALL, *PPO, *topology, f"trainer.critic.trunk={trunk}")
    job = finished_job(*settings, run_dir=tmp_path / "whole", ranks=ranks)
    rows, want = untimed(job.rows), saved(job.checkpoint)
    job = finished_job(*settings, "max_steps=2", run_dir=tmp_path / "run", ranks=ranks)
    job = finished_job(*settings, "resume=auto", run_dir=tmp_path / "run", ranks=ranks)
    assert "resumed from step_2" in job.output
    assert untimed(job.rows) == rows
    got = saved(job.checkpoint)
    of_critic = {
        "shared": {"value/weight", "value/bias", "value/exp_avg_sq/weight"},
        "own": {"value/score.weight", "value/exp_avg_sq/model.norm.weight"},
    }
    assert got.keys() >= of_critic[trunk]
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("loss=rloo", "trainer.advantages=gae"),
            "gives each token its own advantage, which this loss does not use",
        ),
        (
            ("trainer.reward_kl_coef=0.1",),
            "needs a reference; reference=frozen, or trainer.reward_kl_coef=0",
        ),
        (
            ("trainer.minibatches_per_step=3",),
            "cannot cut their groups into 3 minibatches each; need a multiple of 3 groups",
        ),
        (("group_size=1",), "or trainer.advantages=gae"),
        (
            ("trainer.critic.trunk=own",),
            "choose it, or trainer.critic.trunk=shared",
        ),
        (
            ("loss=ppo", "trainer.advantages=gae", "trainer.critic.path=DIR"),
            "trainer.critic.trunk=own, or trainer.critic.path=null",
        ),
        (
            (*OWN, "trainer.critic.path=/nowhere"),
            "no such file: /nowhere/config.json",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(overrides, message):
    with pytest.raises(ConfigError, match=message):
        compose_config(list(overrides))


def test_a_value_head_needs_no_group():
    assert compose_config(["loss=ppo", "trainer.advantages=gae", "group_size=1"]).group_size == 1
