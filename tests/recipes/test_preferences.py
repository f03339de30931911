"""recipes/preferences.py as a user starts it: the file of pairs, and who reads it."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from llamarl.config.command_line import compose_config
from llamarl.config.preferences import PREFERENCES
from llamarl.disk.drafts import Draft
from llamarl.learning.preference import read_preference_data
from llamarl.models.config import tiny_directory
from recipes import preferences
from tests.build.job import finished_job
from tests.build.model_directory import copy_tiny
from tests.build.rows import read_rows, write_rows
from tests.built_tasks import need_reasoning_gym
from tests.judge_server import JudgeServer, between
from tests.labels import closeness
from tests.launching import ROOT, ForkedJob
from tests.scorers import SCORES, score_of, write_scorer
from tests.supervised import task_of

RECIPE = ROOT / "recipes" / "preferences.py"
NUM_ROWS = 60
NUM_PROMPTS = 54  # a tenth of the rows is held out
MODEL = f"model.path={tiny_directory()}"
SMALL = (
    "model.dtype=float32",
    "task.max_prompt_tokens=32",
    "max_new_tokens=4",
    "groups_per_step=8",
    "samples=3",
    "threads=1",
)
CLOSENESS = "reward.fn=tests.labels:closeness"
FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    """Sums as a file of JSON lines, none twice."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    draw = random.Random(0)
    sums: dict[tuple[int, int], None] = {}
    while len(sums) < NUM_ROWS:
        sums[draw.randrange(10, 60), draw.randrange(10, 40)] = None
    rows = []
    for a, b in sums:
        rows.append({"prompt": f"{a}+{b}=", "answer": str(a + b), "human": f"{a + b}!"})
    return f"task.path={write_rows(file, *rows)}"


@pytest.fixture
def make(prompts, run_here, tmp_path):
    """make(*words, out="pairs.jsonl"): (exit code, what was said, the rows). In this process."""

    def run(*words: str, out: str = "pairs.jsonl"):
        has_another_task = any(word.startswith("task=") for word in words)
        data = () if has_another_task else (prompts,)
        given = [MODEL, *SMALL, *data, f"out={tmp_path / out}", *words]
        words = {word.partition("=")[0]: word for word in given}
        config = compose_config([*words.values()], PREFERENCES)
        code, said = run_here(lambda: preferences.run.__wrapped__(config))
        file = tmp_path / out
        return code, said.out + said.err, read_rows(file) if file.exists() else []

    return run


def read(file: Path, model: Path | None = None):
    """The pairs of a file, as recipes/reward_model.py reads them with its defaults."""
    tokenizer = AutoTokenizer.from_pretrained(model or tiny_directory())
    return read_preference_data(task_of(file, max_tokens=1024), tokenizer).train


def test_a_functions_pairs(make, tmp_path):
    code, said, rows = make(CLOSENESS, "references=[answer]")
    assert code == 0, said
    assert f"prompts       {NUM_PROMPTS}\n" in said
    assert f"completions   {NUM_PROMPTS * 3}," in said
    assert f"references    {NUM_PROMPTS}," in said
    assert f"pairs         {len(rows)}," in said and len(rows) > 10
    for row in rows:
        answer = str(eval(row["prompt"].rstrip("=")))
        for side in ("chosen", "rejected"):
            assert row[f"{side}_score"] == closeness(row["prompt"], row[side], {"answer": answer})
            assert row[f"{side}_sample"] != "answer" or row[side] == answer
        assert row["chosen_score"] > row["rejected_score"] and row["margin"] == 0.0
    references = [row["chosen_sample"] == "answer" for row in rows]
    assert any(references) and not all(references)
    assert [file.name for file in tmp_path.glob("pairs*")] == ["pairs.jsonl"]
    pairs = read(tmp_path / "pairs.jsonl")
    assert len(pairs) == len(rows) and "task.max_tokens=" in said  # the model's context is short


