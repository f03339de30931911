"""Async against sync, same config, one run: seconds a step, and how near they are to the bound.

    python benchmarks/step.py [--steps 10] [--json]

The model is a random 12.6 M-parameter Llama (8 layers, hidden 384), 64 completions of 128 forced
tokens a step, fp32, one thread a rank: trainer | generator and reward. The sync run gives each
side's seconds while the other rests; an ideal pipeline takes the longer of the two a step. Printed:
busy seconds of each side, and async seconds a step over that bound (1.00 is ideal).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path

from running import busy_s, machine, run_job

COMPLETIONS, TOKENS = 64, 128
WARMUP = 2  # steps left out of the medians


def medium_model(out: Path) -> Path:
    import torch
    from make_tiny import TINY_CONFIG, write_directory
    from random_weights import random_weights

    from llamarl.models.build import build_decoder, read_config
    from llamarl.models.hf import export, named_parameters_hf

    config = {
        **TINY_CONFIG,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "head_dim": 64,
    }
    like = out / "like"
    like.mkdir()
    write_directory(like, config)
    decoder = random_weights(build_decoder(read_config(like)), seed=0)
    export(named_parameters_hf(decoder), like, out / "medium", dtype=torch.float32)
    return out / "medium"


@dataclasses.dataclass(frozen=True)
class Measured:
    step_s: float
    generate_s: float
    train_s: float
    lag_max: float


def measure(folder: Path, name: str, model: Path, steps: int, overrides: list[str]) -> Measured:
    common = [
        "model=tiny",
        f"model.path={model}",
        f"max_steps={steps}",
        f"groups_per_step={COMPLETIONS // 8}",
        "group_size=8",
        f"max_new_tokens={TOKENS}",
        f"generator.min_new_tokens={TOKENS}",
        "generator.max_slots=64",
        "task.max_prompt_tokens=32",
        "eval.every=0",
        "checkpoint.every=0",
        "threads=1",
        "trainer.skip_zero_advantage=false",
        "lr=1e-6",
    ]
    rows = [r for r in run_job(folder / name, common + overrides) if r["step"] > WARMUP]
    walls = [b["time/wall_s"] - a["time/wall_s"] for a, b in zip(rows, rows[1:])]
    return Measured(
        step_s=statistics.median(walls),
        generate_s=busy_s(folder / name, "generator") / steps,
        train_s=busy_s(folder / name, "trainer") / steps,
        lag_max=max(r["lag/max"] for r in rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = medium_model(folder)
        sync = measure(folder, "sync", model, args.steps, ["max_lag=0", "overcommit=0"])
        ahead = measure(folder, "async", model, args.steps, ["max_lag=1"])
    bound = max(sync.generate_s, sync.train_s)
    result = {
        "benchmark": "step",
        "sync": dataclasses.asdict(sync),
        "async": dataclasses.asdict(ahead),
        "bound_s": bound,
        "async_over_bound": ahead.step_s / bound,
        "sync_over_async": sync.step_s / ahead.step_s,
        "machine": machine(),
    }
    if args.json:
        print(json.dumps(result))
        return
    for name, m in (("sync", sync), ("async", ahead)):
        print(
            f"{name:6} {m.step_s:6.2f} s/step   generator busy {m.generate_s:5.2f}   "
            f"trainer busy {m.train_s:5.2f}   lag max {m.lag_max:.0f}"
        )
    print(
        f"bound  {bound:6.2f} s/step (the slower side alone): "
        f"async takes {ahead.step_s / bound:.2f} x that, sync {sync.step_s / bound:.2f} x"
    )
    print(f"machine {machine()}")


if __name__ == "__main__":
    main()
