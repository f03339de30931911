"""The configuration of a supervised job: recipes/reward_model.py and, with what llamarl.config.sft
adds, recipes/sft.py. Imports no torch.

As llamarl.config.schema is for the main job: types and ranges here, values and what they mean in
conf/supervised.yaml.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import ClassVar, Literal

from llamarl.config.command_line import JobKind, main
from llamarl.config.conversion import to_values
from llamarl.config.fields import (
    BelowOne,
    Count,
    Flag,
    Natural,
    NonNegative,
    Positive,
    Seed,
    Text,
    marked,
    settings_dataclass,
)
from llamarl.config.findings import Findings, Problem
from llamarl.config.sections.checkpoint import CheckpointSettings
from llamarl.config.sections.metrics import MetricsSettings, find_metrics
from llamarl.config.sections.run import find_ranks
from llamarl.config.sections.trainer import ShardedTrainerSettings


@settings_dataclass
class StartingModelSettings:
    path: Text
    dtype: Literal["float32", "bfloat16"]


@settings_dataclass
class RowsSettings:
    """Where the rows are, and how they become tokens."""

    kind: Literal["rows"]
    path: Text
    eval_path: str | None
    num_eval: Natural
    max_tokens: Count
    drop_long: Flag
    chat: Flag
    system_prompt: str | None


@settings_dataclass
class SupervisedTrainerSettings(ShardedTrainerSettings):
    warmup_fraction: BelowOne


@settings_dataclass
class PreferenceSettings:
    center_coef: NonNegative


@settings_dataclass
class SupervisedEvalSettings:
    every: Natural


@settings_dataclass
class SupervisedConfig:
    """Settings of every supervised job."""

    out: Text | None = marked("outward")
    resume: str = marked("outward")
    resume_with_other: list[Literal["data", "model"]] = marked("outward")
    dry_run: Flag = marked("outward")
    ranks: Count | None = marked("outward")
    seed: Seed = marked("identity")
    epochs: Positive | None = marked("identity")
    max_steps: Count | None = marked("identity")
    examples_per_step: Count = marked("identity")
    lr: Positive = marked("identity")
    threads: Count | None = marked("outward")
    timeout_s: Positive = marked("outward")
    heartbeat_timeout_s: Positive = marked("outward")
    stop_s: Positive = marked("outward")
    model: StartingModelSettings
    eval: SupervisedEvalSettings
    checkpoint: CheckpointSettings = marked("outward")
    metrics: MetricsSettings = marked("outward")
    trainer: SupervisedTrainerSettings

    scores: ClassVar[bool]  # whether the model is a scorer rather than a language model

    @property
    def run_dir(self) -> str | None:
        """The directory of the run, which is called `out` here."""
        return self.out


@settings_dataclass
class RewardModelConfig(SupervisedConfig):
    task: RowsSettings = marked("data")
    loss: PreferenceSettings = marked("identity")

    scores: ClassVar[bool] = True


def check_common(config: SupervisedConfig, rows: RowsSettings | None, world_size: int) -> Findings:
    """Find what cannot work together in any supervised job, or with this many ranks and these
    files. rows: the config's, if it has any.
    """
    found = Findings(to_values(config))
    find_ranks(config, world_size, found)
    world_size = config.ranks or world_size
    if world_size % config.trainer.replicate:
        found.add(f"must divide the {world_size} ranks", "trainer.replicate")
    files: dict[str, str | None] = {"model.path": f"{config.model.path}/config.json"}
    if rows is not None:
        files |= {"task.path": rows.path, "task.eval_path": rows.eval_path}
    for key, file in files.items():
        if file is not None and not Path(file).is_file():
            found.add(f"there is no file {file}", key)
    find_metrics(config.metrics, found)
    if config.resume not in ("never", "auto") and not Path(config.resume).is_dir():
        found.add("need never, auto, or the directory of a checkpoint", "resume")
    if config.resume == "auto" and config.out is None:
        found.add("resume=auto looks in the run's directory; out=DIR", "resume", "out")
    if config.epochs is None and config.max_steps is None:
        found.add("the job would never end; set one of them", "epochs", "max_steps")
    return found


def check(
    config: RewardModelConfig, world_size: int, local_world_size: int | None = None
) -> list[Problem]:
    """Return the values that cannot work together, or with this many ranks and these files."""
    return check_common(config, config.task, world_size).problems


def is_of_a_supervised_job(file: Path) -> bool:
    """Whether a run's config.yaml is a supervised job's, which does not say how to sample. Only
    these have the key `out`.
    """
    lines = file.read_text(errors="replace").splitlines()
    return any(line.startswith("out:") for line in lines)


REWARD_MODEL = JobKind("reward_model", RewardModelConfig, check=check)
reward_model_main = functools.partial(main, kind=REWARD_MODEL)
