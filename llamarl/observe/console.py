"""The console: one line a step. On a terminal an aligned table with colour (rich); in a pipe or
file plain `name value` words.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from llamarl.observe.rates import (
    ACCURACY,
    EVALUATED,
    LEFT_OUT,
    LEFT_OUT_REASON,
    Row,
    number_of,
    sets_of,
    step_of,
)
from llamarl.observe.samples import SampleFile, SampleRhythm, sample_lines
from llamarl.words.choices import OWN, column_of

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

HEADER_EVERY = 25
SHOWN_REASON = 120  # characters of a reason
IDLE_HIGH = 0.25  # an idle share above this is worth a colour

# The cells of a line, by their header on a terminal.
WIDTHS = {
    "step": 9,
    "reward": 7,
    "eval": 6,
    "lag": 7,
    "loss": 9,
    "grad": 7,
    "tok/s": 6,
    "idle g/t": 9,
    "idle": 5,
    "s/step": 7,
}
RL_COLUMNS = ("step", "reward", "eval", "lag", "loss", "grad", "tok/s", "idle g/t", "s/step")
# Columns of a job whose only executor is a trainer.
SUPERVISED_COLUMNS = ("step", "eval", "loss", "grad", "idle", "s/step")


class Console:
    """Prints the given columns of each row (a sink). `max_steps` is only shown; `stream` is
    standard output unless given. show_every: steps, so often with the newest of `samples`; 0:
    never.
    """

    def __init__(
        self,
        *,
        max_steps: int | None = None,
        stream: TextIO | None = None,
        columns: Sequence[str] = RL_COLUMNS,
        samples: SampleFile | None = None,
        show_every: int = 0,
    ):
        self.max_steps = max_steps
        self._columns = tuple(columns)
        self.stream = stream or sys.stdout
        self._samples = SampleRhythm(samples, show_every)
        self._num_lines = 0
        self._time_left = TimeLeft()
        self._bar: Bar | None = None
        self._rich: RichConsole | None = None
        if self.stream.isatty():
            from rich.console import Console as RichConsole

            self._rich = RichConsole(file=self.stream, highlight=False)

    def write(self, row: Row) -> None:
        """Print one row, every so often with a sample, and the time that the rest will take."""
        if self._rich is None:
            self._print_plain(row)
        else:
            self._print_table_row(row, self._rich)
        for line in self._sample_lines(row):
            if self._rich is None:
                print(line, file=self.stream, flush=True)
            else:
                self._rich.print(line, style="dim", markup=False)
        self._move_bar(row)

    def _sample_lines(self, row: Row) -> list[str]:
        """Return lines about the newest sample, if it is time to show one."""
        newest = self._samples.due(step_of(row))
        return [] if newest is None else sample_lines(newest)

    def _move_bar(self, row: Row) -> None:
        """On a terminal: show under the table how far the run is."""
        if self.max_steps is None or self._rich is None or row.get("time/wall_s") is None:
            return
        if self._bar is None:
            self._bar = Bar("run", self.max_steps, "steps", console=self._rich)
        self._bar.show(step_of(row), self._left_s(row))

    def _left_s(self, row: Row) -> float | None:
        """Return the seconds that the rest of the run will take; None where they are unknown."""
        wall_s = number_of(row, "time/wall_s")
        if self.max_steps is None or wall_s is None:
            return None
        step = step_of(row)
        self._time_left.note(step, wall_s)
        return self._time_left.of(self.max_steps - step)

    def _print_plain(self, row: Row) -> None:
        """Print a row as `name value` words."""
        # Where all scores are 0 or 1 their mean is an accuracy.
        is_accuracy = row.get(ACCURACY) is not None
        names = {"eval": "accuracy" if is_accuracy else "held-out"}
        cells = self._cells(row)
        missing = left_out(row)
        if missing:
            cells["eval"] += f" ({missing})"
        words = [f"{names.get(name, name)} {cell}" for name, cell in cells.items() if cell]
        left = shown_left(self._left_s(row))
        if left:
            words.append(f"left {left}")
        print("  ".join(words), file=self.stream, flush=True)
        for line in set_lines(row):
            print(line, file=self.stream, flush=True)

    def _print_table_row(self, row: Row, rich: RichConsole) -> None:
        """Print a row as a line of the table, after the headers every HEADER_EVERY lines."""
        from rich.text import Text

        cells = self._cells(row)
        if self._num_lines % HEADER_EVERY == 0:
            headers = " ".join(f"{header:>{WIDTHS[header]}}" for header in cells)
            rich.print(headers, style="dim", no_wrap=True, crop=False)
        self._num_lines += 1
        idle = max(
            number_of(row, "generator/idle_fraction") or 0,
            number_of(row, "trainer/idle_fraction") or 0,
        )
        idle_style = "yellow" if idle > IDLE_HIGH else ""
        styles = {
            "reward": "bold",
            "eval": "bold green",
            "idle g/t": idle_style,
            "idle": idle_style,
        }
        printed = Text()
        for header, cell in cells.items():
            printed.append(f"{cell:>{WIDTHS[header]}}", style=styles.get(header, ""))
            printed.append(" ")
        printed.rstrip()
        missing = left_out(row)
        if missing:
            printed.append(f"\n{'held out':>{WIDTHS['step']}} {missing}", style="yellow")
        for told in set_lines(row):
            printed.append(f"\n{told}", style="green")
        rich.print(printed, no_wrap=True, crop=False)

    def _cells(self, row: Row) -> dict[str, str]:
        every_cell = format_cells(row, self.max_steps)
        return {header: every_cell[header] for header in self._columns}

    def close(self) -> None:
        """Finish the table."""
        if self._bar is not None:
            self._bar.close()
        self.stream.flush()


def format_cells(row: Row, max_steps: int | None) -> dict[str, str]:
    """Return the cells of a line by their header, unpadded; an empty one where the row has no
    value.
    """

    def cell(name: str, spec: str) -> str:
        value = row.get(name)
        return "" if value is None else format(value, spec)

    def pair(first: str, second: str) -> str:
        return f"{first or '-'}/{second or '-'}" if first or second else ""

    step = str(row["step"])
    rate = number_of(row, "generator/tokens_per_s")
    trainer_idle = cell("trainer/idle_fraction", ".0%")
    return {
        "step": f"{step}/{max_steps}" if max_steps else step,
        "reward": cell("reward/mean", ".3f") or ("--" if row.get("tokens/generated") else ""),
        "eval": evaluated(row) or cell("eval/loss", ".4f") or ("--" if row.get(LEFT_OUT) else ""),
        "lag": pair(cell("lag/mean", ".1f"), cell("lag/max", ".0f")),
        "loss": cell("loss/value", ".4f"),
        "grad": cell("grad_norm", ".3g"),
        "tok/s": "" if rate is None else short_count(rate),
        "idle g/t": pair(cell("generator/idle_fraction", ".0%"), trainer_idle),
        "idle": trainer_idle,
        "s/step": cell("time/step_s", ".3g"),
    }


def evaluated(row: Row, name: str = OWN) -> str:
    """Format the evaluation of a set, unpadded; "" where it has no number."""
    for column, spec in ((ACCURACY, ".1%"), (EVALUATED, ".3f")):
        value = row.get(column_of(name, column))
        if value is not None:
            return format(value, spec)
    return ""


def set_lines(row: Row) -> list[str]:
    """Return a line for each set of held-out prompts besides the task's own, such as "held-out NAME
    accuracy 12.0%".
    """
    lines = []
    for name in sets_of(row):
        is_accuracy = row.get(column_of(name, ACCURACY)) is not None
        line = f"held-out {name} {'accuracy' if is_accuracy else 'reward'} "
        line += evaluated(row, name) or "--"
        missing = left_out(row, name)
        lines.append(f"{line} ({missing})" if missing else line)
    return lines


def left_out(row: Row, name: str = OWN) -> str:
    """Say which completions of an evaluated set have no score, and why; "" where all have one."""
    count = row.get(column_of(name, LEFT_OUT))
    if not count:
        return ""
    what = "errors" if row.get(column_of(name, "eval/errors")) else "abstentions"
    reason = str(row.get(column_of(name, LEFT_OUT_REASON)))[:SHOWN_REASON]
    if row.get(column_of(name, EVALUATED)) is None:
        return f"all {count} are {what}: {reason}"
    return f"{count} {what} left out: {reason}"


def short_count(value: float) -> str:
    """Format a count with three digits and a letter: 812, 5.21k, 18.2k, 1.3M."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.0f}"


# --- How far some work is ---

LINE_EVERY_S = 10.0  # between two plain lines; shorter work has none
WINDOW = 20  # newest readings that tell the pace


class TimeLeft:
    """Predicts the end by the pace of the newest WINDOW readings."""

    def __init__(self):
        self._readings: deque[tuple[float, float]] = deque(maxlen=WINDOW + 1)

    def note(self, done: float, at_s: float) -> None:
        """Note how much was done at a time. If work or time goes back, start over: the row of an
        evaluation has the time of its end, which may be later than the next step's.
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
    """Shows how far some work is. total: in `unit`. stream: standard error unless given, so that
    standard output holds results only. is_bar: draw a bar on a terminal. at_once: units that run
    together; no time is predicted before as many are done, because the first ones to end took the
    time of all of them.
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
    """Tells in plain lines how far a slow checkpoint is; the run's own bar stays."""

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
