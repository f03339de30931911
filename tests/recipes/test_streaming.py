"""reward.stream=true as a user starts it: the same rewards, the same bits, ranks that share the
scorer, and a rank that is killed.
"""

import json
import os
import signal

import pytest

from tests.build.job import finished_job
from tests.launching import SMALL, ForkedJob, untimed
from tests.scorers import SCORES, write_scorer

EXIT_FAILED = 1
STREAMED = ("reward.stream=true", "reward.piece_tokens=2", "generator.chunk_tokens=2")
# Else answers are of three tokens.
LONG = ("max_new_tokens=12", "generator.min_new_tokens=8")


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    path = tmp_path_factory.mktemp("scorer")
    write_scorer(path)
    return ("reward=model", f"reward.path={path}", *LONG, "max_lag=0")


@pytest.fixture(scope="module")
def run(scorer, tmp_path_factory):
    """A synchronous one on two ranks, of which one generates and rewards."""
    run_dir = tmp_path_factory.mktemp("streaming") / "run"
    return finished_job(*SMALL, *scorer, *STREAMED, run_dir=run_dir, ranks=2)


def rewards_of(job, steps):
    return [row["reward/mean"] for row in job.rows[: steps + 1] if row.get("reward/mean")]


@pytest.mark.slow
def test_completions_are_read_while_they_are_sampled(run):
    told = [row for row in run.rows if row.get("reward/prefilled_early") is not None]
    assert told and run.rows[-1]["reward/error_rate"] == 0
    assert max(row["reward/prefilled_early"] for row in told) > 0
    assert all(row["reward/tail_s"] >= 0 and row["reward/piece_tokens"] == 2 for row in told)
    (trace,) = run.run_dir.glob("trace.rank1.json")
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"step", "read ahead", "read to the end"} <= names


@pytest.mark.bitwise("a synchronous run is the same every time")
@pytest.mark.slow
def test_synchronous_runs_that_stream_are_alike_to_the_bit(run, scorer, tmp_path):
    job = finished_job(*SMALL, *scorer, *STREAMED, run_dir=tmp_path / "run", ranks=2)
    assert untimed(job.rows) == untimed(run.rows)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["reward.tensor_parallel=2", "reward.tensor_parallel=1"])
def test_rewards_are_those_without_streaming_however_ranks_share_it(run, scorer, tmp_path, split):
    placed = ("placement.trainer=[0]", "placement.generator=[1]", "placement.reward=[1,2]")
    given = (*SMALL, *scorer, *placed, split, "max_steps=2")
    found = []
    for stream in ((), STREAMED):
        job = finished_job(*given, *stream, run_dir=tmp_path / str(len(stream)), ranks=3)
        found.append(rewards_of(job, 1))
    # Later steps are of policies that rounding has moved.
    for one in (*found, rewards_of(run, 1)):
        assert one[:1] == pytest.approx(found[0][:1], abs=SCORES)


@pytest.mark.slow
def test_a_killed_rank_that_reads_ahead_ends_the_run_which_goes_on(scorer, tmp_path):
    given = (
        *SMALL,
        *scorer[:-1],
        *STREAMED,
        "placement.trainer=[0]",
        "placement.generator=[0]",
        "placement.reward=[1,2]",
        "on_deadline=truncate",
        "eval.every=0",
    )
    run_dir = tmp_path / "run"
    with ForkedJob(*given, "max_steps=100000", run_dir=run_dir, ranks=3) as job:
        job.until(lambda: len(job.rows) >= 3, "three steps")
        os.kill(job.rank_pids()[2], signal.SIGKILL)
        assert job.wait() == EXIT_FAILED, job.output
        assert "rank 2 (reward)" in job.output, job.output
        step = int(job.checkpoint.name.removeprefix("step_"))
    more = f"max_steps={step + 2}"
    job = finished_job(*given, more, "resume=auto", run_dir=run_dir, ranks=3)
    assert [row["step"] for row in job.rows] == list(range(1, step + 3))


@pytest.mark.slow
def test_a_run_that_did_not_stream_goes_on_with_a_search_of_pieces(scorer, tmp_path):
    """Two generators; the checkpoint it goes on from knows nothing of the reward, the next does."""
    placed = ("placement.trainer=[0]", "placement.generator=[0,1]", "placement.reward=[1]")
    given = (*SMALL, *LONG, *placed)
    run_dir = tmp_path / "run"
    job = finished_job(*given, "max_steps=2", run_dir=run_dir, ranks=2)
    assert not list(job.checkpoint.glob("reward.*"))
    given += scorer[:2]
    searches = ("reward.stream=true", "reward.piece_tokens=auto", "resume=auto")
    searches += ("resume_with_other=[reward]",)
    timed = []
    for steps in (6, 7):
        job = finished_job(*given, *searches, f"max_steps={steps}", run_dir=run_dir, ranks=2)
        assert job.rows[-1]["step"] == steps and job.rows[-1]["reward/error_rate"] == 0
        (part,) = job.checkpoint.glob("reward.rank0.json")
        timed.append(json.loads(part.read_text())["model/chunk_search"]["num_steps"])
    # The first step of a run is not timed: the last one has gone on counting.
    assert timed[1] >= timed[0] >= 1
