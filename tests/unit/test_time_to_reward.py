"""benchmarks/time_to_reward.py without its runs: what it makes of them, what each side is given."""

import importlib
import json
import math
import sys
from argparse import Namespace
from itertools import product
from pathlib import Path

import pytest

from llamarl.config.command_line import check_command_line

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """The script, which finds its neighbours beside itself."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("time_to_reward")


def run_of(benchmark, side, seed, *, steps, seconds, reached=True, cpu_s=20.0):
    return benchmark.Outcome(
        side=side,
        seed=seed,
        reached=reached,
        steps=steps,
        seconds=seconds,
        accuracy=0.8,
        start_accuracy=0.4,
        cpu_s=cpu_s,
        load=0.0,
        float32="highest",
        evaluations=[],
    )


def test_a_run_ends_at_the_first_evaluation_that_shows_the_target(benchmark):
    running = importlib.import_module("running")
    rows = [
        {"step": 5 * i, "eval/accuracy": a, "time/evaluated_s": 2.0 * i}
        for i, a in enumerate((0.4, 0.7, 0.8, 0.9))
    ]
    done = running.Finished(
        status=0,
        output="llamarl  tiny\nfloat32  highest (error 2e-07)\n",
        cpu_s=3.0,
        timed_out=False,
    )
    found = benchmark.outcome("llamarl", 0, rows, done, 0.8)
    assert (found.reached, found.steps, found.seconds, found.start_accuracy) == (True, 10, 4.0, 0.4)
    assert found.float32 == "highest (error 2e-07)"
    missed = benchmark.outcome("llamarl", 0, rows, done, 0.95)
    assert (missed.reached, missed.steps, missed.accuracy) == (False, 15, 0.9)
    assert [missed.value(m) for m in benchmark.MEASURES] == [math.inf, math.inf, 0.4, math.inf]


def test_a_seed_that_missed_the_target_counts_as_slower_than_all_others(benchmark):
    ours = [
        run_of(benchmark, "llamarl", 0, steps=10, seconds=5.0),
        run_of(benchmark, "llamarl", 1, steps=300, seconds=1.0, reached=False),
        run_of(benchmark, "llamarl", 2, steps=20, seconds=8.0),
    ]
    found = benchmark.summary(ours, {"llamarl": 4.0})["llamarl"]
    assert (found["reached"], found["of"]) == (2, 3)
    assert found["seconds"] == {"median": 8.0, "least": 5.0, "most": None}
    assert found["cpu_s"] == {"median": 16.0, "least": 16.0, "most": None}
    assert found["s_per_step"]["least"] == pytest.approx(1 / 300)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_the_ratio_of_seconds_is_that_of_steps_times_that_of_seconds_a_step(benchmark):
    runs = []
    for seed, (steps, seconds) in enumerate([(10, 5.0), (20, 8.0), (30, 9.0)]):
        runs.append(run_of(benchmark, "llamarl", seed, steps=steps, seconds=seconds))
        runs.append(run_of(benchmark, "trl", seed, steps=15, seconds=30.0))
    ratios = benchmark.summary(runs, {"llamarl": 0.0, "trl": 0.0})["ours_over_trl"]
    assert ratios["seconds"] == {
        "of_medians": 8 / 30,
        "pairs": 3,
        "by_seed": {"median": 8 / 30, "least": 5 / 30, "most": 0.3},
    }
    for run, peer in zip(runs[::2], runs[1::2]):
        split = [run.value(m) / peer.value(m) for m in ("seconds", "steps", "s_per_step")]
        assert split[0] == pytest.approx(split[1] * split[2])
    assert ratios["steps"] == {
        "of_medians": 20 / 15,
        "pairs": 3,
        "by_seed": {"median": 20 / 15, "least": 10 / 15, "most": 2.0},
    }


def test_pairs_are_of_seeds_at_which_both_arrived(benchmark):
    runs = [
        run_of(benchmark, side, seed, steps=10, seconds=5.0)
        for side, seed in product(("llamarl", "trl"), (0, 1))
    ]
    runs.append(run_of(benchmark, "llamarl", 2, steps=10, seconds=5.0, reached=False))
    ratios = benchmark.summary(runs, {"llamarl": 0.0, "trl": 0.0})["ours_over_trl"]
    assert (ratios["seconds"]["pairs"], ratios["seconds"]["of_medians"]) == (2, 1.0)
    everyone_missed = [
        run_of(benchmark, side, 0, steps=9, seconds=5.0, reached=False)
        for side in ("llamarl", "trl")
    ]
    found = benchmark.summary(everyone_missed, {"llamarl": 0.0, "trl": 0.0})
    assert found["ours_over_trl"]["seconds"] == {"of_medians": None, "pairs": 0, "by_seed": None}
    assert "reached the target with 0 of 1" in benchmark.show(found) and "never" in benchmark.show(
        found
    )


def test_who_runs_first_alternates(benchmark):
    assert [benchmark.order(["llamarl", "trl"], turn)[0] for turn in range(4)] == [
        "llamarl",
        "trl",
        "llamarl",
        "trl",
    ]


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


def test_a_process_that_takes_too_long_is_ended_with_what_it_started(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    running = importlib.import_module("running")
    monkeypatch.setattr(running, "STOP_S", 0.1)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    done = running.run_process([sys.executable, "-c", deaf], timeout_s=2.0)
    assert done.timed_out and done.status == -9
    quick = running.run_process([sys.executable, "-c", "print(sum(range(10**6)))"], timeout_s=60)
    assert (quick.status, quick.timed_out, quick.output) == (
        0,
        False,
        "499999500000\n",
    ) and quick.cpu_s > 0
