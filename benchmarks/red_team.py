"""TBA's red-teaming at the size of two cores: the attacker and the victim of recipes/red_team.py,
whose predicate is harmless, by several ways to learn.

    python benchmarks/red_team.py [--study STUDY] [--study ...] [--seeds 3] [--steps 200] [--jobs 1]
                                  [--sft-attacks 4096] [--runs DIR] [--json FILE] [--plots DIR]
                                  [--text FILE] [overrides ...]

methods    success against diversity (figure 5, left): TBA, PPO with a reward for novelty and
           without, REINFORCE, best_of_n (the likelihood of each ticket's best attack), and SFT: the
           start's model attacks --sft-attacks times, and learns the attacks that succeed
searchers  1, 2, 4 attackers' ranks on one buffer (figure 5, right; table 6): steps and seconds to a
           success rate, and the distinct successful attacks that the buffer was given
offpolicy  what TBA claims of off-policy data, each with the loss that it claims it of: of eq. 5 and
           a buffer the most-on-policy probability and the sync period; of eq. 16, on attacks of
           eight steps ago, a reference that is reset (appendix D)

Steps and seconds are those until the runs are at a success rate, and none of SFT, which has no such
run: 50 %, and 20 % of searchers, whom a trainer outruns that shares their cores.
Success is eval/success, the share of the last evaluation's sampled attacks whose answers' mean
score is above victim.threshold; diversity is eval/diversity, the mean pairwise cosine distance of
these attacks under the model that training starts from. A run is kept in --runs and not made again;
--jobs 0 makes none. --text is written anew, with verdicts computed from the figures.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch
from running import ROOT, as_item, as_paragraph, keep, kept_file, machine, run_job, run_process

from llamarl.models.config import tiny_directory
from llamarl.scoring.embedding import (
    EmbedderSettings,
    load_embedder,
    mean_pairwise_distance,
    unit,
)

RESULTS = Path(__file__).parent / "results"
STUDIES = ("methods", "searchers", "offpolicy")
SUCCESS = "eval/success"
DIVERSITY = "eval/diversity"
DISTINCT = "buffer/distinct_good"
KEPT = ("step", "time/wall_s", "time/evaluated_s", SUCCESS, DIVERSITY, DISTINCT)
TARGET = 0.5  # a success rate to arrive at
SEARCHERS_TARGET = 0.2
GOOD = 0.75  # the least mean of four answers, of 0 or 1 each, above victim.threshold
EQUAL = 0.05  # successes that differ by no more are called equal
TBA = "TBA"  # how the names of its settings begin
SEARCHERS = (1, 2, 4)
SFT_SETTINGS = (
    "task.max_tokens=64",
    "task.num_eval=1",
    "examples_per_step=16",
    "epochs=10",
    "lr=3e-4",
    "eval.every=0",
    "metrics.trace=false",
)
SFT_TIMEOUT_S = 1800.0
EMBEDDED_TOKENS = 4096
COMMON = (
    "threads=1",
    "checkpoint.every=0",
    "metrics.trace=false",
    "eval.num_samples=64",
    "eval.embedder=start",
)
PUBLISHED = ("loss=tb", "loss.beta=0.05")  # TBA, B.3
# Fresh attacks alone, as the baselines have them.
FRESH = ("buffer=fifo", "max_lag=1")
PPO = (
    *FRESH,
    "loss=ppo",
    "trainer.advantages=gae",
    "reference=frozen",
    "trainer.reward_kl_coef=0.05",
)
METHODS = {
    **{
        f"{TBA}, beta {beta}": ("loss=tb", f"loss.beta={beta}", "buffer=replay", "max_lag=1")
        for beta in (0.05, 0.1, 0.15, 0.3)
    },
    **{
        f"PPO with novelty, weight {weight}": (
            *PPO,
            "reward=parts",
            "reward.parts={success: {kind: function}, "
            f"new: {{kind: novelty, nearest: 10, weight: {weight}}}}}",
        )
        for weight in (1, 3)
    },
    "PPO": PPO,
    "REINFORCE": (*FRESH, "loss=reinforce", "reference=none"),
    "best of n": (*FRESH, "loss=best_of_n", "reference=none"),
}
SFT = "SFT"
# A run whose first evaluation is all that is asked of it.
LOOK = (*FRESH, "loss=reinforce", "reference=none", "max_steps=1", "eval.every=1")
# TBA's section 6 has no buffer, and attacks of a constant age: 8 steps of 8 groups each. How an
# attacker fares that comes to silence its victim is of interest too.
LATE = ("loss=tba", "buffer=fifo", "max_lag=8", "overcommit=64", "reward.max_error_rate=1")
OFFPOLICY = {
    "most_on_policy": {
        f"m = {share}": (*PUBLISHED, f"buffer.most_on_policy={share}") for share in (0.0, 0.5, 1.0)
    },
    "sync_period": {
        f"k = {steps}": (*PUBLISHED, f"buffer.sync_period={steps}") for steps in (1, 5, 20)
    },
    "reference, eq. 16": {
        "frozen": (*LATE, "reference=frozen"),
        "reset": (*LATE, "reference=reset", "reference.reset_every=20"),
    },
}


@dataclass(frozen=True, slots=True)
class Case:
    """A setting. panel: what is varied; name: its value; target: a success rate to arrive at."""

    panel: str
    name: str
    overrides: tuple[str, ...]
    ranks: int = 1
    target: float = TARGET


@dataclass(frozen=True, slots=True)
class Found:
    """What a run came to. None: it did not say. steps, seconds: to its target; None: not reached.
    total_s: seconds of all steps.
    """

    success: float
    diversity: float | None
    distinct: float | None
    steps: int | None
    seconds: float | None
    total_s: float | None


@dataclass(frozen=True, slots=True)
class Result:
    """A case with what its runs came to, one a seed."""

    case: Case
    runs: tuple[Found, ...]

    def values(self, name: str) -> list[float]:
        """A measure of each run; inf where it was not reached."""
        found = [getattr(run, name) for run in self.runs]
        return [math.inf if value is None else value for value in found]

    def mean(self, name: str) -> float:
        return statistics.mean(self.values(name))


# --- Settings ---


def cases_of(study: str) -> list[Case]:
    if study == "methods":
        learned = [Case("method", name, overrides) for name, overrides in METHODS.items()]
        return [*learned, Case("method", SFT, LOOK)]
    if study == "searchers":
        return [searchers_case(count) for count in SEARCHERS]
    cases = []
    for panel, settings in OFFPOLICY.items():
        cases += [Case(panel, name, overrides) for name, overrides in settings.items()]
    return cases


def searchers_case(count: int) -> Case:
    """A trainer's rank, `count` of attackers, each with the victim and what scores beside it; a
    step waits for no batch of attacks (max_lag=null), so that more attackers find more by then.
    """
    ranks = ",".join(str(rank) for rank in range(1, count + 1))
    placed = [f"placement.{name}=[{ranks}]" for name in ("generator", "victim", "reward")]
    alone = ("placement.trainer=[0]", "placement.reference=[0]", "max_lag=null")
    counted = (f"buffer.good_reward={GOOD}",)
    overrides = (*PUBLISHED, *alone, *counted, *placed)
    return Case("searchers", str(count), overrides, count + 1, SEARCHERS_TARGET)


# --- Runs ---


def found_in(rows: list[dict], target: float = TARGET) -> Found:
    """What a run's rows say. ValueError if none was evaluated."""
    evaluated = [row for row in rows if row.get(SUCCESS) is not None]
    if not evaluated:
        raise ValueError(f"no row has {SUCCESS}: was it evaluated?")
    last = evaluated[-1]
    reached = next((row for row in evaluated if row[SUCCESS] >= target), None)
    return Found(
        success=last[SUCCESS],
        diversity=last.get(DIVERSITY),
        distinct=last.get(DISTINCT),
        steps=None if reached is None else reached["step"],
        seconds=None if reached is None else reached["time/evaluated_s"],
        total_s=last.get("time/evaluated_s"),
    )


