"""eval.sets as a user starts them: each set has a curve of its own, by the reward of its own kind,
through a stop, a resume and recipes/evaluate.py.
"""

import json
import shutil
from contextlib import redirect_stdout
from io import StringIO

import pytest

from llamarl.observe.report import write_report
from recipes import evaluate
from tests.launching import EVAL_PROMPTS, SMALL, untimed
from tests.runs import ASKED

BAD_INPUT = 2


@pytest.fixture(scope="module")
def stopped(runs):
    """Half of the synchronous run, with two sets."""
    return runs("half")


def told(rows):
    """Return {step: accuracies of digits and of words} of the steps that have them."""
    found = {}
    for row in rows:
        if "eval/digits/accuracy" in row:
            found[row["step"]] = [row["eval/digits/accuracy"], row["eval/words/accuracy"]]
    return found


def test_each_set_has_an_accuracy_of_its_own_beside_the_tasks(stopped):
    assert told(stopped.rows) == {0: [1.0, 0.0], 2: [1.0, 0.0]}
    for row in (stopped.rows[0], stopped.rows[2]):
        assert 0.0 < row["eval/accuracy"] < 1.0 and row["eval/words/errors"] == 0
    assert f"held out {EVAL_PROMPTS} of the task, 1 of digits, 4 of words" in stopped.output
    assert "held-out digits accuracy 100.0%" in stopped.output
    assert "held out   words accuracy 0.0% -> 0.0%" in stopped.output
    lines = (stopped.run_dir / "samples" / "step_2.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row.get("set") for row in rows] == [None] * EVAL_PROMPTS + ["digits"] + ["words"] * 4
    assert [row["prompt"] for row in rows[-4:]] == list(ASKED)


def test_the_report_shows_the_curves_of_both(stopped, tmp_path):
    page = write_report(stopped.run_dir, tmp_path / "report.html").read_text()
    for title in ("Evaluation", "Evaluation: digits", "Evaluation: words"):
        assert f"<strong>{title}</strong>" in page


def test_a_checkpoint_is_evaluated_on_them_as_the_run_was(stopped, tmp_path, monkeypatch):
    out = tmp_path / "answers.jsonl"
    with redirect_stdout(StringIO()) as said:
        assert evaluate.main([f"model.path={stopped.checkpoint}", f"out={out}", "threads=1"]) == 0
    _, own, digits, words = said.getvalue().split("held out ")
    assert own.startswith("the task's own\ngreedy   pass@1 ")
    assert digits.startswith("digits\ngreedy   pass@1 100.00% of 1 ")
    assert words.startswith("words\ngreedy   pass@1 0.00% of 4 ")
    scores = {}
    for row in map(json.loads, out.read_text().splitlines()):
        scores.setdefault(row.get("set"), []).append(row["score"])
    assert sum(scores[None]) / EVAL_PROMPTS == stopped.rows[2]["eval/accuracy"]
    assert scores["digits"] == [1.0] and scores["words"] == [0.0] * 4


def test_other_sets_are_another_runs(stopped, launch_here, tmp_path):
    run_dir = shutil.copytree(stopped.run_dir, tmp_path / "run")
    code, said = launch_here(*SMALL, "max_lag=0", "resume=auto", f"run_dir={run_dir}")
    assert code == BAD_INPUT
    assert "other held-out prompts: eval.sets." in said.err
    assert "eval.sets.digits.kind: one_prompt in the checkpoint, null now" in said.err


@pytest.mark.bitwise("what is asked besides, samples and a resumption change nothing")
def test_a_resumed_run_with_them_and_without_samples_learns_the_same(runs):
    resumed = runs("resumed")
    assert "resumed from step_2" in resumed.output
    assert told(resumed.rows) == {step: [1.0, 0.0] for step in (0, 2, 4)}
    own = []
    for row in untimed(resumed.rows):
        others = ("eval/digits/", "eval/words/")
        own.append({name: value for name, value in row.items() if not name.startswith(others)})
    assert own == untimed(runs("synchronous").rows)
