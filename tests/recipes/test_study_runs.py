"""A study's run is a job: stopped or killed in the middle, it goes on and is whole. And --multirun:
the runs of a sweep, side by side in one directory that recipes/compare.py takes.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.build.job import run_python
from tests.house import ROOT
from tests.launching import SMALL, Job, environment

pytestmark = pytest.mark.slow

STUDY = """
import sys
from pathlib import Path

sys.path.insert(0, "benchmarks")
import llamarl
from study_runs import loaded, make
from study_terms import Arm, Constant, Last, Question, Study

last = Last("one", "eval/accuracy")
study = Study(
    name="example", paper="", section="", title="", claim="", refuted_by="",
    arms=(Arm("one"),),
    questions=(Question("gain", last, Constant(0.0), "more", 0.0, "points"),),
    checks=(), seeds=(0, 1), minutes=1, y="eval/accuracy", keeps_reports=True,
    common=("max_steps=12", "groups_per_step=4", "eval.every=4", "checkpoint.every=1"),
)
folder = Path(sys.argv[1])
print(make(study, folder, {}, minutes=float(sys.argv[2])))
for seed, arms in loaded(study, folder).items():
    for run in arms.values():
        print(seed, [row["step"] for row in run.rows])
"""
WHOLE = [f"{seed} {list(range(13))}" for seed in (0, 1)]
DEADLINE_S = 240.0


def start(folder, minutes):
    command = [sys.executable, "-c", STUDY, str(folder), str(minutes)]
    options = {"cwd": ROOT, "env": environment(), "text": True}
    return subprocess.Popen(command, stdout=subprocess.PIPE, **options)


def steps_made(folder):
    """The rows that a run under way has written."""
    files = list(folder.glob("*/run/metrics.jsonl"))
    return len(files[0].read_text().splitlines()) if files else 0


def test_a_study_that_is_stopped_after_its_minutes_goes_on(tmp_path):
    said, _ = start(tmp_path, 0.05).communicate(timeout=DEADLINE_S)
    assert said.splitlines()[-1] == "False"
    said, _ = start(tmp_path, 10).communicate(timeout=DEADLINE_S)
    assert said.splitlines()[-3:] == ["True", *WHOLE]
    assert not list(tmp_path.glob("*/run"))
    reports = [file.read_text() for file in tmp_path.glob("*.html")]
    assert len(reports) == 2 and all("Samples" in report for report in reports)


def test_a_study_that_is_killed_takes_its_run_along_and_goes_on(tmp_path):
    process = start(tmp_path, 10)
    end = time.monotonic() + DEADLINE_S
    while steps_made(tmp_path) < 4 and process.poll() is None:
        assert time.monotonic() < end
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    said, _ = start(tmp_path, 10).communicate(timeout=DEADLINE_S)
    assert said.splitlines()[-3:] == ["True", *WHOLE]
    assert all(json.loads(file.read_text())["failed"] is None for file in tmp_path.glob("*.json"))


@pytest.mark.parametrize("ranks", [None, 2])
def test_the_runs_of_a_sweep_are_compared(tmp_path, ranks):
    sweep = ("--multirun", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    given = (*sweep, *SMALL, "max_lag=0,1", "reference=frozen")
    with Job(*given, run_dir=None, ranks=ranks, cwd=tmp_path) as job:
        assert job.wait() == 0, job.output
    plots = tmp_path / "plots"
    said = run_python(ROOT / "recipes" / "compare.py", tmp_path / "sweep", f"out={plots}")
    lines = [line.split()[:2] for line in said.splitlines()[1:3]]
    assert lines == [["max_lag", "0"], ["max_lag", "1"]]
    assert sorted(file.name for file in plots.iterdir()) == ["pareto.png", "progress.png"]