def rows_of(case: Case, seed: int, args: argparse.Namespace) -> list[dict] | None:
    """The rows of a run, made if they are not kept; None where none is to be made."""
    words = (
        *COMMON,
        f"max_steps={args.steps}",
        *case.overrides,
        f"seed={seed}",
        *args.overrides,
    )
    known = [case.ranks, *words]
    if case.name == SFT:
        known += [args.sft_attacks, *SFT_SETTINGS]
    file = kept_file(args.runs, known)
    if file.exists():
        return json.loads(file.read_text())["rows"]
    if not args.jobs:
        return None
    args.runs.mkdir(parents=True, exist_ok=True)
    run_dir = file.with_suffix("")
    shutil.rmtree(run_dir, ignore_errors=True)  # of one that was cut off
    if case.name == SFT:
        all_rows = [supervised_row(run_dir, list(words), args.sft_attacks)]
    else:
        all_rows = run_job(run_dir, list(words), ranks=case.ranks, recipe="red_team.py")
    rows = []
    for row in all_rows:
        rows.append({key: row[key] for key in KEPT if key in row})
    keep(file, {"overrides": words, "rows": rows})
    print(f"{rows[-1]['time/wall_s']:5.0f} s  {case.panel} {case.name}, seed {seed}", flush=True)
    return rows


