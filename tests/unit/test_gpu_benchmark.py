"""benchmarks/gpu.py without a GPU: a rehearsal of all of it, and the peak that it compares with."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house import ROOT

BENCHMARKS = ROOT / "benchmarks"
PROGRAM = BENCHMARKS / "gpu.py"
REHEARSAL_S = 600


@pytest.fixture(scope="module")
def gpu():
    """benchmarks/gpu.py, as a module."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("gpu_benchmark", PROGRAM)
        module = importlib.util.module_from_spec(spec)
        sys.modules["gpu_benchmark"] = module
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))
        sys.modules.pop("gpu_benchmark", None)


def test_without_cuda_it_says_so_in_a_line_and_ends_with_2(gpu, monkeypatch, capsys):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 2
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "no CUDA here" in said


def test_the_peak_is_of_the_sheet_that_has_the_gpus_name(gpu, monkeypatch):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert gpu.peak_flops() == 989e12
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda: "NVIDIA H1000")
    assert gpu.peak_flops() is None


@pytest.mark.slow
def test_a_rehearsal_runs_every_stage(tmp_path):
    command = [sys.executable, str(PROGRAM), "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=REHEARSAL_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert [one["state"] for one in result["stages"]] == ["done"] * 7, done.stdout
    assert all(one["figures"] for one in result["stages"])
    of_tests = result["stages"][0]["figures"]
    assert of_tests["passed"] > 40 and "skipped" not in of_tests
    assert Path(tmp_path, "gpu.md").read_text().startswith("# A rehearsal on a CPU\n")
