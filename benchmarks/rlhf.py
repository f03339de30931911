"""Async RLHF's questions on the synthetic TL;DR of recipes/rlhf.py: what a policy gains by a reward
model, in the eyes of gold, and at which distance from the SFT model.

    python recipes/rlhf.py out=PIPELINE
    python benchmarks/rlhf.py --pipeline PIPELINE [--study STUDY] [--study ...] [--seeds 3]
                              [--jobs 2] [--runs DIR] [--json FILE] [--plots DIR] [--text FILE]
                              [overrides ...]

overoptimisation  RLOO with the KL to the SFT model held, a little, and not at all: proxy and gold
                  over sqrt(KL) (Gao et al. 2022)
minibatches       N = 1, 4, 16 minibatches a step, off-policy by construction, of PPO, RLOO,
                  Proximal RLOO, Online DPO and Best-of-2: win rate against perplexity (Async RLHF,
                  3.2, 3.3)
idle              Online DPO with max_lag 1 and what an idle trainer can do, T = 1, 2, 3 passes over
                  a batch, or an idle generator, K = 2, 4 samples a prompt of which the best and the
                  worst are trained on (4.1, 4.2)
sync              max_lag 1 against 0 on two ranks at equal steps, with seconds (3.5)

All runs begin with PIPELINE's SFT model against its reward model, and those of a study train on as
many completions. The win rate is that of gold over the sloppy teacher's summaries of 500 held-out
posts, greedy; perplexity that of the same answers under the SFT model (docs/rewards.md).
KL itself is the reference's k3 estimate over what the evaluated version samples at temperature 0.7
for the step after, nats a completion: none after the last step. Runs of the first three studies are
one process of one thread each. --runs keeps finished ones; --jobs 0 makes none. --text: a Markdown
file whose tables are written anew, each between its markers `<!-- table STUDY -->` and
`<!-- end -->`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import forked
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from offpolicy_results import refresh
from running import machine, run_job

RESULTS = Path(__file__).parent / "results"
GOLD = "llamarl.tasks.facts:gold"
PROXY = "eval/reward"
GOLD_MEAN = "eval/gold"
WIN_RATE = "eval/win_rate"
KL = "kl/ref"
LENGTH = "completion/length_mean"
STEP = "step"
SECONDS = "time/wall_s"
PERPLEXITY = "eval/perplexity"
KEPT = (PROXY, GOLD_MEAN, WIN_RATE, KL, LENGTH, STEP, SECONDS, "lag/mean", PERPLEXITY)
COMPLETIONS = 128  # a minibatch
UPDATES = 64
LOSSES = ("ppo", "rloo", "proximal_rloo", "online_dpo", "best_of_n")
MINIBATCHES = (1, 4, 16)
PASSES = (1, 2, 3)  # T
SAMPLES = (2, 4)  # K
KL_COEFS = ("0", "0.02", "0.1", "0.5")
RATES = {"ppo": "1e-4", "best_of_n": "5e-5"}
RATE = "1e-4"
STUDIES = ("overoptimisation", "minibatches", "idle", "sync")
TITLES = {
    PROXY: "reward model's score",
    GOLD_MEAN: "gold",
    WIN_RATE: "gold's win rate over the teacher",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One setting. panel: the plot, or the table's column, that it is in, "" if there is one alone,
    whose axis is KL; curve: its name there.
    """

    panel: str
    curve: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """An evaluation. kl: nats a completion; None after the last step. perplexity: None where there
    is no base.
    """

    step: int
    seconds: float
    proxy: float
    gold: float
    win_rate: float
    kl: float | None
    perplexity: float | None


@dataclass(frozen=True, slots=True)
class Curve:
    """The evaluations of a case, run by run, in the order of the seeds. num_failed: runs that an
    error ended.
    """

    case: Case
    runs: tuple[tuple[Point, ...], ...]
    num_failed: int = 0

    def last(self, name: str) -> list[float]:
        """A measure after the last step, of each run."""
        return [getattr(points[-1], name) for points in self.runs]


# --- Settings ---


