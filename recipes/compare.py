"""Compare runs: who reaches more reward, how soon, and at what distance from the reference.

    python recipes/compare.py runs/a runs/b                      two runs
    python recipes/compare.py runs/sweep-TIME --target 0.9       every run of a --multirun
    python recipes/compare.py runs/* --y reward/mean --x kl/ref --out plots

Runs that differ only in their seed are one line: a mean, and a band from the least to the greatest.
Prints a table and writes OUT/progress.png (the value over seconds and over steps) and
OUT/pareto.png (the value against KL to the reference, for runs that have one). Exit status: 0, or 2
for a directory or a column that cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llamarl.observe.compare import KL, default_y, load_runs, measure, reachable, table, variants_of
from llamarl.observe.compare_plots import draw_pareto, draw_progress, save


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "directories", nargs="+", metavar="RUN_DIR", help="of a run, or of a sweep's runs"
    )
    parser.add_argument(
        "--y",
        help="column of metrics.jsonl; "
        "default: eval/reward where all runs have it, else reward/mean",
    )
    parser.add_argument(
        "--x", help=f"column of the pareto plot; default: {KL}, for the runs that have it"
    )
    parser.add_argument(
        "--target",
        type=float,
        help="value of --y to reach; default: the greatest that every run reached",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("comparison"),
        help="directory of the plots (default: comparison)",
    )
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    """FileNotFoundError or ValueError for what cannot be used."""
    runs = load_runs(args.directories)
    y = args.y or default_y(runs)
    variants, implied = variants_of(runs)
    target = reachable(runs, y) if args.target is None else args.target
    results = [measure(variant, y, target) for variant in variants]
    print("\n".join(table(results, y, target)))
    if implied:
        print(f"also differ, with what the names say: {', '.join(implied)}")
    figures = {"progress.png": draw_progress(variants, y, target)}
    x = args.x or KL
    measured = variants if args.x else [variant for variant in variants if variant.has(KL)]
    for variant in variants:
        if variant not in measured:
            what = f"{variant.label}: no {KL}, so not in the pareto plot"
            print(f"compare: {what}; record it with reference=frozen", file=sys.stderr)
    if measured:
        figures["pareto.png"] = draw_pareto(measured, x, y)
    for name, figure in figures.items():
        print(f"written  {save(figure, args.out / name)}")


def main(argv: list[str] | None = None) -> int:
    try:
        run(parse(argv))
    except (ValueError, FileNotFoundError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
