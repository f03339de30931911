"""Peers' published step times beside what the planner and the simulator say of the same jobs.

    python benchmarks/peer_tables.py [--json FILE]

verl's (peer_verl.py), NeMo RL's (peer_nemo.py) and marin's (peer_marin.py): the head of each lists
what was published, what is assumed, and what is set. Of each pair of jobs only the synchronous
figures set anything.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from peer_figures import Figure, Verdict
from peer_marin import marin_rows
from peer_nemo import nemo_rows
from peer_verl import verl_rows


def tables() -> tuple[list[Figure], list[Verdict]]:
    """Return all figures and all verdicts."""
    figures = []
    verdicts = []
    for rows in (verl_rows, nemo_rows, marin_rows):
        some, said = rows()
        figures += some
        verdicts += said
    return figures, verdicts


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the records there")
    given = parser.parse_args(arguments)
    figures, verdicts = tables()
    for one in figures:
        what = "set on this" if one.is_set else "predicted"
        print(
            f"{one.peer:<8}{one.job:<46}{one.what:<22}{one.published_s:8.1f} s  "
            f"here {one.here_s:8.1f} s  {one.error:+.0%}  {what}"
        )
    for said in verdicts:
        print(
            f"{said.peer:<8}{said.job:<46}published {said.published} ({said.published_ratio:.2f}), "
            f"here {said.here} ({said.here_ratio:.2f})"
        )
    if given.json:
        found = {
            "figures": [one.record() for one in figures],
            "verdicts": [said.record() for said in verdicts],
        }
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
