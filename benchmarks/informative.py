"""Batches that teach: what tickets.informative and tickets.sampler=difficulty give where most
groups teach nothing.

    python benchmarks/informative.py [--rows sums|questions|FILE] [--steps N] [--plain-steps N]
                                     [--seeds 1 2 3] [--arms ARM ...] [--target ACCURACY]
                                     [--looks N] [--runs DIR] [--json FILE] [--plot FILE]
                                     [--budget S] [overrides ...]
    python benchmarks/informative.py --report           tables and plot from --json, without runs
    python benchmarks/informative.py --oracle FILE      what known pass rates could give, from lines
                                                        of recipes/evaluate.py --samples 16

sums         300 sums for the tiny model. Four in five are longer than any that it has seen, so that
             their groups are all wrong. Held out are 200 sums of the length that it knows.
questions    240 questions in words for SmolLM2 (LLAMARL_SMOLLM2 names its directory). A third are
             sums of two-digit numbers; the others are products of three-digit numbers, which it
             does not learn. Held out are 100 other sums.
FILE         240 word problems for SmolLM2, each behind three that are shown: 160 short ones of a
             file of GSM8K's (JSON lines with "question" and "answer"), which it hardly solves with
             one equation, and 80 of one step, an addition. Held out are 100 others of one step.

An arm is a pair of settings. A run is one process; what is finished is kept in --runs, and a run
that was cut off goes on from its last checkpoint, so that the study may be made in pieces: --budget
begins no run after so many seconds, and stops the one that runs. --looks: the evaluations of each
run, however many its steps, so that all arms spend as much time on them.

useful       completions of groups that teach, as a share of all that were generated
to target    completions generated, and seconds, until the held-out accuracy has reached --target
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from running import ROOT, machine

from llamarl.tasks.procedural import INSTRUCTION, addition_examples

RESULTS = Path(__file__).parent / "results"
ARMS = {
    "uniform": (),
    "informative": ("tickets.informative=true",),
    "difficulty": ("tickets.sampler=difficulty",),
    "both": ("tickets.informative=true", "tickets.sampler=difficulty"),
}
GROUPS = 16  # a step
GROUPS_OF_SMOLLM2 = 8
SIZE = 8  # completions a group
NUM_KNOWN = 60
NUM_BEYOND = 240
NUM_HELD_OUT = 200
NUM_SUMS = 80
NUM_PRODUCTS = 160
NUM_HELD_OUT_SUMS = 100  # and of problems
NUM_EASY = 80
NUM_HARD = 160
MOST_CHARACTERS = 160  # of a problem with several steps
SAMPLES = 16  # a prompt, for the oracle
COMMON = (
    "threads=1",
    f"group_size={SIZE}",
    "checkpoint.every=10",
    "checkpoint.keep=1",
    "metrics.trace=false",
    "resume=auto",
)


@dataclass(frozen=True)
class Step:
    """What a step was made of. completions: all that were generated until it was taken."""

    completions: int
    teaching_fraction: float
    accuracy: float | None  # on held-out prompts, of the version that the step made
    wall_s: float


@dataclass(frozen=True)
class Run:
    """A finished run of an arm."""

    arm: str
    seed: int
    steps: list[Step]

    @property
    def useful(self) -> float:
        """Completions of groups that teach, as a share of all that were generated."""
        useful = 0.0
        before = 0
        for step in self.steps:
            useful += step.teaching_fraction * (step.completions - before)
            before = step.completions
        return useful / max(1, before)

    @property
    def last_accuracy(self) -> float:
        """The held-out accuracy of the newest version that was evaluated."""
        return [step.accuracy for step in self.steps if step.accuracy is not None][-1]

    def first_at(self, target: float) -> Step | None:
        """Return the first step whose version has the target accuracy; None: it never came."""
        for step in self.steps:
            if step.accuracy is not None and step.accuracy >= target:
                return step
        return None


# --- Rows ---


def write_sums(folder: Path) -> tuple[Path, Path]:
    """Write the rows of `sums`, and the held-out ones, and return their files."""
    known, held_out = addition_examples()
    rows = [{"prompt": e.text, "answer": e.meta["answer"]} for e in known[:NUM_KNOWN]]
    rng = random.Random(0)
    for _ in range(NUM_BEYOND):
        a = rng.randint(100, 999)
        b = rng.randint(100, 999)
        rows.append({"prompt": f"{a}+{b}=", "answer": str(a + b)})
    rng.shuffle(rows)
    asked = [{"prompt": e.text, "answer": e.meta["answer"]} for e in held_out[:NUM_HELD_OUT]]
    return _lines(folder / "rows.jsonl", rows), _lines(folder / "held_out.jsonl", asked)


def write_questions(folder: Path) -> tuple[Path, Path]:
    """Write the rows of `questions`, and the held-out ones, and return their files."""
    rng = random.Random(0)
    pairs = list(itertools.product(range(10, 100), repeat=2))
    sums = [_question(a, "+", b) for a, b in rng.sample(pairs, NUM_SUMS + NUM_HELD_OUT_SUMS)]
    rows = sums[:NUM_SUMS]
    for _ in range(NUM_PRODUCTS):
        rows.append(_question(rng.randint(100, 999), "*", rng.randint(100, 999)))
    rng.shuffle(rows)
    return (
        _lines(folder / "rows.jsonl", rows),
        _lines(folder / "held_out.jsonl", sums[NUM_SUMS:]),
    )


NAMES = ("Mia", "Tom", "Ana", "Ben", "Eva", "Sam", "Lea", "Max")
THINGS = ("apples", "books", "pens", "stamps", "shells", "cards", "coins", "eggs")
TOLD = (
    "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
    "{name} finds {a} {things} on Monday and {b} on Friday. How many {things} are these in all?",
    "There are {a} {things} in a box and {b} in another. How many {things} are there in both?",
)
SHOWN = ((3, 14), (21, 8), (6, 5))  # before each problem, so that it answers with an equation


def write_problems(folder: Path, file: Path) -> tuple[Path, Path]:
    """Write the rows of a FILE, and the held-out ones, and return their files."""
    rng = random.Random(0)
    shown = []
    for told, (a, b) in zip(TOLD, SHOWN):
        shown.append({"role": "user", "content": _told(rng, told, a, b)})
        shown.append({"role": "assistant", "content": f"{a} + {b} = {a + b}"})

    def row(asked: str, answer: str) -> dict:
        return {"prompt": [*shown, {"role": "user", "content": asked}], "answer": answer}

    pairs = itertools.product(range(2, 40), repeat=2)
    easy = []
    for a, b in rng.sample(list(pairs), NUM_EASY + NUM_HELD_OUT_SUMS):
        easy.append(row(_told(rng, rng.choice(TOLD), a, b), str(a + b)))
    read = [json.loads(line) for line in file.read_text().splitlines()]
    short = [problem for problem in read if len(problem["question"]) <= MOST_CHARACTERS]
    if len(short) < NUM_HARD:
        least = f"{NUM_HARD} questions of at most {MOST_CHARACTERS} characters"
        raise SystemExit(f"{file} has {len(short)} of the {least}")
    rows = easy[:NUM_EASY]
    rows += [row(one["question"], one["answer"]) for one in rng.sample(short, NUM_HARD)]
    rng.shuffle(rows)
    return (
        _lines(folder / "rows.jsonl", rows),
        _lines(folder / "held_out.jsonl", easy[NUM_EASY:]),
    )


def _told(rng: random.Random, told: str, a: int, b: int) -> str:
    """Return a problem of one step, an addition."""
    return told.format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b)


def _question(a: int, sign: str, b: int) -> dict[str, str]:
    answer = a + b if sign == "+" else a * b
    return {"prompt": f"What is {a}{sign}{b}? {INSTRUCTION}", "answer": str(answer)}


def _lines(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def groups_of(rows: str) -> int:
    """Return the groups of a step."""
    return GROUPS if rows == "sums" else GROUPS_OF_SMOLLM2


def job_of(rows: str, folder: Path) -> tuple[str, ...]:
    """Return the overrides of the job that all arms share."""
    groups = f"groups_per_step={groups_of(rows)}"
    if rows == "sums":
        path, held_out = write_sums(folder)
        return (
            groups,
            "task=jsonl",
            f"task.path={path}",
            f"task.eval_path={held_out}",
            "task.chat=false",
            "task.max_prompt_tokens=16",
            "max_new_tokens=6",
            "max_lag=0",
            f"eval.num_prompts={NUM_HELD_OUT}",
            "eval.every=2",
            "lr=5e-5",
            "trainer.microbatch_tokens=2048",
        )
    smollm2 = os.environ.get("LLAMARL_SMOLLM2")
    if smollm2 is None:
        raise SystemExit("LLAMARL_SMOLLM2 must name the directory of recipes/fetch_smollm2.py")
    chat = (
        groups,
        "model=hf",
        f"model.path={smollm2}",
        "model.dtype=bfloat16",
        "trainer.compute_dtype=bfloat16",
        "lr=1e-5",
        "task=jsonl",
        "reward.fn=rewards:numeric_match",
    )
    if rows == "questions":
        path, held_out = write_questions(folder)
        longest = 64
        system: tuple[str, ...] = ()
    else:
        path, held_out = write_problems(folder, Path(rows))
        longest = 256
        system = ("task.system_prompt=Answer.",)
    return (
        *chat,
        *system,
        f"task.path={path}",
        f"task.eval_path={held_out}",
        f"task.max_prompt_tokens={longest}",
        "max_new_tokens=16",
        "max_lag=0",
        f"eval.num_prompts={NUM_HELD_OUT_SUMS}",
        "eval.every=5",
    )


# --- Runs ---


def rows_of(folder: Path) -> list[dict]:
    """Return the rows of a run's metrics, by step, as far as it has come."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in found if "step" in row]


