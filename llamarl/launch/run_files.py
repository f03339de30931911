"""What a run leaves in its directory, and what it prints of itself at its end.

RUN_DIR/outcome.json is the outcome of a run, for a program that reads it:

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
from typing import Literal

from llamarl.checkpoint.latest import LATEST, latest_in
from llamarl.config.conversion import to_values
from llamarl.controller import ExecutorController
from llamarl.disk.files import replace_text
from llamarl.launch.inputs import JobInputs
from llamarl.launch.placement import Placement
from llamarl.launch.run_directory import RunDirectory
from llamarl.learning.samples import SampleMaker
from llamarl.observe import RowWriter, build_sinks
from llamarl.observe.ended import FILE_NAME
from llamarl.observe.expected import expectation_of, verdict
from llamarl.observe.samples import SampleFile

Ended = Literal["finished", "stopped", "failed"]

log = logging.getLogger("llamarl")


class RunFiles:
    """The files of a run.

    directory: the run's; until it is opened, the place where it will be. stopped_after: the last
    step of a run that was stopped; only the leader knows.
    """

    def __init__(self, inputs: JobInputs, placement: Placement, directory: RunDirectory):
        self.config = inputs.config
        self.directory = directory
        self.stopped_after: int | None = None
        self._inputs = inputs
        self._placement = placement
        self._writer: RowWriter | None = None

    def writer(self) -> RowWriter:
        """Make what writes the leader's metrics: the rows, the console, and what else the config
        asks for.
        """
        m = self.config.metrics
        samples = SampleFile(self.directory.path)
        sinks = build_sinks(
            self.directory.path,
            max_steps=self.config.max_steps,
            metrics=m,
            free_running=self._placement.sync_period if self.config.max_lag is None else None,
            config=to_values(self.config),
            samples=samples,
            show_every=m.show_every if m.samples else 0,
        )
        self._writer = RowWriter(
            self.directory.path,
            sinks,
            eval_due=self._inputs.eval_due,
            first_step=0,
            samples=samples,
        )
        return self._writer

    @property
    def sample_maker(self) -> SampleMaker | None:
        """What makes the samples that people look at; None where none are kept."""
        if not self.config.metrics.samples:
            return None
        return SampleMaker(
            num_groups=self.config.metrics.samples,
            decode=self._inputs.decode_raw,
            parts=[part.name for part in self.config.reward_parts],
        )

    def conclude(self) -> None:
        """Print how the run went, on the leader."""
        if self._writer is None:
            return
        print(f"\n{self._writer.summary()}")
        if self.stopped_after is None:
            known = expectation_of(self.config)
            if known is not None:
                print(f"expected   {verdict(known, self._writer.file.read())}")
        if self.stopped_after is not None:
            steps = f"{self.stopped_after} of {self.config.max_steps}"
            print(f"stopped    after step {steps}: resume=auto goes on")
        checkpoints = self.directory.path / "checkpoints"
        newest = latest_in(checkpoints)
        if newest is not None:
            latest = checkpoints / LATEST
            model = (latest if latest.is_dir() else newest) / "hf"
            print(f"model      {model}, the Hugging Face directory of {newest.name}", flush=True)


# --- The outcome ---


def has_finished(run: ExecutorController, max_steps: int) -> bool:
    """Whether a run that ended well had nothing more to do. On the leader."""
    return run.step >= max_steps or run.reached_target


@contextmanager
def recorded(run: ExecutorController, run_dir: Path, *, max_steps: int) -> Iterator[None]:
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