def test_the_same_seed_gives_the_same_file(make, tmp_path):
    noisy = ("label_noise=0.3", "pairing=random", "num_prompts=24", CLOSENESS)
    for out, seed in (("one", 1), ("same", 1), ("other", 2)):
        code, said, _ = make(*noisy, f"seed={seed}", "samples=6", out=out)
        assert code == 0, said
    assert (tmp_path / "one").read_bytes() == (tmp_path / "same").read_bytes()
    assert (tmp_path / "one").read_bytes() != (tmp_path / "other").read_bytes()


@pytest.mark.slow
def test_what_was_stopped_goes_on_to_the_same_file(make, tmp_path, monkeypatch):
    code, said, whole = make(CLOSENESS, out="whole")
    assert code == 0, said
    add = Draft.add
    pieces = []

    def stop(self, piece, notes):
        pieces.append(piece)
        if len(pieces) == 4:
            self._stream.write(b'{"prompt": "half a ')
            raise KeyboardInterrupt
        add(self, piece, notes)

    with monkeypatch.context() as patch:
        patch.setattr(Draft, "add", stop)
        code, said, rows = make(CLOSENESS)
    assert (code, rows) == (INTERRUPTED, []) and "the same command goes on after" in said
    code, said, _ = make(CLOSENESS, "label_noise=0.5")
    assert code == BAD_INPUT
    assert "was begun for other pairs" in said and "label_noise: 0.0 in the file, 0.5 now" in said
    code, said, rows = make(CLOSENESS)
    assert code == 0 and "pairs.jsonl.part has 24 prompts" in said
    assert (tmp_path / "pairs.jsonl").read_bytes() == (tmp_path / "whole").read_bytes()
    assert f"prompts       {NUM_PROMPTS}\n" in said and f"pairs         {len(whole)}," in said
    code, said, _ = make(CLOSENESS)
    assert code == BAD_INPUT and "pairs.jsonl is there already" in said


def test_what_another_version_began_is_not_gone_on_with(make, tmp_path):
    (tmp_path / "pairs.jsonl.part").write_text("{}\n")
    said_of_it = {"bytes": 3, "notes": {}, "about": {"what_made_it": {}}}
    (tmp_path / "pairs.jsonl.progress").write_text(json.dumps(said_of_it))
    code, said, _ = make(CLOSENESS)
    assert code == BAD_INPUT
    assert "pairs.jsonl.part was written by another version of llamarl" in said


@pytest.mark.slow
def test_a_killed_one_goes_on_to_the_same_file(make, prompts, tmp_path):
    unhurried = "reward.fn=tests.labels:unhurried"
    code, said, _ = make(unhurried, out="whole")
    assert code == 0, said
    words = (MODEL, *SMALL, prompts, unhurried)

    def job():
        return ForkedJob(*words, run_dir=tmp_path / "pairs", recipe=RECIPE, directory_key="out")

    def has_begun():
        progress = tmp_path / "pairs.progress"
        return progress.exists() and json.loads(progress.read_text())["bytes"] > 0

    with job() as killed:
        killed.until(has_begun, "pairs")
        killed.signal_rank(0)
        assert killed.wait() != 0
    with job() as resumed:
        assert resumed.wait() == 0, resumed.output
    assert (tmp_path / "pairs").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_models_scores_are_its_own(make, tmp_path):
    model = write_scorer(tmp_path / "gold")
    gold = ("reward=model", f"reward.path={tmp_path / 'gold'}", "reward.dtype=float32")
    code, said, rows = make(*gold, "pairing=best_worst", "margin_coef=0.5")
    assert code == 0, said
    assert 10 < len(rows) <= NUM_PROMPTS
    by_prompt = {tuple(pair.prompt_ids.tolist()): pair for pair in read(tmp_path / "pairs.jsonl")}
    tokenizer = AutoTokenizer.from_pretrained(tiny_directory())
    for row in rows:
        pair = by_prompt[tuple(tokenizer.encode(row["prompt"]))]
        for side in ("chosen", "rejected"):
            ids = torch.cat([pair.prompt_ids, getattr(pair, f"{side}_ids")])
            score = float(score_of(model, ids))
            if len(row[side]) < 3:  # else it may have been cut, and is scored without an end
                assert row[f"{side}_score"] == pytest.approx(score, abs=SCORES)
        difference = row["chosen_score"] - row["rejected_score"]
        assert row["margin"] == pytest.approx(0.5 * difference) and difference > 0
        assert pair.margin == row["margin"]


