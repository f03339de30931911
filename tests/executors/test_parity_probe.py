"""The start-up parity probe ends a run whose generator does not hold the trainer's weights."""

import os
import subprocess
import sys

from tests.launching import RECIPE, ROOT, SMALL

BROKEN = """
import runpy, sys, torch
from executors.generator import Generator
send = Generator._send_probe
def broken(self):
    with torch.no_grad():
        next(self.engine.decoder.parameters()).mul_(1.05)
    send(self)
Generator._send_probe = broken
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_other_weights_in_the_generator_end_the_run_before_anything_is_trained(tmp_path):
    command = [sys.executable, "-c", BROKEN, str(RECIPE), *SMALL, f"run_dir={tmp_path / 'run'}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=env)
    assert done.returncode == 1
    assert "generator 0 and the trainer differ by" in done.stderr
    assert "step 1/" not in done.stdout