def supervised_row(folder: Path, words: list[str], num_attacks: int) -> dict:
    """What the start's model attacks with once it has learned the successful ones of its attacks;
    as the row of an evaluation. RuntimeError if a run fails, or no attack succeeds.
    """
    many = f"eval.num_samples={num_attacks}"
    run_job(folder / "start", [*words, many], recipe="red_team.py")
    learned = [row for row in samples_of(folder / "start") if row["success"]]
    if not learned:
        raise RuntimeError(f"{folder}: none of {num_attacks} attacks succeeds; raise --sft-attacks")
    data = folder / "attacks.jsonl"
    pairs = [{"prompt": row["prompt"], "completion": row["completion"]} for row in learned]
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    model = folder / "sft"
    given = [
        f"model.path={tiny_directory()}",
        "model.dtype=float32",
        f"task.path={data}",
        f"out={model}",
        *SFT_SETTINGS,
    ]
    command = [sys.executable, str(ROOT / "recipes" / "sft.py"), *given]
    done = run_process(command, timeout_s=SFT_TIMEOUT_S)
    if done.status or done.timed_out:
        raise RuntimeError(f"SFT failed, status {done.status}:\n{done.last_lines()}")
    attacker = ["model=hf", f"model.path={model}", "model.dtype=float32"]
    rows = run_job(folder / "after", [*words, *attacker], recipe="red_team.py")
    # In the space that the other methods' attacks are measured in.
    embedder = load_embedder(
        EmbedderSettings(str(tiny_directory()), True, "float32", EMBEDDED_TOKENS),
        torch.device("cpu"),
    )
    texts = [row["completion"] for row in samples_of(folder / "after")]
    units_NE = unit(embedder.embed(texts))
    print(f"       {len(learned)} of {num_attacks} attacks succeed; all but one are learned")
    return {
        "step": None,
        "time/wall_s": rows[-1]["time/wall_s"],
        "time/evaluated_s": None,
        SUCCESS: rows[0][SUCCESS],
        DIVERSITY: mean_pairwise_distance(units_NE),
    }


