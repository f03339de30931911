"""Replicas of the generator that share all ranks with the trainer: each rank is asked for by two
executors, and none may stand in one while another waits for it in the other.
"""

import pytest

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
    with ForkedJob(*SHARED, run_dir=tmp_path / "run", ranks=4) as job:
        assert job.wait() == 0, job.output
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
