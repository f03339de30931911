"""The main job, whole and in this process, on a GPU that is not there, of NVIDIA's kind or a Mac's:
generator with graphs, reward, trainer, weights, canary, evaluation and checkpoints.
"""

import json
import runpy
import sys

import pytest

# What a recipe loads: it loads faster where there is no GPU that is not there.
from executors import build, generator, reward, trainer  # noqa: F401
from llamarl.comm import groups
from tests.build.rows import read_rows
from tests.house import ROOT
from tests.imagined_gpu import imagined_apple_gpu, imagined_gpu, untouchable_gpu

pytestmark = pytest.mark.slow

RECIPE = ROOT / "recipes" / "llama_async.py"
MODEL = ROOT / "llamarl" / "models" / "tiny"
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

    def run(*overrides, on=imagined_gpu):
        command = [str(RECIPE), f"run_dir={tmp_path / 'run'}", *TINY, *overrides]
        monkeypatch.setattr(sys, "argv", command)
        with on() as gpu:
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


APPLE_VARIANTS = {
    "defaults": [],
    "adapters": VARIANTS["adapters"],
    "values": VARIANTS["values"],
}


@pytest.mark.parametrize("overrides", APPLE_VARIANTS.values(), ids=APPLE_VARIANTS)
def test_a_job_runs_on_a_macs_gpu_without_cuda_float64_or_unawaited_copies(run, overrides):
    rows, gpu = run("device=mps", *overrides, on=imagined_apple_gpu)
    assert rows[-1]["step"] == 2 and rows[-1]["eval/accuracy"] is not None
    assert rows[1]["parity/logprob_diff_max"] < 1e-3
    assert sum(gpu.allocated) > 5 * rows[-1]["weights/bytes"], "both models compute there"


SIDE_JOBS = {
    "sft": ["task=addition", "max_new_tokens=4", "max_steps=2", "examples_per_step=4"],
    "reward_model": ["task.path=PAIRS", "epochs=null", "max_steps=2", "examples_per_step=2"],
    "preferences": ["task=addition", "num_prompts=2", "samples=2", "groups_per_step=2"],
    "evaluate": ["num_prompts=2", "samples=2", "generator.top_p=0.9", f"eval.base={MODEL}"],
}


@pytest.mark.parametrize("name", SIDE_JOBS)
def test_a_side_job_computes_on_a_macs_gpu(run_here, monkeypatch, tmp_path, name):
    pairs = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "f"} for n in range(12)]
    (tmp_path / "PAIRS").write_text("\n".join(map(json.dumps, pairs)))
    monkeypatch.chdir(tmp_path)
    recipe = str(ROOT / "recipes" / f"{name}.py")
    words = [recipe, f"model.path={MODEL}", "out=out", "device=mps", *SIDE_JOBS[name]]
    monkeypatch.setattr(sys, "argv", words)
    with imagined_apple_gpu() as gpu:
        code, said = run_here(lambda: runpy.run_path(recipe, run_name="__main__"))
    assert code in (0, None), said
    assert sum(gpu.allocated) > 6_500_000, "the model is there, and more"


def test_a_job_leaves_a_gpu_alone_if_told_to(run):
    rows, _ = run("device=cpu", on=untouchable_gpu)
    assert rows[-1]["step"] == 2
