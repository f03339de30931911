"""Studies of what papers claim, announced before they run, and judged by rules from before.

    python benchmarks/study.py --list                   all studies, their verdicts and minutes
    python benchmarks/study.py NAME --announce          write the page's first part; commit it then
                                                        (without NAME: all that are not announced)
    python benchmarks/study.py NAME [--minutes 3.5]     make runs, or go on with them; and the page
    python benchmarks/study.py NAME --report            the page and figure from what is kept
    python benchmarks/study.py --claims                 rewrite the tables of results/claims.md

A study is a table of settings and a sentence in benchmarks/studies/: arms, seeds, questions with
margins, and checks of whether its runs were in a state to answer. No run is made unless the page of
benchmarks/results/claims/ that git has committed announces just these settings. --minutes stops
after so many: the same command goes on, and so it does after a kill, from the last checkpoint.
The same command beside it, with the same --runs, makes other runs; --seeds 0 1 those of these seeds
alone.
--given NAME=PATH: a directory that a study's settings name, such as a model's. A study that is
announced anew keeps its old page and results beside the new ones, with the day in their names.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
from claims import write_claims
from running import ROOT, machine
from studies import STUDIES
from study_pages import (
    PAGES,
    NotAnnounced,
    announced_in,
    announces,
    check_announced,
    committed,
    draw,
    entry,
    headline,
    page,
    page_file,
    read_entry,
    results_file,
    runs_of,
    write_entry,
)
from study_runs import Maker, loaded, make
from study_terms import Study
from study_verdicts import outcome

RUNS = ROOT / "runs" / "studies"


def announce(study: Study, folder: Path, today: str) -> list[Path]:
    """Write a study's page as it is before any run. Returns the old files that were put aside.

    A page that announces the same stays as it is, with its results.
    """
    file = page_file(study, folder)
    aside: list[Path] = []
    if file.exists():
        if announces(announced_in(file.read_text()), study):
            return []
        if results_file(study, folder).exists():
            aside = _put_aside(study, folder, today)
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(page(study, None))
    return aside


def _put_aside(study: Study, folder: Path, today: str) -> list[Path]:
    """Put the day into the names of a study's page, results and figure. Returns the files."""
    name = f"{study.name}_{today}"
    aside = []
    for old in sorted(folder.glob(f"{study.name}.*")):
        aside.append(old.rename(old.with_name(f"{name}{old.suffix}")))
    old_page = folder / f"{name}.md"
    shown = old_page.read_text().replace(f"({study.name}.png)", f"({name}.png)")
    old_page.write_text(shown)
    return aside


def report(study: Study, runs: Path, folder: Path, about: dict) -> None:
    """Write a study's results, page and figure from the runs that are kept, if there are any."""
    found = loaded(study, runs)
    kept = entry(study, found, about)
    if not kept["runs"]:
        print(f"{study.name}: no finished run in {runs}")
        return
    write_entry(results_file(study, folder), kept)
    rewrite(study, folder)


def rewrite(study: Study, folder: Path) -> None:
    """Write a study's page and figure anew from its kept results."""
    kept = read_entry(study, folder)
    page_file(study, folder).write_text(page(study, kept))
    if kept is None:
        return
    draw(study, kept, results_file(study, folder).with_suffix(".png"))
    print(headline(study, outcome(study, runs_of(kept))), flush=True)


def conduct(
    study: Study,
    *,
    runs: Path,
    folder: Path,
    given: Mapping[str, str],
    seeds: Sequence[int] | None = None,
    minutes: float | None = None,
    text: str | None = None,
    maker: Maker | None = None,
) -> bool:
    """Make a study's runs and write what came of them. Returns whether all are made.

    text: what git has committed of its page. NotAnnounced if that announces something else.
    """
    check_announced(study, text)
    missing = [name for name in study.given if name not in given]
    if missing:
        words = " ".join(f"--given {name}=PATH" for name in missing)
        raise ValueError(
            f"{study.name} needs {words}: {', '.join(study.remarks) or 'see its page'}"
        )
    others = sorted(set(seeds or ()) - set(study.seeds))
    if others:
        raise ValueError(f"--seeds {others[0]}: {study.name} has {_listed(study.seeds)}")
    about = {"date": datetime.date.today().isoformat(), "machine": machine()}
    try:
        return make(study, runs, given, seeds=seeds, minutes=minutes, maker=maker)
    finally:
        report(study, runs, folder, about)


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def show_list(folder: Path) -> None:
    for study in STUDIES.values():
        kept = read_entry(study, folder)
        verdict = outcome(study, runs_of(kept)).verdict if kept else "not tested yet"
        num_runs = 0 if kept is None else len(kept["runs"])
        of_runs = len(study.arms) * len(study.seeds)
        print(f"{study.name:28} {num_runs:3} of {of_runs:3} runs  {study.minutes:3} min  {verdict}")


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("study", nargs="?", choices=STUDIES)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--claims", action="store_true")
    parser.add_argument("--announce", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", help="make runs of these alone")
    parser.add_argument("--minutes", type=float, help="stop after so many")
    parser.add_argument("--given", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--runs", type=Path, default=RUNS, help="keeps runs")
    args = parser.parse_args(words)
    if args.report and not args.study:
        parser.error("--report: of which study?")
    if not (args.study or args.list or args.claims or args.announce):
        parser.error("name a study, or give --list, --announce or --claims")
    wrong = [word for word in args.given if "=" not in word]
    if wrong:
        parser.error(f"--given {wrong[0]}: NAME=PATH is meant")
    args.given = {name: str(Path(path).absolute()) for name, path in map(_pair, args.given)}
    return args


def _pair(word: str) -> tuple[str, str]:
    name, _, path = word.partition("=")
    return name, path


def _end(number: int, frame: object) -> None:
    """End as by an exception, so that a run that is under way is asked to stop."""
    raise SystemExit(128 + number)


def main() -> None:
    args = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, _end)
    if args.list:
        show_list(PAGES)
    elif args.announce:
        announce_all([STUDIES[args.study]] if args.study else list(STUDIES.values()))
    elif args.report:
        rewrite(STUDIES[args.study], PAGES)
    elif args.study:
        go_on(STUDIES[args.study], args)
    if not args.list:
        write_claims()


def announce_all(studies: list[Study]) -> None:
    """Write the pages that announce something else than their settings say."""
    today = datetime.date.today().isoformat()
    for study in studies:
        file = page_file(study, PAGES)
        if file.exists() and announces(announced_in(file.read_text()), study):
            continue
        for old in announce(study, PAGES, today):
            print(f"kept {old}")
        print(f"written {file}: commit it before the first run")


def go_on(study: Study, args: argparse.Namespace) -> None:
    """Make a study's runs, or say in a line why not."""
    try:
        is_whole = conduct(
            study,
            runs=args.runs.absolute(),
            folder=PAGES,
            given=args.given,
            seeds=args.seeds,
            minutes=args.minutes,
            text=committed(page_file(study, PAGES)),
        )
    except (NotAnnounced, ValueError) as error:
        sys.exit(str(error))
    made = "all runs" if args.seeds is None else f"all runs of seeds {_listed(args.seeds)}"
    print(f"{made} are made" if is_whole else "not all are made: the same command goes on")


if __name__ == "__main__":
    main()
