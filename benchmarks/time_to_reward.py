"""A race to a held-out accuracy: the main job beside TRL's GRPO, seed by seed, on the same cores.

    python benchmarks/time_to_reward.py --trl-python V/bin/python [--model DIR] [--target 0.8]
                                        [--seeds 5] [--cores 2] [--json FILE] [overrides ...]

Both sides have SAME: the loss (TRL's dapo, ours grpo with normalize=tokens), batch, one update a
batch, optimizer, constant rate, float32, examples and evaluation. What differs is what each system
is: TRL generates, then trains, in one process of as many threads as there are cores; ours does both
at once, in a process of one thread a core, on data at most one step old.

Overrides go to our side alone, after those. Without --trl-python (an environment with TRL 1.16;
none is needed for llamarl) ours runs alone.

Seconds are the clock's, from before a side loads its model, with everything imported, to the end
of the first evaluation that shows the target; all evaluations are included. CPU seconds are those
of the whole process tree, less those of a run of one step; two such runs come first, of which
the second counts and the first warms caches. Runs take turns, and who goes first changes with the
seed. A run that has not reached the target after --steps or --seconds is censored: it counts
as one that takes longer than all others. The file of --json is written after each run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from running import ROOT, Finished, job_command, machine, read_rows, run_process

RESULTS = Path(__file__).parent / "results"
SAME = {
    "groups": 32,
    "group_size": 8,
    "max_new_tokens": 6,
    "temperature": 1.0,
    "clip": 0.2,
    "lr": 5e-5,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
}
MEASURES = ("seconds", "steps", "s_per_step", "cpu_s")


@dataclass(frozen=True)
class Outcome:
    """One run. steps, seconds, accuracy: of the evaluation at the target, else of its last."""

    side: str
    seed: int
    reached: bool
    steps: int
    seconds: float
    accuracy: float
    start_accuracy: float
    cpu_s: float
    load: float
    float32: str
    evaluations: list[tuple[int, float, float]]  # step, seconds, accuracy
    evaluating_s: float | None = None  # part of seconds; None: ours evaluates beside the training

    def value(self, measure: str) -> float:
        """Of MEASURES; inf: never."""
        if measure == "s_per_step":
            return self.seconds / self.steps if self.steps else math.inf
        return getattr(self, measure) if self.reached else math.inf


# --- The two sides ---


def same_overrides() -> tuple[str, ...]:
    """SAME in the words of our configuration."""
    s = SAME
    return (
        "loss=grpo",
        "loss.normalize=tokens",
        f"loss.clip_low={s['clip']}",
        f"loss.clip_high={s['clip']}",
        "loss.kl_coef=0",
        "trainer.advantages=group_mean_std",
        f"groups_per_step={s['groups']}",
        f"group_size={s['group_size']}",
        "trainer.minibatches_per_step=1",
        "trainer.updates_per_batch=1",
        f"max_new_tokens={s['max_new_tokens']}",
        f"temperature={s['temperature']}",
        f"lr={s['lr']}",
        "trainer.schedule=constant",
        "trainer.optimizer=adamw",
        f"trainer.beta1={s['beta1']}",
        f"trainer.beta2={s['beta2']}",
        f"trainer.eps={s['eps']}",
        f"trainer.weight_decay={s['weight_decay']}",
        f"trainer.max_grad_norm={s['max_grad_norm']}",
        "model.dtype=float32",
        "trainer.compute_dtype=float32",
    )


def our_overrides(args: argparse.Namespace) -> list[str]:
    """All settings of ours but the model's directory and the seed."""
    measured = (
        "checkpoint.every=0",
        "metrics.trace=false",
        f"eval.every={args.eval_every}",
        f"eval.target={args.target}",
    )
    return [
        "max_lag=1",
        "threads=1",
        f"max_steps={args.steps}",
        *measured,
        *same_overrides(),
        *args.overrides,
    ]


def our_command(args: argparse.Namespace, seed: int, run_dir: Path) -> list[str]:
    overrides = [*our_overrides(args), f"model.path={args.model}", f"seed={seed}"]
    return job_command(run_dir, overrides, ranks=args.cores)


def trl_command(args: argparse.Namespace, seed: int, run_dir: Path) -> list[str]:
    worker = ROOT / "benchmarks" / "time_to_reward_trl.py"
    options = {
        "--run-dir": run_dir,
        "--model": args.model,
        "--examples": args.examples,
        "--settings": json.dumps(SAME),
        "--steps": args.steps,
        "--target": args.target,
        "--eval-every": args.eval_every,
        "--seed": seed,
        "--threads": args.trl_threads,
    }
    command = [args.trl_python, str(worker)]
    for name, value in options.items():
        command += [name, str(value)]
    return command


COMMANDS = {"llamarl": our_command, "trl": trl_command}


