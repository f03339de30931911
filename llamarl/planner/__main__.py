"""Predicts runs before they start: a machine's data sheet, and the best split of its GPUs.

    # a data sheet of this machine, by a probe of about a minute or from runs that were made on it
    python -m llamarl.planner fit --probe sheet=NAME.yaml [model.path=DIR]
    python -m llamarl.planner fit runs/a runs/b sheet=NAME.yaml prompt_tokens=150

    # the split whose step is shortest; a config.json is enough, and no GPU is needed
    python -m llamarl.planner search --gpus 16 --gpu-memory 80 sheet=h100 model.path=DIR
                                     groups_per_step=64 group_size=8 max_new_tokens=2048

    # the same plan on the real ledger and a virtual clock; or any settings and seconds
    python -m llamarl.planner search ... --simulate
    python -m llamarl.planner simulate max_lag=1,2,4 overcommit=0,8,auto update_s=5

    # how wrong it is about a run that was made
    python -m llamarl.planner check runs/a sheet=NAME.yaml prompt_tokens=150

docs/planner.md has all keys. Exit status: 0, or 2 for what cannot be used or does not fit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from llamarl.models.config import check_sizes, read_config
from llamarl.planner.costs import Costs
from llamarl.planner.memory import GIB
from llamarl.planner.plans import Plan
from llamarl.planner.predict import Predictor
from llamarl.planner.search import Found, Limits, NothingFits, search
from llamarl.planner.search_settings import KEYS, Settings, read_words
from llamarl.planner.sheet import Sheet, read_sheet
from llamarl.planner.shown import lines_of, record_of

SHEET = "h100"


def take(words: Sequence[str], key: str, default: str) -> tuple[str, list[str]]:
    """Return the value of a key among key=value words, and the other words."""
    value = default
    others = []
    for word in words:
        name, has_value, text = word.partition("=")
        if name == key and has_value:
            value = text
        else:
            others.append(word)
    return value, others


def best_of(settings: Settings, sheet: Sheet, limits: Limits) -> tuple[Found, Predictor]:
    """Return the best plans, with activation checkpointing as it was given or as is faster.
    ValueError where none fits.
    """
    model = read_config(settings.path)
    check_sizes(model)
    for side, tensor in (
        ("trainer", limits.trainer_tensor),
        ("generator", limits.generator_tensor),
    ):
        if tensor is not None and tensor > model.num_attention_heads:
            raise ValueError(
                f"{side}.tensor_parallel={tensor}: the model has {model.num_attention_heads} query "
                "heads to split"
            )
    work = settings.work()
    on_cpu = sheet.device.kind == "cpu"
    choices = [False, True] if settings.checkpointing is None else [settings.checkpointing]
    found: list[tuple[Found, Predictor]] = []
    problem: NothingFits | None = None
    for checkpointing in choices:
        numerics = settings.numerics(checkpointing=checkpointing, on_cpu=on_cpu)
        predictor = Predictor.of(Costs(sheet, model, numerics), work)
        try:
            found.append((search(predictor, limits), predictor))
        except NothingFits as error:
            problem = error
    if not found:
        assert problem is not None, "a search finds a plan or says why not"
        raise problem
    return min(found, key=lambda one: one[0].best.step_s)


def run_search(given: argparse.Namespace) -> None:
    """Print the best plans. ValueError or OSError for what cannot be used."""
    named, words = take(given.words, "sheet", given.sheet)
    settings = read_words(words)
    sheet = read_sheet(named)
    gib = sheet.device.memory_gib if given.gpu_memory is None else given.gpu_memory
    if gib <= 0:
        raise ValueError(f"--gpu-memory {gib:g}: need GiB above 0")
    memory = gib * GIB * sheet.assumed("memory_share")
    most = settings.max_lag * settings.groups
    if settings.overcommit is not None and settings.overcommit > most:
        raise ValueError(
            f"overcommit={settings.overcommit}: with max_lag={settings.max_lag} at most "
            f"{most} groups can be started beyond a batch"
        )
    limits = Limits(
        gpus=given.gpus,
        memory=memory,
        overcommit=settings.overcommit,
        trainer_tensor=settings.trainer_tensor,
        generator_tensor=settings.generator_tensor,
    )
    found, predictor = best_of(settings, sheet, limits)
    if given.json:
        checkpointing = predictor.costs.numerics.checkpointing
        print(json.dumps(record_of(found, settings, checkpointing)))
        return
    for line in lines_of(found, predictor, settings, given.gpus, memory):
        print(line)
    if given.simulate:
        print(f"\nsimulated\n{simulated(found.best.plan, predictor, settings)}")


def simulated(plan: Plan, predictor: Predictor, settings: Settings) -> str:
    """Return what comes of a plan on the real ledger and a virtual clock, in lines for people."""
    # The ledger's service needs torch, for which a search without it does not wait.
    from llamarl.planner.simulate import describe, simulate
    from llamarl.planner.simulation_settings import SimulationSettings

    generator = plan.generator
    work = predictor.work
    run = SimulationSettings(
        max_lag=plan.max_lag,
        overcommit=plan.overcommit,
        groups_per_step=work.groups,
        group_size=work.group_size,
        num_generators=generator.replicas,
        max_slots=max(generator.slots, work.group_size),
        num_trainers=plan.trainer.data_ranks,
        prompt_tokens=round(work.prompt_tokens),
        length_mean=work.completion_tokens,
        length_sigma=work.sigma,
        max_new_tokens=work.max_new_tokens,
    )
    return describe(simulate(run, predictor.costs.timings(plan)))


def run_fit(given: argparse.Namespace) -> None:
    """Make a data sheet, write it and print its curves. ValueError or OSError for what cannot be
    used.
    """
    # A fit of runs needs no torch, and a probe imports it itself.
    from llamarl.planner.fit import fit_runs, shown_sheet
    from llamarl.planner.race import with_race

    out, words = take(given.words, "sheet", "sheet.yaml")
    base, words = take(words, "base", SHEET)
    runs = [word for word in words if "=" not in word]
    rest = [word for word in words if "=" in word]
    if given.probe == bool(runs):
        raise ValueError("fit needs either --probe or the directories of runs")
    if given.probe:
        from llamarl.planner.probe import probe

        path, rest = take(rest, "model.path", "")
        dtype, rest = take(rest, "model.dtype", "")
        fn, rest = take(rest, "reward.fn", "")
        seconds, rest = take(rest, "seconds", "60")
        threads, rest = take(rest, "threads", "")
        if rest:
            raise ValueError(f"{rest[0]}: unknown key of fit --probe; {_PROBE_KEYS}")
        sheet = probe(
            path=path,
            dtype=dtype,
            reward_fn=fn,
            budget_s=_positive("seconds", seconds),
            threads=_count("threads", threads) if threads else 0,
        )
    else:
        prompt, rest = take(rest, "prompt_tokens", "0")
        if rest:
            raise ValueError(f"{rest[0]}: unknown key of fit; known: sheet, base, prompt_tokens")
        tokens = 0.0 if prompt == "0" else _positive("prompt_tokens", prompt)
        made = [Path(run) for run in runs]
        sheet = fit_runs(made, read_sheet(base), prompt_tokens=tokens)
        sheet = with_race(sheet, made, prompt_tokens=tokens)
    from llamarl.planner.sheet import write_sheet

    write_sheet(sheet, out)
    for line in shown_sheet(sheet):
        print(line)
    print(f"written   {out}")


def run_check(given: argparse.Namespace) -> None:
    """Print what was predicted and measured of runs. ValueError or OSError for what cannot be
    used.
    """
    from llamarl.planner import check

    named, words = take(given.words, "sheet", SHEET)
    prompt, words = take(words, "prompt_tokens", "0")
    tokens = 0.0 if prompt == "0" else _positive("prompt_tokens", prompt)
    unknown = [word for word in words if "=" in word]
    if unknown or not words:
        raise ValueError("check needs the directories of runs; known keys: sheet, prompt_tokens")
    sheet = read_sheet(named)
    for run in words:
        checked = check.check_run(Path(run), sheet, prompt_tokens=tokens)
        for line in check.lines_of(Path(run), checked):
            print(line)


_PROBE_KEYS = "known: sheet, model.path, model.dtype, reward.fn, seconds, threads"


def _count(key: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{key}={text}: need a whole number of at least 1")
    return int(text)


def _positive(key: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError as error:
        raise ValueError(f"{key}={text}: need a number above 0") from error
    if not 0 < number < float("inf"):
        raise ValueError(f"{key}={text}: need a number above 0")
    return number


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m llamarl.planner",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    fit = commands.add_parser("fit", help="make a data sheet of a machine")
    fit.add_argument("--probe", action="store_true", help="time the parts on this machine")
    fit.add_argument("words", nargs="*", help="directories of runs, and key=value")
    compare = commands.add_parser("check", help="predict runs that were made, and compare")
    compare.add_argument("words", nargs="*", help="directories of runs, and key=value")
    commands.add_parser("simulate", help="simulate a run on a virtual clock", add_help=False)
    find = commands.add_parser("search", help="find the best split of GPUs")
    find.add_argument("--gpus", type=int, required=True, help="how many there are")
    find.add_argument("--gpu-memory", type=float, help="GiB of each; by default the sheet's")
    find.add_argument("--sheet", default=SHEET, help="a data sheet's name or file")
    find.add_argument("--json", action="store_true", help="print one object")
    find.add_argument("--simulate", action="store_true", help="simulate the best plan too")
    find.add_argument("words", nargs="*", help=f"key=value: {', '.join(KEYS)}")
    words = sys.argv[1:] if arguments is None else list(arguments)
    # key=value may stand between the options too, which argparse would not take.
    given = [word for word in words if "=" in word and not word.startswith("-")]
    return parser.parse_args([word for word in words if word not in given] + given)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["simulate"]:  # it has a parser of its own
        from llamarl.planner.simulate import run

        return run(words[1:])
    given = parse(words)
    runs = {"fit": run_fit, "search": run_search, "check": run_check}
    try:
        runs[given.command](given)
    except (ValueError, OSError) as error:
        print(f"llamarl.planner: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
