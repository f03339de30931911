"""Whether a core waits: seconds of a step beside those that its work would take on all cores.

    python benchmarks/cores.py [--steps 60] [--repeats 3] [--only NAME ...] [--json FILE]
                               [--job NAME='KEYS ...'] [--load N] [--one-session]

A job runs under torchrun. Between its tenth step and its last one the clock's seconds are counted,
and the CPU seconds of the launcher and all that it started, reward workers too. Work is CPU seconds
over cores. 1.00 means that no core waited; half of the work on one core alone would be 2.00 on two.

default      the main job on two ranks
one process  the same in one process of two threads
medium       a random 12.6 M-parameter model, 64 completions of 128 tokens a step, two ranks; after
             two steps, for a sixth as many
--job        another placement, by name: keys of the main job, of the default's model

--load N runs N busy processes beside, and tells the same. Jobs take turns.

A job is started in a session of its own, as from another terminal: Linux shares cores between
sessions first (its autogroups), and between the threads of one after that. torchrun gives each of
its ranks such a session. --one-session leaves a job of one process in that of the load, where its
two threads get two parts of N + 2.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from running import ROOT, job_command, machine
from start_up import cpu_s_of
from step import COMPLETIONS, TOKENS, medium_model

WARMUP = 10  # steps before the clock starts; of the medium model, whose steps are long, fewer
FEW = 2
QUIET = ("eval.every=0", "checkpoint.every=0")
MEDIUM = (
    f"groups_per_step={COMPLETIONS // 8}",
    "group_size=8",
    f"max_new_tokens={TOKENS}",
    f"generator.min_new_tokens={TOKENS}",
    "generator.max_slots=64",
    "task.max_prompt_tokens=32",
    "trainer.skip_zero_advantage=false",
    "lr=1e-6",
)


@dataclass(frozen=True, slots=True)
class Case:
    """A job. words: its keys; steps: of which the first `warmup` are not counted."""

    name: str
    words: tuple[str, ...]
    steps: int
    ranks: int = 2
    warmup: int = WARMUP


@dataclass(frozen=True, slots=True)
class Found:
    """A run's seconds a step. run_s: from the start of the process to its end."""

    step_s: float
    cpu_s: float
    run_s: float

    def ratio(self, cores: int) -> float:
        """Return a step's seconds over those that its CPU seconds take on so many cores."""
        return self.step_s * cores / self.cpu_s


def run(case: Case, *, one_session: bool = False) -> Found:
    """Run a job, in a session of its own unless told otherwise. RuntimeError if it fails, or made
    no step after the warm-up.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = job_command(Path(folder) / "run", [*QUIET, *case.words], ranks=case.ranks)
        if case.ranks == 1:
            recipe = command.index(str(ROOT / "recipes" / "llama_async.py"))
            command = [sys.executable, *command[recipe:]]
        command.append(f"max_steps={case.steps}")
        began = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=not one_session,
        )
        marks = []
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith((f"step {case.warmup}/", f"step {case.steps}/")):
                cpu_s = cpu_s_of(psutil.Process(process.pid))
                marks.append((time.perf_counter(), cpu_s))
        status = process.wait()
        run_s = time.perf_counter() - began
    if status or len(marks) != 2:
        raise RuntimeError(f"{case.name}, status {status}: {''.join(said[-15:])}")
    (first_s, first_cpu_s), (last_s, last_cpu_s) = marks
    counted = case.steps - case.warmup
    return Found(
        step_s=(last_s - first_s) / counted,
        cpu_s=(last_cpu_s - first_cpu_s) / counted,
        run_s=run_s,
    )


def _spin() -> None:
    while True:
        sum(range(10_000))


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Keep so many processes busy."""
    busy = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(processes)]
    for process in busy:
        process.start()
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.join()


def as_row(case: Case, runs: list[Found]) -> dict[str, object]:
    """Return a job's medians, and the range of its seconds a step."""
    cores = len(os.sched_getaffinity(0))
    steps_s = sorted(found.step_s for found in runs)
    return {
        "job": case.name,
        "keys": " ".join(case.words),
        "step_s": round(statistics.median(steps_s), 4),
        "step_s_range": [round(steps_s[0], 4), round(steps_s[-1], 4)],
        "cpu_s": round(statistics.median(found.cpu_s for found in runs), 4),
        "ratio": round(statistics.median(found.ratio(cores) for found in runs), 3),
        "run_s": round(statistics.median(found.run_s for found in runs), 2),
        "runs": [asdict(found) for found in runs],
    }


def as_line(row: dict) -> str:
    """Return a row as a line of the table."""
    low, high = row["step_s_range"]
    return (
        f"{row['job']:28} {row['step_s']:7.3f} s a step ({low:.3f}-{high:.3f})   "
        f"{row['cpu_s']:6.3f} CPU s   {row['ratio']:5.2f}   whole run {row['run_s']:6.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--job", action="append", default=[], metavar="NAME=KEYS")
    parser.add_argument("--load", type=int, default=0)
    parser.add_argument("--one-session", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, load(args.load):
        medium = ("model=tiny", f"model.path={medium_model(Path(scratch))}", *MEDIUM)
        cases = [
            Case("default", (), args.steps),
            Case("one process", (), args.steps, ranks=1),
            Case("medium", medium, FEW + args.steps // 6, warmup=FEW),
        ]
        for job in args.job:
            name, _, keys = job.partition("=")
            cases.append(Case(name, tuple(keys.split()), args.steps))
        if args.only:
            cases = [case for case in cases if case.name in args.only]
        runs: dict[str, list[Found]] = {case.name: [] for case in cases}
        for _ in range(args.repeats):
            for case in cases:
                runs[case.name].append(run(case, one_session=args.one_session))
    rows = [as_row(case, runs[case.name]) for case in cases]
    for row in rows:
        print(as_line(row))
    if args.json:
        found = {
            "machine": machine(),
            "load": args.load,
            "one_session": args.one_session,
            "rows": rows,
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