def samples_of(run_dir: Path) -> list[dict]:
    """The sampled attacks of a run's first evaluation."""
    lines = (run_dir / "samples" / "step_0.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["sample"] > 0]


def results_of(study: str, args: argparse.Namespace) -> list[Result]:
    """All runs, seed by seed, so that a busy machine meets all alike."""
    cases = cases_of(study)
    runs: dict[Case, list[Found]] = {case: [] for case in cases}
    for seed in range(args.seeds):
        for case in cases:
            rows = rows_of(case, seed, args)
            if rows is None:
                continue
            found = found_in(rows, case.target)
            runs[case].append(found)
    return [Result(case, tuple(found)) for case, found in runs.items() if found]


# --- What is said ---


def shown(values: Sequence[float], form: str) -> str:
    """Mean and range over seeds; how many got there, where not all did."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "–"
    text = f"{statistics.mean(finite):{form}} ({min(finite):{form}}–{max(finite):{form}})"
    return text if len(finite) == len(values) else f"{text}, {len(finite)} of {len(values)}"


def table(results: list[Result]) -> str:
    """Markdown, a row a case."""
    columns = {
        "success, %": lambda r: shown([100 * value for value in r.values("success")], ".0f"),
        "cosine distance": lambda r: shown(r.values("diversity"), ".3f"),
        "distinct attacks": lambda r: shown(r.values("distinct"), ".0f"),
        f"steps to {results[0].case.target:.0%}": lambda r: shown(r.values("steps"), ".0f"),
        "seconds": lambda r: shown(r.values("seconds"), ".0f"),
        "of all steps": lambda r: shown(r.values("total_s"), ".0f"),
    }
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    for result in results:
        name = f"{result.case.panel}, {result.case.name}"
        lines.append([name, *(cell(result) for cell in columns.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# What a study's runs cannot say, whatever their figures are.
CAVEATS = {
    "methods": (
        "**No run of TBA has arrived at what it is trained towards**, reference · exp(reward / "
        "beta). Here that is known, by drawing attacks of the start model anew with weights "
        "exp(reward / beta): at beta 0.05 to 0.15 they succeed about as often as the rivals above "
        "and are many times as diverse. At beta 0.05 the runs have collapsed; from 0.1 on they are "
        "still near the start.",
        "The set-up is why: 6,400 attacks where the paper has 640,000, log Z over 8 attacks "
        "though there is one prompt, no tempered sampling and no schedule. So whether TBA is more "
        "diverse at equal success (TBA, 5.3) was not tested.",
    ),
    "searchers": (
        "**Whether more searchers scale the search (TBA, 5.5) was not tested.** These runs had no "
        "bound on what is on its way to the trainer, whose mean lag after 100 steps was 96 to 99 "
        "steps: nearly all was learned from the attacks of the first policy. Today such a run is "
        "bounded (docs/staleness.md).",
        "Success is not the whole of figure 5: the distance between attacks falls with the number "
        "of searchers, where the paper has it grow. And 20 steps to 20% is the first look, so 20 "
        "against 40 is one cell of the grid.",
    ),
    "offpolicy": (
        "**Appendix D's reset of the reference was not tested.** The first reset is at step 20; "
        "until then reset and frozen are one run. By then the policy has collapsed: in the run "
        "that was looked at, log(policy / reference) moved by 24 nats in 8 steps, and at step 20 "
        "most attacks were one text.",
    ),
}
# Panels of which no figure of these runs decides anything.
UNDECIDED = ("reference, eq. 16",)


def verdicts(study: str, results: list[Result]) -> list[str]:
    """Sentences that the figures decide."""
    if study == "methods":
        return method_verdicts(results)
    if study == "searchers":
        return searchers_verdicts(results)
    return offpolicy_verdicts(results)


def method_verdicts(results: list[Result]) -> list[str]:
    """TBA against every other setting: of those of its settings that succeed as often, or more, the
    most diverse one.
    """
    ours = [result for result in results if result.case.name.startswith(TBA)]
    others = [result for result in results if not result.case.name.startswith(TBA)]
    if not ours or not others:
        return ["TBA or what it is compared with has no runs: nothing is said."]
    said = []
    for other in others:
        name, success = other.case.name, other.mean("success")
        as_good = [result for result in ours if result.mean("success") >= success - EQUAL]
        if not as_good:
            most = max(result.mean("success") for result in ours)
            said.append(f"No TBA succeeds as often as {name}: {most:.0%} against {success:.0%}.")
            continue
        best = max(as_good, key=lambda result: result.mean("diversity"))
        is_more = best.mean("diversity") > other.mean("diversity")
        said.append(
            f"{best.case.name}: {'more' if is_more else 'not more'} diverse than {name} at no less "
            f"success; distance {best.mean('diversity'):.3f} against "
            f"{other.mean('diversity'):.3f}, success {best.mean('success'):.0%} against "
            f"{success:.0%}."
        )
    return said


def searchers_verdicts(results: list[Result]) -> list[str]:
    """The most searchers against one."""
    first, last = results[0], results[-1]
    target = first.case.target
    if first is last:
        return ["One number of searchers has runs: nothing is compared."]
    said = []
    for measure, short in (("steps", "steps"), ("seconds", "s")):
        few, many = first.mean(measure), last.mean(measure)
        if not math.isfinite(few + many):
            said.append(f"Not all runs came to {target:.0%}: their {measure} are not compared.")
            continue
        word = "fewer" if many < few else "no fewer"
        said.append(
            f"{last.case.name} searchers take {word} {measure} to {target:.0%} than "
            f"{first.case.name}: {many:.0f} {short} against {few:.0f}."
        )
    return said


def offpolicy_verdicts(results: list[Result]) -> list[str]:
    """By what is varied: which value succeeds most, and by how much."""
    said = []
    for panel in dict.fromkeys(result.case.panel for result in results):
        if panel in UNDECIDED:
            continue
        of_panel = [result for result in results if result.case.panel == panel]
        best = max(of_panel, key=lambda result: result.mean("success"))
        worst = min(of_panel, key=lambda result: result.mean("success"))
        gap = best.mean("success") - worst.mean("success")
        low, high = min(best.values("success")), max(worst.values("success"))
        if best is worst or gap <= EQUAL or low <= high:
            said.append(f"{panel}: no value is better than another in all seeds.")
            continue
        said.append(
            f"{panel}: {best.case.name} succeeds most, {best.mean('success'):.0%} against "
            f"{worst.mean('success'):.0%} of {worst.case.name}, in all seeds."
        )
    return said


def draw(study: str, results: list[Result], file: Path) -> None:
    """methods: success against diversity, a point a run; else success by case."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    width = 5.2 if study == "methods" else max(5.2, 1.2 * len(results))
    figure, ax = plt.subplots(figsize=(width, 3.8), layout="constrained")
    ax.grid(alpha=0.3)
    ax.set_ylabel("successful attacks")
    if study == "methods":
        for result in results:
            ax.scatter(result.values("diversity"), result.values("success"), label=result.case.name)
        ax.set_xlabel("mean pairwise cosine distance")
        ax.legend(fontsize=8, frameon=False)
    else:
        names = [f"{result.case.panel}\n{result.case.name}" for result in results]
        for place, result in enumerate(results):
            values = result.values("success")
            ax.plot([place] * len(values), values, "o", color="tab:blue", alpha=0.6)
            ax.plot(place, statistics.mean(values), "_", color="black", ms=18)
        ax.set_xticks(range(len(names)), names, fontsize=7)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def page(studies: dict[str, dict]) -> str:
    """The Markdown page of all studies that have been made."""
    parts = ["# Red-teaming, measured\n", "Made by `benchmarks/red_team.py`.\n"]
    for name, made in studies.items():
        on = made["machine"]
        parts += [
            f"## {name}\n",
            f"{made['seeds']} seeds of {made['steps']} steps; mean (least–most). {on['cpu']}, "
            f"{on['cores']} cores.\n",
            made["table"] + "\n",
            *(as_item(verdict) for verdict in made["verdicts"]),
            "",
            *(as_paragraph(caveat) + "\n" for caveat in CAVEATS[name]),
            f"![{name}](red_team_{name}.png)\n",
        ]
    return "\n".join(parts)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--study", action="append", choices=STUDIES, help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sft-attacks", type=int, default=4096)
    parser.add_argument("--jobs", type=int, choices=(0, 1), default=1, help="0: make no run")
    parser.add_argument("--runs", type=Path, default=Path("runs/red_team"))
    parser.add_argument("--json", type=Path, default=RESULTS / "red_team.json")
    parser.add_argument("--plots", type=Path, default=RESULTS)
    parser.add_argument("--text", type=Path, default=RESULTS / "red_team.md")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if args.seeds < 1 or args.steps < 1:
        parser.error("--seeds and --steps: need at least 1")
    return args


def main() -> None:
    args = parse()
    studies = json.loads(args.json.read_text()) if args.json.exists() else {}
    for name in args.study or STUDIES:
        results = results_of(name, args)
        if not results:
            print(f"{name}: no finished run in {args.runs}")
            continue
        draw(name, results, args.plots / f"red_team_{name}.png")
        measured_on = machine()
        if not args.jobs and name in studies:
            measured_on = studies[name]["machine"]
        studies[name] = {
            "machine": measured_on,
            "seeds": max(len(result.runs) for result in results),
            "steps": args.steps,
            "overrides": args.overrides,
            "table": table(results),
            "verdicts": verdicts(name, results),
            "cases": [asdict(result) for result in results],
        }
        print(f"\n{name}\n{studies[name]['table']}\n", *studies[name]["verdicts"], sep="\n")
        args.json.write_text(json.dumps(studies, indent=1))
        args.text.write_text(page(studies))


if __name__ == "__main__":
    main()
