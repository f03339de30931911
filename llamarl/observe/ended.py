"""Exit codes that tell a scheduler's script how a run ended:

    python -m llamarl.observe.ended RUN_DIR

    code   what RUN_DIR/outcome.json says
    0      finished: there is nothing more to do
    75     stopped: resume=auto goes on from its checkpoint
    1      failed: an error ended it
    3      nothing: the run is under way, was killed, or never started
    2      what cannot be read

A run's own processes cannot end with such a code: torchrun takes any nonzero code of a worker for
a failure, and itself ends with 1 on SIGTERM. 75 is "try again" in sysexits.h: a scheduler can be
told to restart jobs that end with it (Slurm's RequeueExit).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

FILE_NAME = "outcome.json"
EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_UNREADABLE = 2
EXIT_NO_OUTCOME = 3
EXIT_STOPPED = 75
EXIT_CODES = {"finished": EXIT_FINISHED, "stopped": EXIT_STOPPED, "failed": EXIT_FAILED}


def outcome_of(run_dir: Path) -> dict[str, object] | None:
    """Return what a run's outcome.json says; None if there is none that can be read."""
    try:
        outcome = json.loads((run_dir / FILE_NAME).read_text())
    except (OSError, ValueError):
        return None
    return outcome if isinstance(outcome, dict) else None


def said_of(run_dir: str | Path) -> tuple[int, str]:
    """Return the exit code for a run, and a line about how it ended. ValueError or OSError names
    the file that cannot be read.
    """
    file = Path(run_dir) / FILE_NAME
    try:
        text = file.read_text()
    except FileNotFoundError:
        why = "it is under way, was killed, or never started"
        return EXIT_NO_OUTCOME, f"{run_dir}: no {FILE_NAME}: {why}"
    try:
        outcome = json.loads(text)
        code = EXIT_CODES[outcome["ended"]]
        return code, f"{run_dir}: {outcome['ended']} after step {outcome['step']}"
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: {text[:80]!r} is no outcome of a run") from error


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code for the run."""
    parser = argparse.ArgumentParser(
        prog="python -m llamarl.observe.ended",
        description="Exit with 0 for a run that finished, 75 if it was stopped, 1 if it failed.",
    )
    parser.add_argument("run_dir")
    try:
        code, line = said_of(parser.parse_args(argv).run_dir)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return EXIT_UNREADABLE
    print(line)
    return code


if __name__ == "__main__":
    sys.exit(main())
