"""How long a user waits for an answer: for help, for what is wrong with a command line, for a plan,
and for the first step of the main job.

    python benchmarks/start_up.py [--repeats 5] [--root CHECKOUT] [--json]

Each is a command as a user gives it, in processes of their own. CPU seconds are user and system
time of all of them, the launcher's too, up to the answer: the console's line of step 1, or the end.
Wall seconds are of the same span, and grow with the machine's load. The limit is `import torch` in
the same round: every process that computes has it, and torchrun's launcher too. Medians over the
rounds, after one that fills caches of files. --root: another checkout, to compare with.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from running import ROOT, machine

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
RECIPE = "recipes/llama_async.py"
FIRST_STEP = "step 1/"
STEPS = "max_steps=3"


@dataclass(frozen=True, slots=True)
class Question:
    """A command of Python, and what answers it.

    torches: how many of its processes import PyTorch. answered_by: how the line begins that is the
    answer; empty: the end of the process. status: how it ends.
    """

    name: str
    words: tuple[str, ...]
    torches: int
    answered_by: str = ""
    status: int = 0


@dataclass(frozen=True, slots=True)
class Waited:
    """The seconds up to an answer."""

    cpu_s: float
    wall_s: float


QUESTIONS = (
    Question(name="import torch", words=("-c", "import torch"), torches=1),
    Question(name="help", words=(RECIPE, "--help"), torches=0),
    Question(name="mistyped key", words=(RECIPE, "trainer.lrr=1"), torches=0, status=2),
    Question(name="dry run", words=(RECIPE, "+dry_run=true"), torches=1),
    Question(
        name="first step, one process",
        words=(RECIPE, STEPS),
        torches=1,
        answered_by=FIRST_STEP,
    ),
    Question(
        name="first step, two ranks",
        words=(*TORCHRUN, RECIPE, STEPS),
        torches=3,
        answered_by=FIRST_STEP,
    ),
)


def ask(question: Question, root: Path) -> Waited:
    """Start a question's command in a checkout, and wait for its answer. RuntimeError if none came,
    or if it ended in another way than it should.
    """
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *question.words]
        if question.answered_by:
            command.append(f"run_dir={folder}/run")
        began = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        waited = None
        said = []
        for line in process.stdout:
            said.append(line)
            is_answer = question.answered_by and line.startswith(question.answered_by)
            if is_answer and waited is None:
                wall_s = time.perf_counter() - began
                waited = Waited(cpu_s=cpu_s_of(psutil.Process(process.pid)), wall_s=wall_s)
        _, status, used = os.wait4(process.pid, 0)
        if not question.answered_by:
            wall_s = time.perf_counter() - began
            waited = Waited(cpu_s=used.ru_utime + used.ru_stime, wall_s=wall_s)
    if waited is None or os.waitstatus_to_exitcode(status) != question.status:
        raise RuntimeError(f"{question.name}: {''.join(said[-15:])}")
    return waited


def cpu_s_of(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and its descendants so far, those that ended included."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue  # it ends: its parent counts it from now on
        total += times.user + times.system + times.children_user + times.children_system
    return total


def measure(root: Path, repeats: int) -> list[dict[str, object]]:
    """Return a row a question: medians over `repeats` rounds, each of which asks them all."""
    rounds: list[list[Waited]] = []
    for number in range(repeats + 1):
        waited = [ask(question, root) for question in QUESTIONS]
        if number:  # the first fills the caches
            rounds.append(waited)
    rows = []
    import_s = statistics.median(waited[0].cpu_s for waited in rounds)
    for place, question in enumerate(QUESTIONS):
        cpu_s = [waited[place].cpu_s for waited in rounds]
        wall_s = [waited[place].wall_s for waited in rounds]
        limit_s = question.torches * import_s
        row: dict[str, object] = {"question": question.name}
        row["cpu_s"] = round(statistics.median(cpu_s), 2)
        row["cpu_s_range"] = [round(min(cpu_s), 2), round(max(cpu_s), 2)]
        row["wall_s"] = round(statistics.median(wall_s), 2)
        row["wall_s_range"] = [round(min(wall_s), 2), round(max(wall_s), 2)]
        row["limit_cpu_s"] = round(limit_s, 2)
        rows.append(row)
    return rows


def as_line(row: dict) -> str:
    """Return a row as a line of the table."""
    low, high = row["cpu_s_range"]
    first, last = row["wall_s_range"]
    cpu = f"{row['cpu_s']:6.2f} ({low:.2f} to {high:.2f})"
    wall = f"{row['wall_s']:6.2f} ({first:.2f} to {last:.2f})"
    ratio = ""
    if row["limit_cpu_s"]:
        ratio = f"{row['cpu_s'] / row['limit_cpu_s']:.1f}"
    return f"{row['question']:24} {cpu:24} {wall:24} {row['limit_cpu_s']:6.2f} {ratio:>6}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    before = machine()
    rows = measure(args.root.resolve(), args.repeats)
    found = {**before, "load_after": machine()["load"], "repeats": args.repeats, "rows": rows}
    if args.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{found['cpu']}, {found['cores']} cores, Python {found['python']}, {found['torch']}")
    print(f"load {found['load']} before, {found['load_after']} after; {args.repeats} rounds")
    print(f"{'':24} {'CPU s':24} {'wall s':24} {'limit':>6} {'ratio':>6}")
    for row in rows:
        print(as_line(row))


if __name__ == "__main__":
    main()
