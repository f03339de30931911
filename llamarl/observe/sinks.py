"""Sinks: where rows go. Here is the JSONL file; the console is in console.py, other programs'
sinks are in services.py.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Protocol

from llamarl.disk.files import set_aside
from llamarl.disk.space import shown_free
from llamarl.errors import MetricsError
from llamarl.observe.rates import Row, step_of

# The most that is held of rows that the disk refuses: some 32,000 rows of 2 KB.
MOST_HELD_BYTES = 1 << 26

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes finished rows, in step order, each once.

    An error of a sink ends no run: RowWriter warns of it once.
    """

    def write(self, row: Row) -> None:
        """Take one row: {"step": int, name: number, text or None}."""

    def close(self) -> None:
        """Release files and connections."""


class Jsonl:
    """Writes one JSON object a line, in UTF-8. A row reaches the file at once, so that a killed run
    loses none.

    Rows that the disk refuses (it is full, over its quota, read-only, broken) are held in memory,
    some 2 KB each and MOST_HELD_BYTES in all, and written in their order with the next row, or by
    `retry`. A line is in the file as a whole and once: what the disk took of one is cut off again.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._continues = False  # after a write or truncate: append to what is there
        self._num_bytes = 0  # of the whole lines in the file
        self._held: list[tuple[int, bytes]] = []  # (step, line), oldest first
        self._held_bytes = 0
        self._lost: list[int] = []  # steps whose rows there was no memory for either
        self._refused: OSError | None = None  # why the oldest held row is not in the file

    @property
    def held(self) -> list[Row]:
        """The rows that the disk has refused so far, oldest first."""
        return [json.loads(line) for _, line in self._held]

    def write(self, row: Row) -> None:
        """Append one row, after those that are held; or hold it, with a warning at the first."""
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        if self._held_bytes + len(line) > MOST_HELD_BYTES:
            if not self._lost:
                log.error(
                    "%s: %s bytes of rows are held in memory; those from step %d on are lost, but "
                    "for what the console shows",
                    self.path,
                    f"{self._held_bytes:,}",
                    row["step"],
                )
            self._lost.append(step_of(row))
        else:
            self._held.append((step_of(row), line))
            self._held_bytes += len(line)
        self.retry()

    def retry(self) -> bool:
        """Write what is held. Returns whether nothing is held any more."""
        if not self._held:
            return True
        steps = [step for step, _ in self._held]
        try:
            self._append_held()
        except OSError as error:
            if self._refused is None:
                log.error(
                    "%s: the row of step %d (%d bytes) is refused (%s), and %s. It and those after "
                    "it are held in memory, and written once the disk takes them. Make room there; "
                    "training goes on",
                    self.path,
                    self._held[0][0],
                    len(self._held[0][1]),
                    error,
                    shown_free(self.path),
                )
            self._refused = error
            return False
        if self._refused is not None:
            log.warning("%s: %s, which were held, are written", self.path, _shown(steps))
            self._refused = None
        return True

    def _append_held(self) -> None:
        """Append the held lines, as many as the disk takes. OSError if it does not take all."""
        if not self._continues:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            set_aside(self.path)
            self._continues = True
        refused: OSError | None = None
        num_written = 0
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            end = min(size, self._num_bytes)
            if size > end:
                os.ftruncate(descriptor, end)  # of a line that the disk took only a part of
            try:
                for _, line in self._held:
                    _write_at(descriptor, line, end)
                    end += len(line)
                    num_written += 1
            except OSError as error:
                refused = error
                os.ftruncate(descriptor, end)
        finally:
            # A network file system may refuse only here: then nothing counts as written.
            os.close(descriptor)
        self._num_bytes = end
        self._held_bytes -= sum(len(line) for _, line in self._held[:num_written])
        del self._held[:num_written]
        if refused is not None:
            raise refused

    def sync(self) -> None:
        """Put the written rows on the disk, so that they survive a power cut. If the disk refuses,
        warn only: the checkpoint is worth more than a few rows.
        """
        try:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
        except FileNotFoundError:
            return  # there is no row yet
        except OSError as error:
            log.warning("%s: may lose its last rows in a power cut (%s)", self.path, error)

    def read(self) -> list[Row]:
        """Return all rows so far: those of the file (see `read_rows`), and those that are held."""
        written = read_rows(self.path) if self.path.exists() else []
        return written + self.held

    def truncate(self, step: int) -> list[Row]:
        """Cut off the rows from `step` on, and a line that a kill left unfinished. Returns the rows
        cut off.
        """
        assert not self._continues, "truncate comes before the first write"
        self._continues = True
        rows = self.read()
        # Rows are in step order: the kept ones are a prefix.
        num_kept = sum(step_of(row) < step for row in rows)
        if self.path.exists():
            with open(self.path, "r+b") as file:
                for _ in range(num_kept):
                    file.readline()
                self._num_bytes = file.tell()
                file.truncate(self._num_bytes)
        return rows[num_kept:]

    def close(self, sealed_step: int | None = None) -> None:
        """Write what is held. MetricsError names the rows that the disk still refuses, and those of
        them that the checkpoint of sealed_step holds.
        """
        self.retry()
        missing = [step for step, _ in self._held] + self._lost
        if not missing:
            return
        kept = []
        if sealed_step is not None:
            kept = [step for step, _ in self._held if step <= sealed_step]
        lost = missing[len(kept) :]
        why = self._refused or "the disk refused them for too long to hold them"
        said = [f"{self.path}: {_shown(missing)} could not be written ({why}), "]
        said.append(f"and {shown_free(self.path)}.")
        if kept:
            said.append(
                f" The checkpoint of step {sealed_step} holds {_shown(kept)}: make room there, and "
                "start again with resume=auto, which writes them."
            )
        if lost:
            said.append(f" No checkpoint holds {_shown(lost)}: what they said is on the console.")
        raise MetricsError("".join(said))


def _write_at(descriptor: int, line: bytes, offset: int) -> None:
    """Write all of a line at a place of a file. OSError if the disk does not take all of it."""
    while line:
        num_bytes = os.pwrite(descriptor, line, offset)
        if not num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        line = line[num_bytes:]
        offset += num_bytes


def _shown(steps: list[int]) -> str:
    """Format the rows of these steps, for people."""
    if len(steps) == 1:
        return f"the row of step {steps[0]}"
    return f"{len(steps)} rows (steps {steps[0]} to {steps[-1]})"


def read_rows(path: str | Path) -> list[Row]:
    """Read the rows of a metrics.jsonl. An unfinished last line is left out; any other bad line is
    a ValueError "FILE:LINE: what".
    """
    lines = Path(path).read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{path}:{number}: not JSON ({error}); repair or delete this line"
            ) from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ValueError(
                f'{path}:{number}: not a metrics row: need an object with an integer "step"'
            )
        rows.append(row)
    return rows
