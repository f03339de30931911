"""On-policy distillation beside supervised fine-tuning on a teacher's samples, at equal tokens.

    python benchmarks/distillation.py [--seeds 0 1 2] [--runs DIR] [--json FILE]
    python benchmarks/distillation.py --report              the page from --json, without runs
    python benchmarks/distillation.py --teacher DIR --student DIR [overrides ...]
                                                            other models, such as SmolLM2-360M and
                                                            -135M with task=questions; a directory
                                                            that is not there is told and skipped

By default the student is the embedded model, which adds two-digit numbers with 40 % right, and the
teacher is what 100 steps of the main job make of it. That is the nearest teacher that a student can
have. Every run trains on TOTAL completions, of the prompts of its seed, each SIZE times.

    distill           loss=distill, lag 1: the student samples, the teacher scores its tokens
    SFT               supervised training on the teacher's samples, one pass
    distill, lag 4    the first in large batches of old data
    Tinker's, lag 4   the same with the sampler's logprobs in the advantage (`of_sampler`)

The first two have 64 completions a step, and of the learning rates in RATES the one that is best on
the first seed.

tokens       that were trained on, of the whole run
cpu_s        of the arm's processes, starts included; of SFT with the teacher's sampling
accuracy     greedy, on 500 held-out prompts

A run is one process of one thread. What is finished is kept in --runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from running import ROOT, Finished, job_command, machine, read_rows, run_process

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
from llamarl.config.command_line import compose_config
from llamarl.launch.inputs import JobInputs
from llamarl.learning.losses.common import masked, needs_reference, uses_all_completions
from llamarl.learning.losses.policy_gradient import policy_gradient
from llamarl.models.config import tiny_directory

RESULTS = ROOT / "benchmarks" / "results"
TOTAL = 10_240  # completions of a run
SIZE = 8  # of each prompt
BATCH = 64  # completions a step
LARGE = 512
LOOKS = 5
TEACHER_STEPS = 100
TIMEOUT_S = 600.0
COMMON = (
    "threads=1",
    f"group_size={SIZE}",
    "checkpoint.every=0",
    "metrics.trace=false",
    "loss=distill",
)
SFT = "SFT"
RATES = (2e-5, 5e-5)


def of_sampler(inputs, *, ratio_cap=4.0):
    """`distill` with Tinker's advantage: log ref - log mu, mu = generator_logprobs."""
    mu = masked(inputs.generator_logprobs, inputs.loss_mask)
    advantages = masked(inputs.ref_logprobs, inputs.loss_mask) - mu
    return policy_gradient(replace(inputs, advantages=advantages), ratio_cap=ratio_cap)


of_sampler = needs_reference(uses_all_completions(of_sampler))


def batches(completions: int, max_lag: int) -> tuple[str, ...]:
    """Return the words of steps of so many completions and a window that is kept full, so that the
    lag is max_lag.
    """
    groups = completions // SIZE
    steps = TOTAL // completions
    return (
        f"groups_per_step={groups}",
        f"max_steps={steps}",
        f"eval.every={steps // LOOKS}",
        f"max_lag={max_lag}",
        f"overcommit={max_lag * groups}",
        f"generator.max_slots={(max_lag + 1) * completions}",
    )


ARMS = {
    "distill": batches(BATCH, 1),
    SFT: (),
    "distill, lag 4": batches(LARGE, 4),
    "Tinker's, lag 4": (*batches(LARGE, 4), "loss.fn=distillation:of_sampler"),
}
TUNED = ("distill", SFT)


@dataclass(frozen=True)
class Run:
    """A finished run. accuracies: by the completions that were trained on before."""

    arm: str
    seed: int
    lr: float | None  # None: the default
    accuracies: dict[int, float]
    tokens: int
    cpu_s: float

    @property
    def last(self) -> float:
        return self.accuracies[max(self.accuracies)]


@dataclass(frozen=True)
class Bench:
    """The models and the task of a study, and where its runs are."""

    student: Path
    teacher: Path
    words: tuple[str, ...]  # of the task
    runs: Path

    @property
    def given(self) -> tuple[str, ...]:
        """The words of every main job with the student."""
        own = () if self.student == tiny_directory() else (f"model.path={self.student}",)
        teacher = f"reference.path={self.teacher}"
        return (*COMMON, *own, teacher, *self.words)


