"""benchmarks/time_to_reward.py without its runs: both sides are given the same settings."""

import importlib
import json
from argparse import Namespace
from pathlib import Path

import pytest

from llamarl.config.command_line import check_command_line

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """The script, which finds its neighbours beside itself."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("time_to_reward")


@pytest.mark.parametrize("ours", ["same", "best"])
def test_our_side_is_a_job_that_the_config_accepts(benchmark, ours):
    args = Namespace(ours=ours, steps=9, eval_every=5, target=0.8, overrides=["groups_per_step=16"])
    assert check_command_line([*benchmark.our_overrides(args), "seed=0"], world_size=2)


def test_both_sides_are_given_the_same_settings(benchmark):
    args = Namespace(
        ours="same",
        steps=9,
        eval_every=5,
        target=0.8,
        overrides=[],
        trl_python="python",
        model="DIR",
        examples="FILE",
        trl_threads=2,
    )
    command = benchmark.trl_command(args, 3, Path("out"))
    theirs = json.loads(command[command.index("--settings") + 1])
    ours = dict(override.split("=", 1) for override in benchmark.our_overrides(args))
    names = {"groups": "groups_per_step", "clip": "loss.clip_low"}
    for name, value in theirs.items():
        key = names.get(name, name)
        given = ours[key] if key in ours else ours[f"trainer.{key}"]
        assert float(given) == value
