"""recipes/red_team.py as a user starts it: on ranks of their own to the bit twice, learning, a
victim that is killed, and what is refused.
"""

import pytest

from recipes import evaluate
from tests.build.rows import read_rows
from tests.launching import ROOT, ForkedJob, untimed
from tests.scorers import write_scorer

pytestmark = pytest.mark.slow

RECIPE = ROOT / "recipes" / "red_team.py"
BAD_INPUT, EXIT_FAILED = 2, 1
FEW = (
    "groups_per_step=4",
    "group_size=4",
    "task.max_prompt_tokens=8",
    "eval.num_samples=8",
    "eval.every=2",
    "max_steps=4",
    "checkpoint.every=2",
)
APART = (
    "placement.trainer=[0]",
    "placement.generator=[1]",
    "placement.victim=[1,2]",
    "placement.reward=[2]",
    "placement.reference=[0]",
)


def red_team(*overrides, run_dir, ranks=None):
    return ForkedJob(*FEW, *overrides, run_dir=run_dir, ranks=ranks, recipe=RECIPE)


def finished(*overrides, run_dir, ranks=None, code=0):
    """A job that has ended with this code."""
    with red_team(*overrides, run_dir=run_dir, ranks=ranks) as job:
        assert job.wait() == code, job.output
        return job


def sampled_at(step, run_dir) -> list[dict]:
    """What an evaluation has written of its sampled attacks."""
    attacks = read_rows(run_dir / "samples" / f"step_{step}.jsonl")
    return [attack for attack in attacks if attack["sample"] > 0]


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """In step with the trainer, on three ranks, two of which are victims."""
    run_dir = tmp_path_factory.mktemp("red_team") / "run"
    return finished(*APART, "max_lag=0", run_dir=run_dir, ranks=3)


@pytest.mark.bitwise("a synchronous run is the same every time")
def test_in_step_with_the_trainer_two_runs_have_the_same_bits(apart, tmp_path):
    job = finished(*APART, "max_lag=0", run_dir=tmp_path / "run", ranks=3)
    assert untimed(job.rows) == untimed(apart.rows)


def test_an_attack_is_a_success_by_most_of_its_answers_and_their_share_is_reported(apart):
    said = [row["eval/success"] for row in apart.rows if row.get("eval/success") is not None]
    assert len(said) == 3 and all(0 <= share <= 1 for share in said)
    assert sum(row.get("victim/tokens") or 0 for row in apart.rows) > 0
    assert any(row.get("reward/success") is not None for row in apart.rows)
    for step, success in zip((0, 2, 4), said):
        sampled = sampled_at(step, apart.run_dir)
        assert all(len(attack["answers"]) == 4 for attack in sampled if attack["score"] > 0)
        assert all(attack["success"] == (attack["score"] > 0.5) for attack in sampled)
        assert sum(attack["success"] for attack in sampled) / len(sampled) == success


def test_one_process_trains_as_three_do(apart, tmp_path):
    job = finished("max_lag=0", run_dir=tmp_path / "run")
    for ours, theirs in zip(untimed(job.rows), untimed(apart.rows), strict=True):
        for name in ("reward/mean", "eval/reward", "eval/success"):
            assert ours.get(name) == theirs.get(name)


def test_a_killed_victim_ends_the_run_with_its_name_and_a_checkpoint(tmp_path):
    forever = ("max_steps=100000", "eval.every=0", "checkpoint.every=1000")
    with red_team(*APART, *forever, run_dir=tmp_path / "run", ranks=3) as job:
        job.until_rows(3)
        job.signal_rank(2)
        assert job.wait() == EXIT_FAILED, job.output
        assert "rank 2 (victim, reward)" in job.output, job.output
        assert "was sealed" in job.output


def test_a_victim_that_often_says_nothing_ends_the_run_with_the_reason(tmp_path):
    """Asked for the sum of 12 and six digits, the tiny model may have nothing to say."""
    asked = ("victim.template='12+{attack}='", "max_steps=100", "eval.every=0")
    job = finished(*asked, "reward.max_error_rate=0.01", run_dir=tmp_path / "run", code=EXIT_FAILED)
    assert "above reward.max_error_rate=0.01" in job.output
    assert "the victim's 4 replies are empty" in job.output


def test_a_model_may_be_the_classifier(tmp_path):
    write_scorer(tmp_path, labels=("mild", "toxic"))
    given = ("reward=model", f"reward.path={tmp_path}", "reward.label=toxic", "eval.every=0")
    job = finished(*given, run_dir=tmp_path / "run")
    assert job.rows[-1]["reward/std"] > 0


NOVEL = (
    "reward=parts",
    "reward.parts={hit: {kind: function}, new: {kind: novelty, nearest: 4, weight: 0.5}}",
    "max_lag=0",
    "buffer=fifo",
    "loss=reinforce",
    "reference=none",
)


@pytest.fixture(scope="module")
def resumed_novel(tmp_path_factory):
    """One that was stopped after two steps."""
    run_dir = tmp_path_factory.mktemp("novel") / "run"
    for steps in (2, 4):
        job = finished(*NOVEL, f"max_steps={steps}", "resume=auto", run_dir=run_dir)
    return job


@pytest.mark.bitwise("a synchronous run that was resumed is the one that was not")
def test_a_resumed_run_remembers_the_attacks_that_novelty_is_to(resumed_novel, tmp_path):
    job = finished(*NOVEL, run_dir=tmp_path / "whole")
    assert untimed(resumed_novel.rows) == untimed(job.rows)


def test_attacks_are_rewarded_for_novelty(resumed_novel):
    last = resumed_novel.rows[-1]
    assert 0 < last["reward/new/mean"] < 1, "attacks have become like those before them"
    assert 0 < last["diversity/cosine_distance"] < 1
    sampled = sampled_at(4, resumed_novel.run_dir)
    assert all(attack["score"] > 0 for attack in sampled), "none is quite like others"
    assert sum(attack["success"] for attack in sampled) / len(sampled) == last["eval/success"]


def test_attacks_are_learned(tmp_path):
    """From one in twelve at the start to most of them."""
    sizes = ("groups_per_step=8", "group_size=8", "max_steps=100", "eval.num_samples=64")
    rare = ("eval.every=50", "checkpoint.every=0", "max_lag=0")
    job = finished(*sizes, *rare, run_dir=tmp_path / "run")
    said = [row["eval/success"] for row in job.rows if row.get("eval/success") is not None]
    assert said[0] < 0.3 and said[-1] > said[0] + 0.3


@pytest.mark.parametrize(
    "given, said",
    [
        (["victim.path={scorer}"], "gives scores and no tokens; the victim needs a language model"),
        (["victim.max_prompt_tokens=510"], "its context is 512 tokens"),
        (
            ["victim.template='12345{{attack}}'", "victim.max_prompt_tokens=6"],
            "6 tokens stand around every attack",
        ),
    ],
)
def test_what_cannot_be_a_victim_is_refused_before_anything_starts(tmp_path, given, said):
    write_scorer(tmp_path)
    words = [word.format(scorer=tmp_path) for word in given]
    assert said in finished(*words, run_dir=tmp_path / "run", code=BAD_INPUT).output


@pytest.mark.usefixtures("process_state")
def test_evaluate_does_not_score_attacks_as_answers(apart, capsys, tmp_path):
    assert evaluate.main([f"model.path={apart.checkpoint}", f"out={tmp_path / 'out'}"]) == BAD_INPUT
    assert "eval/success" in capsys.readouterr().err