def float32_of(side: str, output: str) -> str:
    """How the process said that it multiplies float32."""
    lines = output.splitlines()
    if side == "llamarl":
        said = [line.split(maxsplit=1)[1] for line in lines if line.startswith("float32 ")]
    else:
        said = [json.loads(line)["float32"] for line in lines if line.startswith('{"trl"')]
    return said[0] if said else "unknown"


def race(side: str, seed: int, run_dir: Path, args: argparse.Namespace) -> Outcome:
    """One run of one side. RuntimeError if it failed, or never evaluated."""
    threads = {"llamarl": 1, "trl": args.trl_threads}[side]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = run_process(COMMANDS[side](args, seed, run_dir), timeout_s=args.seconds, env=env)
    if done.status and not done.timed_out:
        raise RuntimeError(
            f"{side}, seed {seed} failed, status {done.status}:\n{done.last_lines()}"
        )
    rows = [row for row in read_rows(run_dir) if row.get("eval/accuracy") is not None]
    if not rows:
        raise RuntimeError(
            f"{side}, seed {seed} made no evaluation in {args.seconds:.0f} s:\n{done.last_lines()}"
        )
    return outcome(side, seed, rows, done, args.target)


def outcome(side: str, seed: int, rows: list[dict], done: Finished, target: float) -> Outcome:
    """What a run's evaluated rows come to."""
    reached = [row for row in rows if row["eval/accuracy"] >= target]
    last = reached[0] if reached else rows[-1]
    return Outcome(
        side=side,
        seed=seed,
        reached=bool(reached),
        steps=last["step"],
        seconds=last["time/evaluated_s"],
        accuracy=last["eval/accuracy"],
        start_accuracy=rows[0]["eval/accuracy"],
        cpu_s=done.cpu_s,
        load=os.getloadavg()[0],
        float32=float32_of(side, done.output),
        evaluations=[
            (row["step"], round(row["time/evaluated_s"], 2), row["eval/accuracy"]) for row in rows
        ],
        evaluating_s=last.get("time/evaluating_s"),
    )


# --- What the runs come to ---


def spread(values: list[float]) -> dict[str, float | None]:
    """Median, least and most; None where it is infinite: a run that never arrived."""
    found = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def summary(outcomes: list[Outcome], start_cpu_s: dict[str, float]) -> dict:
    """How many of each side's runs reached the target, MEASURES over all seeds, their ratios."""
    found: dict = {}
    values: dict[str, dict[str, dict[int, float]]] = {}  # side -> measure -> seed -> value
    for side in dict.fromkeys(o.side for o in outcomes):
        runs = [o for o in outcomes if o.side == side]
        values[side] = {}
        for measure in MEASURES:
            values[side][measure] = {o.seed: o.value(measure) for o in runs}
        values[side]["cpu_s"] = {
            seed: cpu - start_cpu_s[side] for seed, cpu in values[side]["cpu_s"].items()
        }
        found[side] = {"reached": sum(o.reached for o in runs), "of": len(runs)}
        found[side] |= {
            measure: spread(list(values[side][measure].values())) for measure in MEASURES
        }
    if len(values) == 2:
        found["ours_over_trl"] = {
            measure: ratio(values["llamarl"][measure], values["trl"][measure])
            for measure in MEASURES
        }
    return found


def ratio(ours: dict[int, float], theirs: dict[int, float]) -> dict:
    """Ours over TRL's: of the medians over all seeds; seed by seed where both arrived."""
    medians = statistics.median(ours.values()), statistics.median(theirs.values())
    pairs = [
        ours[seed] / theirs[seed]
        for seed in ours
        if seed in theirs and math.isfinite(ours[seed] + theirs[seed])
    ]
    of_medians = medians[0] / medians[1] if all(map(math.isfinite, medians)) else None
    return {
        "of_medians": of_medians,
        "pairs": len(pairs),
        "by_seed": spread(pairs) if pairs else None,
    }


def show(found: dict) -> str:
    """A line a side and measure."""

    def number(value: float | None) -> str:
        return "never" if value is None else f"{value:.3g}"

    def numbers(of: dict) -> str:
        return f"{number(of['median'])} ({number(of['least'])} to {number(of['most'])})"

    lines = []
    for side in (name for name in ("llamarl", "trl") if name in found):
        lines.append(
            f"{side:8} reached the target with {found[side]['reached']} of {found[side]['of']} "
            "seeds; median (range):"
        )
        lines += [f"    {measure:12} {numbers(found[side][measure])}" for measure in MEASURES]
    for measure, of in found.get("ours_over_trl", {}).items():
        pairs = (
            f"; seed by seed {numbers(of['by_seed'])}, {of['pairs']} pairs" if of["by_seed"] else ""
        )
        shown = "none: a median is never" if of["of_medians"] is None else number(of["of_medians"])
        lines.append(f"ours / TRL   {measure:12} of medians {shown}{pairs}")
    return "\n".join(lines)


def order(sides: list[str], turn: int) -> list[str]:
    """Who runs first changes with every seed."""
    return sides if turn % 2 == 0 else sides[::-1]


