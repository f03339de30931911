"""Metrics: every executor reports through it.

    executor --report(step, {...})-->  Metrics --"metrics" messages--> the leader's Metrics
             --add(counter, amount)-->    |                              --> RowWriter --> sinks
             --span(track, name, ...)-->  +--> Trace (stays on its rank)

A report belongs to a step and is sent on at the next `pump`. A counter only grows (tokens, busy and
idle seconds, stalls); each rank sends its *totals* at most every POST_INTERVAL_S, so a repeated
message changes nothing, and the leader turns the sum over ranks into the rates of a row (rates.py).

One thread a rank calls it: the controller's loop, from which all executors are stepped. On the
leader the listener thread notes when a message came.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from numbers import Integral
from typing import TYPE_CHECKING, SupportsFloat

from llamarl.observe.rates import MEAN, SUM, Counters, Row
from llamarl.observe.rows import RowWriter
from llamarl.observe.samples import Sample
from llamarl.observe.trace import Trace

if TYPE_CHECKING:
    from llamarl.comm.control import Control

TOPIC = "metrics"
POST_INTERVAL_S = 0.1

log = logging.getLogger(__name__)


class Metrics:
    """Takes the reports of a process's executors; one per process. `writer` is given on the leader
    and nowhere else (ValueError).
    """

    def __init__(
        self, *, rank: int, leader: int, control: Control, writer: RowWriter | None, trace: Trace
    ):
        if (writer is not None) != (rank == leader):
            raise ValueError(
                f"rank {rank}: the leader (rank {leader}) needs the RowWriter, and only the leader"
            )
        self.rank = rank
        self.leader = leader
        self.control = control
        self.writer = writer
        self.trace = trace
        self.counters: Counters = {}
        self._reports: list[tuple[float, int, Row]] = []  # when, of which step, what
        self._arrived: deque[tuple[float, int, dict]] = deque()  # when, from whom, what
        self._clock = time.monotonic
        if writer is not None:
            self._clock = writer.clock
            control.on(TOPIC, self._note_arrival)
        self._posted: Counters = {}
        self._posted_at = -math.inf
        self._warned: set[str] = set()

    def report(self, step: int, values: dict[str, SupportsFloat | str | None]) -> None:
        """Put values into the row of `step`: numbers, 0-dim tensors, or a reason as text. NaN and
        infinity become null, with one warning a name.
        """
        numbers = {name: self._number(step, name, value) for name, value in values.items()}
        self._reports.append((self._clock(), step, numbers))

    def add(self, counter: str, amount: float) -> None:
        """Let a counter grow by `amount`. Cheap: a dict update."""
        self.counters[counter] = self.counters.get(counter, 0) + amount

    def add_mean(self, name: str, value: float) -> None:
        """Add an observation to a column: the mean over all ranks since the row before."""
        self.add(f"{MEAN}{name}/sum", value)
        self.add(f"{MEAN}{name}/count", 1)

    def add_sum(self, name: str, value: float) -> None:
        """Add to a column: the sum over all ranks since the row before."""
        self.add(f"{SUM}{name}", value)

    def span(self, track: str, name: str, start_s: float, end_s: float) -> None:
        """Put a bar into the trace; times are `time.monotonic()`."""
        self.trace.add(track, name, start_s, end_s)

    def keep_sample(self, step: int, make: Callable[[], Sample]) -> None:
        """Keep what `make` returns as the sample of a step, on the leader; elsewhere do nothing."""
        if self.writer is not None:
            self.writer.keep_sample(step, make)

    def pump(self) -> None:
        """Send new reports to the leader; on the leader, read them and write the rows that are
        whole. Never blocks.
        """
        if self.writer is None:
            self._post()
            return
        messages = []
        while self._arrived:
            messages.append(self._arrived.popleft())
        # All counters first: the rates of a row that becomes whole now must include them.
        self.writer.set_counters(self.rank, self.counters)
        reports = []
        for at, sender, message in messages:
            self.writer.set_counters(sender, message["counters"])
            reports += [(at, *report) for report in message["reports"]]
        reports += self._reports
        self._reports = []
        for at, step, values in reports:
            self.writer.ingest(step, values, at=at)
        self.writer.flush()

    def _note_arrival(self, sender: int, message: dict) -> None:
        """On the leader: keep a message with its time of arrival, because the loop may be in a long
        step. Runs on the listener thread.
        """
        self._arrived.append((self._clock(), sender, message))

    def state_dict(self, step: int) -> dict:
        """Return JSON values for the checkpoint of `step`; {} except on the leader."""
        return {} if self.writer is None else self.writer.state_dict(step)

    def load_state_dict(self, state: dict) -> None:
        """Go on after a checkpoint, on the leader. Cuts metrics.jsonl back to it; no row may have
        been written before.
        """
        if self.writer is not None and state:
            self.writer.load_state_dict(state)

    def close(self, sealed_step: int | None = None) -> None:
        """Send or write what is left. On the leader call it after the others' last messages have
        arrived. sealed_step: the newest step that there is a checkpoint of. MetricsError names the
        rows that the disk still refuses.
        """
        self._posted_at = -math.inf
        self.pump()
        if self.writer is not None:
            self.writer.close(sealed_step)

    def _post(self) -> None:
        now = time.monotonic()
        counters_due = now - self._posted_at >= POST_INTERVAL_S and self.counters != self._posted
        if not (self._reports or counters_due):
            return
        self._posted = dict(self.counters)
        self._posted_at = now
        reports = [(step, values) for _, step, values in self._reports]
        message = {"reports": reports, "counters": self._posted}
        self.control.post(self.leader, TOPIC, message)
        self._reports = []

    def _number(
        self, step: int, name: str, value: SupportsFloat | str | None
    ) -> float | str | None:
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, Integral):
            return int(value)
        number = float(value)
        if math.isfinite(number):
            return number
        if name not in self._warned:
            self._warned.add(name)
            log.warning(
                "%s is %s at step %d; rows hold null for it (said once)", name, number, step
            )
        return None
