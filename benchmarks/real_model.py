"""A real model learns: SmolLM2-135M-Instruct on questions that it answers badly, held out.

    python recipes/fetch_smollm2.py out=MODEL_DIR
    python benchmarks/real_model.py --model MODEL_DIR [--tasks sum larger ...] [--seeds 2]
        [--modes async sync] [--sync-jobs 1] [--runs DIR] [--json FILE] [--page FILE]
        [overrides ...]
    python benchmarks/real_model.py --page FILE        the page and plots anew, without runs

sum         What is 7+12? Answer with the number only. Numbers of 1 to 20
two_digits  the same with numbers of 10 to 99
larger      Which number is larger, 7 or 12? Numbers of 10 to 99
chain_sum   reasoning-gym's, two terms of one or two digits

async is max_lag=1 on two processes of one thread, sync max_lag=0 on the same two, with everything
else equal. Of sync runs, which keep one of two cores busy at a time, the seeds of a task may run
side by side (--sync-jobs 2). A finished run in --runs is not made again. Seconds are those of the
run's own clock (time/wall_s), evaluations included. Held-out accuracy is the greedy answer's. Kept
beside the curves: the held-out answers before the first step and after the last, of the first seed.
Overrides go to every run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from running import ROOT, job_command, machine, read_rows, run_process

RESULTS = Path(__file__).parent / "results"
TASKS = {
    "sum": ["task=questions", "task.name=sum", "task.least=1", "task.most=20", "max_steps=60"],
    "two_digits": ["task=questions", "task.name=sum", "task.least=10", "task.most=99"],
    "larger": ["task=questions", "task.name=larger", "task.least=10", "task.most=99"],
    "chain_sum": [
        "task=reasoning_gym",
        "task.name=chain_sum",
        "task.options.max_terms=2",
        "task.options.max_digits=2",
        "reward.fn=llamarl.tasks.rewards:numeric_match",
        "max_new_tokens=24",
    ],
}
COMMON = [
    "model=hf",
    "lr=1e-5",
    "group_size=8",
    "groups_per_step=8",
    "max_steps=100",
    "eval.every=10",
    "eval.num_prompts=100",
    "model.dtype=bfloat16",
    "trainer.compute_dtype=bfloat16",
    "threads=1",
    "metrics.trace=false",
]
MODES = {"async": "max_lag=1", "sync": "max_lag=0"}
ACCURACY = "eval/accuracy"
SECONDS = "time/wall_s"
SHOWN_ANSWERS = 8
PAGE_COLUMNS = 120
CELL = 40  # characters of a table of answers


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="none: no runs are made")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--sync-jobs", type=int, default=1, help="sync runs at a time")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="of a run")
    parser.add_argument("--runs", type=Path, default=Path("runs/real_model"))
    parser.add_argument("--json", type=Path, default=RESULTS / "real_model.json")
    parser.add_argument("--page", type=Path, default=RESULTS / "real_model.md")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    args, unknown = parser.parse_known_args()
    wrong = [word for word in unknown if word.startswith("-") or "=" not in word]
    if wrong:
        parser.error(f"unknown: {' '.join(wrong)}")
    args.overrides += unknown
    return args


def curve_of(rows: list[dict]) -> list[dict]:
    """A run's evaluations, in order: step, seconds, accuracy."""
    return [
        {"step": row["step"], "seconds": row[SECONDS], "accuracy": row[ACCURACY]}
        for row in rows
        if row.get(ACCURACY) is not None
    ]


def answers_of(directory: Path, overrides: list[str], out: Path) -> list[dict]:
    """The greedy answers of a model directory or a checkpoint to some held-out prompts, at equal
    distances: their order is that of the numbers in them. RuntimeError if it cannot be asked.
    """
    evaluate = [sys.executable, str(ROOT / "recipes" / "evaluate.py")]
    asked = [f"model.path={directory}", "samples=0", f"out={out}"]
    done = run_process([*evaluate, *overrides, *asked], timeout_s=600)
    if done.status:
        raise RuntimeError(f"evaluate {directory} failed:\n{done.last_lines()}")
    every_line = [json.loads(line) for line in out.read_text().splitlines()]
    lines = at_equal_distances(every_line, SHOWN_ANSWERS)
    return [{"prompt": line["prompt"], "answer": line["completion"]} for line in lines]


