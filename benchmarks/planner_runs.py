"""The runs that benchmarks/planner.py predicts: which there are, which of them a fit may see, and
what is measured of each.

A cell is a model, a number of ranks, a split, a batch and whether it is synchronous. Which cells
are held out from the fit is a property of the cell, fixed here before any was measured: a fit sees
two ranks that are apart, and synchronous ones that share everything. All else is held out: one side
on both ranks, asynchronous jobs that share ranks, and three ranks on two cores.

Batches: 36 and 72 groups of the tiny model, 14 and 18 of one of 12.6 M. None of them was measured
before the planner that is held to them was finished: earlier runs had 16, 24, 28, 48, 56 and 64
groups, and 4, 6, 8, 10, 12 and 16.

Each cell is run several times, in turns: all cells once, in an order of the turn's own, then all
again. So whatever else the machine does for a while meets a turn of many cells, and not all runs of
one. A run's figure is the mean of its steps behind the first fifth, without the longest and the
shortest fifth of these, and a cell's is the median of its runs.

`threads=1` of every cell: no trainer changes its threads.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from running import keep, kept_file, run_job

GROUP = 8  # completions of a prompt
MAX_LAG = 2
POLL_S = 0.1
# Nothing but training: no evaluation, no checkpoint before the last. Completions of advantage 0 are
# trained on too, since how many there are is learned and no plan can know it.
COMMON = (
    "threads=1",
    f"group_size={GROUP}",
    "eval.every=0",
    "eval.num_prompts=0",
    "checkpoint.every=0",
    "trainer.skip_zero_advantage=false",
)


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the proof. batches: groups a step."""

    name: str
    batches: tuple[int, int]
    steps: int
    overrides: tuple[str, ...]


MODELS = (
    Model("tiny", (36, 72), 32, ("lr=1e-6",)),
    Model(
        "12.6 M",
        (14, 18),
        7,
        (
            "lr=1e-6",
            "max_new_tokens=32",
            "generator.min_new_tokens=32",
            "generator.max_slots=128",
            "task.max_prompt_tokens=32",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Split:
    """Which ranks each executor has."""

    name: str
    ranks: int
    trainer: tuple[int, ...]
    generator: tuple[int, ...]
    reward: tuple[int, ...]

    @property
    def overrides(self) -> tuple[str, ...]:
        """Each trainer rank has a model of its own, so that they only add their gradients up."""
        found = []
        for key in ("trainer", "generator", "reward"):
            ranks = ",".join(map(str, getattr(self, key)))
            found.append(f"placement.{key}=[{ranks}]")
        return (*found, f"trainer.replicate={len(self.trainer)}")


SPLITS = (
    Split("apart", 2, trainer=(0,), generator=(1,), reward=(1,)),
    Split("both train", 2, trainer=(0, 1), generator=(1,), reward=(1,)),
    Split("all on both", 2, trainer=(0, 1), generator=(0, 1), reward=(1,)),
    Split("three apart", 3, trainer=(0,), generator=(1,), reward=(2,)),
    Split("two generate", 3, trainer=(0,), generator=(1, 2), reward=(2,)),
    Split("two train", 3, trainer=(0, 1), generator=(2,), reward=(2,)),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A run of the proof."""

    model: Model
    split: Split
    groups: int
    is_synchronous: bool

    @property
    def name(self) -> str:
        """Its name, for people."""
        how = "sync" if self.is_synchronous else "async"
        return f"{self.model.name}, {self.split.name}, {self.groups} groups, {how}"

    @property
    def is_held_out(self) -> bool:
        """Whether no fit may see it."""
        if self.split.name == "all on both":
            return not self.is_synchronous
        return self.split.name != "apart"

    @property
    def overrides(self) -> list[str]:
        """The run's words."""
        # Half of a batch or a little less: two trainer ranks share them evenly.
        ahead = 0 if self.is_synchronous else self.groups // 4 * 2
        return [
            *COMMON,
            *self.model.overrides,
            *self.split.overrides,
            f"groups_per_step={self.groups}",
            f"max_steps={self.model.steps}",
            f"max_lag={0 if self.is_synchronous else MAX_LAG}",
            f"overcommit={ahead}",
        ]


def cells(turn: int = 0) -> list[Cell]:
    """All cells, those that a fit may see first, and so shuffled that what changes on the machine
    does not go with any setting.
    """
    found = []
    for model, split in itertools.product(MODELS, SPLITS):
        for groups, is_synchronous in itertools.product(model.batches, (True, False)):
            found.append(Cell(model, split, groups, is_synchronous))
    random.Random(turn).shuffle(found)
    return sorted(found, key=lambda cell: cell.is_held_out)


class Watch(threading.Thread):
    """Reads what the ranks of a job that this process starts have held at most, and computed."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self.peaks: dict[int, int] = {}  # process -> bytes, by its peak of resident memory

    def run(self) -> None:
        while not self._ended.wait(POLL_S):
            for launcher in children(None):
                for rank in children(launcher):
                    held = peak_bytes(rank)
                    if held:
                        self.peaks[rank] = max(held, self.peaks.get(rank, 0))

    def stop(self) -> list[int]:
        """End, and return the peaks of the ranks in the order in which they were started."""
        self._ended.set()
        self.join()
        return [self.peaks[rank] for rank in sorted(self.peaks)]


def children(process: int | None) -> list[int]:
    """The processes that this one, or another, has started and that are there."""
    place = "self" if process is None else str(process)
    found = []
    try:
        for task in Path(f"/proc/{place}/task").iterdir():
            found += [int(word) for word in (task / "children").read_text().split()]
    except OSError:
        pass  # it has ended
    return found


def peak_bytes(process: int) -> int:
    """The most resident memory that a process has had; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def run_dir_of(cell: Cell, runs: Path, turn: int) -> Path:
    """Where a cell's run is."""
    known: list[object] = [cell.name, cell.overrides]
    if turn:
        known.append(turn)
    return kept_file(runs, known).with_suffix("")


def measure(cell: Cell, model_path: str, runs: Path, turn: int = 0) -> dict:
    """Make a cell's run, unless it is kept, and return its record. turn: which run of the cell."""
    run_dir = run_dir_of(cell, runs, turn)
    file = run_dir.with_suffix(".json")
    if file.exists():
        return json.loads(file.read_text())
    words = cell.overrides
    if model_path:
        words += ["model=tiny", f"model.path={model_path}"]
    watch = Watch()
    watch.start()
    began = time.time()
    try:
        run_job(run_dir, words, ranks=cell.split.ranks, timeout_s=240)
    finally:
        peaks = watch.stop()
    found = {"cell": cell.name, "peak_bytes": peaks, "took_s": time.time() - began}
    keep(file, found)
    return found
