"""A job that runs to its end, and what a program says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.launching import JOB_S, RECIPE, ROOT, ForkedJob, Job, environment


def finished_job(
    *overrides: str,
    run_dir: Path,
    ranks: int | None = None,
    recipe: Path = RECIPE,
    kind: type[Job] = ForkedJob,
    **options,
) -> Job:
    """Run a job to its end; AssertionError with its output if it fails. Its rows and its run
    directory can be read afterwards. options: of the Job.

        finished_job(*SMALL, "max_lag=0", run_dir=tmp_path / "run", ranks=2).rows
    """
    with kind(*overrides, run_dir=run_dir, ranks=ranks, recipe=recipe, **options) as job:
        assert job.wait() == 0, job.output
        return job


def run_python(*arguments: object, cwd: Path = ROOT, timeout_s: float = JOB_S, **env: str) -> str:
    """Return what Python prints for these arguments. AssertionError with its errors if it fails."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