def common(pipeline: Path) -> tuple[str, ...]:
    """The overrides of all runs."""
    rows = (
        "task=jsonl",
        f"task.path={pipeline}/teacher.jsonl",
        f"task.eval_path={pipeline}/teacher_held_out.jsonl",
        "task.answer_key=completion",
        "task.chat=false",
        "task.max_prompt_tokens=80",
        "max_new_tokens=32",
        "temperature=0.7",
    )
    judged = (f"eval.gold={GOLD}", "eval.reference_key=completion", "eval.num_prompts=500")
    models = (
        "model=hf",
        f"model.path={pipeline}/sft",
        "model.dtype=float32",
        "reward=model",
        f"reward.path={pipeline}/reward_model",
        "reference=frozen",
    )
    return (*models, *rows, *judged, "threads=1", "checkpoint.every=0", "metrics.trace=false")


def own_critic(pipeline: Path) -> tuple[str, ...]:
    """PPO's value model, which starts as the reward model (Async RLHF, 2.1)."""
    start = f"trainer.critic.path={pipeline}/reward_model"
    return (
        "trainer.advantages=gae",
        "trainer.whiten=advantages",
        "trainer.critic.trunk=own",
        start,
    )


def settings(loss: str, *, minibatches: int = 1, max_lag: int = 0) -> tuple[str, ...]:
    """Overrides of UPDATES optimizer updates with a loss."""
    size = 1 if loss == "ppo" else 2
    groups = COMPLETIONS * minibatches // size
    return (
        f"loss={loss}",
        f"group_size={size}",
        f"groups_per_step={groups}",
        f"trainer.minibatches_per_step={minibatches}",
        f"max_steps={UPDATES // minibatches}",
        f"eval.every={max(1, 8 // minibatches)}",
        f"lr={RATES.get(loss, RATE)}",
        f"max_lag={max_lag}",
    )


def overoptimisation_cases() -> list[Case]:
    """RLOO, twice as long and at twice the rate: far enough to leave what was learned from."""
    far = (f"max_steps={2 * UPDATES}", "eval.every=8", "lr=2e-4")
    return [
        Case("", f"kl_coef {coef}", (*settings("rloo"), *far, f"loss.kl_coef={coef}"))
        for coef in KL_COEFS
    ]


def minibatch_cases() -> list[Case]:
    return [
        Case(
            f"N = {count}",
            loss,
            (*settings(loss, minibatches=count), f"eval.every={max(1, 16 // count)}"),
        )
        for count, loss in itertools.product(MINIBATCHES, LOSSES)
    ]


def idle_cases() -> list[Case]:
    of_trainer = {f"T = {passes}": f"trainer.updates_per_batch={passes}" for passes in PASSES}
    of_generator = {f"K = {samples}": f"group_size={samples}" for samples in SAMPLES}
    cases = []
    for panel, curves in {"passes": of_trainer, "samples": of_generator}.items():
        for curve, word in curves.items():
            overrides = (*settings("online_dpo", max_lag=1), "eval.every=16", word)
            cases.append(Case(panel, curve, overrides))
    return cases


def sync_cases() -> list[Case]:
    return [
        Case(loss, f"max_lag {lag}", settings(loss, max_lag=lag))
        for loss, lag in itertools.product(("online_dpo", "rloo"), (0, 1))
    ]


# --- Runs ---


def points_of(rows: list[dict]) -> tuple[Point, ...]:
    """The evaluations of a run that have gold's say. A step's KL is of completions that the version
    before it sampled, at max_lag 0.
    """
    points = []
    for row, after in zip(rows, [*rows[1:], {}]):
        if row.get(GOLD_MEAN) is None:
            continue
        kl = None
        if after.get(KL) is not None:
            kl = after[KL] * after[LENGTH]
        points.append(
            Point(
                step=row[STEP],
                seconds=row[SECONDS],
                proxy=row[PROXY],
                gold=row[GOLD_MEAN],
                win_rate=row[WIN_RATE],
                kl=kl,
                perplexity=row.get(PERPLEXITY),
            )
        )
    return tuple(points)


def made_apart(cases: list[Case], args: argparse.Namespace) -> list[Curve]:
    """Each run in one process, args.jobs at a time, seed by seed."""
    forked.KEPT.update(KEPT)
    wanted = {}
    for seed, case in itertools.product(args.seed, cases):
        wanted[case, seed] = words_of(case, seed, args)
    if args.jobs:
        forked.make(args.runs, list(wanted.values()), jobs=args.jobs)
    curves = []
    for case in cases:
        kept = [forked.load_run(args.runs, wanted[case, seed]) for seed in args.seed]
        runs = [run for run in kept if run is not None]
        num_failed = sum(run.failed is not None for run in runs)
        of_runs = [points_of(run.rows) for run in runs]
        with_points = [points for points in of_runs if points]
        curves.append(Curve(case, tuple(with_points), num_failed))
    return [curve for curve in curves if curve.runs]


