"""Where rows go: JSONL always, TensorBoard and Weights & Biases by option. The console is in
console.py.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from llamarl.errors import MetricsError
from llamarl.native.disk import free_bytes
from llamarl.observe.console import RL_COLUMNS, Console
from llamarl.observe.rates import Row
from llamarl.observe.signal import SignalWatch


class Sink(Protocol):
    """Anything that takes finished rows, in step order, each once."""

    def write(self, row: Row) -> None:
        """Take one row: {"step": int, name: number, text or None}."""

    def close(self) -> None:
        """Release files and connections."""


class Jsonl:
    """One JSON object a line, in UTF-8, flushed at every row, so that a killed run loses no row."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._continues = False  # after a write or truncate: append to what is there

    def write(self, row: Row) -> None:
        """Append one row. MetricsError if the disk refuses it; what a resumed run finds of the row
        then, it cuts off.
        """
        line = json.dumps(row, allow_nan=False) + "\n"
        try:
            if not self._continues:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._set_aside()
                self._continues = True
            with self.path.open("ab") as file:
                file.write(line.encode())
        except OSError as error:
            what = f"the row of step {row['step']} ({len(line)} bytes)"
            raise MetricsError(
                f"{self.path}: {what} could not be written ({error}), "
                f"and {free_bytes(self.path):,} bytes are free. "
                "Make room there, and start again with resume=auto"
            ) from error

    def read(self) -> list[Row]:
        """All rows of the file so far; see `read_rows`."""
        return read_rows(self.path) if self.path.exists() else []

    def truncate(self, step: int) -> list[Row]:
        """Cut off the rows from `step` on, and a line that a kill left unfinished. Returns the rows
        cut off.
        """
        assert not self._continues, "truncate comes before the first write"
        self._continues = True
        rows = self.read()
        # Rows are in step order: the kept ones are a prefix.
        num_kept = sum(row["step"] < step for row in rows)
        if self.path.exists():
            with open(self.path, "r+b") as file:
                for _ in range(num_kept):
                    file.readline()
                file.truncate(file.tell())
        return rows[num_kept:]

    def close(self) -> None:
        """Nothing is held open between rows."""

    def _set_aside(self) -> None:
        """Keep an earlier run's file as NAME.1.jsonl, NAME.2.jsonl, ..."""
        if self.path.exists():
            names = (self.path.with_suffix(f".{n}{self.path.suffix}") for n in itertools.count(1))
            os.replace(self.path, next(aside for aside in names if not aside.exists()))


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a metrics.jsonl. An unfinished last line is left out; any other bad line is a
    ValueError "FILE:LINE: what".
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


class TensorBoard:
    """Scalars under RUN_DIR/tensorboard; a resumed run hides what an earlier one logged from its
    first row on.
    """

    def __init__(self, run_dir: str | Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"metrics.tensorboard=true needs TensorBoard: pip install tensorboard ({error})"
            ) from error
        self._open = partial(SummaryWriter, str(Path(run_dir) / "tensorboard"))
        self._writer: SummaryWriter | None = None

    def write(self, row: Row) -> None:
        if self._writer is None:
            self._writer = self._open(purge_step=row["step"])
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB:
    """One Weights & Biases run a run directory: its id is kept in RUN_DIR/wandb_id, so that a
    resumed run continues it.

    W&B takes steps only upwards: rows that a resumed run repeats are ignored by it, with its own
    warning.
    """

    def __init__(self, run_dir: str | Path, *, config: dict | None = None):
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                f"metrics.wandb=true needs Weights & Biases: pip install wandb ({error})"
            ) from error
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        id_file = run_dir / "wandb_id"
        run_id = id_file.read_text().strip() if id_file.exists() else None
        self._run = wandb.init(
            project="llamarl", dir=str(run_dir), config=config, id=run_id, resume="allow"
        )
        id_file.write_text(self._run.id)

    def write(self, row: Row) -> None:
        values = {name: value for name, value in row.items() if isinstance(value, int | float)}
        step = values.pop("step")
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


def build_sinks(
    run_dir: str | Path,
    *,
    max_steps: int | None,
    columns: Sequence[str] = RL_COLUMNS,
    tensorboard: bool = False,
    wandb: bool = False,
    config: dict | None = None,
) -> list[Sink]:
    """The console and what was asked for; RowWriter adds the JSONL file. ValueError names a package
    that is missing.

    columns: those that the console shows.
    """
    sinks: list[Sink] = [Console(max_steps=max_steps, columns=columns), SignalWatch()]
    if tensorboard:
        sinks.append(TensorBoard(run_dir))
    if wandb:
        sinks.append(WandB(run_dir, config=config))
    return sinks
