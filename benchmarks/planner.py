"""What the planner predicts of runs on this machine, and what they take.

    python benchmarks/planner.py --runs DIR --minutes 33 [--turns 3] --write

Claims, of the cells of planner_runs.py that no fit has seen, and the margins that they are held to:

    a step's seconds                       within 15 %
    the most that a rank holds             within 15 %
    the mean lag                           within 0.2 steps
    the split that is predicted fastest    is the fastest of those measured, or within 3 % of it

Each cell is run `--turns` times, all cells once before any is run again; figures are the medians of
its runs. Probes and runs are kept in DIR: the same command goes on where `--minutes` of measuring
were spent, and --write makes the page of what there is. Two predictions are made of each cell:

    fit      of runs: a sheet from all runs of the cells that are not held out (llamarl.planner fit
             RUN_DIR...)
    probe    of no run: a sheet from a probe of this machine (llamarl.planner fit --probe)

A rank's memory is the peak of its process's resident memory (VmHWM), and the rank of a job that
holds most is compared.

Two ranks have two cores here, and three ranks have two: the figures are of one machine. Three turns
are 144 runs and take about an hour on two quiet cores. --dry-run says how many runs are missing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from planner_plots import draw
from planner_runs import MODELS, Cell, Model, cells, measure, run_dir_of
from running import ROOT, as_item, as_paragraph, machine
from step import medium_model

from llamarl.observe.rates import number_of
from llamarl.planner.check import check_run, lag_of, timed_rows
from llamarl.planner.fit import fit_runs
from llamarl.planner.race import with_race
from llamarl.planner.repeats import is_of_stray, step_of
from llamarl.planner.sheet import Sheet, read_sheet

STEP = 0.15
MEMORY = 0.15
LAG = 0.2
CHOICE = 0.03
PROMPT = 6.0  # tokens of "12+34="
PROBE_S = 40
RESULTS = ROOT / "benchmarks" / "results"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """A cell, predicted by the fit and by the probe, and measured. Seconds of a step, steps of
    mean lag, and bytes of the rank that holds most; the probe's figure is of seconds alone. spread:
    of the runs' seconds, as a share of their median.
    """

    model: str
    split: str
    ranks: int
    groups: int
    is_synchronous: bool
    is_held_out: bool
    step_s: float
    fit_s: float
    probe_s: float
    runs: int
    spread: float
    lag: float
    fit_lag: float
    held: int
    fit_held: int

    @property
    def how(self) -> str:
        """Whether it is synchronous, as a word."""
        return "sync" if self.is_synchronous else "async"

    @property
    def step_error(self) -> float:
        """The share by which the fit's step is too long."""
        return self.fit_s / self.step_s - 1

    @property
    def probe_error(self) -> float:
        """The share by which the probe's step is too long."""
        return self.probe_s / self.step_s - 1

    @property
    def memory_error(self) -> float:
        """The share by which the memory that is predicted is too large."""
        return self.fit_held / self.held - 1

    @property
    def lag_error(self) -> float:
        """The steps by which the mean lag that is predicted is too large."""
        return self.fit_lag - self.lag


@dataclass(frozen=True, slots=True)
class Choice:
    """Of the splits and ways of a model, a number of ranks and a batch: that which is predicted
    fastest, and that which was. behind: by what share the first was slower.
    """

    model: str
    ranks: int
    groups: int
    chosen: str
    fastest: str
    behind: float


# --- Measuring ---


def model_path(model: Model, runs: Path) -> str:
    """A model's directory; "": the embedded one."""
    if model.name == "tiny":
        return ""
    folder = runs / "model"
    if not (folder / "medium").exists():
        folder.mkdir()
        medium_model(folder)
    return str(folder / "medium")


def missing(runs: Path, turns: int) -> list[tuple[int, Cell]]:
    """The runs that are still to be made, in the order in which they will be."""
    found = []
    for turn in range(turns):
        for cell in cells(turn):
            if not is_made(cell, runs, turn):
                found.append((turn, cell))
    return found


def is_made(cell: Cell, runs: Path, turn: int) -> bool:
    """Whether a run is there."""
    return run_dir_of(cell, runs, turn).with_suffix(".json").exists()


def measure_all(runs: Path, turns: int, minutes: float) -> bool:
    """Make the probes and then runs until all are there or so many minutes are spent. Whether all
    are there.
    """
    end_s = time.monotonic() + 60 * minutes
    for model in MODELS:
        probe_sheet(model, runs)
    to_make = missing(runs, turns)
    for number, (turn, cell) in enumerate(to_make):
        if time.monotonic() > end_s:
            return False
        began = time.monotonic()
        measure(cell, model_path(cell.model, runs), runs, turn)
        took_s = time.monotonic() - began
        print(f"{number + 1} of {len(to_make)}: {cell.name}, {took_s:.0f} s", flush=True)
    return True