def is_finished(folder: Path, steps: int) -> bool:
    rows = rows_of(folder)
    return bool(rows) and rows[-1]["step"] == steps and (folder / "finished").exists()


def make(folder: Path, overrides: tuple[str, ...], until: float) -> None:
    """Run a job to its end, or until the time `until`."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "recipes" / "llama_async.py"), f"run_dir={folder}"]
    with (folder / "log").open("a") as log:
        process = subprocess.Popen([*command, *overrides], stdout=log, stderr=log, cwd=ROOT)
        try:
            code = process.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # it saves a checkpoint, and ends
            process.wait()
            return
    if code:
        raise SystemExit(f"{folder} failed with code {code}; see its log")
    (folder / "finished").touch()


def read(folder: Path, arm: str, seed: int, groups: int) -> Run:
    """Return a finished run of so many groups a step."""
    steps = []
    completions = 0
    for row in rows_of(folder):
        if row["step"] == 0:
            continue
        completions += (groups + row.get("tickets/given_back", 0)) * SIZE
        step = Step(
            completions=completions,
            teaching_fraction=row["groups/teaching_fraction"],
            accuracy=row.get("eval/accuracy"),
            wall_s=row["time/wall_s"],
        )
        steps.append(step)
    return Run(arm, seed, steps)


def run_of(values: dict) -> Run:
    """Return a run as it was kept."""
    steps = [Step(**step) for step in values["steps"]]
    return Run(values["arm"], values["seed"], steps)


# --- The oracle ---


def oracle(scores: Path) -> dict[str, float]:
    """Return what could be had of prompts whose pass rates are known, from lines of
    recipes/evaluate.py with SAMPLES samples a prompt.
    """
    solved: dict[int, list[float]] = {}
    for line in scores.read_text().splitlines():
        row = json.loads(line)
        if row.get("sample") is not None:
            solved.setdefault(row["number"], []).append(row["score"])
    rates = [statistics.fmean(scores) for scores in solved.values()]
    chances = [1 - p**SIZE - (1 - p) ** SIZE for p in rates]
    total = sum(chances)
    return {
        "prompts": len(rates),
        "pass_rate": statistics.fmean(rates),
        "uniform": total / len(chances),
        "oracle": sum(chance * chance for chance in chances) / total,
        "dead": sum(p in (0, 1) for p in rates) / len(rates),
    }


# --- What is said of them ---


def table(runs: list[Run], target: float) -> str:
    """Return the arms as a Markdown table: medians, and the range over seeds."""
    lines = [
        "| arm | seeds | useful ÷ generated | completions to target | seconds to target | "
        "last accuracy |",
        "|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        own = [run for run in runs if run.arm == arm]
        if not own:
            continue
        first = [run.first_at(target) for run in own]
        came = [step for step in first if step is not None]
        last = [run.last_accuracy for run in own]
        completions = _range([step.completions for step in came], "{:.0f}")
        seconds = _range([step.wall_s for step in came], "{:.0f}")
        if len(came) < len(own):
            completions += f", {len(own) - len(came)} never"
        useful = _range([run.useful for run in own], "{:.1%}")
        lines.append(
            f"| {arm} | {len(own)} | {useful} | {completions} | {seconds} | "
            f"{_range(last, '{:.1%}')} |"
        )
    return "\n".join(lines)


def ratios(runs: list[Run], target: float) -> str:
    """Return each arm's figures against uniform's of the same seed."""
    lines = []
    base = {run.seed: run for run in runs if run.arm == "uniform"}
    for arm in ARMS:
        own = [run for run in runs if run.arm == arm and run.seed in base and arm != "uniform"]
        if not own:
            continue
        useful = [f"{run.useful / base[run.seed].useful:.2f}" for run in own]
        fewer = []
        for run in own:
            theirs = base[run.seed].first_at(target)
            mine = run.first_at(target)
            both = theirs is not None and mine is not None
            fewer.append(f"{mine.completions / theirs.completions:.2f}" if both else "none")
        lines.append(f"{arm}: useful x {', '.join(useful)}; completions x {', '.join(fewer)}")
    return "\n".join(lines)


def _range(values: list[float], form: str) -> str:
    if not values:
        return "none"
    middle = form.format(statistics.median(values))
    return f"{middle} ({form.format(min(values))} to {form.format(max(values))})"


def smooth(values: list[float]) -> list[float]:
    """Return the mean of each value and the nine before it."""
    return [statistics.fmean(values[max(0, end - 10) : end]) for end in range(1, len(values) + 1)]


def draw(runs: list[Run], path: Path) -> None:
    """Draw held-out accuracy against completions, and the share that is useful by step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    colours = dict(zip(ARMS, ("#777777", "#1f77b4", "#ff7f0e", "#2ca02c")))
    for run in runs:
        label = run.arm if run.seed == runs[0].seed else None
        asked = [step for step in run.steps if step.accuracy is not None]
        left.plot(
            [step.completions for step in asked],
            [step.accuracy for step in asked],
            color=colours[run.arm],
            alpha=0.8,
            label=label,
        )
        right.plot(
            range(1, len(run.steps) + 1),
            smooth([step.teaching_fraction for step in run.steps]),
            color=colours[run.arm],
            alpha=0.8,
        )
    left.set_xlabel("completions generated")
    left.set_ylabel("held-out accuracy")
    left.legend()
    right.set_xlabel("step")
    right.set_ylabel("groups that teach, of all generated (ten steps)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", default="sums")
    parser.add_argument("--steps", type=int, default=60, help="of an arm that refills")
    parser.add_argument("--plain-steps", type=int, default=240, help="of one that does not")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--looks", type=int, default=None)
    parser.add_argument("--runs", type=Path, default=Path("runs/informative"))
    parser.add_argument("--json", type=Path, default=RESULTS / "informative.json")
    parser.add_argument("--plot", type=Path, default=RESULTS / "informative.png")
    parser.add_argument("--budget", type=float, default=1e9)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--oracle", type=Path, default=None)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if args.oracle is not None:
        print(json.dumps(oracle(args.oracle), indent=1))
        return
    if args.report:
        kept = json.loads(args.json.read_text())
        runs = [run_of(values) for values in kept["runs"]]
    else:
        runs = make_all(args)
        what = {"rows": args.rows, "machine": machine()}
        kept = {**what, "runs": [asdict(run) for run in runs]}
        args.json.write_text(text_of(kept))
    if runs:
        print(table(runs, args.target))
        print(ratios(runs, args.target))
        draw(runs, args.plot)


