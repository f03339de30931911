"""A run whose generator does not hold the trainer's weights ends at the version where
that begins.
"""

import subprocess
import sys

import pytest

from tests.launching import JOB_S, RECIPE, ROOT, SMALL, environment

pytestmark = pytest.mark.machine

BROKEN = """
import runpy, sys, torch
from llamarl.ddma.receiver import WeightsReceiver
swap, first = WeightsReceiver.swap, int(sys.argv[1])
def broken(self):
    staged = swap(self)
    if staged is not None and staged.version >= first:
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.dim() == 2:
                    parameter.mul_(1.05)
                    break
    return staged
WeightsReceiver.swap = broken
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_broken(first: int, run_dir) -> subprocess.CompletedProcess:
    """The main job in one process; from version `first` on, one matrix of the generator is 1.05
    times the trainer's.
    """
    # In step with the trainer, so that every version is swapped in.
    command = [
        sys.executable,
        "-c",
        BROKEN,
        str(first),
        str(RECIPE),
        *SMALL,
        "max_lag=0",
        f"run_dir={run_dir}",
    ]
    env = environment()
    return subprocess.run(command, capture_output=True, text=True, timeout=JOB_S, cwd=ROOT, env=env)


@pytest.mark.parametrize("version", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_other_weights_in_the_generator_end_the_run_before_anything_more_is_trained(
    tmp_path, version
):
    done = run_broken(version, tmp_path / "run")
    assert done.returncode == 1, done.stderr
    assert "generator on rank 0 and the trainer differ by" in done.stderr
    assert f"in the logprobs of fixed prompts under version {version}, more than" in done.stderr
    assert "Traceback" not in done.stderr
    assert f"step {version + 1}/" not in done.stdout and ("step 1/" in done.stdout) == (
        version > 0
    ), done.stdout


@pytest.mark.slow
def test_the_same_run_with_the_trainers_weights_passes(tmp_path):
    done = run_broken(99, tmp_path / "run")
    assert done.returncode == 0, done.stderr
