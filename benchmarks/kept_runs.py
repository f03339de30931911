"""Runs of this checkout beside the same runs of another commit: what a change must leave as it was.

    python benchmarks/kept_runs.py BASE [options]

BASE is checked out in a temporary git worktree. Synchronous runs are made twice there and once
here. A column that is bit-identical in both runs of the base must be so here too, at every step.
Columns that differ between equal runs are listed and not compared. Clocks are left out.
Asynchronous runs must come to the base's conf/expected.yaml, or NEAR the base's rewards. If one
does not, another seed is tried. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table
from running import PAGE_COLUMNS, ROOT, read_rows, run_process

CLOCK = re.compile(r"^time/|_per_s$|/idle_fraction|_s$|/seconds$")
NEAR = 0.25  # of the base's mean reward, that of an asynchronous run may differ by
RUN_S = 900.0
FILE_OF_CODE = "import llamarl; print(llamarl.__file__)"
WRITE_SCORER = "import pathlib; from tests.scorers import *; write_scorer(pathlib.Path('scorer'))"

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class KeptRun:
    """A run that both sides make, as kept_runs.yaml says."""

    name: str
    synchronous: bool
    ranks: int
    words: list[list[str]]
    expected: str | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """A checkout, and what its command lines have that the other's have not.

    renamed: NEW=OLD, with OLD the key's name in this checkout.
    """

    name: str
    root: Path
    shared: Path
    python: str
    words: list[str]
    renamed: list[str]

    def env(self) -> dict[str, str]:
        """Return an environment that imports this checkout's own code and sees no GPU."""
        path = os.pathsep.join([str(self.root), str(self.shared)])
        return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}

    def ask(self, code: str) -> str:
        """Run a line of Python outside the checkout, and return its output."""
        command = [self.python, "-c", code]
        return subprocess.check_output(command, env=self.env(), cwd=self.shared, text=True)

    def make(self, run: KeptRun, folder: Path, *words: str) -> list[Row]:
        """Make a run and return its rows. SystemExit if it fails."""
        began = time.monotonic()
        name = f"{run.name}-{self.name}-".replace(" ", "_")
        run_dir = tempfile.mkdtemp(prefix=name, dir=folder)
        words_of_run = itertools.chain(*run.words)
        given = [word.replace("SHARED", str(self.shared)) for word in words_of_run]
        for new, old in (pair.split("=") for pair in self.renamed):
            given = [re.sub(rf"^{re.escape(new)}\b", old, word) for word in given]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={run.ranks}"]
        recipe = [str(self.root / "recipes" / "llama_async.py"), f"run_dir={run_dir}"]
        start = [self.python, *(launcher if run.ranks > 1 else []), *recipe]
        command = [*start, *given, *self.words, *words]
        done = run_process(command, timeout_s=RUN_S, env=self.env(), cwd=self.root)
        if done.status or done.timed_out:
            sys.exit(f"{run.name} ({self.name}) failed: {command}\n{done.last_lines()}")
        print(f"{run.name} ({self.name}) took {time.monotonic() - began:.0f} s", flush=True)
        return read_rows(Path(run_dir))


@dataclass(frozen=True, slots=True)
class Difference:
    """A value that is not as it was; steps: one, or a range."""

    steps: str
    column: str
    base: str
    here: str

    def __str__(self) -> str:
        return f"step {self.steps}, {self.column}: base {self.base}, here {self.here}"


def read_runs() -> dict[str, KeptRun]:
    """Read the runs from kept_runs.yaml."""
    known = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return {name: KeptRun(name=name, **given) for name, given in known["runs"].items()}


def differences(base: list[Row], here: list[Row]) -> list[Difference]:
    """Return all values that differ, but for clocks, in the order of the steps."""
    found = []
    for index in range(max(len(base), len(here))):
        before = base[index] if index < len(base) else {}
        after = here[index] if index < len(here) else {}
        for column in sorted(before.keys() | after.keys()):
            # A number's text in JSON tells all its bits.
            old = json.dumps(before[column]) if column in before else "absent"
            new = json.dumps(after[column]) if column in after else "absent"
            if old != new and not CLOCK.search(column):
                found.append(Difference(steps=str(index), column=column, base=old, here=new))
    return found


def columns_of(rows: list[Row]) -> set[str]:
    """Return the names of all columns but clocks."""
    names = set().union(*rows)
    return {name for name in names if not CLOCK.search(name)}


def hold_synchronous(
    runs: list[list[Row]], candidate: list[Row], allowed: list[str]
) -> tuple[list[Difference], list[str]]:
    """Return the differences in columns that equal runs of the base agree in, and remarks."""
    unequal = itertools.chain(*(differences(runs[0], again) for again in runs[1:]))
    left_out = {one.column for one in unequal}
    remarks = [f"unsteady: {', '.join(sorted(left_out))}"] if left_out else []
    lone = columns_of(runs[0]) ^ columns_of(candidate)
    if lone - left_out:
        remarks.append(f"new or gone: {', '.join(sorted(lone - left_out))}")
    for pattern in allowed:
        left_out |= set(fnmatch.filter(lone, pattern))
    found = [one for one in differences(runs[0], candidate) if one.column not in left_out]
    return found, [f"{len(columns_of(candidate) - left_out)} columns compared", *remarks]


