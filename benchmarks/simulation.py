"""How close a simulated run is to a true one: seconds a step, lag and idle shares.

    python benchmarks/simulation.py [--steps 30] [--json FILE]

Main jobs on two ranks, with a reward that sleeps (benchmarks/sleeping.py). A job is simulated with
the seconds of an update, a publication, a swap and a chunk that it was measured to take, since
other work on the machine changes these from job to job; the seconds of a score are the first job's.
The last job's reward is the task's own, which takes no time, so that its trainer is the slow side.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from running import busy_s, machine, run_job
from sleeping import SECONDS

from llamarl.planner.simulation_settings import SimulationSettings
from llamarl.planner.straight import StraightTimings
from llamarl.planner.world import SimulationResult, simulate

WARMUP = 5  # steps left out
SIZES = {"groups_per_step": 8, "group_size": 4}
SLOTS = 256
TOKENS = 6  # the default task's longest completion
# Keys of the main job; num_workers is reward.num_workers.
CASES: tuple[dict[str, int], ...] = (
    {"max_lag": 4, "overcommit": 8, "num_workers": 1},
    {"max_lag": 0, "overcommit": 0, "num_workers": 1},
    {"max_lag": 2, "overcommit": 4, "num_workers": 4},
    {"max_lag": 8, "overcommit": 16, "num_workers": 0},  # 0: the task's own reward
)
SHARES = ("trainer/idle_fraction", "generator/idle_fraction")


def measure(case: dict[str, int], steps: int, run_dir: Path) -> dict[str, float]:
    """Means of a true run's rows after WARMUP, weighted by time where they are shares of it."""
    overrides = [f"{key}={case[key]}" for key in ("max_lag", "overcommit")]
    overrides += [f"{key}={value}" for key, value in SIZES.items()]
    if case["num_workers"]:
        overrides.append("reward.fn=benchmarks.sleeping:slow")
        overrides.append(f"reward.num_workers={case['num_workers']}")
    overrides += [
        f"max_steps={steps}",
        f"generator.max_slots={SLOTS}",
        "eval.num_prompts=0",
        "checkpoint.every=0",
        "threads=1",
    ]
    rows = run_job(run_dir, overrides)
    steps_s = []
    for before, row in zip(rows[WARMUP - 1 :], rows[WARMUP:]):
        steps_s.append(row["time/wall_s"] - before["time/wall_s"])
    rows = rows[WARMUP:]
    updates_s = []
    for row in rows:
        stalls_s = row["time/wait_for_data_s"] + row["weights/publish_stall_s"]
        updates_s.append(row["time/step_s"] - stalls_s)
    found = {
        "step_s": statistics.mean(steps_s),
        "lag": statistics.mean(row["lag/mean"] for row in rows),
        "lag_max": max(row["lag/max"] for row in rows),
        "update_s": statistics.mean(updates_s),
        "publish_s": statistics.mean(row["weights/publish_stall_s"] for row in rows),
        "swap_s": statistics.mean(row["weights/swap_stall_s"] for row in rows),
        "length": statistics.mean(row["completion/length_mean"] for row in rows),
        "generator_s": busy_s(run_dir, "generator") / steps,
    }
    for name in SHARES:
        counted = [pair for pair in zip(rows, steps_s) if pair[0][name] is not None]
        idle_s = sum(row[name] * seconds for row, seconds in counted)
        found[name] = idle_s / sum(seconds for _, seconds in counted)
    return found


def score_s(first: dict[str, float]) -> float:
    """Seconds of a score in the first run, whose reward is the slow side: a step's seconds over a
    step's completions.
    """
    return first["step_s"] / (SIZES["groups_per_step"] * SIZES["group_size"])


def foretell(
    case: dict[str, int], steps: int, true: dict[str, float], of_score_s: float
) -> SimulationResult:
    """Simulate a case. of_score_s: seconds of a score of the reward that sleeps."""
    settings = SimulationSettings(
        max_steps=steps,
        warmup_steps=WARMUP,
        max_lag=case["max_lag"],
        overcommit=case["overcommit"],
        num_workers=max(1, case["num_workers"]),
        max_slots=SLOTS,
        length_mean=true["length"],
        length_sigma=0.3,
        max_new_tokens=TOKENS,
        prompt_tokens=5,
        **SIZES,
    )
    seconds = StraightTimings(
        decode_s=true["generator_s"] / TOKENS,
        update_s=true["update_s"],
        score_s=of_score_s if case["num_workers"] else 0.0,
        publish_s=true["publish_s"],
        swap_s=true["swap_s"],
    )
    return simulate(settings, seconds.timings())


def row_of(case: dict[str, int], true: dict[str, float], result: SimulationResult) -> dict:
    shares = {f"{idle.executor}/idle_fraction": idle.share for idle in result.idle}
    simulated = {"step_s": result.step_s, "lag": result.mean_lag, "lag_max": result.max_lag}
    simulated |= {name: shares[name] for name in SHARES}
    return {**case, "true": true, "simulated": simulated}


def show(row: dict) -> str:
    """A line: each figure true, then simulated."""
    true, ours = row["true"], row["simulated"]
    texts = [f"{row['max_lag']:>7} {row['overcommit']:>10} {row['num_workers']:>7}"]
    texts.append(f"{true['step_s']:>7.3f} {ours['step_s']:>6.3f}")
    texts.append(f"{true['lag']:>6.2f} {ours['lag']:>5.2f}")
    for name in SHARES:
        texts.append(f"{true[name]:>8.1%} {ours[name]:>6.1%}")
    return "  ".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"a reward of {SECONDS} s; each figure true, then simulated")
    print(
        "max_lag overcommit workers   s a step          lag          trainer idle    generator idle"
    )
    rows = []
    first: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(CASES):
            true = measure(case, args.steps, Path(folder) / str(number))
            first = first or true
            rows.append(row_of(case, true, foretell(case, args.steps, true, score_s(first))))
            print(show(rows[-1]), flush=True)
    print(f"machine {machine()}")
    if args.json:
        result = {"benchmark": "simulation", "steps": args.steps, "rows": rows}
        result["machine"] = machine()
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