def test_chat_prompts_are_the_tokens_that_were_answered(make, tmp_path):
    """A reward model that reads the file with its defaults reads what the policy read."""
    model = tmp_path / "model"
    copy_tiny(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ {'system': '9', 'user': '8', 'assistant': '7'}[m['role']] }}"
        "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    tokenizer.save_pretrained(model)
    words = (f"model.path={model}", "task.system_prompt=1+1", "generator.min_new_tokens=2")
    code, said, rows = make(*words, "reward.fn=tests.labels:length")
    assert code == 0, said
    for row, pair in zip(rows, read(tmp_path / "pairs.jsonl", model), strict=True):
        system, user = row["prompt"]
        assert system == {"role": "system", "content": "1+1"}
        assert tokenizer.decode(pair.prompt_ids) == f"91+18{user['content']}="
        (reply,) = row["chosen"]
        assert reply["role"] == "assistant"
        assert tokenizer.decode(pair.chosen_ids[:-1]) == reply["content"]


def larger(question):
    """A judge of two who prefers the larger number."""
    a, b = (between(question, f"answer_{place}") for place in "ab")
    return f"Verdict: {'A' if a > b else 'B'}"


def judged_by(server):
    return ("reward=judge", f"reward.url={server.url}", "reward.model=wise", "reward.ask=group")


def test_a_judges_verdicts_are_the_labels(make):
    with JudgeServer(larger) as server:
        code, said, rows = make(*judged_by(server), "references=[answer]", "num_prompts=20")
    assert code == 0, said
    assert len(rows) > 10 and len(server.questions) >= 2 * len(rows)
    for row in rows:
        assert row["chosen"] > row["rejected"]
        assert (row["chosen_score"], row["rejected_score"]) == (1.0, 0.0)
    assert f"orders agree  100.0% of {len(server.questions) // 2:,} comparisons" in said


def test_a_judge_who_prefers_a_place_labels_nothing(make):
    with JudgeServer(lambda question: "Verdict: A") as server:
        code, said, rows = make(*judged_by(server), "num_prompts=8")
    assert (code, rows) == (FAILED, [])
    assert "no pair of 8 prompts" in said and "orders agree  0.0% of" in said


def test_held_out_prompts_are_pairs_of_their_own(make):
    code, said, held = make(CLOSENESS, "split=held_out", "samples=8", out="held")
    assert code == 0 and f"prompts       {NUM_ROWS - NUM_PROMPTS}\n" in said and held
    code, said, both = make(CLOSENESS, "split=all", out="all")
    assert code == 0 and f"prompts       {NUM_ROWS}\n" in said
    train = [row["prompt"] for row in both if row["number"] < NUM_PROMPTS]
    assert {row["prompt"] for row in held} <= {row["prompt"] for row in both} - set(train)


@pytest.mark.slow
def test_a_reference_may_be_another_key(make):
    longer = "reward.fn=tests.labels:length"
    code, said, rows = make("references=[human]", longer, "num_prompts=10")
    assert code == 0, said
    assert any(row["chosen"].endswith("!") and row["chosen_sample"] == "human" for row in rows)
    code, said, _ = make("references=[humn]", CLOSENESS, out="other")
    assert code == BAD_INPUT
    assert 'prompts.jsonl:1: no key "humn"; did you mean "human"?' in said
    code, said, _ = make("task=addition", "references=[solution]")
    assert code == BAD_INPUT and "prompt 0, " in said and 'no key "solution"' in said


