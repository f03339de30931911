"""Replicas of the generator that share ranks with the trainer: each rank is asked for by two
executors, and none may stand in one while another waits for it in the other.
"""

import pytest

from tests.build.job import finished_job
from tests.launching import SMALL, STEPS, ForkedJob

pytestmark = pytest.mark.slow

# By rank 2 of four, which leads the second replica, an evaluation is made before all ranks save.
SHARED = ("max_lag=0", "placement.colocate=[trainer,generator]", "generator.tensor_parallel=2")
# Another rank than the trainer's leads the replica that it is in: rank 0 swaps the last version, or
# samples, with rank 1, and saves its own part only then.
LED_FROM_BESIDE = (
    "max_lag=1",
    "placement.trainer=[1]",
    "placement.generator=[0,1]",
    "generator.tensor_parallel=2",
    "eval.every=0",
)


@pytest.mark.parametrize("shared, ranks", [((*SHARED, "eval.every=1"), 4), (LED_FROM_BESIDE, 2)])
def test_a_run_ends_with_its_last_evaluation_and_checkpoint(tmp_path, shared, ranks):
    job = finished_job(*SMALL, *shared, run_dir=tmp_path / "run", ranks=ranks)
    assert job.saved_step == STEPS
    if shared != LED_FROM_BESIDE:
        assert [row["step"] for row in job.rows] == list(range(STEPS + 1))
        assert all(row["eval/reward"] is not None for row in job.rows)


@pytest.mark.parametrize("shared", [(*SHARED, "eval.every=1"), LED_FROM_BESIDE])
def test_a_run_ends_when_it_is_stopped_amid_completions(tmp_path, shared):
    given = (*SMALL, *shared, "max_steps=100000", "generator.chunk_tokens=1")
    with ForkedJob(*given, run_dir=tmp_path / "run", ranks=2) as job:
        job.until_rows(3)
        job.stop()
        assert job.wait() == 0, job.output
    assert job.saved_step == job.rows[-1]["step"]
