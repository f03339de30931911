"""The outcome of a run, for a program that reads it: RUN_DIR/outcome.json.

    {"ended": "stopped", "step": 120, "max_steps": 1000}

    ended       meaning
    "finished"  it made all its steps, or reached eval.target; exit code 0
    "stopped"   a signal ended it early; resume=auto goes on from its checkpoint; exit code 0
    "failed"    an error ended it; exit code 1

While a run goes on, and after one that was killed, there is no such file.

The exit code of a rank cannot tell a stopped run from a finished one. torchrun takes any code of a
worker but 0 for a failure and starts the workers again while --max-restarts allows it; and torchrun
itself ends with 1 when it is sent SIGTERM. `python -m llamarl.observe.ended RUN_DIR` has a code for
each.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

from llamarl.disk.files import replace_text
from llamarl.observe.ended import FILE_NAME

Ended = Literal["finished", "stopped", "failed"]

log = logging.getLogger("llamarl")


class Running(Protocol):
    """A run under way, as its controller knows it."""

    @property
    def is_leader(self) -> bool: ...

    @property
    def reached_target(self) -> bool:
        """Whether its evaluations have reached eval.target."""
        ...

    @property
    def step(self) -> int:
        """How many steps were made."""
        ...


def has_finished(run: Running, max_steps: int) -> bool:
    """Whether a run that ended well had nothing more to do. On the leader."""
    return run.step >= max_steps or run.reached_target


@contextmanager
def recorded(run: Running, run_dir: Path, *, max_steps: int) -> Iterator[None]:
    """Run the body, which is the run. Then write its outcome, on the leader alone."""
    ended: Ended = "failed"
    try:
        yield
        ended = "finished" if has_finished(run, max_steps) else "stopped"
    finally:
        if run.is_leader:
            _write(run_dir / FILE_NAME, ended, run.step, max_steps)


def _write(file: Path, ended: Ended, step: int, max_steps: int) -> None:
    """Write the file. If the disk refuses it, the run still ends as it would have."""
    said = {"ended": ended, "step": step, "max_steps": max_steps}
    try:
        replace_text(file, json.dumps(said) + "\n")
    except OSError as error:
        log.warning("%s", error)


def forget(run_dir: Path) -> None:
    """Delete the outcome of an earlier run in this directory. OSError if that fails."""
    (run_dir / FILE_NAME).unlink(missing_ok=True)
