"""A run that trains adapters in bfloat16, stopped and resumed: trainer and generator stay the same
model, what travels is small, and the checkpoint is evaluated and gone on from.
"""

from __future__ import annotations

import pytest

from llamarl.evaluation.model import find_model
from llamarl.models.config import tiny_directory
from llamarl.models.peft import WEIGHTS
from tests.build.job import finished_job
from tests.build.model_directory import same_tensors
from tests.launching import SMALL, untimed

STEPS = 3
LORA = (
    *SMALL,
    "max_lag=0",
    "model.dtype=bfloat16",
    "trainer.lora.rank=4",
    "lr=1e-3",
    "groups_per_step=16",
    "eval.every=0",
)
RMS = "parity/logprob_diff_rms"


def run_to(end, *overrides, run_dir):
    return finished_job(*LORA, *overrides, f"max_steps={end}", run_dir=run_dir)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_to(STEPS, run_dir=tmp_path_factory.mktemp("lora") / "run")


def adapter_of(job):
    return job.run_dir / "checkpoints" / f"step_{STEPS}" / "adapter"


def test_the_policy_that_is_sampled_is_the_one_that_is_trained(run):
    """At step 1 B is 0, so what differs there is the rounding of two orders of bfloat16. Adapters
    that are not applied in the generator make 70 times as much by step 2.
    """
    first, *later = run.rows
    assert len(later) == STEPS - 1
    for row in later:
        assert row[RMS] < 5 * first[RMS]
        assert row["ratio/mean"] == pytest.approx(1, abs=first[RMS])
        assert row["weights/bytes"] < 0.05 * (tiny_directory() / "model.safetensors").stat().st_size


def test_a_resumed_run_goes_on_as_one_that_was_not_stopped(run, tmp_path):
    run_to(2, run_dir=tmp_path / "run")
    resumed = run_to(STEPS, "resume=auto", run_dir=tmp_path / "run")
    assert untimed(resumed.rows) == untimed(run.rows)
    assert same_tensors(adapter_of(resumed) / WEIGHTS, adapter_of(run) / WEIGHTS)


def test_a_checkpoint_is_evaluated_by_its_adapters_and_a_run_starts_from_them(run, tmp_path):
    path, of = find_model(run.run_dir / "checkpoints" / "latest")
    assert (path, of) == (adapter_of(run), run.run_dir)
    merged, _ = find_model(path.with_name("hf"))
    assert merged == path.with_name("hf")
    other = run_to(0, f"trainer.lora.path={path}", run_dir=tmp_path / "run")
    started = other.run_dir / "checkpoints" / "step_0" / "adapter"
    assert same_tensors(started / WEIGHTS, path / WEIGHTS)