def probe_sheet(model: Model, runs: Path) -> Sheet:
    """The sheet of a probe in a process of its own, as a rank has it; made once."""
    file = runs / f"probe {model.name}.yaml"
    if not file.exists():
        words = [f"sheet={file}", "threads=1", f"seconds={PROBE_S}"]
        path = model_path(model, runs)
        if path:
            words.append(f"model.path={path}")
        command = [sys.executable, "-m", "llamarl.planner", "fit", "--probe", *words]
        subprocess.run(command, cwd=ROOT, check=True, timeout=400)
    return read_sheet(file)


# --- Comparing ---


def fit_sheet(model: Model, runs: Path, turns: int) -> Sheet:
    """The sheet of all runs of a model's cells that a fit may see."""
    seen = []
    for cell in cells():
        if cell.model is model and not cell.is_held_out:
            seen += made_runs(cell, runs, turns)
    fit = fit_runs(seen, probe_sheet(model, runs), prompt_tokens=PROMPT)
    return with_race(fit, seen, prompt_tokens=PROMPT)


def compare(model: Model, runs: Path, turns: int, fit: Sheet) -> Iterator[Row]:
    """Yield the rows of a model's cells, by the sheet of a fit and that of a probe."""
    probe = probe_sheet(model, runs)
    for cell in cells():
        if cell.model is not model:
            continue
        if made_runs(cell, runs, turns):
            yield _row(cell, runs, turns, fit, probe)


def made_runs(cell: Cell, runs: Path, turns: int) -> list[Path]:
    """The runs of a cell that are there."""
    dirs = [run_dir_of(cell, runs, turn) for turn in range(turns)]
    return [run for run in dirs if run.with_suffix(".json").exists()]


