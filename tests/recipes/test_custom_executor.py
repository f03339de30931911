"""recipes/custom_executor.py: its executor goes wherever the main job's executors go."""

import json
import subprocess
import sys

import pytest

from tests.launching import ROOT, SMALL, STEPS, environment

RECIPE = ROOT / "recipes" / "custom_executor.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, overrides",
    [
        (2, ["placement.reward=[0,1]"]),
        (1, ["reference=frozen", "loss.kl_coef=0.01"]),
        (1, ["reference=reset", "reference.reset_every=2", "loss.kl_coef=0.01", "max_lag=0"]),
    ],
)
def test_it_takes_the_topologies_of_the_main_job(tmp_path, ranks, overrides):
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        if ranks > 1
        else []
    )
    command = [
        sys.executable,
        *launcher,
        str(RECIPE),
        *SMALL,
        *overrides,
        f"run_dir={tmp_path / 'run'}",
    ]
    env = environment()
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows[-1]["step"] == STEPS and all(row["eval/accuracy"] is not None for row in rows[::2])
    if ranks == 1:
        assert rows[1]["kl/ref"] == pytest.approx(0.0, abs=1e-4) and rows[2]["kl/ref"] > 0
