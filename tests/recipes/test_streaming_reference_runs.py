"""reference.stream=true as a user starts it: what is trained is the same but for rounding, the same
bits each time, and on ranks that share the model; resumed, and killed.
"""

import json
import os
import signal

import pytest

from tests.build.job import finished_job
from tests.launching import SMALL, ForkedJob, untimed

EXIT_FAILED = 1
GIVEN = (*SMALL, "reference=frozen", "loss.kl_coef=0.1", "max_lag=0", "lr=1e-3", "eval.every=0")
STREAMED = ("reference.stream=true", "reference.piece_tokens=3", "generator.chunk_tokens=2")
TWO = ("placement.trainer=[0]", "placement.generator=[1]", "placement.reward=[1]")


def run(*overrides, run_dir, ranks=2):
    job = finished_job(*GIVEN, *TWO, *overrides, run_dir=run_dir, ranks=ranks)
    return job


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run whose reference scores whole groups."""
    return untimed(run(STREAMED[-1], run_dir=tmp_path_factory.mktemp("whole") / "run").rows)


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("streamed") / "run"
    return run(*STREAMED, run_dir=run_dir)


def assert_close(rows, wanted):
    assert max(row["kl/ref"] for row in wanted) > 1e-4
    assert len(rows) == len(wanted)
    # Of the start, and of one update; further ones are of policies that rounding has moved.
    for row, other in zip(rows[:2], wanted):
        assert row["kl/ref"] == pytest.approx(other["kl/ref"], rel=1e-3, abs=1e-6)
    assert rows[0]["reward/mean"] == pytest.approx(wanted[0]["reward/mean"])
    assert rows[-1]["kl/ref"] == pytest.approx(wanted[-1]["kl/ref"], rel=0.2)


@pytest.mark.slow
def test_completions_are_read_while_they_are_sampled_and_train_the_same(streamed, whole):
    told = [row for row in streamed.rows if row.get("reference/prefilled_early") is not None]
    assert max(row["reference/prefilled_early"] for row in told) > 0.5
    assert all(row["reference/tail_s"] >= 0 for row in told)
    (trace,) = streamed.run_dir.glob("trace.rank1.json")
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"read ahead", "read to the end"} <= names
    assert_close(untimed(streamed.rows), whole)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["reference.tensor_parallel=2", "reference.tensor_parallel=1"])
def test_ranks_that_share_the_model_say_the_same(whole, tmp_path, split):
    placed = ("placement.reference=[1,2]", split)
    assert_close(untimed(run(*STREAMED, *placed, run_dir=tmp_path / "run", ranks=3).rows), whole)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("resumed") / "run"
    run(*STREAMED, "max_steps=2", run_dir=run_dir)
    return run(*STREAMED, "resume=auto", run_dir=run_dir)


@pytest.mark.slow
def test_a_resumed_run_reads_what_was_not_told_again(resumed, whole):
    assert_close(untimed(resumed.rows), whole)


@pytest.mark.bitwise("a synchronous run that was resumed is the one that was not")
@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(resumed, streamed):
    assert untimed(resumed.rows) == untimed(streamed.rows)


@pytest.mark.slow
def test_a_killed_rank_that_reads_ahead_is_named_and_the_run_goes_on(tmp_path):
    """With lag, on two ranks of which the second follows."""
    given = (*SMALL, "reference=frozen", "loss.kl_coef=0.1", "eval.every=0", *STREAMED, *TWO)
    given += ("placement.reference=[2,3]",)
    run_dir = tmp_path / "run"
    with ForkedJob(*given, "max_steps=100000", run_dir=run_dir, ranks=4) as job:
        job.until(
            lambda: any(row.get("reference/prefilled_early") for row in job.rows[3:]),
            "steps of what was read before",
        )
        os.kill(job.rank_pids()[3], signal.SIGKILL)
        assert job.wait() == EXIT_FAILED, job.output
        assert "rank 3 (reference)" in job.output, job.output
        step = int(job.checkpoint.name.removeprefix("step_"))
    job = finished_job(*given, f"max_steps={step + 2}", "resume=auto", run_dir=run_dir, ranks=4)
    assert [row["step"] for row in job.rows] == list(range(1, step + 3))