def typical_run(dirs: list[Path]) -> Path:
    """The run whose completions are of median length: a plan is told no more of it."""
    lengths = {}
    for run in dirs:
        said = [number_of(row, "completion/length_mean") or 0.0 for row in timed_rows(run)]
        lengths[run] = statistics.median(said)
    return sorted(dirs, key=lambda run: lengths[run])[len(dirs) // 2]


def peaks_of(run: Path) -> list[int]:
    """The peak of each rank's resident memory."""
    return json.loads(run.with_suffix(".json").read_text())["peak_bytes"]


def _row(cell: Cell, runs: Path, turns: int, fit: Sheet, probe: Sheet) -> Row:
    dirs = made_runs(cell, runs, turns)
    run = typical_run(dirs)
    fitted = check_run(run, fit, prompt_tokens=PROMPT)
    probed = check_run(run, probe, prompt_tokens=PROMPT)
    steps = [step_of(timed_rows(one)) for one in dirs]
    step_s = statistics.median(steps)
    # The rank that holds most is compared: a job fits if it does.
    held = statistics.median(max(peaks_of(one)) for one in dirs)
    return Row(
        model=cell.model.name,
        split=cell.split.name,
        ranks=cell.split.ranks,
        groups=cell.groups,
        is_synchronous=cell.is_synchronous,
        is_held_out=cell.is_held_out,
        step_s=step_s,
        fit_s=fitted.step_s,
        probe_s=probed.step_s,
        runs=len(dirs),
        spread=(max(steps) - min(steps)) / step_s,
        lag=statistics.median(lag_of(timed_rows(one)) for one in dirs),
        fit_lag=fitted.lag[0],
        held=round(held),
        fit_held=max(fitted.rank_bytes.values()),
    )


def choices(rows: list[Row]) -> list[Choice]:
    """What the planner would choose of what was measured."""
    found = []
    keys = sorted({(row.model, row.ranks, row.groups) for row in rows})
    for model, ranks, groups in keys:
        own = [row for row in rows if (row.model, row.ranks, row.groups) == (model, ranks, groups)]
        chosen = min(own, key=lambda row: row.fit_s)
        fastest = min(own, key=lambda row: row.step_s)
        found.append(
            Choice(
                model=model,
                ranks=ranks,
                groups=groups,
                chosen=f"{chosen.split}, {chosen.how}",
                fastest=f"{fastest.split}, {fastest.how}",
                behind=chosen.step_s / fastest.step_s - 1,
            )
        )
    return found


# --- The page ---


def counts(rows: list[Row], made: list[Choice]) -> dict[str, tuple[int, int]]:
    """How many of the held-out cells are within each margin, and of how many."""
    held_out = [row for row in rows if row.is_held_out]
    ahead = [row for row in held_out if not row.is_synchronous]
    alone = [row for row in held_out if row.is_synchronous]
    return {
        "step": (sum(abs(row.step_error) <= STEP for row in held_out), len(held_out)),
        "step of synchronous cells": (
            sum(abs(row.step_error) <= STEP for row in alone),
            len(alone),
        ),
        "step of asynchronous cells": (
            sum(abs(row.step_error) <= STEP for row in ahead),
            len(ahead),
        ),
        "step, by the probe, of all cells": (
            sum(abs(row.probe_error) <= STEP for row in rows),
            len(rows),
        ),
        "memory": (sum(abs(row.memory_error) <= MEMORY for row in held_out), len(held_out)),
        "lag of asynchronous cells": (
            sum(abs(row.lag_error) <= LAG for row in ahead),
            len(ahead),
        ),
        "choice": (sum(one.behind <= CHOICE for one in made), len(made)),
    }


def runs_of(rows: list[Row]) -> str:
    """How many runs a cell has, in words."""
    counts = sorted({row.runs for row in rows})
    shown = " or ".join(map(str, counts))
    return "once" if counts == [1] else f"{shown} times"


def page(rows: list[Row], made: list[Choice], strays: list[str]) -> str:
    """The Markdown page. strays: sentences of the fits on runs that others contradict."""
    here = machine()
    found = counts(rows, made)
    lines = ["# Predicted and measured", ""]
    lines.append(
        as_paragraph(
            f"`benchmarks/planner.py` made this page on {here['cores']} cores of an {here['cpu']}, "
            f"torch {here['torch']}, and on no other machine. Each cell was run {runs_of(rows)}, "
            "all cells once before any was run again, and figures are the medians of its runs; a "
            "run's step is the mean of its steps behind the first fifth, without the longest and "
            "the shortest fifth of these. The fit saw all runs of the cells that are marked so, "
            "and no other; which they are, and all margins, were fixed before any was measured "
            "(`benchmarks/planner_runs.py`). Constants of what a process holds, and of how long a "
            "message and the weights take, come from runs of other batches. `threads=1`: no "
            "trainer changes its threads. `planner.json` has all figures."
        )
    )
    lines += ["", "| held-out cells within their margins | |"]
    lines.append("|---|---|")
    for name, (good, of) in found.items():
        lines.append(f"| {name} | {good} of {of} |")
    lines.append("")
    lines.append(
        as_paragraph(
            f"Margins: {STEP:.0%} of a step and of memory, {LAG} steps of lag, and a chosen split "
            f"that is the fastest or within {CHOICE:.0%} of it. Spread is the difference between "
            "the longest and the shortest run of a cell over their median: "
            f"{statistics.median(row.spread for row in rows):.0%} in the median of all cells, and "
            f"{max(row.spread for row in rows):.0%} at most."
        )
    )
    for said in strays:
        lines += ["", as_paragraph(f"A run that a fit saw: {said}")]
    lines += ["", "![predicted over measured](predicted.png)", ""]
    for note in NOTES:
        if not note.startswith("-"):
            lines.append("")
        lines.append(note)
        if not note.startswith("-"):
            lines.append("")
    lines += ["", "## Steps and lags", ""]
    lines.append(
        "| model | split | groups | | fit saw it | measured s | spread | fit | | probe | | lag | "
        "predicted |"
    )
    lines.append("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for row in in_order(rows):
        lags = "| 0 | 0 |" if row.is_synchronous else f"| {row.lag:.2f} | {row.fit_lag:.2f} |"
        lines.append(
            f"| {row.model} | {row.split} | {row.groups} | {row.how} | "
            f"{'' if row.is_held_out else 'yes'} | {row.step_s:.4f} | "
            f"{'one run' if row.runs == 1 else format(row.spread, '.0%')} | "
            f"{row.fit_s:.4f} | {marked(row.step_error, STEP)} | {row.probe_s:.4f} | "
            f"{marked(row.probe_error, STEP)} {lags}"
        )
    lines += ["", "## Memory of the rank that holds most", ""]
    lines.append("| model | split | groups | | MiB | predicted | |")
    lines.append("|---|---|---|---|---|---|---|")
    for row in in_order(rows):
        lines.append(
            f"| {row.model} | {row.split} | {row.groups} | {row.how} | {row.held / MIB:.0f} | "
            f"{row.fit_held / MIB:.0f} | {marked(row.memory_error, MEMORY)} |"
        )
    lines += ["", "## What would be chosen", ""]
    lines.append("| model | ranks | groups | predicted fastest | fastest | behind it |")
    lines.append("|---|---|---|---|---|---|")
    for one in made:
        lines.append(
            f"| {one.model} | {one.ranks} | {one.groups} | {one.chosen} | {one.fastest} | "
            f"{marked(one.behind, CHOICE)} |"
        )
    lines += ["", "## Earlier cells", "", OTHER_CELLS, "", SAME_CELLS]
    return "\n".join(lines) + "\n"


def marked(error: float, margin: float) -> str:
    """A share; bold beyond its margin."""
    text = f"{error:+.0%}"
    return text if abs(error) <= margin else f"**{text}**"


def in_order(rows: list[Row]) -> list[Row]:
    """The rows of a table: what the fit saw first."""
    return sorted(
        rows,
        key=lambda row: (
            row.model != "tiny",
            row.is_held_out,
            row.ranks,
            row.split,
            row.groups,
            row.how,
        ),
    )


NOTES = (
    as_paragraph(
        "What a split's name means: `apart` is trainer | generator and reward; `both train` "
        "has both ranks train, and the second does all else; `all on both` has both train and "
        "generate; `three apart` is trainer | generator | reward; `two generate` and `two "
        "train` have that many ranks for the one side, and the third hosts the reward. Every "
        "trainer rank has all of the model (`trainer.replicate`). A plan is told the mean "
        "length of prompts and completions, and nothing else of a run."
    ),
    as_paragraph("What may break a prediction:"),
    as_item(
        "**The race between weights and tickets.** Where executors are apart, whether a ticket "
        "starts just before or just after a version has arrived is a step of lag, and a matter of "
        "milliseconds. The simulation draws both ways. A generator on a trainer's rank waits for "
        "the version, and has no such race."
    ),
    as_item(
        "**Three ranks on two cores.** Cores are shared evenly in the simulation. A kernel also "
        "wakes and places processes, which it does not have. Jobs of the earlier cells with 28 "
        "groups on three ranks took 10 to 18 % longer than predicted for it; those of this page "
        "did not."
    ),
    as_item("**Few sizes.** A fit of two batch sizes guesses below the smaller one."),
    as_item(
        "**Caches.** What a piece loses while other processes work is one number of a model and a "
        "machine. It is of two processes: three and four on two cores, with their caches, may "
        "lose more."
    ),
    as_item(
        "**Memory pressure** was not tried: 24 GB were there, and no rank held more than 1.7. "
        "Where pages are given back or swapped, both a process's peak and its seconds are others."
    ),
)
OTHER_CELLS = as_paragraph(
    "Other cells were announced and measured before, of 28 and 56 groups of the tiny model and 12 "
    "and 16 of 12.6 M, on a CPU with AVX512 (`planner_earlier.json`): of 36 cells that no fit saw "
    "the planner had the step within its margin in 30, memory in 36 and the lag in 16 of 20, and "
    "chose rightly in 4 of 8. Where ranks train and generate, the lag was a matter of chance at "
    "that time."
)
SAME_CELLS = as_paragraph(
    "The cells of this page were measured twice before. With longer turns of the generator beside "
    "a reward a step was within its margin in 35 of 36, memory in 36, the lag in 20 of 20 and the "
    "choice in 8 of 8; with short turns these were 36, 36, 19 and 8. The lag that was missed was "
    "1.58 where 1.33 was predicted: trainer on two of three ranks, 72 groups. Their split into "
    "seen and unseen, and all margins, are as they were. A probe had 31 of 48 before, and 33 then. "
    "In all of these runs a helper thread of an asynchronous trainer computed weights' gradients; "
    "it was removed after them."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--minutes", type=float, default=4.0, help="of measuring, this time")
    parser.add_argument("--turns", type=int, default=3, help="runs of each cell")
    parser.add_argument("--dry-run", action="store_true", help="count the missing runs, and end")
    parser.add_argument("--write", action="store_true", help="write the results' files")
    args = parser.parse_args()
    runs = args.runs.absolute()
    if args.dry_run:
        for turn, cell in missing(runs, args.turns):
            print(f"turn {turn + 1}: {cell.name}{', held out' if cell.is_held_out else ''}")
        return
    runs.mkdir(parents=True, exist_ok=True)
    is_whole = measure_all(runs, args.turns, args.minutes)
    if not (is_whole or args.write):
        print("not all runs are made; once more, or --write of those that are")
        return
    rows = []
    strays = []
    for model in MODELS:
        fit = fit_sheet(model, runs, args.turns)
        strays += [note for note in fit.notes if is_of_stray(note)]
        rows += compare(model, runs, args.turns, fit)
    made = choices(rows)
    text = page(rows, made, strays)
    print(text)
    if args.write:
        (RESULTS / "planner.md").write_text(text)
        found = {
            "benchmark": "planner",
            "turns": args.turns,
            "cells": [asdict(row) for row in in_order(rows)],
            "choices": [asdict(one) for one in made],
            "within": counts(rows, made),
            "strays": strays,
            "machine": machine(),
        }
        (RESULTS / "planner.json").write_text(json.dumps(found, indent=1) + "\n")
        draw(rows, RESULTS / "predicted.png")


if __name__ == "__main__":
    main()