# --- The program ---


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="a Hugging Face directory; default: the package's own, 40 %% right")
    add("--target", type=float, default=0.8)
    add("--seeds", type=int, default=5)
    add("--first-seed", type=int, default=10, help="above 2: settings were chosen on 0 to 2")
    add("--steps", type=int, default=300, help="a run that needs more is censored")
    add("--seconds", type=float, default=300.0, help="as well, with its start and end")
    add("--eval-every", type=int, default=5, help="steps")
    add("--cores", type=int, default=2, help="of each side: both are held to these")
    add("--trl-threads", type=int, help="default: as many as --cores")
    add("--trl-python", help="an interpreter that has TRL 1.16")
    add("--json", type=Path, default=RESULTS / "time_to_reward.json")
    add("overrides", nargs="*", help="of our side")
    args = parser.parse_args()
    usable = sorted(os.sched_getaffinity(0))
    if args.cores > len(usable):
        parser.error(f"--cores {args.cores}: this process may use {len(usable)}")
    os.sched_setaffinity(0, usable[: args.cores])  # and so all that it starts
    args.trl_threads = args.trl_threads or args.cores
    return args


def write_examples(file: Path) -> None:
    """The additions that our side trains on and holds out, for the other side."""
    from llamarl.tasks.procedural import addition_examples

    train, held_out = addition_examples()
    values = {
        "train": [(e.text, e.meta["answer"]) for e in train],
        "held_out": [(e.text, e.meta["answer"]) for e in held_out],
    }
    file.write_text(json.dumps(values))


def versions(args: argparse.Namespace) -> dict:
    import llamarl

    found = {"llamarl": llamarl.__version__}
    if args.trl_python:
        code = (
            "import importlib.metadata, json\n"
            "names = 'trl', 'transformers', 'accelerate', 'torch'\n"
            "print(json.dumps({name: importlib.metadata.version(name) for name in names}))"
        )
        done = run_process([args.trl_python, "-c", code], timeout_s=60)
        if done.status:
            raise SystemExit(f"{args.trl_python} has no TRL:\n{done.last_lines()}")
        found["trl_python"] = json.loads(done.output.splitlines()[-1])
    return found


def settings(args: argparse.Namespace) -> dict:
    """What was run, and on what: all that the file of results says besides the runs."""
    return {
        "benchmark": "time_to_reward",
        "like_for_like": not args.overrides,
        "model": Path(args.model).name,
        "target": args.target,
        "eval_every": args.eval_every,
        "budget": {"steps": args.steps, "seconds": args.seconds},
        "machine": machine(),
        "versions": versions(args),
        "cores": args.cores,
        "processes": {"llamarl": args.cores, "trl": 1},
        "threads": {"llamarl": 1, "trl": args.trl_threads},
        "same": SAME,
        "llamarl_overrides": our_overrides(args),
    }


def start_cpu_s(sides: list[str], scratch: Path, args: argparse.Namespace) -> dict[str, float]:
    """CPU seconds of each side's run of one step: the second one's, for the first fills caches."""
    one_step = argparse.Namespace(**{**vars(args), "overrides": [*args.overrides, "max_steps=1"]})
    one_step.steps = 1
    found = {}
    for turn in ("first", "second"):
        for side in sides:
            found[side] = race(side, args.first_seed, scratch / f"{side}-{turn}", one_step).cpu_s
    return found


def main() -> None:
    args = arguments()
    sys.path.insert(0, str(ROOT))
    from llamarl.config.placement import TINY_MODEL

    args.model = str(Path(args.model or TINY_MODEL).resolve())
    sides = ["llamarl", "trl"] if args.trl_python else ["llamarl"]
    result = settings(args)
    print(f"{result['machine']}")
    print(f"on {args.cores} cores: llamarl {args.cores} x 1 thread, TRL 1 x {args.trl_threads}")
    print(f"ours     {' '.join(our_overrides(args))}", flush=True)
    if not args.trl_python:
        print("trl      skipped: no --trl-python, an environment that has it")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        args.examples = scratch / "examples.json"
        write_examples(args.examples)
        starts = start_cpu_s(sides, scratch, args)
        outcomes: list[Outcome] = []
        for turn in range(args.seeds):
            seed = args.first_seed + turn
            for side in order(sides, turn):
                found = race(side, seed, scratch / f"{side}-{seed}", args)
                outcomes.append(found)
                ended = "reached" if found.reached else "NOT reached:"
                print(
                    f"seed {seed} {side:8} {ended} {found.accuracy:.1%}, {found.steps} steps, ",
                    end="",
                )
                print(
                    f"{found.seconds:.1f} s, load {found.load:.1f}, float32 {found.float32}",
                    flush=True,
                )
                result["start_cpu_s"] = starts
                result["runs"] = [asdict(o) for o in outcomes]
                result["summary"] = summary(outcomes, starts)
                args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{show(result['summary'])}\nwritten  {args.json}")


if __name__ == "__main__":
    main()
