"""The keys of a run that are in no section, the sections `checkpoint` and `metrics`, and
what cannot go together among them.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from llamarl.words.choices import DeviceName, Governor
from llamarl.words.fields import (
    AnyText,
    AtLeastOne,
    Count,
    Flag,
    Natural,
    Positive,
    Seed,
    Text,
    Whole,
    marked,
    settings_dataclass,
)
from llamarl.words.findings import Findings

# More would take a dry run minutes.
_PLACED = Field(ge=1, le=65_536, description="a whole number from 1 to 65,536")
PlacedRanks = Annotated[Whole, _PLACED]


@settings_dataclass
class RunSettings:
    max_steps: Natural
    """Batches that are trained on. A policy version counts them; trainer.minibatches_per_step
    makes several updates of one.
    """
    num_epochs: Positive | None
    """Passes over the task's training rows, or a part of one. max_steps then follows from the rows
    whose prompts fit; null: max_steps is as given.
    """
    run_dir: AnyText | None = marked("outward")
    """Directory of everything that the run writes; null: a new one under runs/."""
    resume: AnyText = marked("outward")
    """never; auto: the newest valid checkpoint of run_dir, or a start if there is none; PATH:
    that checkpoint, or an error.
    """
    resume_with_other: list[Literal["data", "reward", "model"]] = marked("outward")
    """Resume although these differ from the checkpoint's: data (its prompts), reward (what
    scores), model (model.path, eval.gold, ...).
    """
    seed: Seed = marked("identity", "data", "answers", "outward")
    """Seed of every random choice."""
    dry_run: Flag = marked("outward")
    """Print the resolved run, check data and reward on three samples, and exit."""
    ranks: PlacedRanks | None = marked("outward")
    """Ranks of a dry run in one process, as if so many were started; null: those that were."""
    max_lag: Natural | None = marked("identity", "answers")
    """Steps that the oldest token of a trained completion may be old; 0: synchronous and
    on-policy. With N minibatches and T passes a step, that is up to (max_lag + 1) N T - 1
    optimizer updates. With buffer=replay: at the time a completion joins the buffer; null: only
    the buffer's size bounds it (docs/algorithms.md).
    """
    overcommit: Natural | Governor
    """Groups that are started beyond one batch and not yet trained on, or a rule that finds how
    many (docs/asynchrony.md). auto: as few as keep the trainer from waiting; oppo, window: by
    the trend of the reward. With max_lag=null: beyond one batch and not yet arrived at the
    trainer; auto: another batch, or two groups a generator if that is more.
    """
    on_deadline: Literal["wait", "truncate"]
    """What happens to a straggler at its last step. wait: the trainer waits for it; truncate:
    its unfinished completions end there and are not trained on.
    """
    straggler_factor: AtLeastOne = marked("outward")
    """The log names a ticket that takes more than this many times the median."""
    groups_per_step: Count = marked("identity")
    """Prompts of a step, over all trainer ranks."""
    group_size: Count = marked("identity", "answers")
    """Completions of a prompt."""
    max_new_tokens: Count = marked("identity", "answers")
    """Tokens of a completion at most, over all turns of a dialogue."""
    temperature: Positive = marked("identity", "answers")
    """Sampling temperature. The trainer scores tokens at the same temperature."""
    lr: Positive
    """Peak learning rate."""
    device: DeviceName = marked("outward")
    """auto: a GPU where there is one, else the CPU; or one of the others, for all that the job
    computes. mps is a Mac's GPU, on which nothing was tried (docs/quickstart.md).
    """
    threads: Count | None = marked("answers", "outward")
    """Intra-op threads of a rank; null: on CPUs 1 with max_lag=0 (for equal bits), else
    OMP_NUM_THREADS if it is set, else the machine's cores over its ranks; with GPUs torch's own
    number. The OMP_NUM_THREADS=1 that torchrun sets counts as not set.
    """
    timeout_s: Positive = marked("outward")
    """Seconds that any wait may last. Then a typed error names who waited for what."""
    heartbeat_timeout_s: Positive = marked("outward")
    """Seconds of silence after which a rank counts as dead."""
    stop_s: Positive
    """Seconds that the ranks have to end after a stop request, once the trainer's step and
    export are done.
    """
    offload: Flag
    """Executors of placement.colocate take turns on their device and wait in host memory. Needs
    max_lag=0.
    """

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


def find_ranks(ranks: int | None, dry_run: bool, num_started: int, found: Findings) -> None:
    """Find ranks that were not started. num_started: the ranks that torchrun started."""
    if ranks is not None and not dry_run:
        found.add(
            "a run has as many ranks as torchrun --nproc-per-node starts; +dry_run=true shows "
            "what other numbers would hold",
            "ranks",
            "dry_run",
        )
    if ranks is not None and num_started > 1:
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


def find_run(run: RunSettings, num_started: int, found: Findings, *, has_rows: bool) -> None:
    """Find ranks that were not started, and a run or a checkpoint that cannot be resumed.

    num_started: the ranks that torchrun started. has_rows: the task's prompts are one list of rows.
    """
    find_ranks(run.ranks, run.dry_run, num_started, found)
    if run.num_epochs is not None and not has_rows:
        found.add(
            "this task has no list of rows to pass over; max_steps=STEPS in place of num_epochs",
            "num_epochs",
            "task.kind",
        )
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


@settings_dataclass
class CheckpointSettings:
    every: Natural
    """Steps between checkpoints; 0: one at the end alone."""
    keep: Count
    """Newest checkpoints that are kept."""


@settings_dataclass
class MetricsSettings:
    tensorboard: Flag
    """Write metrics for TensorBoard too."""
    wandb: Flag
    """Send metrics to Weights & Biases too."""
    trackio: Flag
    """Send metrics to Trackio too, which keeps them on this machine."""
    mlflow: Flag
    """Write metrics for MLflow too: to RUN_DIR/mlruns, or to MLFLOW_TRACKING_URI."""
    project: Text
    """Project (of MLflow: experiment) of the run at wandb, trackio and mlflow."""
    run_name: Text | None
    """Name of the run there; null: that of the run's directory."""
    trace: Flag
    """Write a bounded Perfetto trace of what every rank did."""


@settings_dataclass
class RunMetricsSettings(MetricsSettings):
    """Those of a run of RL, which has samples to look at."""

    samples: Natural
    """Groups of a step that are kept in RUN_DIR/samples.jsonl for the report; 0: none
    (docs/watching.md).
    """
    show_every: Natural
    """Steps between two looks of the console at the best and the worst completion of such a
    group, and between two tables of samples at wandb, trackio and mlflow; 0: never.
    """


def find_metrics(metrics: MetricsSettings, found: Findings) -> None:
    """Find places for rows whose package is not installed: each is an extra of its own name."""
    for name in ("tensorboard", "wandb", "trackio", "mlflow"):
        if not getattr(metrics, name):
            continue
        package = find_spec(name)
        # A folder of that name here, such as the one that wandb makes, has no origin.
        if package is None or package.origin is None:
            what = f"the package {name} is missing; pip install 'llamarl[{name}]'"
            found.add(what, f"metrics.{name}")
