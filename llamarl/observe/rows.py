"""RowWriter: the leader's metrics, one row an optimizer step, written to RUN_DIR/metrics.jsonl in
the order of steps.

Reports for one step come from several ranks and at different times; the evaluation of a step may
come many steps later. A row is *whole*, and is written once all rows before it are, when it has

    loss/value       the trainer's part (step 0, the untrained policy, has none), and
    eval/reward      if an evaluation of this step is due; or eval/left_out, if none of its
                     completions has a score; or one of these of a set of eval.sets: all of them
                     come together.

The trainer's report is also the moment at which the row's rates are taken from the counters of all
ranks. Rows are never rewritten, except that a resumed run first cuts the file back to its
checkpoint. So the file of a killed and resumed run equals that of an uninterrupted one, except for
the columns that depend on the clock (`is_timing`).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from llamarl.observe.columns import COLUMNS
from llamarl.observe.rates import (
    ACCURACY,
    EVALUATED,
    Counters,
    RateMeter,
    Row,
    idle_shares,
    is_evaluated,
    number_of,
    sets_of,
    step_of,
)
from llamarl.observe.samples import Sample, SampleFile
from llamarl.observe.sinks import Jsonl, Sink
from llamarl.words.choices import OWN, column_of

TRAINED = "loss/value"
FILE_NAME = "metrics.jsonl"

log = logging.getLogger(__name__)


class RowWriter:
    """Collects reports into rows and writes each whole row once, to metrics.jsonl and then to every
    sink.

    `eval_due(step)` says whether step's row waits for an evaluation; `first_step` is the first row
    to write (0 for a run that has a baseline). A fresh run in a directory that has a metrics.jsonl
    keeps the old file under another name. samples: the file of what people look at.
    """

    def __init__(
        self,
        run_dir: str | Path,
        sinks: list[Sink],
        *,
        eval_due: Callable[[int], bool],
        first_step: int,
        clock: Callable[[], float] = time.monotonic,
        samples: SampleFile | None = None,
    ):
        self.run_dir = Path(run_dir)
        self.samples = samples or SampleFile(run_dir)
        self.sinks = sinks
        self.eval_due = eval_due
        self.next_row = first_step
        self.clock = clock
        self.file = Jsonl(self.run_dir / FILE_NAME)
        self.last_trained = first_step - 1  # newest step that the trainer has reported
        self.evaluated: float | None = None  # the mean reward of the newest evaluation
        self._pending: dict[int, Row] = {}
        self._abandoned: set[int] = set()
        self._warned: set[str] = set()
        # By rank, totals since this process group started; by -1 those of the runs it resumes.
        self._counters: dict[int, Counters] = {}
        self._start_s = clock()
        self._meter = RateMeter(wall_s=0.0, counters={})

    @property
    def wall_s(self) -> float:
        """The seconds since the start. They go on over a resume, without the time in between."""
        return self.clock() - self._start_s

    def set_counters(self, rank: int, totals: Counters) -> None:
        """Replace a rank's counter totals."""
        self._counters[rank] = totals

    def counters(self) -> Counters:
        """Return the totals over all ranks and over the runs that this one resumes."""
        total: Counter[str] = Counter()
        for counters in self._counters.values():
            total.update(counters)
        return dict(total)

    def ingest(self, step: int, values: Row, *, at: float | None = None) -> None:
        """Merge one report into the row of `step`. A null never replaces a number. A report whose
        row is written already is dropped, with a warning. at: its time by the clock; None: now.
        """
        if step < self.next_row:
            names = ", ".join(sorted(values))
            if names not in self._warned:
                self._warned.add(names)
                log.warning(
                    "report of %s for step %d dropped: its row is written already (said once)",
                    names,
                    step,
                )
            return
        row = self._pending.setdefault(step, {})
        for name, value in values.items():
            if value is not None or row.get(name) is None:
                row[name] = value
        if TRAINED in values:
            self.last_trained = max(self.last_trained, step)
            wall_s = self.wall_s
            row.update(self._meter.read(wall_s, self.counters()))
            row["time/wall_s"] = wall_s
        came_s = (self.clock() if at is None else at) - self._start_s
        if step == 0 and is_evaluated(values) and TRAINED not in values:
            row["time/wall_s"] = came_s
        reward = number_of(values, EVALUATED)
        if reward is not None:
            self.evaluated = reward
        if is_evaluated(values):
            row["time/evaluated_s"] = came_s

    def keep_sample(self, step: int, make: Callable[[], Sample]) -> None:
        """Keep what `make` returns as the sample of a step, beside the rows."""
        self.samples.keep(step, make)

    def flush(self) -> None:
        """Write every row that is whole and whose predecessors are written."""
        while self._whole(self.next_row):
            step = self.next_row
            self.next_row += 1
            row = self._pending.pop(step, {})
            if step > 0 and TRAINED not in row:
                log.warning(
                    "the trainer's report of step %d was lost (a restart?); its row is incomplete",
                    step,
                )
            if not row:
                continue
            row = {"step": step, "policy_version": step} | row
            known = {name: row[name] for name in COLUMNS if name in row}
            ordered = known | dict(sorted(row.items()))
            self.samples.set_aside()
            self.file.write(ordered)
            for sink in self.sinks:
                self._use(sink, partial(sink.write, ordered))

    def _use(self, sink: Sink, call: Callable[[], None]) -> None:
        """Call a sink beside the file. If it fails the run goes on, with one warning a sink."""
        try:
            call()
        except Exception as error:  # whatever it is, no step depends on it
            name = type(sink).__name__
            if name not in self._warned:
                self._warned.add(name)
                log.warning(
                    "%s did not take a row (%s: %s); the run goes on, and %s gets every row "
                    "(said once)",
                    name,
                    type(error).__name__,
                    error,
                    self.file.path,
                )

    def is_complete(self, step: int) -> bool:
        """Whether all rows up to `step` are trained, and evaluated or given up."""
        if step > max(0, self.last_trained):
            return False
        return all(self._evaluated(s) for s in range(self.next_row, step + 1))

    def abandon_eval(self, step: int) -> None:
        """Let the row of `step` be written without its evaluation, which failed or which the run
        ends before.
        """
        if step >= self.next_row and not self._evaluated(step):
            log.warning(
                "the evaluation of step %d was given up; its row has no %s", step, EVALUATED
            )
            self._abandoned.add(step)

    def state_dict(self, step: int) -> dict:
        """Return what a checkpoint of `step` needs, as JSON values. Reports for later steps are
        left out.

        Rows that the disk refuses are tried once more, and kept in it where that fails. Those that
        it counts as written are on the disk for good.
        """
        self.file.retry()
        self.file.sync()
        self.samples.sync()
        pending = [[s, dict(row)] for s, row in sorted(self._pending.items()) if s <= step]
        return {
            "step": step,
            "next_row": min(self.next_row, step + 1),
            "pending": pending,
            "held": [row for row in self.file.held if step_of(row) <= step],
            "counters": self.counters(),
            "wall_s": self.wall_s,
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue after the checkpoint that `state` belongs to: later rows leave the file, and are
        trained again. Rows that the disk had refused until then are written.

        If the file has more of the rows that waited for an evaluation at the checkpoint, that is
        kept. The checkpoint's own version is evaluated again; the weights of earlier ones are gone,
        and so their rows wait no longer.
        """
        first = state["next_row"]
        step = state["step"]
        self.samples.cut(step)
        held = state["held"]
        # They may have been written after the checkpoint: each is in the file once, in its place.
        removed = self.file.truncate(min([first, *(row["step"] for row in held)]))
        for row in held:
            self.file.write(row)
        self._pending = {step_of(row): row for row in removed if first <= step_of(row) <= step}
        for pending_step, row in state["pending"]:
            self._pending[pending_step] = self._pending.get(pending_step, {}) | row
        self.next_row = first
        self.last_trained = step
        self._counters = {-1: state["counters"]}
        self._start_s = self.clock() - state["wall_s"]
        self._meter = RateMeter(wall_s=state["wall_s"], counters=state["counters"])
        for earlier in range(first, step):
            self.abandon_eval(earlier)

    def close(self, sealed_step: int | None = None) -> None:
        """Write the rows that lack only their evaluation, and close every sink.

        sealed_step: the newest step that there is a checkpoint of. MetricsError names the rows that
        the disk still refuses.
        """
        for step in range(self.next_row, self.last_trained + 1):
            self.abandon_eval(step)
        self.flush()
        for sink in self.sinks:
            self._use(sink, sink.close)
        self.file.close(sealed_step)

    def summary(self) -> str:
        """Return the text that ends a run: results before and after, speed and idle shares of the
        whole run, including the parts before a resume.
        """
        rows = self.file.read()
        counters = self.counters()
        wall_s = self.wall_s
        num_steps = rows[-1]["step"] if rows else 0
        lines = [f"{num_steps} steps in {wall_s:.1f} s"]
        for name in (OWN, *sets_of(itertools.chain.from_iterable(rows))):
            evaluated = _known(rows, column_of(name, EVALUATED))
            accuracy = _known(rows, column_of(name, ACCURACY))
            # Supervised runs have no rewards; in others an accuracy is the mean of the same scores.
            if accuracy and len(evaluated) in (0, len(accuracy)):
                label = f"held out   {name} accuracy" if name else "accuracy  "
                lines.append(f"{label} {accuracy[0]:.1%} -> {accuracy[-1]:.1%}")
            elif evaluated:
                label = f"held out   {name} reward" if name else "held out   reward"
                lines.append(f"{label} {evaluated[0]:.4g} -> {evaluated[-1]:.4g}")
        if "generator/tokens" in counters and wall_s > 0:
            tokens_per_s = counters["generator/tokens"] / wall_s
            lines.append(f"generated  {tokens_per_s:,.0f} tokens/s")
        for idle in idle_shares(counters):
            causes = f" ({idle.shown_causes})" if idle.shown_causes else ""
            lines.append(f"idle       {idle.executor} {idle.share:.0%}{causes}")
        lines.append(f"written    {self.run_dir / FILE_NAME}")
        lines.append(f"report     llamarl report {self.run_dir}")
        return "\n".join(lines)

    def _whole(self, step: int) -> bool:
        row = self._pending.get(step, {})
        # The trainer reports in order: once a later step is in, nothing more comes for this one.
        # Step 0 without an evaluation ends the same way.
        trained = TRAINED in row or step < self.last_trained or (step == 0 and is_evaluated(row))
        return trained and self._evaluated(step)

    def _evaluated(self, step: int) -> bool:
        return (
            not self.eval_due(step)
            or is_evaluated(self._pending.get(step, {}))
            or step in self._abandoned
        )


def _known(rows: list[Row], column: str) -> list[float]:
    """Return the values that rows have in a column."""
    values = (number_of(row, column) for row in rows)
    return [value for value in values if value is not None]