def text_of(kept: dict) -> str:
    """Return what is kept as JSON, with a line for each run."""
    head = {name: value for name, value in kept.items() if name != "runs"}
    runs = ",\n".join(json.dumps(run) for run in kept["runs"])
    return f'{json.dumps(head)[:-1]}, "runs": [\n{runs}\n]}}\n'


def make_all(args: argparse.Namespace) -> list[Run]:
    """Make the runs that are not finished, as far as there is time, and return all that are."""
    until = time.monotonic() + args.budget
    job = job_of(args.rows, args.runs.resolve())
    runs = []
    for seed in args.seeds:
        for arm in args.arms:
            folder = args.runs.resolve() / f"{arm}-{seed}"
            refills = "tickets.informative=true" in ARMS[arm]
            steps = args.steps if refills else args.plain_steps
            looks = () if args.looks is None else (f"eval.every={max(1, steps // args.looks)}",)
            overrides = (
                *COMMON,
                *job,
                *looks,
                *ARMS[arm],
                f"seed={seed}",
                f"max_steps={steps}",
                *args.overrides,
            )
            is_late = time.monotonic() > until - 5
            if not is_finished(folder, steps) and not is_late:
                make(folder, overrides, until)
            if is_finished(folder, steps):
                runs.append(read(folder, arm, seed, groups_of(args.rows)))
    return runs


if __name__ == "__main__":
    main()
