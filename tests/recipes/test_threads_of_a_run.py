"""A run whose trainer tries threads between its steps, and one that must not."""

import os

import pytest

from llamarl.native.threads import STEPS
from tests.launching import SMALL, ForkedJob

CORES = len(os.sched_getaffinity(0))
TRIED = STEPS + STEPS + 1  # steps: the first ones, a round of the first crew, and one of the next
LONG = (
    "trainer.skip_zero_advantage=false",  # every step has tokens, and so a time
    "eval.every=0",
    "checkpoint.every=0",
    f"max_steps={TRIED}",
)


def threads_of(tmp_path, *overrides) -> list[tuple[int, int]]:
    """Return the threads of every step, and the helpers."""
    with ForkedJob(*SMALL, *LONG, *overrides, run_dir=tmp_path / "run", ranks=2) as job:
        assert job.wait() == 0, job.output
    rows = [row for row in job.rows if row["step"] > 0]
    return [(row["trainer/threads"], row["trainer/threads_helping"]) for row in rows]


@pytest.mark.parametrize(("adapt", "counted"), [("true", CORES > 1), ("false", False)])
def test_a_run_says_what_a_generators_helper_took(tmp_path, adapt, counted):
    keys = ("threads=1", f"placement.adapt={adapt}")
    with ForkedJob(*SMALL, *keys, run_dir=tmp_path / "run", ranks=2) as job:
        assert job.wait() == 0, job.output
    assert any("generator/parts_helped" in row for row in job.rows) == counted


@pytest.mark.skipif(CORES < 2, reason="on one core there is nothing to try")
def test_a_trainer_changes_its_threads_within_a_run(tmp_path):
    own = CORES // 2
    found = threads_of(tmp_path)
    assert len(found) == TRIED
    first, second = (own, 0), (CORES, 0)
    if own == 1:  # a rank of one thread has a helper, and is tried without it
        first, second = (1, 1), (1, 0)
    assert found == [first] * (STEPS + STEPS) + [second]


@pytest.mark.parametrize(
    ("keys", "helping"),
    [
        (("threads=1",), int(CORES > 1)),
        (("threads=1", "placement.adapt=false"), 0),
        (("max_lag=0",), 0),
        (("threads=1", "placement.trainer=[0,1]"), 0),
    ],
)
def test_threads_that_are_given_or_decide_bits_stay(tmp_path, keys, helping):
    assert threads_of(tmp_path, *keys) == [(1, helping)] * TRIED
