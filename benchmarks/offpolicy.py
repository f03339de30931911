"""What off-policy data does to each loss: the main job on the addition task, seed by seed.

    python benchmarks/offpolicy.py [--study STUDY] [--steps 64] [--seeds 3] [--jobs 2] [--runs DIR]
                                   [--json FILE] [--plots DIR] [--text FILE] [overrides ...]
    python benchmarks/offpolicy.py --report      the tables of --text anew from --json, without runs

lag          held-out accuracy against steps at max_lag 0 to 16, with the lag that was reached
             (LlamaRL, TBA: who holds)
minibatches  the same number of updates, N of them on each batch: off-policy by construction
             (Async RLHF, 3.2)
cap          AIPO's ratio_cap at the highest lag, by learning rate (LlamaRL: 2 to 10)
sync         max_lag 0 against asynchronous settings, equal steps
search       steps to 90 % at the rate of all other studies, and at others for losses that do not
             get there, on a seed of its own: sets the rates of `table` and `tba`
table        steps and seconds to 80 % and 90 %, for all losses
tba          the same for TBA, with and without its replay buffer, Online DPO and GRPO

A run is one process and one thread. --runs keeps finished ones: a study that was cut off goes on,
and studies share runs. Without --study all are made. Overrides go to every run. --text: a Markdown
file whose tables are written anew, each between its markers `<!-- table STUDY -->` and
`<!-- end -->`.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterable
from pathlib import Path

from forked import load_run, make
from offpolicy_results import (
    TARGETS,
    Case,
    Curve,
    choose_rate,
    page_tables,
    read_json,
    refresh,
    steps_to,
    tables,
    write_json,
)
from running import machine

STUDIES = ("lag", "minibatches", "cap", "sync", "search", "table", "tba")
RESULTS = Path(__file__).parent / "results"
GROUPS, SIZE = 16, 8  # groups a step, completions a group
RATE = (
    "3e-5"  # at which lag hurts plain REINFORCE within 64 steps, and nothing is unstable on-policy
)
CAP_RATES = ("5e-5", "3e-5")
OTHER_RATES, SEARCH_SEED = ("1e-5", "1e-4"), 100
LAGS = (0, 4, 16, 1, 2, 8)  # the ends first: a study that is cut off has them
LOSSES = ("aipo", "reinforce", "tba", "ppo")
MINIBATCHES = (1, 4, 16)
CAPS = (2, 4, 8, 10, "null")
ALL_LOSSES = (
    "aipo",
    "reinforce",
    "grpo",
    "dr_grpo",
    "ppo",
    "rloo",
    "copg",
    "proximal_rloo",
    "online_dpo",
    "best_of_n",
    "tb",
    "tba",
    "cispo",
    "icepop",
    "kimi_k2",
)
COMMON = (
    "threads=1",
    f"group_size={SIZE}",
    "checkpoint.every=0",
    "metrics.trace=false",
    "trainer.microbatch_tokens=1024",
)
TO_TARGET = ("eval.target=0.9", "eval.every=4")


def settings(
    loss: str, *, max_lag: int = 1, steps: int, rate: str = RATE, minibatches: int = 1
) -> tuple[str, ...]:
    """Overrides of a run of `steps` optimizer updates, whose window is kept full: the lag is
    max_lag from step max_lag on.
    """
    groups = GROUPS * minibatches
    slots = (
        (max_lag + 1) * groups * SIZE + 512
    )  # all that may be started beside the evaluation: no version is held for long
    return (
        *COMMON,
        f"loss={loss}",
        f"max_lag={max_lag}",
        f"overcommit={max_lag * groups}",
        f"generator.max_slots={slots}",
        f"groups_per_step={groups}",
        f"trainer.minibatches_per_step={minibatches}",
        f"lr={rate}",
        f"max_steps={steps // minibatches}",
        f"eval.every={max(1, 8 // minibatches)}",
    )


def lag_cases(steps: int) -> list[Case]:
    return [
        Case("lag", f"max_lag {lag}", loss, settings(loss, max_lag=lag, steps=steps))
        for lag, loss in itertools.product(LAGS, LOSSES)
    ]


def minibatch_cases(steps: int) -> list[Case]:
    return [
        Case(
            "minibatches",
            f"N = {n}",
            loss,
            settings(loss, max_lag=0, steps=steps, minibatches=n),
            updates_a_step=n,
        )
        for n, loss in itertools.product(MINIBATCHES, LOSSES)
    ]


def cap_cases(steps: int) -> list[Case]:
    return [
        Case(
            "cap",
            f"lr {rate}",
            f"ratio_cap {cap}",
            (*settings("aipo", max_lag=16, steps=steps, rate=rate), f"loss.ratio_cap={cap}"),
        )
        for rate, cap in itertools.product(CAP_RATES, CAPS)
    ]


def sync_cases(steps: int) -> list[Case]:
    """AIPO on-policy, one step off it, and as the main job finds its overcommit by itself with room
    for four steps of lag.
    """
    auto = tuple(
        "overcommit=auto" if s.startswith("overcommit=") else s
        for s in settings("aipo", max_lag=4, steps=steps)
    )
    return [
        Case("sync", "", "max_lag 0", settings("aipo", max_lag=0, steps=steps)),
        Case("sync", "", "max_lag 1", settings("aipo", max_lag=1, steps=steps)),
        Case("sync", "", "max_lag 4, overcommit auto", auto),
    ]


def search_cases(steps: int, losses: Iterable[str], rates: Iterable[str]) -> list[Case]:
    return [
        Case("search", loss, f"lr {rate}", (*settings(loss, steps=steps, rate=rate), *TO_TARGET))
        for loss, rate in itertools.product(losses, rates)
    ]


def table_cases(steps: int, rates: dict[str, str]) -> list[Case]:
    return [
        Case(
            "table",
            f"lr {rates[loss]}",
            loss,
            (*settings(loss, steps=steps, rate=rates[loss]), *TO_TARGET),
        )
        for loss in ALL_LOSSES
    ]


def tba_cases(steps: int, rates: dict[str, str]) -> list[Case]:
    """TBA on fresh groups is `table`'s. With its own buffer a step draws from all that there is:
    each step waits for a batch of new groups (max_lag 1), or for no batch, as published (max_lag
    null).
    """
    fresh = [c for c in table_cases(steps, rates) if c.curve in ("tba", "online_dpo", "grpo")]
    waits = settings("tba", steps=steps, rate=rates["tba"])
    # Where the trainer waits for no batch, a turn of the one process is a step, in which a worker
    # scores no more than 64 completions.
    free = (
        *("max_lag=null" if s.startswith("max_lag=") else s for s in waits),
        "reward.num_workers=4",
    )
    return [
        *(Case("tba", c.panel, c.curve, c.overrides) for c in fresh),
        Case(
            "tba",
            f"lr {rates['tba']}",
            "tba, replay, max_lag 1",
            ("buffer=replay", *waits, *TO_TARGET),
        ),
        Case(
            "tba",
            f"lr {rates['tba']}",
            "tba, replay, max_lag null",
            ("buffer=replay", *free, *TO_TARGET),
        ),
    ]


def measure(cases: list[Case], seeds: list[int], args: argparse.Namespace) -> list[Curve]:
    """All runs of these cases, seed by seed, so that a busy machine meets all alike."""
    wanted = {
        (case, seed): (*case.overrides, f"seed={seed}", *args.overrides)
        for seed, case in itertools.product(seeds, cases)
    }
    if args.jobs:
        make(args.runs, list(wanted.values()), jobs=args.jobs)
    curves = []
    for case in cases:
        runs = [load_run(args.runs, wanted[case, seed]) for seed in seeds]
        curves.append(Curve(case, tuple(run for run in runs if run)))
    return [curve for curve in curves if curve.runs]


def study(name: str, args: argparse.Namespace) -> list[Curve]:
    steps = args.steps
    seeds = list(range(args.seeds))
    far = args.steps * 3 // 2
    if name in ("lag", "minibatches", "cap", "sync"):
        cases = {
            "lag": lag_cases,
            "minibatches": minibatch_cases,
            "cap": cap_cases,
            "sync": sync_cases,
        }[name](steps)
        if name == "lag":  # what the claim is about first
            measure(
                [
                    c
                    for c in cases
                    if c.curve != "ppo" and c.panel in ("max_lag 0", "max_lag 4", "max_lag 16")
                ],
                seeds,
                args,
            )
        return measure(cases, seeds, args)
    found = search(far, args)
    if name == "search":
        return found
    rates = {}
    for loss in ALL_LOSSES:
        rates[loss] = choose_rate([curve for curve in found if curve.case.panel == loss])
    return measure((table_cases if name == "table" else tba_cases)(far, rates), seeds, args)


def search(steps: int, args: argparse.Namespace) -> list[Curve]:
    """RATE for all losses; other rates for those that do not reach the target with it."""
    common = measure(search_cases(steps, ALL_LOSSES, [RATE]), [SEARCH_SEED], args)
    behind = [c.case.panel for c in common if math.isinf(steps_to(c.runs[0].rows, TARGETS[-1]))]
    return common + measure(search_cases(steps, behind, OTHER_RATES), [SEARCH_SEED], args)


def report(json_file: Path, text: Path) -> None:
    """Write all tables of the page from what was measured."""
    curves = read_json(json_file)
    for name in dict.fromkeys(curve.case.study for curve in curves):
        found = [curve for curve in curves if curve.case.study == name]
        for marker, table in page_tables(name, found).items():
            refresh(text, marker, table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--study", action="append", choices=STUDIES, help="may be given several times; default: all"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=64,
        help="optimizer updates a run; half as many again in search, table and tba",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--jobs",
        type=int,
        default=2,
        help="runs at a time; 0: make none, report on what --runs has",
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/offpolicy"), help="keeps finished runs"
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "offpolicy.json")
    parser.add_argument("--plots", type=Path, default=RESULTS)
    parser.add_argument("--text", type=Path, default=RESULTS / "offpolicy.md")
    parser.add_argument(
        "--report", action="store_true", help="only write --text's tables from --json"
    )
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if args.report:
        report(args.json, args.text)
        return
    if args.steps % max(MINIBATCHES):
        parser.error(
            f"--steps must be a multiple of {max(MINIBATCHES)}, "
            "the updates of a step of `minibatches`"
        )
    from offpolicy_plots import plot  # behind the command line's checks: --help needs no matplotlib

    curves: list[Curve] = []
    for name in args.study or STUDIES:
        curves += (found := study(name, args))
        plot(name, found, args.plots)
        print(f"\n{name}\n{tables(name, found)}\n", flush=True)
        about = {
            "steps": args.steps,
            "seeds": args.seeds,
            "overrides": args.overrides,
            "machine": machine(),
        }
        write_json(args.json, curves, about)
        if args.text.exists():
            report(args.json, args.text)


if __name__ == "__main__":
    main()
