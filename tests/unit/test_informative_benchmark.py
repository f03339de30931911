"""The study of batches that teach: its rows, and what is read off its runs."""

import importlib
import json
import re
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def informative(monkeypatch):
    """The script, which finds its neighbours beside itself."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("informative")


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_third_of_the_questions_are_sums_and_held_out_are_others(informative, tmp_path):
    path, held_out = informative.write_questions(tmp_path)
    rows = lines_of(path)
    asked = lines_of(held_out)
    assert (len(rows), len(asked)) == (240, 100)
    sums = [row["prompt"] for row in rows if "+" in row["prompt"]]
    assert len(sums) == 80
    assert not {row["prompt"] for row in asked} & set(sums)
    for row in rows + asked:
        a, sign, b = re.fullmatch(
            r"What is (\d+)([+*])(\d+)\? Answer with the number only\.", row["prompt"]
        ).groups()
        expected = int(a) + int(b) if sign == "+" else int(a) * int(b)
        assert int(row["answer"]) == expected
        assert len(a) == len(b) == (2 if sign == "+" else 3)


def gsm8k_file(folder, num_short):
    """Write rows in GSM8K's form, of which so many are short."""
    path = folder / "gsm8k.jsonl"
    with path.open("w") as file:
        for number in range(num_short + 50):
            asked = f"What is problem {number}?" + "?" * (200 if number >= num_short else 0)
            row = {"question": asked, "answer": f"Step by step.\n#### {number}"}
            file.write(json.dumps(row) + "\n")
    return path


def asked_of(row):
    return row["prompt"][-1]["content"]


def test_a_third_of_the_problems_are_of_one_step_and_held_out_are_others(informative, tmp_path):
    path, held_out = informative.write_problems(tmp_path, gsm8k_file(tmp_path, 170))
    rows = lines_of(path)
    asked = lines_of(held_out)
    assert (len(rows), len(asked)) == (240, 100)
    hard = [row for row in rows if "problem" in asked_of(row)]
    easy = [row for row in rows if "problem" not in asked_of(row)]
    assert (len(hard), len(easy)) == (160, 80)
    for row in hard:
        assert "??" not in asked_of(row)
        number = re.search("[0-9]+", asked_of(row)).group()
        assert row["answer"].endswith(f"#### {number}")
    for row in easy + asked:
        numbers = re.findall(r"\d+", asked_of(row))
        assert len(numbers) == 2
        assert int(row["answer"]) == sum(map(int, numbers))
    assert not {asked_of(row) for row in asked} & {asked_of(row) for row in easy}
    shown = rows[0]["prompt"][:-1]
    assert [turn["content"] for turn in shown[1::2]] == ["3 + 14 = 17", "21 + 8 = 29", "6 + 5 = 11"]
    assert all(row["prompt"][:-1] == shown for row in rows + asked)
    again, _ = informative.write_problems(tmp_path / "again", tmp_path / "gsm8k.jsonl")
    assert lines_of(again) == rows


def test_a_file_with_too_few_short_problems_is_refused(informative, tmp_path):
    with pytest.raises(SystemExit, match="has 159 of the 160 questions"):
        informative.write_problems(tmp_path, gsm8k_file(tmp_path, 159))


def test_completions_are_counted_as_they_are_generated(informative, tmp_path):
    rows = [
        {"step": 0, "eval/accuracy": 0.1},
        {"step": 1, "groups/teaching_fraction": 0.25, "time/wall_s": 1.0},
        {
            "step": 2,
            "groups/teaching_fraction": 0.5,
            "tickets/given_back": 8,
            "time/wall_s": 3.0,
            "eval/accuracy": 0.7,
        },
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = informative.read(tmp_path, "both", 1, groups=8)
    assert [step.completions for step in run.steps] == [64, 64 + 128]
    assert run.useful == pytest.approx((0.25 * 64 + 0.5 * 128) / 192)
    assert run.first_at(0.7).wall_s == 3.0
    assert run.first_at(0.8) is None


def test_an_oracle_draws_the_prompts_that_are_sometimes_solved(informative, tmp_path):
    scores = {0: [1, 0] * 8, 1: [0] * 16}
    path = tmp_path / "scores.jsonl"
    with path.open("w") as file:
        for number, given in scores.items():
            for sample, score in enumerate(given):
                file.write(json.dumps({"number": number, "sample": sample, "score": score}) + "\n")
    found = informative.oracle(path)
    teaches = 1 - 2 * 0.5**informative.SIZE
    assert found["uniform"] == pytest.approx(teaches / 2)
    assert found["oracle"] == pytest.approx(teaches)
    assert found["dead"] == 0.5
