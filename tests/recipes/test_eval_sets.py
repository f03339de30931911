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
from tests.launching import EVAL_PROMPTS, SMALL, ForkedJob, untimed

BAD_INPUT = 2
ASKED = ("12+34=", "23+41=", "55+16=", "70+11=")


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Two of different kinds. The embedded model was taught sums: it answers with digits, which
    `digits` asks for (contains_words), and never with what `words` asks for (exact_match).
    """
    file = tmp_path_factory.mktemp("rows") / "words.jsonl"
    rows = [{"prompt": prompt, "answer": "forty-six"} for prompt in ASKED]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    digits = (
        'digits: {kind: one_prompt, text: "12+34=", words: ["1","2","3","4","5","6","7","8","9"]'
    )
    words = f"words: {{kind: jsonl, path: {file}, max_prompt_tokens: 16}}"
    return f"eval.sets={{{digits}, max_prompt_tokens: 16}}, {words}}}"


@pytest.fixture(scope="module")
def stopped(sets, tmp_path_factory):
    """Two ranks, asynchronous: half of its steps."""
    run_dir = tmp_path_factory.mktemp("sets") / "run"
    given = (sets, "eval.save_samples=true", "max_steps=2")
    with ForkedJob(*SMALL, *given, run_dir=run_dir, ranks=2) as job:
        assert job.wait() == 0, job.output
        yield job


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


def test_the_report_shows_the_curves_of_both(stopped):
    page = write_report(stopped.run_dir, stopped.run_dir.parent / "report.html").read_text()
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


def test_other_sets_are_another_runs_and_the_same_ones_go_on(stopped, sets, tmp_path):
    given = (*SMALL, "eval.save_samples=true", "resume=auto")
    run_dir = tmp_path / "run"  # the other tests read what has stopped
    shutil.copytree(stopped.run_dir, run_dir)
    with ForkedJob(*given, run_dir=run_dir) as job:
        assert job.wait() == BAD_INPUT
        assert "other held-out prompts: eval.sets." in job.output
        assert "eval.sets.digits.kind: one_prompt in the checkpoint, null now" in job.output
    with ForkedJob(*given, sets, run_dir=run_dir, ranks=2) as job:
        assert job.wait() == 0, job.output
        assert "resumed from step_2" in job.output
        assert told(job.rows) == {step: [1.0, 0.0] for step in (0, 2, 4)}
        assert [row["step"] for row in job.rows] == [0, 1, 2, 3, 4]


@pytest.mark.bitwise("what is asked besides changes nothing that is learned")
def test_a_synchronous_run_learns_the_same_with_and_without_them(synchronous_run, sets, tmp_path):
    with ForkedJob(*SMALL, "max_lag=0", sets, run_dir=tmp_path / "run") as job:
        assert job.wait() == 0, job.output
    own = []
    for row in untimed(job.rows):
        others = ("eval/digits/", "eval/words/")
        own.append({name: value for name, value in row.items() if not name.startswith(others)})
    assert own == untimed(synchronous_run.rows)
