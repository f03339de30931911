"""A run whose trainer tries threads between its steps, and one that must not."""

import os

import pytest

from llamarl.machine.threads import STEPS
from tests.launching import SMALL, ForkedJob

CORES = len(os.sched_getaffinity(0))
TRIED = STEPS + STEPS + 1  # steps: the first ones, a round of the first number, and one of the next
LONG = (
    "trainer.skip_zero_advantage=false",  # every step has tokens, and so a time
    "eval.every=0",
    "checkpoint.every=0",
    f"max_steps={TRIED}",
)


def threads_of(tmp_path, *overrides) -> list[int]:
    """Return the threads of every step."""
    with ForkedJob(*SMALL, *LONG, *overrides, run_dir=tmp_path / "run", ranks=2) as job:
        assert job.wait() == 0, job.output
    return [row["trainer/threads"] for row in job.rows if row["step"] > 0]


@pytest.mark.skipif(CORES < 2, reason="on one core there is nothing to try")
def test_a_trainer_changes_its_threads_within_a_run(tmp_path):
    own = CORES // 2
    assert threads_of(tmp_path) == [own] * (STEPS + STEPS) + [CORES]


@pytest.mark.parametrize("key", ["threads=1", "max_lag=0"])
def test_threads_that_are_given_or_decide_bits_stay(tmp_path, key):
    assert threads_of(tmp_path, key) == [1] * TRIED


@pytest.mark.skipif(CORES < 2, reason="on one core there is nothing to try")
def test_a_trainer_that_may_not_adapt_keeps_its_threads(tmp_path):
    assert threads_of(tmp_path, "placement.adapt=false") == [CORES // 2] * TRIED
