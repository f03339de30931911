"""Benchmarks run to their end and print figures, at the smallest size; what they are is nobody's
claim here.

Left out: step and weight_sync, whose smallest size takes minutes, and offpolicy, which has tests of
its own.
"""

import json
import subprocess
import sys

import pytest

from llamarl.config.placement import TINY_MODEL
from tests.launching import ROOT, environment

pytestmark = pytest.mark.slow


def run(name, *arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=environment()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_train(tmp_path):
    size = ("--model", TINY_MODEL, "--dtype", "float32", "--completions", 16, "--repeats", 1)
    run("train", *size, "--peer", tmp_path, "--json", tmp_path / "train.json")
    (found,) = json.loads((tmp_path / "train.json").read_text())["models"].values()
    rates = found["float32"]
    assert rates["even"]["tokens_per_s"] > 0 and 0 <= rates["uneven"]["padding"]["ours"] < 1


def test_decode(tmp_path):
    size = (
        "--batch",
        4,
        "--new-tokens",
        8,
        "--against",
        "transformers",
        "--dtype",
        "float32",
        "--repeats",
        1,
    )
    run("decode", "--model", TINY_MODEL, *size, "--json", tmp_path / "decode.json")
    assert "engine" in (tmp_path / "decode.json").read_text()


def test_scoring(tmp_path):
    size = ("--prompts", 2, "--group", 2, "--batch", 2, "--repeats", 1)
    run("scoring", "--model", TINY_MODEL, *size, "--json", tmp_path / "scoring.json")
    found = json.loads((tmp_path / "scoring.json").read_text())
    assert found["ratio"] > 0 and found["scores_apart"] < 1e-4


def test_machinery():
    assert json.loads(run("machinery", "--steps", 3, "--json").splitlines()[-1])


@pytest.mark.parametrize("ours", ["same", "best"])
def test_time_to_reward(tmp_path, ours):
    """Without TRL, which is not installed with the tests: ours alone, and it says so."""
    size = (
        "--seeds",
        1,
        "--steps",
        2,
        "--eval-every",
        1,
        "--cores",
        1,
        "--target",
        0.1,
        "--ours",
        ours,
    )
    assert "skipped" in run("time_to_reward", *size, "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["summary"]["llamarl"]["reached"], found["like_for_like"]) == (1, ours == "same")


def test_overcommit(tmp_path):
    run(
        "overcommit",
        "--steps",
        14,
        "--learn",
        0,
        "--train-s",
        0.02,
        "--json",
        tmp_path / "found.json",
    )
    assert json.loads((tmp_path / "found.json").read_text())


def test_quantized(tmp_path):
    run("quantized", "--steps", 2, "--seeds", 1, "--json", tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text())


def test_streaming(tmp_path):
    """Without TRL: ours alone. What it keeps of its runs is not made again."""
    sizes = ("--groups", 2, "--group", 2, "--answer-tokens", 12, "--slots", 4, "--steps", 2)
    chunks = ("--chunks", 4)
    files = ("--json", tmp_path / "found.json", "--page", tmp_path / "found.md")
    words = ("--model", TINY_MODEL, *sizes, *chunks, *files, "--runs", tmp_path / "runs")
    run("streaming", *words)
    found = json.loads((tmp_path / "found.json").read_text())
    run("streaming", *words)
    again = json.loads((tmp_path / "found.json").read_text())
    assert again["runs"] == found["runs"]
    assert [made["way"] for made in found["runs"]] == ["none", "intra", "inter", "both"]
    assert all(made["tail_s"] > 0 for made in found["runs"])
    assert 0 <= found["runs"][1]["prefilled_early"] <= 1
    assert "| intra | 4 |" in (tmp_path / "found.md").read_text()
