"""PPO through the main job: value head, shaped rewards, several minibatches and passes; and going
on from a checkpoint.
"""

import pytest
from safetensors.torch import load_file

from tests.build.job import finished_job
from tests.build.model_directory import same_tensors
from tests.launching import SMALL, untimed

pytestmark = pytest.mark.slow

PPO = (
    *SMALL,
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
PART = "trainer.rank0.safetensors"  # of a checkpoint
FSDP2 = ("placement.trainer=[0,1]",)
TP2 = (*FSDP2, "trainer.tensor_parallel=2")


@pytest.mark.parametrize("ranks", [None, 2])
def test_ppo_runs_and_its_head_is_in_checkpoints_alone(tmp_path, ranks):
    job = finished_job(*PPO, "max_steps=2", run_dir=tmp_path / "run", ranks=ranks)
    rows, state = job.rows[1:], load_file(job.checkpoint / PART)
    exported = load_file(job.checkpoint / "hf" / "model.safetensors")
    assert [row["step"] for row in rows] == [1, 2]
    # The head learns within the first step; the variance is of the old values, which were 0.
    assert rows[0]["value/mean"] != 0 and rows[0]["value/loss"] > 0
    assert rows[0]["value/explained_variance"] == pytest.approx(0.0)
    # Later updates of a step are off-policy, and the first is compared alone.
    assert rows[0]["ratio/max"] > 1 + 1e-3
    assert all(row["parity/logprob_diff_max"] <= 1e-4 for row in rows)
    assert rows[0]["reward/shaped_mean"] != rows[0]["reward/mean"]
    assert state["value/weight"].abs().sum() > 0 and state["value/exp_avg/weight"].abs().sum() > 0
    assert not [name for name in exported if "value" in name]


def test_a_value_model_of_its_own_is_in_checkpoints_and_not_in_what_is_exported(tmp_path):
    own = (*PPO, "trainer.critic.trunk=own", "max_steps=1")
    job = finished_job(*own, run_dir=tmp_path / "run")
    row, state = job.rows[1], load_file(job.checkpoint / PART)
    exported = load_file(job.checkpoint / "hf" / "model.safetensors")
    assert row["value/loss"] > 0 and row["value/grad_norm"] > 0
    trunk = {name.removeprefix("model/") for name in state if name.startswith("model/")}
    own = {f"value/{name}" for name in (*trunk, "score.weight")}
    assert own | {"value/exp_avg/score.weight"} <= state.keys()
    assert exported.keys() == trunk


@pytest.mark.bitwise("a synchronous run that was resumed is the one that was not")
@pytest.mark.parametrize(
    "trunk, topology, ranks",
    [("shared", (), None), ("own", (), None), ("own", FSDP2, 2), ("own", TP2, 2)],
    ids=["shared", "own", "own_fsdp2", "own_tp2"],
)
def test_a_resumed_ppo_run_has_the_bits_of_one_that_was_not_interrupted(
    tmp_path, trunk, topology, ranks
):
    settings = (*PPO, *topology, f"trainer.critic.trunk={trunk}")
    whole = finished_job(*settings, run_dir=tmp_path / "whole", ranks=ranks)
    for words in ("max_steps=2", "resume=auto"):
        job = finished_job(*settings, words, run_dir=tmp_path / "run", ranks=ranks)
    assert "resumed from step_2" in job.output
    assert untimed(job.rows) == untimed(whole.rows)
    of_critic = {
        "shared": {"value/weight", "value/bias", "value/exp_avg_sq/weight"},
        "own": {"value/score.weight", "value/exp_avg_sq/model.norm.weight"},
    }
    assert load_file(job.checkpoint / PART).keys() >= of_critic[trunk]
    assert same_tensors(job.checkpoint / PART, whole.checkpoint / PART)
