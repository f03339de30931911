"""Benchmarks run to their end and print figures, at the smallest size; what they are is nobody's
claim here.

Left out: step and weight_sync, whose smallest size takes minutes, and offpolicy, which has tests of
its own.
"""

import importlib
import json
import subprocess
import sys

import pytest

from llamarl.config.placement import TINY_MODEL
from tests.build.job import run_python
from tests.build.rows import read_rows
from tests.launching import ROOT

pytestmark = pytest.mark.slow


def run(name, *arguments):
    return run_python(ROOT / "benchmarks" / f"{name}.py", *arguments, timeout_s=600)


def found_by(name, folder, *arguments):
    """The figures that a benchmark writes."""
    run(name, *arguments, "--json", folder / "found.json")
    return json.loads((folder / "found.json").read_text())


def test_train(tmp_path):
    size = ("--model", TINY_MODEL, "--dtype", "float32", "--completions", 16, "--repeats", 1)
    (found,) = found_by("train", tmp_path, *size, "--peer", tmp_path)["models"].values()
    rates = found["float32"]
    assert rates["even"]["tokens_per_s"] > 0 and 0 <= rates["uneven"]["padding"]["ours"] < 1


def test_decode(tmp_path):
    size = ("--batch", 4, "--new-tokens", 8, "--dtype", "float32", "--repeats", 1)
    size += ("--against", "transformers", "--model", TINY_MODEL)
    assert "engine" in json.dumps(found_by("decode", tmp_path, *size))


def test_implementations(tmp_path):
    found = found_by("implementations", tmp_path, "--small", "--repeats", 1)
    assert found["training"]["ratio"] > 0 and found["decoding"]["ratio"] > 0


def test_scoring(tmp_path):
    size = ("--prompts", 2, "--group", 2, "--batch", 2, "--repeats", 1)
    found = found_by("scoring", tmp_path, "--model", TINY_MODEL, *size)
    assert found["ratio"] > 0 and found["scores_apart"] < 1e-4


def test_machinery():
    assert json.loads(run("machinery", "--steps", 3, "--json").splitlines()[-1])


def test_growth(tmp_path):
    found = found_by("growth", tmp_path, "--ranks", "2,8", "--meshes", "8", "--steps", 3)
    assert [row["ranks"] for row in found["frame"]] == [2, 8]
    assert all(row["messages_per_step"] > 0 and row["memory_mb"] > 0 for row in found["frame"])
    run("growth", "--page", tmp_path / "found.json")
    assert (tmp_path / "found.png").exists()
    assert "1,000 generators" in " ".join((tmp_path / "found.md").read_text().split())


def test_time_to_reward(tmp_path):
    """Without TRL, which is not installed with the tests: ours alone, and it says so."""
    size = ("--seeds", 1, "--steps", 2, "--eval-every", 1, "--cores", 1, "--target", 0.1)
    assert "skipped" in run("time_to_reward", *size, "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["summary"]["llamarl"]["reached"], found["like_for_like"]) == (1, True)


def test_streaming(tmp_path):
    """Without TRL: ours alone. What it keeps of its runs is not made again."""
    sizes = ("--groups", 2, "--group", 2, "--answer-tokens", 12, "--slots", 4, "--steps", 2)
    chunks = ("--chunks", 4)
    files = ("--page", tmp_path / "found.md", "--runs", tmp_path / "runs")
    words = ("--model", TINY_MODEL, *sizes, *chunks, *files)
    found = found_by("streaming", tmp_path, *words)
    assert found_by("streaming", tmp_path, *words)["runs"] == found["runs"]
    assert [made["way"] for made in found["runs"]] == ["none", "intra", "inter", "both"]
    assert all(made["tail_s"] > 0 for made in found["runs"])
    assert 0 <= found["runs"][1]["prefilled_early"] <= 1
    assert "| intra | 4 |" in (tmp_path / "found.md").read_text()


def test_turns(tmp_path):
    size = ("--rows", 8, "--each", 4, "--pairs", 1, "--json", tmp_path / "turns.json")
    assert "of one turn" in run("turns", *size)
    assert "idle" in run("turns", "--idle", "--workers", 4, *size)
    found = json.loads((tmp_path / "turns.json").read_text())
    assert found["turns, tiny"]["ratio"]["turns"][0] > 0
    assert 0 <= found["idle, tiny"]["200 ms"]["idle"] < 1


def test_the_calculators_teacher_is_poor_and_never_shows_held_out_sums(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("calculator")
    module.write_rows(tmp_path)
    names = ("held_out", "train", "warm")
    rows = {name: read_rows(tmp_path / f"{name}.jsonl") for name in names}
    sums = {}
    for name, found in rows.items():
        sums[name] = {row["prompt"].split("?")[0] for row in found}
    assert not sums["held_out"] & sums["train"]
    assert not sums["held_out"] & sums["warm"] and not sums["train"] & sums["warm"]
    said = [row for row in rows["warm"] if "?" not in row["prompt"]]
    asked = [row for row in said if row["completion"] == "?"]
    assert len(asked) * 11 == len(said)
    gone_on = [row for row in rows["warm"] if "?" in row["prompt"]]
    right = 0
    for row in gone_on:
        first, second = map(int, row["prompt"].split("  ")[1].rstrip("=").split("+"))
        right += row["completion"] == str(first + second)
    assert 0.5 < right / len(gone_on) < 0.9  # without a carry the poor way is right too


def test_a_rehearsal_on_a_cpu_runs_every_stage(tmp_path):
    said = run("gpu", "--rehearse", "--out", tmp_path)
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert [one["state"] for one in result["stages"]] == ["done"] * 7, said
    assert all(one["figures"] for one in result["stages"])
    of_tests = result["stages"][0]["figures"]
    assert of_tests["passed"] > 40 and "skipped" not in of_tests
    assert (tmp_path / "gpu.md").read_text().startswith("# A rehearsal on a CPU\n")


@pytest.mark.bitwise("a synchronous run is the same every time")
def test_kept_runs_find_another_rate_and_nothing_else(tmp_path):
    program = str(ROOT / "benchmarks" / "kept_runs.py")
    command = [sys.executable, program, "HEAD", "--only", "one process"]
    given = {"stdout": subprocess.PIPE, "text": True, "timeout": 600}
    done = subprocess.run([*command, "--folder", str(tmp_path)], **given)
    assert done.returncode == 0 and "kept" in done.stdout, done.stdout
    done = subprocess.run([*command, "--here-only", "lr=1e-2"], **given)
    assert done.returncode == 1 and "values differ" in done.stdout, done.stdout
    # The first step is made with the weights of the start.
    assert "step 1," not in done.stdout and "step 2, completion/length_mean: base" in done.stdout
