"""--multirun: the runs of a sweep, in one process and on ranks, side by side in one directory that
recipes/compare.py takes.
"""

import subprocess
import sys

import pytest

from tests.launching import ROOT, SMALL, Job, environment


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, 2])
def test_the_runs_of_a_sweep_are_compared(tmp_path, ranks):
    sweep = tmp_path / "sweep"
    overrides = (
        "--multirun",
        f"hydra.sweep.dir={sweep}",
        *SMALL,
        "max_lag=0,1",
        "reference=frozen",
    )
    with Job(*overrides, run_dir=None, ranks=ranks, cwd=tmp_path) as job:
        assert job.wait() == 0, job.output
    command = [sys.executable, ROOT / "recipes" / "compare.py", sweep, f"out={tmp_path / 'plots'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment())
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:3]] == [
        ["max_lag", "0"],
        ["max_lag", "1"],
    ]
    assert sorted(file.name for file in (tmp_path / "plots").iterdir()) == [
        "pareto.png",
        "progress.png",
    ]
