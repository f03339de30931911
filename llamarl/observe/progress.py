"""Progress: how far a piece of work has come, and how long the rest will take. On a terminal a bar
(rich); in a pipe or file a plain line now and then.

    with Progress("answers", 500) as progress:
        for prompt in prompts:
            ...
            progress.advance()

A run shows its steps so below the console's table (console.py).
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

LINE_EVERY_S = 10.0  # between two plain lines; shorter work has none
WINDOW = 20  # newest readings that tell the pace


class TimeLeft:
    """Foretells the end by the pace of the newest WINDOW readings."""

    def __init__(self):
        self._readings: deque[tuple[float, float]] = deque(maxlen=WINDOW + 1)

    def note(self, done: float, at_s: float) -> None:
        """Note how much was done at a time. Work or a time that goes back begins anew: the row of
        an evaluation has the time of its end, which may be after that of the next step.
        """
        if self._readings and (done < self._readings[-1][0] or at_s < self._readings[-1][1]):
            self._readings.clear()
        self._readings.append((done, at_s))

    def of(self, rest: float) -> float | None:
        """Return the seconds that the rest will take; None while there is no pace."""
        if rest <= 0:
            return 0.0
        if len(self._readings) < 2:
            return None
        first_done, first_s = self._readings[0]
        last_done, last_s = self._readings[-1]
        if last_done <= first_done:
            return None
        return rest * (last_s - first_s) / (last_done - first_done)


def shown_left(seconds: float | None) -> str:
    """Format a time that is left: 8s, 2m10s, 3h05m; "" for one that is unknown or over."""
    if not seconds:
        return ""
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m"


class Bar:
    """A bar at the foot of a terminal, below what the same rich console prints."""

    def __init__(self, what: str, total: float, unit: str, *, console: RichConsole):
        from rich.progress import BarColumn, Progress, TextColumn

        count = "{task.completed:.0f}/{task.total:.0f} " + unit
        columns = [TextColumn("{task.description}"), BarColumn(), TextColumn(count)]
        # Its own thread would draw while other ranks print: it is drawn when it moves.
        self._bar = Progress(
            *columns,
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task(what, total=total, left="")
        self._bar.start()

    def show(self, done: float, left_s: float | None) -> None:
        """Move it."""
        left = shown_left(left_s)
        self._bar.update(self._task, completed=done, left=f"left {left}" if left else "")
        self._bar.refresh()

    def close(self) -> None:
        """Take it away."""
        self._bar.stop()


class Progress:
    """Shows how far some work is. total: of `unit`; stream: standard error unless given, so that
    results stay alone on standard output. is_bar: a terminal has a bar, where nothing else draws
    one. at_once: of the unit, that are under way together. No time is foretold before so much is
    done, because the first ones to end have taken the time of all of these.
    """

    def __init__(
        self,
        what: str,
        total: float,
        *,
        unit: str = "",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        is_bar: bool = True,
        at_once: float = 1,
    ):
        self._what = what
        self._total = total
        self._at_once = at_once
        self._unit = unit
        self._stream = stream or sys.stderr
        self._clock = clock
        self._done = 0.0
        self._time_left = TimeLeft()
        self._time_left.note(0, clock())
        self._said_s = clock()
        self._bar: Bar | None = None
        if is_bar and self._stream.isatty():
            from rich.console import Console as RichConsole

            console = RichConsole(file=self._stream, highlight=False)
            self._bar = Bar(what, total, unit, console=console)

    def advance(self, amount: float = 1) -> None:
        """Note that so much more is done."""
        self._done += amount
        now = self._clock()
        self._time_left.note(self._done, now)
        left_s = None
        if self._done >= self._at_once:
            left_s = self._time_left.of(self._total - self._done)
        if self._bar is not None:
            self._bar.show(self._done, left_s)
        elif now - self._said_s >= LINE_EVERY_S:
            self._said_s = now
            left = shown_left(left_s)
            words = [self._what, f"{self._done:.0f}/{self._total:.0f} {self._unit}".rstrip()]
            if left:
                words.append(f"left {left}")
            print("  ".join(words), file=self._stream, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class CheckpointProgress:
    """Tells how far a checkpoint is that takes long, by plain lines: the run's own bar stays."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._stream = stream
        self._clock = clock
        self._step = -1
        self._num_come = 0
        self._progress: Progress | None = None

    def __call__(self, step: int, come: int, expected: int) -> None:
        """Note that so many of a step's parts are on the disk."""
        if self._progress is None or step != self._step:
            self._step = step
            self._num_come = 0
            self._progress = Progress(
                f"checkpoint of step {step}",
                expected,
                unit="parts",
                stream=self._stream,
                clock=self._clock,
                is_bar=False,
            )
        self._progress.advance(come - self._num_come)
        self._num_come = come
