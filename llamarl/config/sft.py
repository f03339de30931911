"""The configuration of recipes/sft.py: a supervised job that learns rows, or the targets of a task
of the main job, until it is right often enough. Imports no torch.
"""

from __future__ import annotations

import functools
from typing import Annotated, ClassVar

from omegaconf import OmegaConf

from llamarl.config.command_line import JobKind, default_config, main
from llamarl.config.conversion import Problem, known_keys, to_config, to_values
from llamarl.config.rules import check as check_run
from llamarl.config.schema import Config
from llamarl.config.sections.task import (
    AdditionSettings,
    FactsSettings,
    GSM8KSettings,
    PythonTaskSettings,
    QuestionsSettings,
    ReasoningGymSettings,
    RowsSettings,
)
from llamarl.config.supervised import (
    SupervisedConfig,
    SupervisedEvalSettings,
    SupervisedRows,
    check_common,
)
from llamarl.models.config import tiny_directory
from llamarl.words.fields import ByKind, Count, Natural, Share, marked, settings_dataclass

SLOTS = 64  # held-out prompts that are completed at once

# For conf/sft/model/tiny.yaml.
OmegaConf.register_new_resolver("tiny_model", lambda: str(tiny_directory()), replace=True)


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
    """Return a main job with this task, which only completes its held-out prompts. Its settings for
    learning are never used.
    """
    values = to_values(default_config())
    own = to_values(config)
    for name in ("seed", "max_new_tokens", "threads", "timeout_s", "dry_run"):
        values[name] = own[name]
    values["task"] = own["task"]
    values["model"].update(own["model"])
    values["eval"].update(every=1, num_prompts=config.eval.num_prompts)
    values["generator"].update(max_slots=SLOTS)
    values["max_lag"] = 0
    return to_config(values)


def check(config: SFTConfig, world_size: int, local_world_size: int | None = None) -> list[Problem]:
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
    keys = known_keys(SFTConfig)
    for problem in check_run(as_run(config), 1, trains=False):
        if all(key in keys for key in problem.keys):
            found.problems.append(problem)
    return found.problems


SFT = JobKind(
    "sft",
    SFTConfig,
    check=check,
    groups={"model": "sft/model"},
    of_others=("groups_per_step",),
)
sft_main = functools.partial(main, kind=SFT)
