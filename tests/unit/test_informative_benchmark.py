"""The study of batches that teach: what an oracle that draws prompts would come to."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def informative(monkeypatch):
    """The script, which finds its neighbours beside itself."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("informative")


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
