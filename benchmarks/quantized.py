"""What a quantised generator costs in reward: the main job, seed by seed, with the generator in
full precision, int8 and fp8.

    python benchmarks/quantized.py [--steps 60] [--seeds 3] [--json FILE] [overrides ...]

Printed for each kind: held-out accuracy after the run (mean, and range over seeds), the mean reward
of the last ten steps, bytes a sync and KL(generator || trainer). "Within noise" compares means with
the spread of the unquantised seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from running import machine, run_job

KINDS = ("none", "int8", "fp8")


def measure(
    folder: Path, kind: str, seed: int, steps: int, overrides: list[str]
) -> dict[str, float | None]:
    settings = [
        f"generator.quantize={kind}",
        f"seed={seed}",
        f"max_steps={steps}",
        f"eval.every={steps}",
        "checkpoint.every=0",
    ]
    rows = run_job(folder / f"{kind}-{seed}", [*settings, *overrides])
    kls = [
        r["weights/quantization_kl"] for r in rows if r.get("weights/quantization_kl") is not None
    ]
    return {
        "accuracy": rows[-1]["eval/accuracy"],
        "reward": statistics.mean(r["reward/mean"] for r in rows[1:][-10:]),
        "bytes": rows[-1]["weights/bytes"],
        "kl": statistics.mean(kls) if kls else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    results: dict[str, list[dict]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(args.seeds):
            for kind in KINDS:  # seed by seed, so that a busy machine meets all kinds alike
                results[kind].append(measure(Path(scratch), kind, seed, args.steps, args.overrides))
    plain = [r["accuracy"] for r in results["none"]]
    noise = max(plain) - min(plain)
    for kind, runs in results.items():
        accuracies = [r["accuracy"] for r in runs]
        mean = statistics.mean(accuracies)
        kl = (
            f"  KL {statistics.mean(r['kl'] for r in runs):.1e} nats"
            if runs[0]["kl"] is not None
            else ""
        )
        within = ""
        if kind != "none":
            is_within = abs(mean - statistics.mean(plain)) <= noise
            within = "  within noise" if is_within else "  OUTSIDE noise"
        print(
            f"{kind:5} accuracy {mean:6.1%} ({min(accuracies):.1%}..{max(accuracies):.1%})  "
            f"reward {statistics.mean(r['reward'] for r in runs):.3f}  "
            f"{runs[0]['bytes']:,.0f} bytes a sync{kl}{within}"
        )
    print(f"machine {machine()}")
    if args.json:
        args.json.write_text(
            json.dumps({"steps": args.steps, "runs": results, "machine": machine()}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
