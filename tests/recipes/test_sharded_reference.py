"""A reference over ranks of its own, as a user places it: whole or sharded the run is the same to
the bit, and split the same but for rounding, whatever version the reference is of; resumed, and
killed.
"""

import shutil

import pytest

from tests.build.job import finished_job
from tests.launching import SMALL, ForkedJob, untimed

pytestmark = pytest.mark.slow

EXIT_FAILED = 1
SYNCHRONOUS = (*SMALL, "loss.kl_coef=0.1", "max_lag=0", "lr=1e-3", "eval.every=0")
PLACED = ("placement.trainer=[0,1]", "placement.generator=[0]", "placement.reward=[1]")
WHOLE = "placement.reference=[2]"
SHARDED = "placement.reference=[2,3]"
COPIES = (SHARDED, "reference.replicate=2")
SPLIT = (SHARDED, "reference.tensor_parallel=2")
FROZEN = ("reference=frozen",)
RESET = ("reference=reset", "reference.reset_every=1")
END = 4
ROUNDING = 1e-9  # nats: the KL of a policy to itself is at most so much
LEAST_KL = 1e-3  # after a step at this learning rate


def run_to(end, *overrides, run_dir):
    """The rows of a run to step `end`, which has ended well."""
    given = (*SYNCHRONOUS, *PLACED, *overrides, f"max_steps={end}")
    return untimed(finished_job(*given, run_dir=run_dir, ranks=4).rows)


@pytest.fixture(scope="module")
def reset_run(tmp_path_factory):
    """Rows of a whole reference that is reset at every step."""
    return run_to(END, *RESET, WHOLE, run_dir=tmp_path_factory.mktemp("reset") / "run")


@pytest.fixture(scope="module")
def interrupted_run(tmp_path_factory):
    """The directory of a run that shards such a reference and has ended after step 2."""
    run_dir = tmp_path_factory.mktemp("interrupted") / "run"
    run_to(2, *RESET, SHARDED, "checkpoint.every=2", run_dir=run_dir)
    return run_dir


def sharded_runs(kind, folder):
    """Rows by placement, of whom none splits a layer."""
    places = {"sharded": (SHARDED,), "copies": COPIES}
    return [run_to(END, *kind, *placed, run_dir=folder / k) for k, placed in places.items()]


@pytest.fixture(scope="module")
def frozen_run(tmp_path_factory):
    """Rows of a whole frozen reference."""
    return run_to(END, *FROZEN, WHOLE, run_dir=tmp_path_factory.mktemp("frozen") / "run")


@pytest.fixture(scope="module")
def frozen_runs(tmp_path_factory):
    return sharded_runs(FROZEN, tmp_path_factory.mktemp("frozen_shards"))


@pytest.fixture(scope="module")
def reset_runs(tmp_path_factory):
    return sharded_runs(RESET, tmp_path_factory.mktemp("reset_shards"))


def test_a_sharded_frozen_reference_says_what_a_whole_one_does(frozen_run, frozen_runs):
    wanted = [row["kl/ref"] for row in frozen_run]
    assert wanted[0] < ROUNDING < LEAST_KL < wanted[-1]
    for rows in frozen_runs:
        found = [row["kl/ref"] for row in rows]
        assert found[:2] == pytest.approx(wanted[:2], rel=1e-3, abs=ROUNDING)
        # Of a policy that rounding has moved.
        assert found[2:] == pytest.approx(wanted[2:], rel=0.2)


def test_a_sharded_reset_reference_is_the_policy(reset_run, reset_runs):
    """Reset at every step, it differs from the policy by rounding, if at all."""
    for rows in (reset_run, *reset_runs):
        assert max(row["kl/ref"] for row in rows) < ROUNDING


@pytest.mark.bitwise("a reference sharded by rows alone says what the whole one says")
def test_a_sharded_reference_trains_the_bits_that_a_whole_one_does(
    frozen_run, frozen_runs, reset_run, reset_runs
):
    assert all(rows == frozen_run for rows in frozen_runs)
    assert all(rows == reset_run for rows in reset_runs)


def test_a_split_reference_takes_versions_and_is_resumed(tmp_path):
    """Reset after step 2 and resumed after step 3, split and whole: what it says of the policy that
    it is a copy of is nothing, of one that went on the same as a whole one says.
    """
    kind = ("reference=reset", "reference.reset_every=2")
    whole = run_to(END, *kind, WHOLE, run_dir=tmp_path / "whole")
    run_dir = tmp_path / "split"
    kept = "checkpoint.every=3"
    first = run_to(3, *kind, *SPLIT, kept, run_dir=run_dir)
    shutil.copytree(run_dir, tmp_path / "moved")
    again = run_to(END, *kind, *SPLIT, kept, "resume=auto", run_dir=run_dir)
    assert [row["kl/ref"] for row in again[:3]] == [row["kl/ref"] for row in first]
    moved = run_to(END, *kind, WHOLE, kept, "resume=auto", run_dir=tmp_path / "moved")
    wanted = [row["kl/ref"] for row in whole]
    assert max(wanted[0], wanted[2]) < ROUNDING < LEAST_KL < min(wanted[1], wanted[3])
    for rows in (again, moved):
        found = [row["kl/ref"] for row in rows]
        assert found[:3] == pytest.approx(wanted[:3], rel=1e-3, abs=ROUNDING)
        # Of a policy that rounding has moved.
        assert found[3] == pytest.approx(wanted[3], rel=0.2)


@pytest.mark.parametrize("kind, killed", [("frozen", 2), ("reset", 3)])
def test_a_killed_rank_of_a_reference_is_named_and_the_run_ends(tmp_path, kind, killed):
    """Rank 2 leads it, and rank 3 follows. A frozen one is where the model is; what was taken from
    the policy is lost with its rank.
    """
    endless = ("max_steps=100000", "checkpoint.every=1000", "eval.every=0")
    placed = ("placement.trainer=[0]", "placement.generator=[1]", "placement.reward=[1]", SHARDED)
    given = (*SMALL, *endless, *placed, f"reference={kind}", "loss.kl_coef=0.1")
    with ForkedJob(*given, run_dir=tmp_path / "run", ranks=4) as job:
        job.until_rows(2)
        job.signal_rank(killed)
        assert job.wait() == EXIT_FAILED, job.output
        assert f"rank {killed} (reference)" in job.output, job.output
        assert ("was sealed after that" in job.output) == (kind == "frozen"), job.output


@pytest.mark.bitwise("a synchronous run that was resumed is the one that was not")
@pytest.mark.parametrize("after", [(WHOLE,), COPIES])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    reset_run, interrupted_run, tmp_path, after
):
    """On as many ranks as it was saved on, and on others."""
    run_dir = tmp_path / "run"
    shutil.copytree(interrupted_run, run_dir)
    assert run_to(END, *RESET, *after, "resume=auto", run_dir=run_dir) == reset_run
