"""reward=model as a user starts it: on two ranks, on ranks that share the scorer, killed and gone
on with, and judged afterwards.
"""

import pytest

from recipes import evaluate
from tests.build.job import finished_job
from tests.launching import SMALL, ForkedJob, untimed
from tests.random_models import swap_tokens
from tests.scorers import SCORES, spoil_head, write_scorer

pytestmark = pytest.mark.slow

EXIT_FAILED = 1


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    path = tmp_path_factory.mktemp("scorer")
    write_scorer(path)
    return ("reward=model", f"reward.path={path}")


@pytest.fixture(scope="module")
def run(scorer, tmp_path_factory):
    """A synchronous one on two ranks."""
    run_dir = tmp_path_factory.mktemp("model_reward") / "run"
    return finished_job(*SMALL, *scorer, "max_lag=0", run_dir=run_dir, ranks=2)


def test_a_policy_is_trained_against_a_model_on_two_ranks(run):
    last = run.rows[-1]
    assert last["reward/error_rate"] == 0 and last["eval/errors"] == 0
    for row in run.rows[1:]:
        assert row["reward/model/mean"] == row["reward/mean"]
    # In the row that they come in time for, and so of some of its completions.
    told = [row for row in run.rows if row.get("reward/model/tokens")]
    for row in told:
        assert row["reward/model/seconds"] > 0
    assert told


@pytest.mark.usefixtures("process_state")
def test_evaluate_says_what_the_run_said(run, capsys, tmp_path):
    out = tmp_path / "answers.jsonl"
    assert evaluate.main([f"model.path={run.checkpoint}", f"out={out}", "threads=1"]) == 0
    assert f"reward {run.rows[-1]['eval/reward']:.4g} of 20" in capsys.readouterr().out


@pytest.mark.parametrize("split", ["reward.tensor_parallel=2", "reward.tensor_parallel=1"])
def test_ranks_that_share_the_scorer_reward_alike(run, scorer, tmp_path, split):
    placed = ("placement.trainer=[0]", "placement.generator=[1]", "placement.reward=[1,2]")
    given = (*SMALL, *scorer, *placed, split, "max_lag=0")
    job = finished_job(*given, run_dir=tmp_path / "run", ranks=3)
    for one, other in zip(job.rows[:2], run.rows[:2]):
        for name in other.keys() & {"eval/reward", "reward/mean"}:
            if other[name] is not None:
                assert one[name] == pytest.approx(other[name], abs=SCORES)


def test_scores_that_are_not_finite_end_the_run(tmp_path):
    write_scorer(tmp_path)
    spoil_head(tmp_path)
    given = (*SMALL, "reward=model", f"reward.path={tmp_path}", "max_steps=50")
    with ForkedJob(*given, run_dir=tmp_path / "run") as job:
        assert job.wait() == EXIT_FAILED, job.output
    assert "above reward.max_error_rate=0.1" in job.output
    assert "the score is nan" in job.output and "Traceback" not in job.output


def test_a_scorer_of_another_vocabulary_reads_the_text(tmp_path):
    write_scorer(tmp_path)
    swap_tokens(tmp_path)
    given = ("reward=model", f"reward.path={tmp_path}", "max_steps=1")
    job = finished_job(*SMALL, *given, run_dir=tmp_path / "run")
    assert "has another vocabulary than the policy: it reads completions anew" in job.output
    assert job.rows[-1]["reward/error_rate"] == 0


@pytest.mark.bitwise("offloading changes no number")
def test_executors_that_take_turns_train_the_same(scorer, tmp_path):
    parts = (
        "reward=parts",
        f"reward.parts={{rm: {{kind: model, path: {scorer[1].split('=')[1]}}}, "
        "exact: {kind: function, weight: 0.5}}",
        "max_lag=0",
        "placement.colocate=[trainer,generator,reward]",
    )
    found = []
    for offload in ("true", "false"):
        run_dir = tmp_path / offload
        job = finished_job(*SMALL, *parts, f"offload={offload}", run_dir=run_dir, ranks=2)
        found.append(untimed(job.rows))
    assert found[0] == found[1]


def test_a_killed_rank_of_a_scorer_costs_no_step_that_was_trained(scorer, tmp_path):
    """Rank 1 leads the scorer, and rank 2 follows."""
    placed = ("placement.trainer=[0]", "placement.generator=[0]", "placement.reward=[1,2]")
    given = (*SMALL, *scorer, *placed, "checkpoint.every=1000", "eval.every=0")
    run_dir = tmp_path / "run"
    with ForkedJob(*given, "max_steps=100000", run_dir=run_dir, ranks=3) as job:
        job.until_rows(3)
        job.signal_rank(2)
        assert job.wait() == EXIT_FAILED, job.output
        assert "rank 2 (reward)" in job.output, job.output
        assert "was sealed after that" in job.output, job.output
    step = job.saved_step
    assert step >= 3
    more = f"max_steps={step + 2}"
    job = finished_job(*given, more, "resume=auto", run_dir=run_dir, ranks=3)
    assert [row["step"] for row in job.rows] == list(range(1, step + 3))
