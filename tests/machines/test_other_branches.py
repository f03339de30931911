"""The branches of the kernels that hang on the CPU or the compiler, where this machine does not
take them: tile instructions that it may lack, and loops for what it may have.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from llamarl.machine.kernels import library
from llamarl.models.config import tiny_directory
from tests.build.job import run_python
from tests.launching import SMALL, STEPS, Job

pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(library("train", "-fopenmp") is None, reason="no kernels here"),
]
HEADER = Path(__file__).parent / "other_branches.h"
OTHER = {"LLAMARL_NATIVE_INCLUDE": str(HEADER)}
TAKEN = """
import torch
from llamarl.inference.decode import NativeDecode
from llamarl.models.build import build_decoder, read_config
from llamarl.models.config import tiny_directory
from llamarl.models.fused import kernels
decoder = build_decoder(read_config(tiny_directory()), device="cpu")
x = torch.ones(1, dtype=torch.bfloat16)
print(NativeDecode(decoder, x.dtype).use_tiles, kernels(x).has_tiles())
"""
KERNELS = ("tests/unit/test_fused.py", "tests/unit/test_decode_kernels.py")


@pytest.mark.slow
def test_decoding_and_backward_multiply_by_tiles():
    assert run_python("-c", TAKEN, **OTHER).split() == ["True", "1"]


@pytest.mark.slow
@pytest.mark.bitwise("kernels have the same bits whatever rows and threads are beside")
def test_the_kernels_compute_the_same_by_their_other_branches():
    said = run_python("-m", "pytest", "-q", "-n", "0", *KERNELS, **OTHER)
    assert " passed" in said


@pytest.mark.slow
def test_an_asynchronous_run_in_bfloat16_makes_its_steps(tmp_path):
    keys = (
        "model=hf",  # in bfloat16
        f"model.path={tiny_directory()}",
        "task.chat=false",
        "trainer.microbatch_tokens=64",  # several a step
        "trainer.skip_zero_advantage=false",  # every step has a backward
    )
    with Job(*SMALL, *keys, run_dir=tmp_path / "run", ranks=2, env=OTHER) as job:
        assert job.wait() == 0, job.output
    assert [row["step"] for row in job.rows] == list(range(STEPS + 1))