def at_equal_distances(lines: list, count: int) -> list:
    """Returns `count` of the lines, the first among them; all if there are no more."""
    if len(lines) <= count:
        return lines
    return [lines[i * len(lines) // count] for i in range(count)]


def made_run(args: argparse.Namespace, task: str, mode: str, at_a_time: int, seed: int) -> dict:
    """One run: its evaluations, how many runs were made side by side with it, itself among them,
    and for the first seed its answers before and after. RuntimeError if it fails.
    """
    run_dir = args.runs / f"{task}-{mode}-{seed}"
    finished = run_dir / "finished"
    settings = [*COMMON, *TASKS[task], *args.overrides]
    if not finished.exists():
        model = f"model.path={args.model.absolute()}"
        overrides = [model, *settings, MODES[mode], f"seed={seed}", "resume=auto"]
        command = job_command(run_dir.absolute(), overrides)
        done = run_process(command, timeout_s=args.timeout_s)
        if done.status or done.timed_out:
            raise RuntimeError(f"{run_dir} failed:\n{done.last_lines()}")
        finished.write_text(str(at_a_time))
    run = {
        "task": task,
        "mode": mode,
        "seed": seed,
        "at_a_time": int(finished.read_text()),
        "curve": curve_of(read_rows(run_dir)),
    }
    if seed == 0:
        latest = run_dir / "checkpoints" / "latest"
        run["before"] = answers_of(args.model, settings, run_dir / "before.jsonl")
        run["after"] = answers_of(latest, [], run_dir / "after.jsonl")
    return run


def keep(found: dict, made: list[dict]) -> None:
    """Enter runs into what was found, in the place of older ones of the same setting."""
    by_setting = {(run["task"], run["mode"], run["seed"]): run for run in found["runs"]}
    for run in made:
        by_setting[run["task"], run["mode"], run["seed"]] = run
        print(f"{run['task']} {run['mode']} {run['seed']}: {run['curve'][0]} -> {run['curve'][-1]}")
    found["runs"] = [by_setting[setting] for setting in sorted(by_setting)]


def span(values: list[float], form: str) -> str:
    """The mean of some values, and their range where there are several."""
    mean = format(statistics.mean(values), form)
    if len(values) == 1:
        return mean
    return f"{mean} ({format(min(values), form)}–{format(max(values), form)})"


def summary(runs: list[dict]) -> str:
    """A Markdown table: a row a task and mode."""
    lines = [
        "| task | mode | seeds | before | best | last | seconds | steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        for mode in MODES:
            curves = [r["curve"] for r in runs if (r["task"], r["mode"]) == (task, mode)]
            if not curves:
                continue
            best = []
            for curve in curves:
                best.append(max(point["accuracy"] for point in curve))
            cells = [
                task,
                mode,
                str(len(curves)),
                span([curve[0]["accuracy"] for curve in curves], ".1%"),
                span(best, ".1%"),
                span([curve[-1]["accuracy"] for curve in curves], ".1%"),
                span([curve[-1]["seconds"] for curve in curves], ".0f"),
                span([curve[-1]["step"] for curve in curves], ".0f"),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shares_of_seconds(runs: list[dict]) -> list[str]:
    """Of each task that has both modes: async's mean seconds over sync's, in words."""
    shares = []
    for task in TASKS:
        means = {}
        for mode in MODES:
            of_mode = [run["curve"] for run in runs if (run["task"], run["mode"]) == (task, mode)]
            if of_mode:
                means[mode] = statistics.mean(curve[-1]["seconds"] for curve in of_mode)
        if len(means) == len(MODES):
            shares.append(f"{means['async'] / means['sync']:.0%} ({task})")
    return shares


def sync_runs_at_a_time(runs: list[dict]) -> str:
    """How the synchronous runs were made, in a sentence."""
    counts = {run["at_a_time"] for run in runs if run["mode"] == "sync"}
    if counts == {1}:
        return "One run was made at a time."
    return (
        f"Up to {max(counts)} sync runs of a task were made side by side (`--sync-jobs`), each of "
        "which keeps one core busy at a time: what they share of memory and caches slows sync."
    )


def answers_table(run: dict) -> str:
    """A Markdown table of some held-out prompts' answers, before and after."""
    lines = ["| prompt | before | after |", "|---|---|---|"]
    for before, after in zip(run["before"], run["after"]):
        cells = [before["prompt"], before["answer"], after["answer"]]
        lines.append(f"| {' | '.join(shown(cell) for cell in cells)} |")
    return "\n".join(lines)


def shown(text: str) -> str:
    """A text in a cell: one line, of a long one its end, where the numbers are."""
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= CELL else "…" + line[1 - CELL :]


def draw(runs: list[dict], file: Path) -> None:
    """Held-out accuracy against seconds: a panel a task, a colour a mode, a line a seed."""
    of_runs = {run["task"] for run in runs}
    tasks = [task for task in TASKS if task in of_runs]
    figure, axes = plt.subplots(
        1, len(tasks), figsize=(3.6 * len(tasks), 3.2), squeeze=False, sharey=True
    )
    colours = dict(zip(MODES, ("#1f77b4", "#d95f02")))
    for ax, task in zip(axes[0], tasks):
        for run in runs:
            if run["task"] != task:
                continue
            label = run["mode"] if run["seed"] == 0 else None
            minutes = [point["seconds"] / 60 for point in run["curve"]]
            accuracies = [point["accuracy"] for point in run["curve"]]
            ax.plot(minutes, accuracies, color=colours[run["mode"]], label=label, lw=1.5)
        ax.set_title(task, fontsize=10)
        ax.set_xlabel("minutes")
        ax.set_ylim(0, 1.02)
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("held-out accuracy, greedy")
    axes[0][-1].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def write_page(found: dict, page: Path) -> None:
    """The page, and beside it its plot."""
    picture = page.with_suffix(".png")
    draw(found["runs"], picture)
    where = found["machine"]
    about = (
        "`python benchmarks/real_model.py --model MODEL_DIR` made this page: the model is "
        f"SmolLM2-135M-Instruct, on {where['cores']} cores of an {where['cpu']}, torch "
        f"{where['torch']}. Mean over the seeds, and the range. Accuracy is that of greedy answers "
        "to 100 held-out questions, 40 of sum: chance moves a share of 80 % by 4 to 6. What counts "
        "is an answer's last number, so that `10 is larger than 20.` is right."
    )
    parts = [
        "# A real model learns",
        textwrap.fill(about, width=PAGE_COLUMNS, break_on_hyphens=False),
        summary(found["runs"]),
    ]
    shares = shares_of_seconds(found["runs"])
    if shares:
        compared = (
            f"Of the seconds that sync takes for as many steps, async takes {', '.join(shares)}. "
            f"{sync_runs_at_a_time(found['runs'])}"
        )
        parts.append(textwrap.fill(compared, width=PAGE_COLUMNS, break_on_hyphens=False))
    parts.append(f"![held-out accuracy over minutes]({picture.name})")
    for run in found["runs"]:
        if "before" in run:
            parts += [f"## {run['task']}, {run['mode']}: answers", answers_table(run)]
    page.write_text("\n\n".join(parts) + "\n")


def main() -> None:
    args = parse()
    found = {"machine": machine(), "runs": []}
    if args.json.exists():
        found = json.loads(args.json.read_text())
    if args.model:
        for task in args.tasks:
            for mode in args.modes:
                jobs = args.sync_jobs if mode == "sync" else 1
                make = partial(made_run, args, task, mode, jobs)
                with ThreadPoolExecutor(jobs) as pool:
                    made = list(pool.map(make, range(args.seeds)))
                keep(found, made)
                args.json.write_text(json.dumps(found, indent=1))
    write_page(found, args.page)
    print(summary(found["runs"]))


if __name__ == "__main__":
    main()
