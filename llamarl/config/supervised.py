"""The configurations of supervised jobs: recipes/reward_model.py, which learns rows of preferences,
and recipes/sft.py, which learns rows, or the targets of a task of the main job until it is right
often enough. Imports no torch.

As llamarl.config.schema is for the main job: types and ranges here, values and what they mean in
conf/supervised.yaml.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from omegaconf import OmegaConf

from llamarl.config.command_line import JobKind, sampling_job
from llamarl.config.conversion import known_keys, to_values
from llamarl.config.recipe import main
from llamarl.config.rules import check_sampling
from llamarl.config.schema import Config
from llamarl.config.sections.run import (
    CheckpointSettings,
    MetricsSettings,
    PlacedRanks,
    find_metrics,
    find_ranks,
)
from llamarl.config.sections.task import (
    AdditionSettings,
    FactsSettings,
    GSM8KSettings,
    PythonTaskSettings,
    QuestionsSettings,
    ReasoningGymSettings,
    RowsSettings,
)
from llamarl.config.sections.trainer import ShardedTrainerSettings
from llamarl.models.config import tiny_directory
from llamarl.words.choices import DeviceName
from llamarl.words.fields import (
    AnyText,
    BelowOne,
    ByKind,
    Count,
    Flag,
    Natural,
    NonNegative,
    Options,
    Positive,
    Seed,
    Share,
    Text,
    marked,
    settings_dataclass,
)
from llamarl.words.findings import Findings, Problem

SLOTS = 64  # held-out prompts that are completed at once

# For conf/sft/model/tiny.yaml.
OmegaConf.register_new_resolver("tiny_model", lambda: str(tiny_directory()), replace=True)


@settings_dataclass
class StartingModelSettings:
    path: Text
    """Directory of the model that training starts from."""
    dtype: Literal["float32", "bfloat16"]
    """Type of the written model."""
    template_options: Options
    """Variables of the chat template: model.template_options.enable_thinking=false."""


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
    ranks: PlacedRanks | None = marked("outward")
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
    device: DeviceName = marked("outward")
    """auto: a GPU where there is one, else the CPU; or one of the others, for all that the job
    computes. mps is a Mac's GPU, on which nothing was tried (docs/quickstart.md).
    """
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
    find_ranks(config.ranks, config.dry_run, world_size, found)
    world_size = config.ranks or world_size
    if config.device == "mps" and world_size > 1:
        what = f"{world_size} ranks cannot share a model on a Mac's GPU; start one, or device=cpu"
        found.add(what, "device")
    if config.device == "mps" and config.trainer.cpu_offload:
        what = "not on a Mac's GPU; leave it out, or device=cpu"
        found.add(what, "device", "trainer.cpu_offload")
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


def check_reward_model(
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


REWARD_MODEL = JobKind("reward_model", RewardModelConfig, check=check_reward_model)
reward_model_main = functools.partial(main, kind=REWARD_MODEL)


@settings_dataclass
class SFTEvalSettings(SupervisedEvalSettings):
    num_prompts: Natural = marked("data")
    """Held-out prompts of a task. Of rows, task.num_eval are held out."""


@settings_dataclass
class SFTConfig(SupervisedConfig):
    task: Annotated[
        SupervisedRows
        | AdditionSettings
        | FactsSettings
        | QuestionsSettings
        | RowsSettings
        | GSM8KSettings
        | ReasoningGymSettings
        | PythonTaskSettings,
        ByKind(),
    ] = marked("data")
    eval: SFTEvalSettings
    target_accuracy: Share | None
    """Of a task: end once the greedy answers to its held-out prompts have this mean reward by
    the task's own, measured every eval.every steps; null: nothing is answered.
    """
    max_new_tokens: Count | None
    """Tokens of such an answer. Every task has its own."""

    scores: ClassVar[bool] = False

    @property
    def rows(self) -> SupervisedRows | None:
        """The rows that are learned; None if the job learns a task's targets."""
        return self.task if isinstance(self.task, SupervisedRows) else None


def as_run(config: SFTConfig) -> Config:
    """Return a main job that only completes the held-out prompts of the task."""
    values = ("seed", "max_new_tokens", "device", "threads", "timeout_s", "dry_run")
    settings = {"eval.every": 1, "generator.max_slots": SLOTS}
    return sampling_job(config, (*values, "task", "model", "eval"), settings)


def check_sft(
    config: SFTConfig, world_size: int, local_world_size: int | None = None
) -> list[Problem]:
    """Return what cannot work together, or with this many ranks and these files."""
    found = check_common(config, config.rows, world_size)
    aims = config.target_accuracy is not None
    if config.rows is not None:
        if aims:
            what = (
                "rows have no held-out prompts to complete and score; choose a task, such as "
                "task=jsonl task.path=FILE task.answer_key=completion"
            )
            found.add(what, "target_accuracy")
        return found.problems
    if config.max_new_tokens is None:
        found.add("need the longest completion, a whole number of at least 1", "max_new_tokens")
        return found.problems
    if aims and not config.eval.num_prompts:
        found.add(
            "no prompt is completed, so no accuracy is known; eval.num_prompts=100, or "
            "target_accuracy=null",
            "target_accuracy",
            "eval.num_prompts",
        )
    return found.problems + check_sampling(as_run(config), known_keys(SFTConfig))


SFT = JobKind(
    "sft",
    SFTConfig,
    check=check_sft,
    groups={"model": "sft/model"},
    of_others=("groups_per_step",),
)
sft_main = functools.partial(main, kind=SFT)
