"""benchmarks/kept_runs.py: what it holds a run to, and that it finds a change."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch):
    """The script, which finds its neighbours beside itself."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("kept_runs")


def rows(value, *, count=0, **more):
    """Two rows of a run."""
    first = {"step": 0, "eval/reward": 0.5, "time/wall_s": 1.0}
    return [first, {"step": 1, "loss/value": value, "dialogues/turns": count, **more}]


def test_the_last_bit_of_a_steady_column_is_a_difference(program):
    base = [rows(1.0, count=3), rows(1.0, count=4)]
    found, remarks = program.hold_synchronous(base, rows(1.0, count=5), [])
    assert found == []
    # step, eval/reward and loss/value
    assert remarks == ["3 columns compared", "unsteady: dialogues/turns"]
    found, _ = program.hold_synchronous(base, rows(1.0 + 2**-52, count=5), [])
    assert list(map(str, found)) == ["step 1, loss/value: base 1.0, here 1.0000000000000002"]
    found, _ = program.hold_synchronous(base, rows(1.0)[:1], [])
    assert {one.column for one in found} == {"step", "loss/value"}


def test_a_column_that_one_side_has_differs_unless_it_is_allowed(program):
    base = [rows(1.0, **{"kl/ref": None})] * 2
    here = rows(1.0, **{"kl/new": 0.0})
    found, remarks = program.hold_synchronous(base, here, [])
    assert [(one.column, one.base, one.here) for one in found] == [
        ("kl/new", "absent", "0.0"),
        ("kl/ref", "null", "absent"),
    ]
    assert remarks[1:] == ["new or gone: kl/new, kl/ref"]
    assert program.hold_synchronous(base, here, ["kl/*"])[0] == []


def test_an_asynchronous_mean_is_held_to_its_interval(program):
    stage = {"column": "reward/mean", "first": 1, "last": 2, "mean": 0.5, "within": 0.1}
    for last, outside in ((0.7, []), (0.9, ["0.700"])):
        given = [
            {"step": 0},
            {"step": 1, "reward/mean": 0.5},
            {"step": 2, "reward/mean": last},
        ]
        found, _ = program.hold_asynchronous([stage], given)
        assert [one.here for one in found] == outside


@pytest.mark.slow
@pytest.mark.bitwise("a synchronous run is the same every time")
def test_another_rate_is_found_and_nothing_else(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "kept_runs.py"), "HEAD", "--only", "one process"]
    given = {"stdout": subprocess.PIPE, "text": True, "timeout": 600}
    done = subprocess.run([*command, "--folder", str(tmp_path)], **given)
    assert done.returncode == 0 and "kept" in done.stdout, done.stdout
    done = subprocess.run([*command, "--here-only", "lr=1e-2"], **given)
    assert done.returncode == 1 and "values differ" in done.stdout, done.stdout
    # The first step is made with the weights of the start.
    assert "step 1," not in done.stdout and "step 2, completion/length_mean: base" in done.stdout