def stages(run: KeptRun, base: Side, folder: Path) -> list[dict]:
    """Return the means that an asynchronous run must come to, as conf/expected.yaml has them."""
    if run.expected:
        known = yaml.safe_load((base.root / "conf" / "expected.yaml").read_text())
        return known[run.expected]["stages"]
    rows = base.make(run, folder)
    last = rows[-1]["step"]
    half = {"column": "reward/mean", "first": last // 2 + 1, "last": last}
    half["mean"] = mean_of(rows, half)
    return [{**half, "within": NEAR * abs(half["mean"])}]


def mean_of(rows: list[Row], stage: dict) -> float:
    """Return the mean of a stage's column over its steps."""
    chosen = [row for row in rows if stage["first"] <= row["step"] <= stage["last"]]
    return statistics.mean(row[stage["column"]] for row in chosen)


def hold_asynchronous(expected: list[dict], rows: list[Row]) -> tuple[list[Difference], list[str]]:
    """Return the means that are not as expected, and remarks."""
    found, remarks = [], []
    for stage in expected:
        value, steps = mean_of(rows, stage), f"{stage['first']}-{stage['last']}"
        interval = f"{stage['mean']:.3f} ± {stage['within']:.3f}"
        remarks.append(f"steps {steps}: {stage['column']} {value:.3f} ({interval})")
        if abs(value - stage["mean"]) > stage["within"]:
            found.append(Difference(steps, stage["column"], base=interval, here=f"{value:.3f}"))
    return found, remarks


def compare(run: KeptRun, base: Side, here: Side, folder: Path, allowed: list[str]):
    """Make a run on both sides and return its differences and remarks.

    If it differs, it is asked again: of the base, whose columns may be equal twice by chance, or
    with another seed.
    """
    if run.synchronous:
        runs = [base.make(run, folder), base.make(run, folder)]
        candidate = here.make(run, folder)
        if hold_synchronous(runs, candidate, allowed)[0]:
            runs.append(base.make(run, folder))
        return hold_synchronous(runs, candidate, allowed)
    expected = stages(run, base, folder)
    found, remarks = hold_asynchronous(expected, here.make(run, folder))
    if found:
        found, more = hold_asynchronous(expected, here.make(run, folder, "seed=1"))
        remarks += ["with seed=1:", *more]
    return found, remarks


def main() -> int:
    """Compare all runs, print a table, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    runs = read_runs()
    parser.add_argument("base", help="a commit")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of both sides")
    parser.add_argument("--folder", type=Path, help="that keeps the directories of the runs")
    parser.add_argument("--only", nargs="+", choices=runs, default=list(runs))
    lists = {
        "--new-or-gone": "columns that one side alone may have, as patterns of a shell",
        "--renamed": "NEW=OLD: keys with their names in the base",
        "--base-only": "more words of the base's command lines",
        "--here-only": "more words of this checkout's command lines",
    }
    for name, meaning in lists.items():
        parser.add_argument(name, nargs="+", default=[], help=meaning)
    args = parser.parse_args()
    table = Table("run", "result", "what was compared, and what differs", show_lines=True)
    differing = 0
    with tempfile.TemporaryDirectory() as scratch:
        shared, root = Path(scratch), Path(scratch, "base")
        folder = args.folder or Path(tempfile.mkdtemp(dir=shared))
        folder.mkdir(parents=True, exist_ok=True)
        here = Side("here", ROOT, shared, args.python, args.here_only, [])
        base = Side("base", root, shared, args.python, args.base_only, args.renamed)
        worktree = ["git", "-C", str(ROOT), "worktree"]
        subprocess.check_call([*worktree, "add", "--quiet", "--detach", str(root), args.base])
        try:
            for side in (base, here):
                code = Path(side.ask(FILE_OF_CODE).strip())
                assert code.is_relative_to(side.root), f"{side.root} runs the code of {code}"
            here.ask(WRITE_SCORER)
            shutil.copyfile(ROOT / "benchmarks" / "games.py", shared / "games.py")
            for name in args.only:
                found, remarks = compare(runs[name], base, here, folder, args.new_or_gone)
                differing += bool(found)
                result = f"{len(found)} values differ" if found else "kept"
                table.add_row(name, result, "\n".join([*remarks, *map(str, found[:8])]))
        finally:
            subprocess.check_call([*worktree, "remove", "--force", str(root)])
    Console(width=PAGE_COLUMNS).print(table)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