def test_pairs_are_labelled_anew(make, tmp_path):
    """By another judge, as Async RLHF's are: the longer is better, whatever was chosen before."""
    rows = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3=3"},
        {"prompt": "1+2=", "chosen": "3+0", "rejected": "4"},
        {"prompt": "1+3=", "chosen": "13", "rejected": "31"},
    ]
    file = write_rows(tmp_path / "old.jsonl", *rows)
    anew = (f"task.path={file}", "task.answer_key=null", "samples=0", "split=all")
    code, said, made = make(*anew, "references=[chosen,rejected]", "reward.fn=tests.labels:length")
    assert code == 0, said
    labelled = {row["chosen"]: (row["rejected"], row["chosen_sample"]) for row in made}
    assert labelled == {"3=3": ("2", "rejected"), "3+0": ("4", "chosen")}
    assert "ties          1\n" in said and "completions   0," in said


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["reward.fn=nowhere:score"], "nowhere"),
        (["max_new_tokens=100000"], "the model's context is"),
        pytest.param(
            ["task=reasoning_gym", "task.max_prompt_tokens=400"],
            "makes prompts without end; give a number, such as num_prompts=",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bad_input_is_told_before_a_file_is_there(make, tmp_path, words, complaint):
    if "task=reasoning_gym" in words:
        need_reasoning_gym()
    code, said, _ = make(*words)
    assert code == BAD_INPUT and complaint in said
    assert list(tmp_path.iterdir()) == []


def test_a_bad_row_is_named(make, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n{"promt": "1+1=", "answer": "2"}\n')
    code, said, _ = make(f"task.path={file}", CLOSENESS)
    assert code == BAD_INPUT and f'{file}:2: no key "prompt"; did you mean "promt"?' in said
    file.write_text('{"prompt": "1+1=", "answer": "2", "human": "\\ud83d"}\n')
    code, said, _ = make(f"task.path={file}", CLOSENESS, "references=[human]")
    assert code == BAD_INPUT and f'{file}:1: "human" holds \\ud83d at character 1' in said


def test_a_full_disk_is_named_and_costs_nothing(make, monkeypatch):
    def refuse(self, piece, notes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Draft, "add", refuse)
        code, said, _ = make(CLOSENESS, "num_prompts=4")
    assert code == FAILED and "pairs.jsonl.part cannot be written (No space left" in said
    code, said, rows = make(CLOSENESS, "num_prompts=4")
    assert code == 0 and rows


@pytest.mark.slow
def test_a_reward_model_of_noisy_pairs_agrees_with_what_labelled_them(tmp_path):
    """From the command to the model: a fifth of the pairs that it learns from is wrong, none of
    those of other prompts that it is judged by.
    """
    label = ("task=addition", "reward.fn=tests.labels:nearness", "temperature=2")
    model = (MODEL, "model.dtype=float32")
    words = (*model, *label, "max_new_tokens=4", "references=[answer]")

    def pairs(name: str, *more: str) -> Path:
        file = tmp_path / name
        finished_job(*words, *more, run_dir=file, recipe=RECIPE, directory_key="out")
        return file

    train = pairs("train.jsonl", "num_prompts=1000", "label_noise=0.2")
    clean = pairs("clean.jsonl", "num_prompts=100", "split=held_out")
    rows = read_rows(train)
    flipped = sum(row["flipped"] for row in rows) / len(rows)
    assert flipped == pytest.approx(0.2, abs=0.025)
    learn = ("lr=3e-4", "examples_per_step=64", "task.max_tokens=32", "eval.every=0")
    data = (f"task.path={train}", f"task.eval_path={clean}")
    trainer = ROOT / "recipes" / "reward_model.py"
    out = {"run_dir": tmp_path / "rm", "directory_key": "out"}
    job = finished_job(*model, *learn, *data, recipe=trainer, **out)
    assert job.rows[0]["eval/accuracy"] < 0.7
    assert job.rows[-1]["eval/accuracy"] >= 0.85
