"""eval.gold and eval.base as a user starts them: what a scorer that is never trained on says of
each evaluation, and how likely the model that the policy began as finds the answers.
"""

import math
import os
import re
import shutil
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llamarl.evaluation.report import shown_rate
from llamarl.evaluation.win_rate import WinRate
from llamarl.models.config import tiny_directory
from recipes import evaluate
from tests.build.job import finished_job
from tests.build.rows import read_rows, write_rows
from tests.launching import EVAL_PROMPTS, SMALL, environment, untimed
from tests.random_models import swap_tokens
from tests.scorers import SCORES, score_of, write_scorer
from tests.tolerances import rounding

pytestmark = pytest.mark.usefixtures("process_state")

NATS = rounding(terms=128, depth=2 * 8, size=4.0)
USER_MODULE = '''
def close(prompt, completion, meta):
    """The nearer to the answer the better; an abstention where there is no number."""
    if not completion.isdigit():
        return None
    return -abs(int(completion) - int(meta["answer"]))
'''
GIVEN = (*SMALL, "max_lag=0", "max_steps=2")


@pytest.fixture(scope="module")
def gold(tmp_path_factory):
    path = tmp_path_factory.mktemp("gold")
    model = write_scorer(path, seed=3)
    return path, model


@pytest.fixture(scope="module")
def run(gold, tmp_path_factory):
    """A synchronous one, of a reward by a function and a gold model."""
    path, _ = gold
    given = (f"eval.gold={path}", f"eval.base={tiny_directory()}")
    run_dir = tmp_path_factory.mktemp("gold_run") / "run"
    return finished_job(*GIVEN, *given, run_dir=run_dir)


@pytest.fixture(scope="module")
def evaluated(run, tmp_path_factory):
    """What recipes/evaluate.py says of the run's last checkpoint, which is as it was told; and the
    lines that it writes.
    """
    out = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    with redirect_stdout(StringIO()) as said:
        assert evaluate.main([f"model.path={run.checkpoint}", f"out={out}", "threads=1"]) == 0
    return said.getvalue(), read_rows(out)


def ids_of(tokenizer, completion):
    """With the end token, and without what a text of its own begins with."""
    return [*tokenizer.encode(completion, add_special_tokens=False), tokenizer.eos_token_id]


def score_of_answer(model, tokenizer, prompt, completion):
    ids = tokenizer.encode(prompt) + ids_of(tokenizer, completion)
    return float(score_of(model, torch.tensor(ids)))


@pytest.mark.slow
def test_a_run_reports_what_transformers_says_of_its_answers(run, gold, evaluated):
    _, model = gold
    _, answers = evaluated
    tokenizer = AutoTokenizer.from_pretrained(tiny_directory())
    last = run.rows[-1]
    assert [row["step"] for row in run.rows if "eval/gold" in row] == [0, 2]
    assert all(line["finish_reason"] == "stop" for line in answers)
    scores = []
    points = []
    for line in answers:
        true = str(eval(line["prompt"].rstrip("=")))
        ours = score_of_answer(model, tokenizer, line["prompt"], line["completion"])
        theirs = score_of_answer(model, tokenizer, line["prompt"], true)
        scores.append(ours)
        points.append(0.5 if line["completion"] == true else float(ours > theirs))
    assert last["eval/gold"] == pytest.approx(sum(scores) / EVAL_PROMPTS, abs=SCORES)
    assert last["eval/win_rate"] == pytest.approx(sum(points) / EVAL_PROMPTS, abs=1e-12)
    assert last["eval/win_rate_low"] < last["eval/win_rate"] < last["eval/win_rate_high"]
    assert last["eval/gold_masked"] == 0


