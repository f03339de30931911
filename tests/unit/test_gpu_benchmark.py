"""benchmarks/gpu.py without a GPU: what it says of one, how it goes on after a stage that fails,
its page, and a rehearsal of all of it.
"""

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


@pytest.fixture
def run(gpu, monkeypatch, capsys, tmp_path):
    """run(stages, *options): (exit code, figures, page, what was said) of a rehearsal of these."""

    def run(stages: dict, *options: str):
        monkeypatch.setattr(gpu, "STAGES", stages)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as before, behind the test
        out = ["--rehearse", "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["gpu.py", *out, "--stages", ",".join(stages), *options])
        code = gpu.main()
        said = capsys.readouterr().out
        result = json.loads((tmp_path / "gpu.json").read_text())
        return code, result["stages"], (tmp_path / "gpu.md").read_text(), said

    return run


def test_without_cuda_it_says_so_in_a_line_and_ends_with_2(gpu, monkeypatch, capsys):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 2
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "no CUDA here" in said


def test_a_stage_that_fails_is_written_down_and_the_next_one_runs(gpu, run):
    def breaks(setup):
        raise RuntimeError("no kernel image | is available\nand more")

    def half(setup):
        raise gpu.Failed("two tests are red", {"passed": 3})

    def absent(setup):
        raise gpu.Skipped("one GPU alone")

    stages = {
        "breaks": (breaks, 1.0),
        "half": (half, 1.0),
        "absent": (absent, 1.0),
        "works": (lambda setup: {"of the bandwidth": 0.5, "tokens/s": 1234.6}, 1.0),
    }
    code, outcomes, page, said = run(stages)
    assert code == 1
    assert [one["state"] for one in outcomes] == ["failed", "failed", "skipped", "done"]
    assert outcomes[1]["figures"] == {"passed": 3}
    assert "| failed | 0 | RuntimeError: no kernel image / is available |" in page
    assert "| of the bandwidth | 50.0% |" in page and "| tokens/s | 1,235 |" in page
    assert "figures mean nothing" in page and "one GPU alone" in said


def test_a_stage_has_what_is_left_of_the_time_and_none_begins_behind_it(gpu, run, monkeypatch):
    limits = []
    stages = {
        "first": (lambda setup: limits.append(setup.limit_s) or {}, 1e9),
        "second": (lambda setup: {}, 1.0),
    }
    monkeypatch.setattr(gpu, "TOTAL_S", 50.0)
    code, *_ = run(stages)
    assert code == 0 and 0 < limits[0] <= 50.0 * gpu.PATIENCE
    monkeypatch.setattr(gpu, "TOTAL_S", 0.0)
    _, outcomes, *_ = run(stages)
    assert [one["state"] for one in outcomes] == ["skipped", "skipped"]


def test_stages_that_are_not_asked_for_stay_with_their_machine(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    for card, names in (("H1", "first,second"), ("H2", "second")):
        stages = {
            "first": (lambda setup: {"tokens/s": 1.0}, 1.0),
            "second": (lambda setup, card=card: {"tokens/s": float(card[1])}, 1.0),
        }
        monkeypatch.setattr(gpu, "STAGES", stages)
        monkeypatch.setattr(gpu, "device", lambda card=card: {"gpu": card})
        argv = ["gpu.py", "--out", str(tmp_path), "--stages", names]
        monkeypatch.setattr(sys, "argv", argv)
        assert gpu.main() == 0
    outcomes = json.loads((tmp_path / "gpu.json").read_text())["stages"]
    found = [(o["stage"], o["machine"]["gpu"], o["figures"]["tokens/s"]) for o in outcomes]
    assert found == [("first", "H1", 1.0), ("second", "H2", 2.0)]
    outcomes[0]["machine"]["gpu"] = gpu.NO_DEVICE
    (tmp_path / "rehearsed").mkdir()
    (tmp_path / "rehearsed" / "gpu.json").write_text(json.dumps({"stages": outcomes}))
    (found,) = gpu.kept(tmp_path / "rehearsed", [])
    assert found.stage == "second", "a rehearsal's figures are no measured ones"
    page = (tmp_path / "gpu.md").read_text()
    assert page.index("| first | H1, torch") < page.index("| second | H2, torch")


def test_all_stages_together_have_25_minutes(gpu):
    assert sum(limit_s for _, limit_s in gpu.STAGES.values()) == gpu.TOTAL_S == 25 * 60


def test_a_command_that_takes_too_long_or_fails_is_an_error_with_its_last_words(
    gpu, tmp_path, monkeypatch
):
    monkeypatch.setattr(gpu, "BENCHMARKS", tmp_path)
    (tmp_path / "breaks.py").write_text("import sys\nprint('why it broke')\nsys.exit(3)\n")
    setup = gpu.Setup(tmp_path, True, 60.0)
    with pytest.raises(RuntimeError, match="breaks.py ended with 3:\nwhy it broke"):
        setup.benchmark("breaks.py")
    (tmp_path / "waits.py").write_text("import threading\nthreading.Event().wait()\n")
    with pytest.raises(RuntimeError, match="waits.py took longer than 0 s"):
        gpu.Setup(tmp_path, True, 0.1).benchmark("waits.py")


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
