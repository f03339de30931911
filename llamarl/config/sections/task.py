"""The sections of the schema for tasks: each kind alone, as one part of several, and as a set of
held-out prompts.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from llamarl.config.fields import (
    ByKind,
    Count,
    Flag,
    Natural,
    Options,
    Positive,
    Text,
    Texts,
    settings_dataclass,
)
from llamarl.config.findings import Findings


@settings_dataclass
class TaskSettings:
    """The settings of every kind of task."""

    kind: str
    chat: Flag
    system_prompt: str | None
    max_prompt_tokens: Count


@settings_dataclass
class AdditionSettings(TaskSettings):
    kind: Literal["addition"]


@settings_dataclass
class FactsSettings(TaskSettings):
    kind: Literal["facts"]


@settings_dataclass
class QuestionsSettings(TaskSettings):
    kind: Literal["questions"]
    name: Literal["sum", "larger"]
    least: Natural
    most: Natural


@settings_dataclass
class OnePromptSettings(TaskSettings):
    kind: Literal["one_prompt"]
    text: str
    words: Texts


@settings_dataclass
class FileSettings(TaskSettings):
    """Rows of prompts and answers, under keys that the user names."""

    kind: Literal["jsonl", "hf_dataset"]
    path: Text
    prompt_key: str
    answer_key: str | None  # None: no reference answer


@settings_dataclass
class RowsSettings(FileSettings):
    eval_path: str | None


@settings_dataclass
class GSM8KFileSettings(TaskSettings):
    kind: Literal["gsm8k"]
    path: Text


@settings_dataclass
class GSM8KSettings(GSM8KFileSettings):
    eval_path: str | None


@settings_dataclass
class ReasoningGymSettings(TaskSettings):
    kind: Literal["reasoning_gym"]
    name: Text
    options: Options  # the dataset's own parameters


@settings_dataclass
class PythonTaskSettings(TaskSettings):
    kind: Literal["python"]
    fn: Text
    options: Options  # further arguments of the function


@settings_dataclass
class PlaySettings:
    """How dialogues with an environment go."""

    max_turns: Count
    max_turn_tokens: Count | None  # None: what is left
    calls: Literal["auto", "json", "words"]
    num_workers: Count
    timeout_s: Positive
    memory_mb: Count
    kept_tokens: Natural | None  # None: half as many as the cache has


@settings_dataclass
class PlayedSettings(TaskSettings):
    """Prompts whose answers go to an environment."""

    kind: Literal["environment"]
    environment: Text
    path: str | None  # None: the environment makes its own prompts
    prompt_key: str
    num_prompts: Count  # if the environment makes them; of a set: that are asked
    play: PlaySettings


@settings_dataclass
class EnvironmentSettings(PlayedSettings):
    eval_path: str | None


@settings_dataclass
class AdditionPartSettings(AdditionSettings):
    weight: Positive


@settings_dataclass
class FactsPartSettings(FactsSettings):
    weight: Positive


@settings_dataclass
class QuestionsPartSettings(QuestionsSettings):
    weight: Positive


@settings_dataclass
class OnePromptPartSettings(OnePromptSettings):
    weight: Positive


@settings_dataclass
class RowsPartSettings(RowsSettings):
    weight: Positive


@settings_dataclass
class GSM8KPartSettings(GSM8KSettings):
    weight: Positive


@settings_dataclass
class ReasoningGymPartSettings(ReasoningGymSettings):
    weight: Positive


@settings_dataclass
class PythonPartSettings(PythonTaskSettings):
    weight: Positive


@settings_dataclass
class EnvironmentPartSettings(EnvironmentSettings):
    weight: Positive


AnyTaskPartSettings = Annotated[
    (
        AdditionPartSettings
        | FactsPartSettings
        | QuestionsPartSettings
        | OnePromptPartSettings
        | RowsPartSettings
        | GSM8KPartSettings
        | ReasoningGymPartSettings
        | PythonPartSettings
        | EnvironmentPartSettings
    ),
    ByKind(),
]


@settings_dataclass
class MixtureSettings:
    kind: Literal["mixture"]
    parts: dict[str, AnyTaskPartSettings]  # by names of the user's own

    chat: ClassVar[bool] = False  # each part says this for its own prompts
    system_prompt: ClassVar[None] = None

    @property
    def max_prompt_tokens(self) -> int:
        """The largest of the parts'."""
        return max(part.max_prompt_tokens for part in self.parts.values()) if self.parts else 1


AnyTaskSettings = Annotated[
    (
        AdditionSettings
        | FactsSettings
        | QuestionsSettings
        | OnePromptSettings
        | RowsSettings
        | GSM8KSettings
        | ReasoningGymSettings
        | PythonTaskSettings
        | EnvironmentSettings
        | MixtureSettings
    ),
    ByKind(),
]


def find_environment(
    task: PlayedSettings,
    section: str,
    found: Findings,
    *,
    generator_kind: str,
    tensor_parallel: int,
    has_victim: bool,
) -> None:
    """Find what dialogues cannot go together with. section: where the environment is set."""
    kind = f"{section}.kind"
    if has_victim:
        found.add(
            "an attack is one turn, which a victim answers; another task, or victim=none",
            kind,
            "victim.kind",
        )
    if generator_kind != "native":
        found.add(
            "only the native engine goes on behind what an environment says; generator=native",
            kind,
            "generator.kind",
        )
    if tensor_parallel > 1:
        found.add(
            "environments answer one rank, and the ranks that share a model would have to hear of "
            "it; generator.tensor_parallel=1",
            kind,
            "generator.tensor_parallel",
        )
    if not isinstance(task, EnvironmentSettings):
        return  # a set of held-out prompts has no others to hold out
    if task.path is None and task.eval_path is not None:
        found.add(
            f"an environment that makes its own prompts holds some of them out; {section}.path="
            f"FILE, or {section}.eval_path=null",
            f"{section}.eval_path",
            f"{section}.path",
        )


@settings_dataclass
class AdditionSetSettings(AdditionSettings):
    num_prompts: Count


@settings_dataclass
class FactsSetSettings(FactsSettings):
    num_prompts: Count


@settings_dataclass
class QuestionsSetSettings(QuestionsSettings):
    num_prompts: Count


@settings_dataclass
class OnePromptSetSettings(OnePromptSettings):
    num_prompts: Count


@settings_dataclass
class RowsSetSettings(FileSettings):
    num_prompts: Count


@settings_dataclass
class GSM8KSetSettings(GSM8KFileSettings):
    num_prompts: Count


@settings_dataclass
class ReasoningGymSetSettings(ReasoningGymSettings):
    num_prompts: Count


@settings_dataclass
class PythonSetSettings(PythonTaskSettings):
    num_prompts: Count


@settings_dataclass
class EnvironmentSetSettings(PlayedSettings):
    pass


AnyEvalSetSettings = Annotated[
    (
        AdditionSetSettings
        | FactsSetSettings
        | QuestionsSetSettings
        | OnePromptSetSettings
        | RowsSetSettings
        | GSM8KSetSettings
        | ReasoningGymSetSettings
        | PythonSetSettings
        | EnvironmentSetSettings
    ),
    ByKind(),
]
AnyPromptSettings = AnyTaskSettings | AnyTaskPartSettings | AnyEvalSetSettings
