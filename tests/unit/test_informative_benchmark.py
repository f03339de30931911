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
