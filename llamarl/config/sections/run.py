"""The keys of a run that are in no section, and what cannot go together among them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Protocol

from llamarl.config.fields import (
    AtLeastOne,
    Count,
    Flag,
    Natural,
    Positive,
    Seed,
    marked,
    settings_dataclass,
)
from llamarl.config.findings import Findings
from llamarl.words.choices import Governor


@settings_dataclass
class RunSettings:
    max_steps: Natural
    run_dir: str | None = marked("outward")
    resume: str = marked("outward")
    resume_with_other: list[Literal["data", "reward", "model"]] = marked("outward")
    seed: Seed = marked("identity", "data", "answers", "outward")
    dry_run: Flag = marked("outward")
    ranks: Count | None = marked("outward")
    max_lag: Natural | None = marked("identity", "answers")
    overcommit: Natural | Governor
    on_deadline: Literal["wait", "truncate"]
    straggler_factor: AtLeastOne = marked("outward")
    groups_per_step: Count = marked("identity")
    group_size: Count = marked("identity", "answers")
    max_new_tokens: Count = marked("identity", "answers")
    temperature: Positive = marked("identity", "answers")
    lr: Positive
    threads: Count | None = marked("answers", "outward")
    timeout_s: Positive = marked("outward")
    heartbeat_timeout_s: Positive = marked("outward")
    stop_s: Positive
    offload: Flag

    @property
    def synchronous(self) -> bool:
        """Whether each step trains on what the newest weights sampled, and waits for it."""
        return self.max_lag == 0

    @property
    def reproducible(self) -> bool:
        """Whether two runs of one seed have bit-identical rows on a CPU, so that nothing may depend
        on a clock or on which of two ranks is first.
        """
        return self.synchronous


class Imagined(Protocol):
    """A config whose dry run may have more ranks than were started."""

    @property
    def dry_run(self) -> bool: ...

    @property
    def ranks(self) -> int | None: ...


def find_ranks(run: Imagined, num_started: int, found: Findings) -> None:
    """Find ranks that were not started. num_started: the ranks that torchrun started."""
    if run.ranks is not None and not run.dry_run:
        found.add(
            "a run has as many ranks as torchrun --nproc-per-node starts; +dry_run=true shows "
            "what other numbers would hold",
            "ranks",
            "dry_run",
        )
    if run.ranks is not None and num_started > 1:
        found.add(
            f"this dry run has {num_started} ranks already; start it in one process, without "
            "torchrun",
            "ranks",
        )


def unusable(path: Path) -> str | None:
    """Say why a directory cannot be there or be made; None if it can."""
    try:
        nearest = next(one for one in (path, *path.absolute().parents) if one.exists())
    except PermissionError as error:
        return f"{error.filename} cannot be looked into"
    if not nearest.is_dir():
        return f"{nearest} is a file"
    if not os.access(nearest, os.W_OK):
        return f"{nearest} cannot be written to"
    return None


def find_run(run: RunSettings, num_started: int, found: Findings) -> None:
    """Find ranks that were not started, and a run or a checkpoint that cannot be resumed.

    num_started: the ranks that torchrun started.
    """
    find_ranks(run, num_started, found)
    what = unusable(Path(run.run_dir)) if run.run_dir else None
    if run.run_dir is None and Path("runs").is_file():
        what = "runs is a file here"
    if what is not None:
        found.add(f"{what}; need a directory, or where one can be made: run_dir=DIR", "run_dir")
    if run.resume == "auto" and not run.run_dir:
        found.add("resume=auto looks in the run's directory; run_dir=DIR", "resume", "run_dir")
    if run.resume_with_other and run.resume == "never":
        found.add(
            "a run that resumes nothing cannot differ from anything; resume=auto or a "
            "checkpoint's directory, or resume_with_other=[]",
            "resume_with_other",
            "resume",
        )
    if run.resume not in ("auto", "never") and not Path(run.resume).is_dir():
        found.add("no such directory; need auto, never or a checkpoint's directory", "resume")
    if run.offload and not run.synchronous:
        found.add(
            "with lag the trainer and the generator work at the same time, so neither can leave "
            "the device; max_lag=0, or offload=false",
            "offload",
            "max_lag",
        )