def made_on_two_ranks(cases: list[Case], args: argparse.Namespace) -> list[Curve]:
    """Each run on two ranks, one after the other, the two modes of a loss in turn."""
    found: dict[Case, list[tuple[Point, ...]]] = {case: [] for case in cases}
    for seed in args.seed:
        for case in cases:
            words = words_of(case, seed, args)
            folder = args.runs.absolute() / forked.store(args.runs, words).stem
            rows_file = folder.with_suffix(".rows")
            if not rows_file.exists() and not args.jobs:
                continue
            if not rows_file.exists():
                rows = run_job(folder, list(words))
                rows_file.write_text(json.dumps(rows))
                print(f"{rows[-1][SECONDS]:5.0f} s  {case.panel}, {case.curve}, seed {seed}")
            found[case].append(points_of(json.loads(rows_file.read_text())))
    return [Curve(case, tuple(runs)) for case, runs in found.items() if runs]


def words_of(case: Case, seed: int, args: argparse.Namespace) -> tuple[str, ...]:
    pipeline = args.pipeline.absolute()
    critic = own_critic(pipeline) if "loss=ppo" in case.overrides else ()
    base = (f"eval.base={pipeline}/sft",) if case.panel else ()
    given = (*common(pipeline), *base, *critic, *case.overrides)
    return (*given, f"seed={seed}", *args.overrides)


def study(name: str, args: argparse.Namespace) -> list[Curve]:
    if name == "sync":
        return made_on_two_ranks(sync_cases(), args)
    cases_of = {
        "overoptimisation": overoptimisation_cases,
        "minibatches": minibatch_cases,
        "idle": idle_cases,
    }
    return made_apart(cases_of[name](), args)


# --- Tables ---


def spread(values: Iterable[float], form: str = ".2f") -> str:
    """Mean, and the range over seeds."""
    values = list(values)
    return f"{statistics.mean(values):{form}} ({min(values):{form}}–{max(values):{form}})"


def _highest_gold(points: tuple[Point, ...]) -> float:
    return max(point.gold for point in points)


def _farthest(points: tuple[Point, ...]) -> float:
    """The largest KL of a run, nats."""
    return max(point.kl or 0.0 for point in points)


def table(name: str, curves: list[Curve]) -> str:
    """A study's Markdown table, a row a curve; all but the highest gold after the last step."""
    rows = []
    for curve in curves:
        what = f"{curve.case.panel}, {curve.case.curve}" if curve.case.panel else curve.case.curve
        if curve.num_failed:
            what += f" ({curve.num_failed} of {len(curve.runs)} ended early)"
        highest = [_highest_gold(points) for points in curve.runs]
        row = {
            "": what,
            "win rate, %": spread([100 * rate for rate in curve.last("win_rate")], ".1f"),
            "gold": spread(curve.last("gold"), ".3f"),
        }
        if name != "sync":
            row["highest gold"] = spread(highest, ".3f")
        row["proxy"] = spread(curve.last("proxy"))
        if name == "overoptimisation":
            farthest = [_farthest(points) for points in curve.runs]
            row["largest KL, nats"] = spread(farthest, ".1f")
        else:
            row["perplexity"] = spread(curve.last("perplexity"))
        if name == "sync":
            row["seconds"] = spread(curve.last("seconds"), ".0f")
        rows.append(row)
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --- Plots ---


def figure_of(count: int) -> tuple[plt.Figure, list[Axes]]:
    figure, axes = plt.subplots(
        1, count, figsize=(3.8 * count, 3.6), squeeze=False, layout="constrained"
    )
    for ax in axes[0]:
        ax.grid(alpha=0.3)
        ax.tick_params(labelsize=8)
    return figure, list(axes[0])