def finished(command: list[str], fine: int = 0) -> Finished:
    """Run a command to its end. RuntimeError for another exit status than 0 and `fine`."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}  # where `of_sampler` is
    done = run_process(command, timeout_s=TIMEOUT_S, env=env)
    if done.status not in (0, fine) or done.timed_out:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.last_lines()}")
    return done


def script(name: str, *words: str, fine: int = 0) -> Finished:
    return finished([sys.executable, str(ROOT / "recipes" / name), *words], fine)


def make_teacher(folder: Path) -> Path:
    """Return what the main job makes of the embedded model, made once, apart from its run: scripts
    take the settings of a run that a model lies in.
    """
    model = folder / "teacher"
    if not model.is_dir():
        run = folder / "teacher_run"
        finished(job_command(run, [f"max_steps={TEACHER_STEPS}", "eval.every=50"]))
        shutil.copytree(run / "checkpoints" / f"step_{TEACHER_STEPS}" / "hf", model)
    return model


# --- An arm ---


def learn(bench: Bench, arm: str, seed: int, lr: float | None) -> Run:
    """Make a run of the main job."""
    name = f"{arm}_{seed}_{lr}"
    folder = bench.runs / re.sub("[^a-zA-Z0-9.-]+", "_", name)
    rate = () if lr is None else (f"lr={lr:g}",)
    words = [*bench.given, *ARMS[arm], *rate, f"seed={seed}"]
    done = script("llama_async.py", f"run_dir={folder}", *words)
    tokens, accuracies = measured(folder, "tokens/trained")
    return Run(arm, seed, lr, accuracies, tokens, done.cpu_s)


def measured(folder: Path, column: str) -> tuple[int, dict[int, float]]:
    """Return the sum of a run's column, and its accuracies by completions."""
    rows = read_rows(folder)
    return sum(int(row.get(column, 0)) for row in rows), accuracies_of(rows)


def accuracies_of(rows: list[dict]) -> dict[int, float]:
    """Return the accuracies by the completions that were trained on before."""
    looks = {}
    for row in rows:
        if row.get("eval/accuracy") is not None:
            looks[row["step"]] = row["eval/accuracy"]
    a_step = TOTAL // max(looks)
    return {step * a_step: accuracy for step, accuracy in looks.items()}


