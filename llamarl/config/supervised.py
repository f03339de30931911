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
from llamarl.config.sections.checkpoint import CheckpointSettings
from llamarl.config.sections.metrics import MetricsSettings, find_metrics
from llamarl.config.sections.run import find_ranks
from llamarl.config.sections.trainer import ShardedTrainerSettings
from llamarl.words.fields import (
    AnyText,
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
from llamarl.words.findings import Findings, Problem


@settings_dataclass
class StartingModelSettings:
    path: Text
    """Directory of the model that training starts from."""
    dtype: Literal["float32", "bfloat16"]
    """Type of the written model."""


@settings_dataclass
class SupervisedRows:
    """Where the rows are, and how they become tokens."""

    kind: Literal["rows"]
    path: Text
    """JSON lines, as conf/reward_model.yaml and conf/sft.yaml say."""
    eval_path: AnyText | None
    """Held-out rows; null: one of each of num_eval prompts of path, at most a tenth."""
    num_eval: Natural
    """Prompts that are held out, if there is no eval_path."""
    max_tokens: Count
    """Tokens of a row: a prompt with its (longer) answer and the end token. If the model's
    context is shorter, that counts, and the log says so.
    """
    drop_long: Flag
    """Leave longer rows out, and count them; otherwise they are an error."""
    chat: Flag
    """Make a prompt that is a text a user's turn of the tokenizer's chat template, if it has
    one.
    """
    system_prompt: AnyText | None
    """System turn of prompts that have none of their own; null: none."""


@settings_dataclass
class SupervisedTrainerSettings(ShardedTrainerSettings):
    warmup_fraction: BelowOne
    """Share of all steps that is warm-up."""


@settings_dataclass
class PreferenceSettings:
    center_coef: NonNegative
    """Coefficient of (r_chosen + r_rejected)^2, which keeps scores near 0 (0.01 in Eisenstein
    et al. 2023).
    """


@settings_dataclass
class SupervisedEvalSettings:
    every: Natural
    """Steps between evaluations; 0: at the start and the end alone."""


@settings_dataclass
class SupervisedConfig:
    """Settings of every supervised job."""

    out: Text | None = marked("outward")
    """Directory of the model and of everything that the run writes; null: a new one under runs/."""
    resume: AnyText = marked("outward")
    """never; auto: the newest valid checkpoint of out, or a start if there is none; PATH: that
    checkpoint, or an error.
    """
    resume_with_other: list[Literal["data", "model"]] = marked("outward")
    """Resume although these differ from the checkpoint's: data (the rows), model (config.json
    under model.path).
    """
    dry_run: Flag = marked("outward")
    """Print the resolved job, its memory and three examples, and exit."""
    ranks: Count | None = marked("outward")
    """Ranks of a dry run in one process, as if so many were started; null: those that were."""
    seed: Seed = marked("identity")
    """Seed of the order of the rows, and of a reward model's head."""
    epochs: Positive | None = marked("identity")
    """Passes over the rows, or a part of one; null: as many as max_steps takes."""
    max_steps: Count | None = marked("identity")
    """End after so many steps, and have the schedule end there; null: after the epochs."""
    examples_per_step: Count = marked("identity")
    """Rows of an optimizer step, over all ranks."""
    lr: Positive = marked("identity")
    """Peak learning rate."""
    threads: Count | None = marked("outward")
    """Intra-op threads of a rank; null: 1 on CPUs, for equal bits."""
    timeout_s: Positive = marked("outward")
    """Seconds that any wait may last. Then a typed error names who waited for what."""
    heartbeat_timeout_s: Positive = marked("outward")
    """Seconds of silence after which a rank counts as dead."""
    stop_s: Positive = marked("outward")
    """Seconds that the checkpoint has to become whole after a stop request."""
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
    task: SupervisedRows = marked("data")
    loss: PreferenceSettings = marked("identity")

    scores: ClassVar[bool] = True


def check_common(
    config: SupervisedConfig, rows: SupervisedRows | None, world_size: int
) -> Findings:
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