def draw_overoptimisation(curves: list[Curve]) -> plt.Figure:
    """Proxy and gold over sqrt(KL), a line a seed (Gao et al. 2022, figure 1)."""
    figure, axes = figure_of(2)
    for ax, measure, title in zip(axes, ("proxy", "gold"), (TITLES[PROXY], TITLES[GOLD_MEAN])):
        for curve, colour in zip(curves, plt.get_cmap("tab10").colors):
            for number, points in enumerate(curve.runs):
                known = [point for point in points if point.kl is not None]
                distances = [math.sqrt(max(0.0, point.kl)) for point in known]
                values = [getattr(point, measure) for point in known]
                label = None if number else curve.case.curve
                ax.plot(distances, values, color=colour, label=label, lw=1.3, marker=".", ms=4)
        ax.set_xlabel("sqrt(KL from the SFT model), nats a completion", fontsize=8)
        ax.set_title(title, fontsize=9)
    axes[0].legend(fontsize=8, frameon=False)
    return figure


def draw_pareto(curves: list[Curve]) -> plt.Figure:
    """Win rate against perplexity: a path over steps, of the mean over seeds (Async RLHF, figures
    3, 4).
    """
    panels = list(dict.fromkeys(curve.case.panel for curve in curves))
    names = list(dict.fromkeys(curve.case.curve for curve in curves))
    colours = dict(zip(names, plt.get_cmap("tab10").colors))
    figure, axes = figure_of(len(panels))
    for ax, panel in zip(axes, panels):
        for curve in curves:
            if curve.case.panel != panel:
                continue
            longest = max(len(points) for points in curve.runs)
            whole = [points for points in curve.runs if len(points) == longest]
            by_evaluation = list(zip(*whole, strict=True))
            distances = []
            rates = []
            for points in by_evaluation:
                distances.append(statistics.mean(point.perplexity for point in points))
                rates.append(statistics.mean(point.win_rate for point in points))
            colour = colours[curve.case.curve]
            ax.plot(distances, rates, color=colour, lw=1.3, marker=".", ms=4)
            ax.plot(distances[-1:], rates[-1:], "o", color=colour, ms=6, label=curve.case.curve)
        ax.set_xlabel("perplexity under the SFT model", fontsize=8)
        ax.set_title(panel, fontsize=9)
        ax.sharey(axes[0])
        ax.legend(fontsize=8, frameon=False)
    axes[0].set_ylabel(TITLES[WIN_RATE], fontsize=8)
    return figure


def plot(name: str, curves: list[Curve], folder: Path) -> None:
    draw = draw_overoptimisation if name == "overoptimisation" else draw_pareto
    figure = draw(curves)
    figure.savefig(folder / f"rlhf_{name}.png", dpi=110)
    plt.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pipeline", type=Path, required=True, metavar="DIR")
    parser.add_argument("--study", action="append", choices=STUDIES, help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; 0: make none")
    parser.add_argument("--runs", type=Path, default=Path("runs/rlhf"))
    parser.add_argument("--json", type=Path, default=RESULTS / "rlhf.json")
    parser.add_argument("--plots", type=Path, default=RESULTS)
    parser.add_argument("--text", type=Path, default=RESULTS / "rlhf.md")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    for needed in ("sft", "reward_model", "teacher.jsonl", "teacher_held_out.jsonl"):
        if not (args.pipeline / needed).exists():
            parser.error(f"--pipeline {args.pipeline}: no {needed}; make it by recipes/rlhf.py")
    args.seed = list(range(args.seeds))
    return args


def main() -> None:
    args = parse()
    found = json.loads(args.json.read_text()) if args.json.exists() else {"studies": {}}
    for name in args.study or STUDIES:
        curves = study(name, args)
        if not curves:
            print(f"{name}: no finished run in {args.runs}")
            continue
        plot(name, curves, args.plots)
        print(f"\n{name}\n{table(name, curves)}\n", flush=True)
        entries = []
        for curve in curves:
            entry = {
                "panel": curve.case.panel,
                "curve": curve.case.curve,
                "overrides": curve.case.overrides,
                "ended_early": curve.num_failed,
                "runs": [list(map(asdict, points)) for points in curve.runs],
            }
            entries.append(entry)
        measured_on = machine()
        if not args.jobs and name in found["studies"]:
            measured_on = found["studies"][name]["machine"]
        found["studies"][name] = {"machine": measured_on, "curves": entries}
        args.json.write_text(json.dumps(found, indent=1))
        if args.text.exists():
            refresh(args.text, name, table(name, curves))


if __name__ == "__main__":
    main()
