"""Shared by the benchmarks that run whole jobs: start one, read its rows and spans, say what machine it ran on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_job(run_dir: Path, overrides: list[str], *, ranks: int = 2, timeout_s: float = 1800) -> list[dict]:
    """Run the main job on `ranks` processes and return its rows. RuntimeError with its last lines if it fails."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, str(ROOT / "recipes" / "llama_async.py"), f"run_dir={run_dir}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(overrides)} failed:\n" + "\n".join((done.stdout + done.stderr).splitlines()[-15:]))
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def busy_s(run_dir: Path, lane: str, since_s: float = 0.0) -> float:
    """Seconds that an executor worked, over all ranks, from its spans in the run's traces; since_s into the trace."""
    total = 0.0
    for file in run_dir.glob("trace.rank*.json"):
        events = json.loads(file.read_text())["traceEvents"]
        lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
        total += sum(e["dur"] for e in events if e["ph"] == "X" and lanes.get((e["pid"], e["tid"]), "").startswith(lane)) / 1e6
    return total


def machine() -> dict[str, str | int | float]:
    import torch

    model = next(
        (line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine()
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
