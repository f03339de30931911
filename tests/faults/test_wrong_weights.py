"""A generator that samples from other weights, or computes another model, ends the run: by fixed
prompts or by fresh tokens, in float32 and where bfloat16 blurs both; and by the weights themselves,
where an update is too small for bfloat16's logprobs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import RECIPE, SMALL, ForkedJob

# The main job with a fault in its engine. Weights have come when `weights_changed` is called.
FAULTY = """
import dataclasses, runpy, sys
from llamarl.inference import canaries
from llamarl.inference.engine import Engine
from llamarl.models.attention import rotary_of

fault, seen_by, sys.argv = sys.argv[1], sys.argv[2], sys.argv[3:]
if seen_by == "logprobs":  # as if the parameters were right, and an engine's copies of them wrong
    canaries.check_marks = lambda *given, **place: None
right = Engine.weights_changed
held = []

def weights_changed(engine, version, **how):
    parameters = list(engine.decoder.parameters())
    came = [parameter.detach().clone() for parameter in parameters]
    if fault == "wrong_rope":
        config = engine.decoder.config
        engine.decoder.rotary = rotary_of(
            dataclasses.replace(config, rope_theta=10 * config.rope_theta)
        )
    elif fault != "none" and held:
        for parameter, old in zip(parameters, held):
            parameter.data.copy_(old)
    if not held or fault == "a_version_late":
        held[:] = came
    right(engine, version, **how)

Engine.weights_changed = weights_changed
runpy.run_path(sys.argv[0], run_name="__main__")
"""
JOB = (*SMALL, "groups_per_step=16", "eval.every=0", "checkpoint.every=0", "max_lag=0")
ADAPTERS = ("trainer.lora.rank=16", "lr=1e-3")
FAULTS = (
    ("never_arrives", "bfloat16"),
    ("a_version_late", "float32"),
    ("a_version_late", "bfloat16"),
    ("wrong_rope", "bfloat16"),
    ("adapters_never_arrive", "bfloat16"),
)
SMALL_STEPS = ("model.dtype=bfloat16", "lr=1e-5", "trainer.warmup_steps=0")


def run(fault: str, folder: Path, *words: str, seen_by: str = "logprobs") -> tuple[int, str]:
    """(exit code, output) of the main job in one process with this fault."""
    script = folder / "faulty.py"
    script.write_text(FAULTY)
    given = (fault, seen_by, str(RECIPE), *JOB, *words)
    with ForkedJob(*given, run_dir=folder / "run", recipe=script) as job:
        return job.wait(), job.output


@pytest.mark.parametrize("fault, dtype", FAULTS)
def test_a_fault_of_the_generators_weights_ends_the_run(fault, dtype, tmp_path):
    words = ADAPTERS if fault == "adapters_never_arrive" else ()
    code, said = run(fault, tmp_path, f"model.dtype={dtype}", *words)
    assert code == 1, said
    assert "their logprobs differ by" in said and "Traceback" not in said


@pytest.mark.parametrize(
    "fault, words", [("never_arrives", ()), ("a_version_late", ("trainer.lora.rank=16",))]
)
def test_weights_of_an_older_version_end_the_run_at_the_first_small_step(fault, words, tmp_path):
    code, said = run(fault, tmp_path, *SMALL_STEPS, *words, seen_by="weights")
    assert code == 1, said
    assert "does not hold the trainer's weights of version 1," in said and "Traceback" not in said
    assert "step 1/" in said and "step 2/" not in said, "nothing more is trained"


@pytest.mark.parametrize("words", [(), ADAPTERS], ids=["all", "adapters"])
def test_a_run_in_bfloat16_without_a_fault_ends_by_itself(words, tmp_path):
    code, said = run("none", tmp_path, "model.dtype=bfloat16", *words, seen_by="weights")
    assert code == 0, said
