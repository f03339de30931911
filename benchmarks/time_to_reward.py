"""Seconds until held-out accuracy reaches a target, by seed; beside TRL's GRPO in the same run if it is at hand.

    python benchmarks/time_to_reward.py [--model DIR] [--target 0.8] [--seeds 3] [--json] [overrides ...]
    python benchmarks/time_to_reward.py --model PEER/tiny_llama_sft --trl-python V/bin/python --trl-script PEER/trl_grpo.py

Time runs from the first moment at which both sides hold their model to the end of the evaluation that shows the target,
evaluations included. TRL's is its own training time, evaluations excluded: the comparison favours TRL.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from running import machine, run_job

TRL_SETTINGS = "--threads 1 --steps 600 --completions 256 --group 8 --lr 5e-5 --max-s 300 --quiet".split()


def ours(folder: Path, seed: int, args: argparse.Namespace) -> float | None:
    settings = [
        f"seed={seed}",
        f"eval.target={args.target}",
        "max_steps=1000",
        f"eval.every={args.eval_every}",
        "checkpoint.every=0",
    ]
    model = [f"model.path={args.model}"] if args.model else []
    rows = run_job(folder / str(seed), [*settings, *model, *args.overrides])
    return next((r["time/evaluated_s"] for r in rows if (r.get("eval/accuracy") or 0) >= args.target and r["step"] > 0), None)


def trl(seed: int, args: argparse.Namespace) -> float | None:
    command = [
        args.trl_python,
        args.trl_script,
        "--model",
        args.model,
        "--target",
        str(args.target),
        "--seed",
        str(seed),
        *TRL_SETTINGS,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(args.trl_script).parent, timeout=900)
    if done.returncode:
        raise RuntimeError(f"TRL failed:\n{done.stderr[-2000:]}")
    summary = json.loads(done.stdout.splitlines()[-1])["summary"]
    return summary["hit_target"][1] if summary["hit_target"] else None  # (step, training seconds, accuracy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="other ones than those on which settings were chosen")
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--trl-python")
    parser.add_argument("--trl-script")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    result: dict = {"benchmark": "time_to_reward", "target": args.target, "overrides": args.overrides, "machine": machine()}
    result["first_seed"] = args.first_seed
    with tempfile.TemporaryDirectory() as scratch:
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        times = [ours(Path(scratch), seed, args) for seed in seeds]
    result["llamarl_s"], result["llamarl_median_s"] = times, statistics.median(times) if None not in times else None
    if args.trl_python:
        peers = [trl(seed, args) for seed in seeds]
        result["trl_s"], result["trl_median_s"] = peers, statistics.median(peers) if None not in peers else None
        result["ours_over_trl"] = result["llamarl_median_s"] / result["trl_median_s"]
    print(json.dumps(result) if args.json else "\n".join(f"{k:18} {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()