@pytest.mark.slow
@torch.no_grad()
def test_a_run_reports_the_perplexity_of_transformers(run, evaluated):
    tokenizer = AutoTokenizer.from_pretrained(tiny_directory())
    base = AutoModelForCausalLM.from_pretrained(tiny_directory(), dtype=torch.float32)
    total = count = 0
    for line in evaluated[1]:
        prompt = tokenizer.encode(line["prompt"])
        answer = ids_of(tokenizer, line["completion"])
        logprobs = base(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        for i, token in enumerate(answer):
            total += float(logprobs[len(prompt) - 1 + i, token])
        count += len(answer)
    perplexity = math.exp(-total / count)
    assert run.rows[-1]["eval/perplexity"] == pytest.approx(perplexity, rel=NATS)


@pytest.mark.bitwise("what is judged beside a run changes nothing that is learned")
@pytest.mark.slow
def test_gold_changes_nothing_that_is_learned(run, synchronous_run):
    for plain, judged in zip(untimed(synchronous_run.rows), untimed(run.rows)):
        assert plain == {name: judged[name] for name in plain}
    assert len(run.rows) == 3


SHARED = ("placement.trainer=[0]", "placement.generator=[1]", "placement.reward=[1,2]")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["function", "model", "split model"])
def test_ranks_that_share_gold_and_base_judge_as_one_rank_does(run, gold, tmp_path, kind):
    """With a function their ranks act as one for these models' sake alone."""
    path, _ = gold
    given = [*GIVEN, *SHARED, f"eval.gold={path}", f"eval.base={tiny_directory()}"]
    if kind != "function":
        given += ["reward=model", f"reward.path={path}", "max_steps=1"]
    if kind == "split model":
        given.append("reward.tensor_parallel=2")
    job = finished_job(*given, run_dir=tmp_path / "run", ranks=3)
    # Of the policy as it began: rounding grows in later ones, and another reward makes others.
    ours, theirs = job.rows[0], run.rows[0]
    assert ours["step"] == theirs["step"] == 0
    for column in ("eval/gold", "eval/gold_references"):
        assert ours[column] == pytest.approx(theirs[column], abs=SCORES)
    assert ours["eval/perplexity"] == pytest.approx(theirs["eval/perplexity"], rel=NATS)
    if kind == "function":
        assert ours["eval/accuracy"] == theirs["eval/accuracy"]
        assert [row["step"] for row in job.rows if "eval/gold" in row] == [0, 2]
    else:
        assert ours["eval/reward"] == pytest.approx(ours["eval/gold"], abs=SCORES)


@pytest.mark.slow
def test_gold_may_be_a_function_and_beside_a_lagging_trainer(tmp_path):
    (tmp_path / "user_gold.py").write_text(USER_MODULE)
    env = {"PYTHONPATH": os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path)])}
    given = (*SMALL, "eval.gold=user_gold:close", "max_lag=1")
    job = finished_job(*given, run_dir=tmp_path / "run", ranks=2, env=env)
    judged = [row for row in job.rows if "eval/gold" in row]
    assert [row["step"] for row in judged] == [0, 2, 4]
    for row in judged:
        # Only a right answer is as good as the reference, and none is better.
        assert row["eval/gold_references"] == 0
        num_scored = EVAL_PROMPTS - row["eval/gold_masked"]
        wins = row["eval/win_rate"] * num_scored
        assert wins == pytest.approx(row["eval/accuracy"] * EVAL_PROMPTS / 2, abs=1e-9)


# --- recipes/evaluate.py ---

GOLD = "eval.gold=user_gold:close"
BASE = f"eval.base={tiny_directory()}"


@pytest.fixture
def users_folder(tmp_path, monkeypatch):
    """The current directory, with a gold function and files of answers."""
    (tmp_path / "user_gold.py").write_text(USER_MODULE)
    good = {"prompt": "1+1=", "completion": "2"}
    write_rows(tmp_path / "short.jsonl", good)
    write_rows(tmp_path / "bad.jsonl", good, {"prompt": "1+1="})
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def judged(users_folder, capsys):
    """What the recipe prints of the tiny model with some words, and the lines that it writes."""

    def run(*words):
        given = [f"model.path={tiny_directory()}", "num_prompts=30", "samples=0", "threads=1"]
        code = evaluate.main([*given, *words, "out=out.jsonl"])
        said = capsys.readouterr()
        assert code == 0, said.err
        return said.out, read_rows(users_folder / "out.jsonl")

    return run