def taught_rows(bench: Bench, seed: int) -> tuple[list[str], float]:
    """Have the teacher answer the prompts of a seed. Return the words of a task whose rows are its
    answers, with the CPU seconds that it took.
    """
    folder = bench.runs / f"samples_{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    config = compose_config([*bench.given, f"seed={seed}"])
    inputs = JobInputs(config)
    asked = [inputs.prompts[ticket] for ticket in range(TOTAL // SIZE)]
    held_out = inputs.eval_prompts.values()
    prompts = write(folder / "prompts.jsonl", ({"prompt": p.text, "answer": ""} for p in asked))
    right = ({"prompt": p.text, "answer": p.meta["answer"]} for p in held_out)
    out = folder / "samples.jsonl"
    file = ("task=jsonl", f"task.path={prompts}", f"task.eval_path={prompts}")
    chat = f"task.chat={str(config.task.chat).lower()}"
    sizes = (f"max_new_tokens={config.max_new_tokens}", chat)
    answered = script(
        "evaluate.py",
        f"model.path={bench.teacher}",
        "model.dtype=" + config.model.dtype,
        *(*file, *sizes, f"num_prompts={len(asked)}", f"samples={SIZE}"),
        *("reward.fn=rewards:zero", f"out={out}", f"seed={seed}", "threads=1"),
    )
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    sampled = [line for line in lines if line["sample"] > 0]
    rows = ({"prompt": line["prompt"], "answer": line["completion"]} for line in sampled)
    learned = write(folder / "rows.jsonl", rows)
    tested = write(folder / "held_out.jsonl", right)
    return ["task=jsonl", f"task.path={learned}", f"task.eval_path={tested}", chat], answered.cpu_s


def supervise(bench: Bench, seed: int, lr: float, task: list[str]) -> Run:
    """Make a supervised run of one pass over the teacher's samples."""
    folder = bench.runs / f"sft_{seed}_{lr}"
    config = compose_config(list(bench.given))
    done = script(
        "sft.py",
        f"model.path={bench.student}",
        f"model.dtype={config.model.dtype}",
        # Its answers are measured because of a target, which is not reached: exit status 1.
        *("target_accuracy=1", f"max_new_tokens={config.max_new_tokens}"),
        *(*task, f"out={folder}", f"seed={seed}", "threads=1", "metrics.trace=false"),
        *(f"lr={lr:g}", f"examples_per_step={BATCH}", "checkpoint.every=0"),
        f"eval.every={TOTAL // BATCH // LOOKS}",
        fine=1,
    )
    tokens, accuracies = measured(folder, "targets/trained")
    return Run(SFT, seed, lr, accuracies, tokens, done.cpu_s)


def write(file: Path, rows: Iterator[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def runs_of(bench: Bench, seeds: list[int], kept: list[Run]) -> Iterator[Run]:
    """Make the runs that are not kept yet."""
    runs = list(kept)
    for seed in seeds:
        for arm in ARMS:
            rates: tuple[float | None, ...] = (None,)
            if arm in TUNED:
                rates = RATES if seed == seeds[0] else (best_rate(runs, arm),)
            known = {run.lr for run in runs if (run.arm, run.seed) == (arm, seed)}
            missing = [rate for rate in rates if rate not in known]
            made = []
            if arm == SFT and missing:
                task, sampling_s = taught_rows(bench, seed)
                for rate in missing:
                    run = supervise(bench, seed, rate, task)
                    made.append(replace(run, cpu_s=run.cpu_s + sampling_s))
            elif missing:
                made = [learn(bench, arm, seed, rate) for rate in missing]
            runs += made
            yield from made


def best_rate(runs: list[Run], arm: str) -> float | None:
    """Return the learning rate of an arm that is best on the first seed."""
    first = min(run.seed for run in runs)
    own = [run for run in runs if (run.arm, run.seed) == (arm, first)]
    return max(own, key=lambda run: run.last).lr


# --- The page ---


def page(results: dict) -> str:
    """Return the results in Markdown."""
    runs = [Run(**{**run, "accuracies": by_number(run)}) for run in results["runs"]]
    rates = {arm: best_rate(runs, arm) for arm in ARMS}
    shown = [run for run in runs if run.lr == rates[run.arm]]
    looks = sorted(shown[0].accuracies)
    cpu = results["machine"]["cpu"]
    num_seeds = len({run.seed for run in shown})
    lines = [
        "# On-policy distillation",
        "",
        f"`benchmarks/distillation.py`, on one core of a shared {cpu}.",
        f"Student: {results['student']}.",
        f"Teacher: {results['teacher']}, {percent(results['teacher_accuracy'])} % right.",
        f"Mean held-out accuracy in percent of {num_seeds} seeds, by completions trained on; the",
        "range of the last; trained tokens and CPU seconds (SFT: with the teacher's sampling).",
        "",
        f"| arm | {' | '.join(f'{look:,}' for look in looks)} | range | tokens | CPU s |",
        f"|---|{'---|' * (len(looks) + 3)}",
    ]
    for arm in ARMS:
        own = [run for run in shown if run.arm == arm]
        cells = []
        for look in looks:
            cells.append(percent(statistics.mean(run.accuracies[look] for run in own)))
        last = [run.last for run in own]
        spread = f"{percent(min(last))} to {percent(max(last))}"
        tokens = f"{statistics.mean(run.tokens for run in own):,.0f}"
        cpu_s = f"{statistics.mean(run.cpu_s for run in own):.0f}"
        lines.append(f"| {arm} | {' | '.join([*cells, spread, tokens, cpu_s])} |")
    lines.append("")
    first = min(run.seed for run in runs)
    for arm in TUNED:
        tried = [run for run in runs if (run.arm, run.seed) == (arm, first)]
        said = ", ".join(f"{run.lr:g}: {percent(run.last)} %" for run in tried)
        lines.append(f"{arm}: the better of these learning rates on seed {first}: {said}.")
    return "\n".join([*lines, ""])


def by_number(run: dict) -> dict[int, float]:
    return {int(look): accuracy for look, accuracy in run["accuracies"].items()}


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def accuracy_of(model: Path, words: tuple[str, ...], folder: Path) -> float:
    """Return a model's held-out accuracy. folder: where its answers are written."""
    out = folder / "answers.jsonl"
    given = [f"model.path={model}", *words, f"out={out}", "threads=1"]
    script("evaluate.py", *given, "samples=0")
    lines = out.read_text().splitlines()
    return statistics.mean(json.loads(line)["score"] for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "distillation")
    parser.add_argument("--json", type=Path, default=RESULTS / "distillation.json")
    parser.add_argument("--teacher", type=Path)
    parser.add_argument("--student", type=Path, default=tiny_directory())
    parser.add_argument("--report", action="store_true")
    args, words = parser.parse_known_args()
    if not args.report:
        for model in filter(None, (args.teacher, args.student)):
            if not (model / "config.json").is_file():
                print(f"skipped: there is no model in {model}")
                return
        measure(args, tuple(words))
    results = json.loads(args.json.read_text())
    text = page(results)
    args.json.with_suffix(".md").write_text(text)
    print(text)


def measure(args: argparse.Namespace, words: tuple[str, ...]) -> None:
    """Make the runs, and keep each in the results as it is finished."""
    args.runs.mkdir(parents=True, exist_ok=True)
    teacher = args.teacher or make_teacher(args.runs)
    bench = Bench(student=args.student, teacher=teacher, words=words, runs=args.runs)
    results = {
        "machine": machine(),
        "student": args.student.name,
        "teacher": args.teacher.name if args.teacher else f"tiny after {TEACHER_STEPS} steps of RL",
        "teacher_accuracy": accuracy_of(teacher, words, args.runs),
        "runs": [],
    }
    if args.json.is_file():
        results["runs"] = json.loads(args.json.read_text())["runs"]
    kept = [Run(**{**run, "accuracies": by_number(run)}) for run in results["runs"]]
    for run in runs_of(bench, args.seeds, kept):
        print(f"{run.arm}, seed {run.seed}, lr {run.lr}: {percent(run.last)} %", flush=True)
        results["runs"].append(asdict(run))
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
