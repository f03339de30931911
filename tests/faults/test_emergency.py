"""A death that leaves the trainer whole costs at most the step at hand: the trainer saves a
checkpoint before the run ends.
"""

import signal

import pytest

from llamarl.checkpoint.checkpointer import verify
from llamarl.checkpoint.parts import ranks_of
from tests.build.job import finished_job
from tests.launching import GROUPS, SMALL, ForkedJob, Job, untimed
from tests.scorers import write_scorer

pytestmark = pytest.mark.slow

ENDLESS = (*SMALL, "checkpoint.every=1000", "eval.every=0", "max_lag=2", "max_steps=100000")
QUICK = "heartbeat_timeout_s=4"
EXIT_FAILED = 1
ATTEMPTS = 5  # a rank is rarely stopped where the other does not wait for it


def kill_in_step_3(job, rank, number=signal.SIGKILL):
    job.until_rows(3)
    job.signal_rank(rank, number)


def check_whole(job, at_least=3):
    """What the last words left: a valid checkpoint of the last step that was trained,
    and no other.
    """
    assert verify(job.checkpoint) == []
    step = job.saved_step
    names = {path.name for path in job.checkpoint.parent.iterdir()}
    assert step >= at_least and names == {f"step_{step}", "latest"}
    assert job.consumed == step * GROUPS and job.part("controller")["ledger"]["step"] == step
    assert f"A checkpoint of step {step} was sealed" in job.output, job.output
    return step


def test_a_killed_generator_costs_no_step_that_was_trained(tmp_path):
    with Job(*ENDLESS, run_dir=tmp_path / "run", ranks=2) as job:
        kill_in_step_3(job, rank=1)
        assert job.wait() == EXIT_FAILED, job.output
        step = check_whole(job)
        assert "rank 1 (generator, reward)" in job.output, job.output
        assert ranks_of(job.checkpoint, "generator") == []
    again = (*ENDLESS, f"max_steps={step + 2}", "resume=auto")
    job = finished_job(*again, run_dir=tmp_path / "run", ranks=2)
    assert f"resumed from step_{step}" in job.output
    assert [row["step"] for row in job.rows] == list(range(1, step + 3)), "rows, each once"
    assert job.consumed == (step + 2) * GROUPS and job.saved_step == step + 2


def test_a_station_that_fails_beside_the_trainer_costs_no_step_either(tmp_path):
    """In one process: the reward fails for good once FAIL_AFTER completions are scored."""
    failing = (*ENDLESS, "reward.fn=tests.launching:fails_later")
    with ForkedJob(*failing, run_dir=tmp_path / "run", env={"FAIL_AFTER": "48"}) as job:
        assert job.wait() == EXIT_FAILED
        check_whole(job, at_least=1)
        assert "above reward.max_error_rate" in job.output


@pytest.mark.bitwise("a synchronous run that was restarted is the one that was not")
def test_torchrun_restarts_from_the_last_words_of_a_killed_generator(synchronous_run, tmp_path):
    slow = (*SMALL, "max_lag=0", "checkpoint.every=1000", "reward.fn=tests.launching:unhurried")
    with Job(*slow, run_dir=tmp_path / "run", ranks=2, torchrun=("--max-restarts=1",)) as job:
        kill_in_step_3(job, rank=1)  # row 0 is the evaluation before the first
        assert job.wait() == 0, job.output
        assert "resumed from step_" in job.output and "was sealed after that" in job.output
        assert untimed(job.rows) == untimed(synchronous_run.rows)


def test_a_silent_generator_costs_no_step_that_was_trained(tmp_path):
    with ForkedJob(*ENDLESS, QUICK, run_dir=tmp_path / "run", ranks=2) as job:
        kill_in_step_3(job, rank=1, number=signal.SIGSTOP)
        job.until(lambda: "was sealed after that" in job.output, "a checkpoint")
        check_whole(job)
        assert "rank 1 (generator, reward) has not been heard of" in job.output


THREE = ("placement.trainer=[0,1]", "placement.generator=[2]", "placement.reward=[2]")


def test_two_trainer_ranks_save_the_same_step_when_the_generator_dies(tmp_path):
    with ForkedJob(*ENDLESS, *THREE, run_dir=tmp_path / "run", ranks=3) as job:
        kill_in_step_3(job, rank=2)
        assert job.wait() == EXIT_FAILED, job.output
        check_whole(job)
        assert ranks_of(job.checkpoint, "trainer") == [0, 1]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_dead_trainer_rank_is_named_in_a_line_and_leaves_no_checkpoint(tmp_path, killed):
    with Job(*ENDLESS, *THREE, run_dir=tmp_path / "run", ranks=3) as job:
        kill_in_step_3(job, rank=killed)
        assert job.wait() == EXIT_FAILED, job.output
        assert "No checkpoint was made of the steps since the last one" in job.output, job.output
        ours = job.output[: job.output.index("ChildFailedError")]
        assert f"rank {killed} (trainer)" in ours and "controller.py" not in ours, job.output
        assert not list((tmp_path / "run").glob("checkpoints/step_*"))


@pytest.mark.parametrize("shared", ["scorer", "generator"])
def test_a_rank_that_hangs_in_a_collective_with_the_trainers_costs_no_step_either(tmp_path, shared):
    """Rank 0 trains, and stands with the stopped rank 1 in what only a timeout of a minute ends."""
    given = [*ENDLESS, QUICK, "timeout_s=60", "placement.trainer=[0]"]
    if shared == "scorer":
        write_scorer(tmp_path / "scorer")
        given += ["reward=model", f"reward.path={tmp_path / 'scorer'}", "reward.stream=true"]
        given += ["reward.piece_tokens=2", "generator.chunk_tokens=2", "max_new_tokens=12"]
        given += ["placement.generator=[1]", "placement.reward=[0,1]"]
    else:
        given += ["placement.generator=[0,1]", "placement.reward=[0]"]
        given += ["generator.tensor_parallel=2"]
    left = False
    for attempt in range(ATTEMPTS):
        run_dir = tmp_path / f"run{attempt}"
        with ForkedJob(*given, run_dir=run_dir, ranks=2) as job:
            kill_in_step_3(job, rank=1, number=signal.SIGSTOP)
            job.until(lambda: "was sealed after that" in job.output, "a checkpoint")
            check_whole(job)
            assert "has not been heard of" in job.output
            assert "is stuck" not in job.output and "No checkpoint" not in job.output
        left = "leaves a step of" in job.output
        if left:
            break
    assert left, "rank 1 was never stopped while rank 0 stood in a collective with it"