@pytest.mark.slow
def test_evaluate_says_what_the_run_said(run, evaluated):
    said, _ = evaluated
    last = run.rows[-1]
    rate = WinRate(last["eval/win_rate"], last["eval/win_rate_low"], last["eval/win_rate_high"])
    assert f"win rate {shown_rate(rate)} over references" in said
    assert f"perplexity {last['eval/perplexity']:.4g} under {tiny_directory()}" in said
    assert f"gold     {last['eval/gold']:.4g} by " in said


def test_evaluate_beats_the_answers_of_rows_of_files_and_of_models(judged, tmp_path):
    said, lines = judged(GOLD)
    right = [line["completion"] == line["against"] for line in lines]
    assert 0 < sum(right) < len(right)
    assert all((line["gold"] == 0) == is_right for line, is_right in zip(lines, right))
    assert f"win rate {sum(right) / 2 / len(lines):.1%} [" in said
    assert f"over references, {sum(right)} ties" in said
    # Of other answers: those of a file, greedy ones alone, and those of another model.
    others = []
    for line in lines:
        others.append({"prompt": line["prompt"], "completion": "wrong", "sample": 1})
        others.append({"prompt": line["prompt"], "completion": "1000", "sample": 0})
    file = write_rows(tmp_path / "others.jsonl", *others)
    # Where the rows have none under this key it is not missed.
    said, lines = judged(GOLD, f"against={file}", "eval.reference_key=summary")
    assert {line["against"] for line in lines} == {"1000"}
    assert "win rate 100.0% [88.6%, 100.0%]" in said  # 30 of 30: Wilson's 1 / (1 + z^2 / 30)
    said, lines = judged(GOLD, f"against={tiny_directory()}")
    assert "win rate 50.0% [" in said and f"{len(lines)} ties" in said
    assert "no pair's lengths tell it from quality" in said


def test_a_model_of_other_tokens_may_be_beaten_too(judged, tmp_path):
    other = shutil.copytree(tiny_directory(), tmp_path / "other")
    swap_tokens(other)
    said, lines = judged(GOLD, f"against={other}", BASE)
    assert f"over {other}" in said and "perplexity" in said
    texts = [(line["completion"], line["against"]) for line in lines]
    assert any(ours != theirs for ours, theirs in texts)
    unseen = [line for line in lines if not set("78") & set(line["prompt"])]
    assert unseen
    for line in unseen:
        swapped = line["completion"].translate(str.maketrans("78", "87"))
        assert line["against"] == swapped


def test_gold_that_is_the_reward_says_what_the_reward_says(judged, gold):
    path, _ = gold
    said, lines = judged("reward=model", f"reward.path={path}", f"eval.gold={path}")
    assert all(line["gold"] == pytest.approx(line["score"], abs=SCORES) for line in lines)
    mean = re.search(r"^gold     (\S+) by ", said, re.MULTILINE)[1]
    assert f"greedy   reward {mean} of {len(lines)} held-out prompts" in said


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["eval.gold=nowhere"], "no such file: nowhere/config.json"),
        ([GOLD, "against=bad.jsonl"], "bad.jsonl:2: need"),
        ([GOLD, "against=short.jsonl"], "no greedy completion of held-out prompt 0"),
        ([GOLD, "eval.reference_key=summary"], "held-out row 0 ("),
        ([GOLD, "eval.gold_label=good"], "only the directory of a scorer has labels"),
        (["eval.base=nowhere"], "no such file: nowhere/config.json"),
    ],
)
def test_what_cannot_judge_is_said(words, complaint, capsys, users_folder):
    assert evaluate.main([f"model.path={tiny_directory()}", "num_prompts=2", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_a_base_that_scores_is_none(gold, capsys, tmp_path, monkeypatch):
    path, _ = gold
    monkeypatch.chdir(tmp_path)
    assert evaluate.main([f"model.path={tiny_directory()}", f"eval.base={path}"]) == 2
    assert "gives scores and no tokens" in capsys.readouterr().err
