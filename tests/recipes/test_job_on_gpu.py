"""The main job, whole and in this process, on a GPU that is not there: generator with graphs,
reward, trainer, weights, canary, evaluation and checkpoints.
"""

import runpy
import sys

import pytest

# What a recipe loads: it loads faster where there is no GPU that is not there.
from executors import build, generator, reward, trainer  # noqa: F401
from llamarl.comm import groups
from tests.build.rows import read_rows
from tests.house import ROOT
from tests.imagined_gpu import imagined_gpu

pytestmark = pytest.mark.slow

RECIPE = ROOT / "recipes" / "llama_async.py"
TINY = [
    "max_steps=2",
    "groups_per_step=2",
    "group_size=2",
    "eval.every=2",
    "eval.num_prompts=2",
    "generator.max_slots=4",
    "threads=1",
]
VARIANTS = {
    "in turns": ["placement.colocate=[trainer,generator]", "offload=true", "max_lag=0"],
    "fp8": ["generator.quantize=fp8", "model.dtype=bfloat16", "trainer.parity_tolerance=0.5"],
    "adapters": ["trainer.lora.rank=2", "reference=frozen", "loss.kl_coef=0.1"],
    "values": ["loss=ppo", "trainer.advantages=gae"],
}


@pytest.fixture
def run(run_here, monkeypatch, tmp_path):
    """run(*overrides): (rows, gpu) of the job."""
    monkeypatch.setattr(groups.dist, "is_nccl_available", lambda: False)

    def run(*overrides):
        command = [str(RECIPE), f"run_dir={tmp_path / 'run'}", *TINY, *overrides]
        monkeypatch.setattr(sys, "argv", command)
        with imagined_gpu() as gpu:
            code, said = run_here(lambda: runpy.run_path(str(RECIPE), run_name="__main__"))
        assert code in (0, None), said
        return read_rows(tmp_path / "run" / "metrics.jsonl"), gpu

    return run


def test_the_default_job_runs_on_a_gpu(run):
    rows, gpu = run()
    assert rows[-1]["step"] == 2 and rows[-1]["eval/accuracy"] is not None
    assert rows[-1]["weights/bytes"] > 0
    assert rows[1]["parity/logprob_diff_max"] < 1e-3
    streams = {done.who for done in gpu.streams.log}
    assert gpu.streams.num_captures > 0 and len(streams) > 4
    assert any(done.what == "replay" for done in gpu.streams.log)


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_other_jobs_run_on_a_gpu(run, overrides):
    rows, _ = run(*overrides)
    assert rows[-1]["step"] == 2
