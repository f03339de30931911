"""The benchmarks' own arithmetic, without their runs (tests/recipes/test_benchmark_runs.py)."""

import importlib
import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from llamarl.config.command_line import check_command_line
from llamarl.models.sharding import num_parameters
from llamarl.planner.profile import read_profile
from tests.build.rows import write_rows
from tests.house import ROOT


@pytest.fixture
def programs(monkeypatch):
    """programs.NAME: the script of this name, which finds its neighbours beside itself."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = ("time_to_reward", "informative", "gpu", "kept_runs", "llamarl_table")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


# --- time_to_reward.py: both sides are given the same settings ---


def test_both_sides_are_given_the_same_settings_and_ours_is_a_job_of_the_config(programs):
    args = Namespace(
        steps=9,
        eval_every=5,
        target=0.8,
        overrides=["metrics.trace=false"],
        trl_python="python",
        model="DIR",
        examples="FILE",
        trl_threads=2,
    )
    words = programs.time_to_reward.our_overrides(args)
    assert check_command_line([*words, "seed=0"], world_size=2)
    ours = dict(word.split("=", 1) for word in words)
    command = programs.time_to_reward.trl_command(args, 3, Path("out"))
    theirs = json.loads(command[command.index("--settings") + 1])
    names = {"groups": "groups_per_step", "clip": "loss.clip_low"}
    for name, value in theirs.items():
        key = names.get(name, name)
        given = ours[key] if key in ours else ours[f"trainer.{key}"]
        assert float(given) == value


# --- informative.py: what an oracle that draws prompts would come to ---


def test_an_oracle_draws_the_prompts_that_are_sometimes_solved(programs, tmp_path):
    rows = []
    for number, given in enumerate(([1, 0] * 8, [0] * 16)):
        for sample, score in enumerate(given):
            rows.append({"number": number, "sample": sample, "score": score})
    path = write_rows(tmp_path / "scores.jsonl", *rows)
    found = programs.informative.oracle(path)
    teaches = 1 - 2 * 0.5**programs.informative.SIZE
    assert found["uniform"] == pytest.approx(teaches / 2)
    assert found["oracle"] == pytest.approx(teaches)
    assert found["dead"] == 0.5


# --- gpu.py ---


def test_the_peak_is_of_the_profile_that_has_the_gpus_name(programs, monkeypatch):
    cuda = programs.gpu.torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert programs.gpu.peak_flops() == 989e12
    monkeypatch.setattr(cuda, "get_device_name", lambda: "NVIDIA H1000")
    assert programs.gpu.peak_flops() is None


# --- kept_runs.py: what it holds a run to ---


def rows(value, *, count=0, **more):
    """Two rows of a run."""
    first = {"step": 0, "eval/reward": 0.5, "time/wall_s": 1.0}
    return [first, {"step": 1, "loss/value": value, "dialogues/turns": count, **more}]


def test_the_last_bit_of_a_steady_column_is_a_difference(programs):
    base = [rows(1.0, count=3), rows(1.0, count=4)]
    hold = programs.kept_runs.hold_synchronous
    found, remarks = hold(base, rows(1.0, count=5), [])
    assert found == []
    # step, eval/reward and loss/value
    assert remarks == ["3 columns compared", "unsteady: dialogues/turns"]
    found, _ = hold(base, rows(1.0 + 2**-52, count=5), [])
    assert list(map(str, found)) == ["step 1, loss/value: base 1.0, here 1.0000000000000002"]
    found, _ = hold(base, rows(1.0)[:1], [])
    assert {one.column for one in found} == {"step", "loss/value"}


def test_a_column_that_one_side_has_differs_unless_it_is_allowed(programs):
    base = [rows(1.0, **{"kl/ref": None})] * 2
    here = rows(1.0, **{"kl/new": 0.0})
    hold = programs.kept_runs.hold_synchronous
    assert [one.column for one in hold(base, here, [])[0]] == ["kl/new", "kl/ref"]
    assert hold(base, here, ["kl/*"])[0] == []


def test_an_asynchronous_mean_is_held_to_its_interval(programs):
    stage = {"column": "reward/mean", "first": 1, "last": 2, "mean": 0.5, "within": 0.1}
    for last, outside in ((0.7, []), (0.9, ["0.700"])):
        given = [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": last}]
        found, _ = programs.kept_runs.hold_asynchronous([stage], given)
        assert [one.here for one in found] == outside


# --- llamarl_table.py: LlamaRL's step times from the hardware profile of H100s ---


def test_every_figure_is_within_a_quarter_and_three_were_not_set(programs):
    table = programs.llamarl_table
    assert [round(num_parameters(row.model) / 1e9) for row in table.TABLE] == [8, 71, 406]
    found = table.predictions(read_profile("h100"))
    assert len(found) == 6
    assert all(abs(one["error"]) <= 0.25 for one in found), found
    predicted = [(one["model"], one["system"]) for one in found if not one["is_set"]]
    later = "asynchronous"
    assert predicted == [("70B", "synchronous"), ("70B", later), ("405B", later)]
    # Both of the 8B row's figures to 1 %, as the free values are those that it gives.
    eight = [abs(one["error"]) for one in found if one["model"] == "8B"]
    assert len(eight) == 2 and max(eight) < 0.01
