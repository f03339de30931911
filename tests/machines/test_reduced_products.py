"""A machine that reduces float32 products is noticed; and were it not, the main job would end at
its first parity check.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamarl.machine.kernels import library
from tests.launching import JOB_S, RECIPE, ROOT, SMALL, environment

pytestmark = pytest.mark.machine
REDUCED = Path(__file__).parent / "reduced"
MEASURE = (
    "from llamarl.machine.precision import use_float32_products; "
    "print(use_float32_products(reproducible=True))"
)
# The main job, on a machine whose settings would be chosen without regard to their error.
CARELESS = """
import runpy, sys
from llamarl.machine import precision
precision.choose = lambda tried, *, reproducible: next(m for m in tried if m.setting == "medium")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*command: str) -> subprocess.CompletedProcess:
    """Python on such a machine."""
    path = os.pathsep.join([str(REDUCED), environment()["PYTHONPATH"]])
    command = [sys.executable, *command]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=JOB_S,
        cwd=ROOT,
        env=environment(PYTHONPATH=path),
    )


def test_reduced_products_are_measured_and_not_chosen():
    done = run("-c", MEASURE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("highest (error ") and "not medium (error " in done.stdout


@pytest.mark.slow
def test_the_main_job_ends_at_its_first_parity_check_if_they_are_chosen_all_the_same(tmp_path):
    if library("decode", "-fopenmp") is None:
        pytest.skip("trainer and generator multiply alike without the C kernels")
    done = run("-c", CARELESS, str(RECIPE), *SMALL, "max_lag=0", f"run_dir={tmp_path / 'run'}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "float32  medium" in done.stdout
    assert (
        "generator on rank 0 and the trainer on fixed prompts under version 0" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert "step 1/" not in done.stdout
