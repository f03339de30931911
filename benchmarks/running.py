"""Shared by the benchmarks that run whole jobs: start one, read its rows and spans, name the
machine.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER_LINE = "torch/distributed/elastic/multiprocessing/api.py"
PAGE_COLUMNS = 130  # of Markdown
STOP_S = 60.0  # a process that is asked to end has so long


@dataclass(frozen=True, slots=True)
class Finished:
    """A process that ended. cpu_s: user and system seconds of it and of all its descendants that
    were waited for.
    """

    status: int
    output: str  # stdout and stderr
    cpu_s: float
    timed_out: bool

    def last_lines(self) -> str:
        """What it said last, before what a launcher says of ranks that failed."""
        every = self.output.splitlines()
        said = list(itertools.takewhile(lambda line: LAUNCHER_LINE not in line, every))
        return "\n".join((said or every)[-15:])


def run_process(
    command: list[str], *, timeout_s: float, env: dict[str, str] | None = None, cwd: Path = ROOT
) -> Finished:
    """Run it to its end, in the repository's root or another directory.

    After timeout_s it is asked to end, and STOP_S later killed with its descendants.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    timed_out = False
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=cwd, env=env, start_new_session=True
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                pass  # killed below
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        output = log.read().decode(errors="replace")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Finished(status=process.returncode, output=output, cpu_s=cpu_s, timed_out=timed_out)


def job_command(
    run_dir: Path, overrides: list[str], *, ranks: int = 2, recipe: str = "llama_async.py"
) -> list[str]:
    """The command line of the main job, or of another recipe of its kind, on `ranks` processes."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    return [*launcher, str(ROOT / "recipes" / recipe), f"run_dir={run_dir}", *overrides]


def read_rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def run_job(
    run_dir: Path,
    overrides: list[str],
    *,
    ranks: int = 2,
    timeout_s: float = 1800,
    recipe: str = "llama_async.py",
) -> list[dict]:
    """Run the main job, or another recipe of its kind, on `ranks` processes and return its rows.
    RuntimeError if it fails.
    """
    command = job_command(run_dir, overrides, ranks=ranks, recipe=recipe)
    done = run_process(command, timeout_s=timeout_s)
    if done.status or done.timed_out:
        cause = (
            f"took longer than {timeout_s:.0f} s"
            if done.timed_out
            else f"failed, status {done.status}"
        )
        raise RuntimeError(f"{' '.join(overrides)} {cause}:\n{done.last_lines()}")
    return read_rows(run_dir)


def busy_s(run_dir: Path, track: str, since_s: float = 0.0) -> float:
    """Seconds that an executor worked, over all ranks, from the run's traces; since_s into them."""
    total = 0.0
    for file in run_dir.glob("trace.rank*.json"):
        events = json.loads(file.read_text())["traceEvents"]
        tracks = {
            (e["pid"], e["tid"]): e["args"]["name"]
            for e in events
            if e["ph"] == "M" and e["name"] == "thread_name"
        }
        total += (
            sum(
                e["dur"]
                for e in events
                if e["ph"] == "X" and tracks.get((e["pid"], e["tid"]), "").startswith(track)
            )
            / 1e6
        )
    return total


def machine() -> dict[str, str | int | float]:
    """The CPU by name, the cores that this process may use, its load now, and versions."""
    import torch

    model = next(
        (
            line.split(":")[1].strip()
            for line in open("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def kept_file(folder: Path, known: object) -> Path:
    """Where what a run came to is kept, by all that makes it that run: settings, as JSON."""
    name = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
    return folder.absolute() / f"{name}.json"


def keep(file: Path, found: dict) -> None:
    """Write it, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".part")
    draft.write_text(json.dumps(found))
    draft.replace(file)


def as_paragraph(text: str) -> str:
    """A text in lines of a page's width."""
    return textwrap.fill(text, PAGE_COLUMNS, break_on_hyphens=False)


def as_item(text: str) -> str:
    """The same as an item of a list."""
    return textwrap.fill(f"- {text}", PAGE_COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
