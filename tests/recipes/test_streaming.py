"""reward.stream=true and reference.stream=true as a user starts them: the same rewards and the same
training but for rounding, the same bits each time, ranks that share the model, and a rank that is
killed.
"""

import json

import pytest

from tests.build.job import finished_job
from tests.launching import SMALL, ForkedJob, untimed
from tests.scorers import SCORES, write_scorer

pytestmark = pytest.mark.slow

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


def test_completions_are_read_while_they_are_sampled(run):
    told = [row for row in run.rows if row.get("reward/prefilled_early") is not None]
    assert told and run.rows[-1]["reward/error_rate"] == 0
    assert max(row["reward/prefilled_early"] for row in told) > 0
    assert all(row["reward/tail_s"] >= 0 and row["reward/piece_tokens"] == 2 for row in told)
    (trace,) = run.run_dir.glob("trace.rank1.json")
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"step", "read ahead", "read to the end"} <= names


@pytest.mark.bitwise("a synchronous run is the same every time")
def test_synchronous_runs_that_stream_are_alike_to_the_bit(run, scorer, tmp_path):
    job = finished_job(*SMALL, *scorer, *STREAMED, run_dir=tmp_path / "run", ranks=2)
    assert untimed(job.rows) == untimed(run.rows)


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


def test_a_killed_rank_that_reads_ahead_ends_the_run_which_goes_on(scorer, tmp_path):
    placed = ("placement.trainer=[0]", "placement.generator=[0]", "placement.reward=[1,2]")
    given = (*SMALL, *scorer[:-1], *STREAMED, *placed, "on_deadline=truncate", "eval.every=0")
    run_dir = tmp_path / "run"
    with ForkedJob(*given, "max_steps=100000", run_dir=run_dir, ranks=3) as job:
        job.until_rows(3)
        job.signal_rank(2)
        assert job.wait() == EXIT_FAILED, job.output
        assert "rank 2 (reward)" in job.output, job.output
    step = job.saved_step
    more = f"max_steps={step + 2}"
    job = finished_job(*given, more, "resume=auto", run_dir=run_dir, ranks=3)
    assert [row["step"] for row in job.rows] == list(range(1, step + 3))


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
        timed.append(job.part("reward")["model/chunk_search"]["num_steps"])
    # The first step of a run is not timed: the last one has gone on counting.
    assert timed[1] >= timed[0] >= 1


# --- a reference ---

GIVEN = (*SMALL, "reference=frozen", "loss.kl_coef=0.1", "max_lag=0", "lr=1e-3", "eval.every=0")
READ_AHEAD = ("reference.stream=true", "reference.piece_tokens=3", "generator.chunk_tokens=2")
TWO = ("placement.trainer=[0]", "placement.generator=[1]", "placement.reward=[1]")


def run_of(*overrides, run_dir, ranks=2):
    return finished_job(*GIVEN, *TWO, *overrides, run_dir=run_dir, ranks=ranks)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run whose reference scores whole groups."""
    return untimed(run_of(READ_AHEAD[-1], run_dir=tmp_path_factory.mktemp("whole") / "run").rows)


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    return run_of(*READ_AHEAD, run_dir=tmp_path_factory.mktemp("streamed") / "run")


def assert_close(rows, wanted):
    assert max(row["kl/ref"] for row in wanted) > 1e-4
    assert len(rows) == len(wanted)
    # Of the start, and of one update; further ones are of policies that rounding has moved.
    for row, other in zip(rows[:2], wanted):
        assert row["kl/ref"] == pytest.approx(other["kl/ref"], rel=1e-3, abs=1e-6)
    assert rows[0]["reward/mean"] == pytest.approx(wanted[0]["reward/mean"])
    assert rows[-1]["kl/ref"] == pytest.approx(wanted[-1]["kl/ref"], rel=0.2)


def test_a_reference_reads_completions_while_they_are_sampled_and_trains_the_same(streamed, whole):
    told = [row for row in streamed.rows if row.get("reference/prefilled_early") is not None]
    assert max(row["reference/prefilled_early"] for row in told) > 0.5
    assert all(row["reference/tail_s"] >= 0 for row in told)
    (trace,) = streamed.run_dir.glob("trace.rank1.json")
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"read ahead", "read to the end"} <= names
    assert_close(untimed(streamed.rows), whole)


@pytest.mark.parametrize("split", ["reference.tensor_parallel=2", "reference.tensor_parallel=1"])
def test_ranks_that_share_the_reference_say_the_same(whole, tmp_path, split):
    placed = ("placement.reference=[1,2]", split)
    job = run_of(*READ_AHEAD, *placed, run_dir=tmp_path / "run", ranks=3)
    assert_close(untimed(job.rows), whole)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("resumed") / "run"
    run_of(*READ_AHEAD, "max_steps=2", run_dir=run_dir)
    return run_of(*READ_AHEAD, "resume=auto", run_dir=run_dir)


def test_a_resumed_run_reads_what_was_not_told_again(resumed, whole):
    assert_close(untimed(resumed.rows), whole)


@pytest.mark.bitwise("a synchronous run that was resumed is the one that was not")
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(resumed, streamed):
    assert untimed(resumed.rows) == untimed(streamed.rows)


def test_a_killed_rank_of_a_reference_that_reads_ahead_is_named_and_the_run_goes_on(tmp_path):
    """With lag, on two ranks of which the second follows."""
    given = (*SMALL, "reference=frozen", "loss.kl_coef=0.1", "eval.every=0", *READ_AHEAD, *TWO)
    given += ("placement.reference=[2,3]",)
    run_dir = tmp_path / "run"
    with ForkedJob(*given, "max_steps=100000", run_dir=run_dir, ranks=4) as job:
        early = "reference/prefilled_early"
        job.until(lambda: any(row.get(early) for row in job.rows[3:]), "steps of what was read")
        job.signal_rank(3)
        assert job.wait() == EXIT_FAILED, job.output
        assert "rank 3 (reference)" in job.output, job.output
    step = job.saved_step
    job = finished_job(*given, f"max_steps={step + 2}", "resume=auto", run_dir=run_dir, ranks=4)
    assert [row["step"] for row in job.rows] == list(range(1, step + 3))
