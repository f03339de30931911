"""Replicas of the generator that share ranks with the trainer: each rank is asked for by two
executors, and none may stand in one while another waits for it in the other.
"""

import pytest

from tests.build.job import finished_job
from tests.launching import SMALL, STEPS, ForkedJob

SHARED = (
    *SMALL,
    "eval.every=1",
    "max_lag=0",
    "placement.colocate=[trainer,generator]",
    "generator.tensor_parallel=2",
)


@pytest.mark.slow
def test_a_run_ends_with_its_last_evaluation(tmp_path):
    """Rank 2 leads the second replica: it evaluates with rank 3 before all four ranks save."""
    job = finished_job(*SHARED, run_dir=tmp_path / "run", ranks=4)
    assert [row["step"] for row in job.rows] == list(range(STEPS + 1))
    assert all(row["eval/reward"] is not None for row in job.rows)
    assert job.checkpoint.name == f"step_{STEPS}"


@pytest.mark.slow
def test_a_run_ends_when_it_is_stopped_amid_completions(tmp_path):
    given = (*SHARED, "max_steps=100000", "generator.chunk_tokens=1")
    with ForkedJob(*given, run_dir=tmp_path / "run", ranks=2) as job:
        job.until(lambda: len(job.rows) >= 3, "three rows")
        job.stop()
        assert job.wait() == 0, job.output
        assert job.checkpoint.name == f"step_{job.rows[-1]['step']}"


# Another rank than the trainer's leads the replica that it is in.
LED_FROM_BESIDE = (
    *SMALL,
    "max_lag=1",
    "placement.trainer=[1]",
    "placement.generator=[0,1]",
    "generator.tensor_parallel=2",
)


@pytest.mark.slow
def test_a_trainer_takes_part_in_its_replica_until_the_last_checkpoint_is_sealed(tmp_path):
    """Rank 0 swaps the last version, or samples, with rank 1, and saves its own part only then."""
    given = (*LED_FROM_BESIDE, "eval.every=0")
    job = finished_job(*given, run_dir=tmp_path / "run", ranks=2)
    assert job.checkpoint.name == f"step_{STEPS}"


@pytest.mark.slow
def test_and_so_it_does_after_a_stop(tmp_path):
    given = (*LED_FROM_BESIDE, "max_steps=100000", "generator.chunk_tokens=1", "eval.every=0")
    with ForkedJob(*given, run_dir=tmp_path / "run", ranks=2) as job:
        job.until(lambda: len(job.rows) >= 3, "three rows")
        job.stop()
        assert job.wait() == 0, job.output
        assert job.checkpoint.name == f"step_{job.rows[-1]['step']}"
