"""The sections of the schema for tasks: each kind alone, as one part of several, and as a set of
held-out prompts.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from llamarl.words.fields import (
    AnyText,
    ByKind,
    Count,
    Flag,
    Flat,
    Natural,
    Options,
    Positive,
    Text,
    Texts,
    settings_dataclass,
)
from llamarl.words.findings import Findings


@settings_dataclass
class TaskSettings:
    """The settings of every kind of task."""

    kind: str
    chat: Flag
    """Show prompts by the tokenizer's chat template."""
    system_prompt: AnyText | None
    """System turn of prompts that have none of their own; null: none."""
    max_prompt_tokens: Count
    """Tokens of a prompt at most. By default what the model's context leaves, up to 512."""


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
    """sum: how much two numbers are together; larger: which one is larger."""
    least: Natural
    """Smallest number of a question."""
    most: Natural
    """Largest number of a question. All pairs of numbers are asked; a tenth is held out, at
    most eval.num_prompts.
    """


@settings_dataclass
class OnePromptSettings(TaskSettings):
    kind: Literal["one_prompt"]
    text: AnyText
    """The prompt. It may be empty if the tokenizer begins a text with a token of its own."""
    words: Texts
    """The task's own reward is 1 if an answer holds one of these words."""


@settings_dataclass
class FileSettings(TaskSettings):
    """Rows of prompts and answers, under keys that the user names."""

    kind: Literal["jsonl", "hf_dataset"]
    path: Text
    """JSON lines; of hf_dataset a directory, a split's folder, a file, or a pattern of files
    (docs/data.md).
    """
    prompt_key: AnyText
    """Key of a row's prompt: a text, or a list of messages whose last is the user's
    (docs/data.md).
    """
    answer_key: AnyText | None
    """Key of a row's reference answer; null: there is none, and the reward must do without."""


@settings_dataclass
class RowsSettings(FileSettings):
    eval_path: AnyText | None
    """Held-out rows; null: a dataset's test or validation split, or a fixed random tenth of
    path. At most eval.num_prompts are asked.
    """


@settings_dataclass
class GSM8KFileSettings(TaskSettings):
    kind: Literal["gsm8k"]
    path: Text
    """JSON lines with question and answer."""


@settings_dataclass
class GSM8KSettings(GSM8KFileSettings):
    eval_path: AnyText | None
    """Held-out rows; null: a fixed random tenth of path. At most eval.num_prompts are asked."""


@settings_dataclass
class ReasoningGymSettings(TaskSettings):
    kind: Literal["reasoning_gym"]
    name: Text
    """Dataset of reasoning-gym. Problems are made from the seed; evaluation uses another seed."""
    options: Options
    """The dataset's own parameters: task.options.min_terms=2."""


@settings_dataclass
class PythonTaskSettings(TaskSettings):
    kind: Literal["python"]
    fn: Text
    """module:function, which returns a Task (docs/data.md)."""
    options: Options
    """Further arguments of the function: task.options.most=99."""


@settings_dataclass
class PlaySettings:
    """How dialogues with an environment go."""

    max_turns: Count
    """Turns of a dialogue at most."""
    max_turn_tokens: Count | None
    """Tokens of a turn at most; null: what max_new_tokens leaves, which counts all turns and
    what is said between them.
    """
    calls: Literal["auto", "json", "words"]
    """How the policy calls tools. json; words; auto: json with a chat template."""
    num_workers: Count
    """Worker processes. Many environments live in each."""
    timeout_s: Positive
    """Seconds of a call. Then its worker is killed; that dialogue is not trained on, and the
    worker's others are played again.
    """
    memory_mb: Count
    """MiB that a worker and its children may hold (Linux)."""
    kept_tokens: Natural | None
    """Places of keys and values that are kept while environments work; null: half as many as
    the cache has.
    """


@settings_dataclass
class PlayedSettings(TaskSettings):
    """Prompts whose answers go to an environment."""

    kind: Literal["environment"]
    environment: Text
    """module:Class of an environment of your own (docs/data.md)."""
    path: AnyText | None
    """JSON lines, whose rows the environment is reset with; null: it makes its own prompts."""
    prompt_key: AnyText
    """Key of a row's prompt: a text, or a list of messages whose last is the user's."""
    play: PlaySettings
    """How dialogues go."""


@settings_dataclass
class EnvironmentSettings(PlayedSettings):
    num_prompts: Count
    """Prompts of an environment that makes its own; then they are asked again."""
    eval_path: AnyText | None
    """Held-out rows; null: a fixed random tenth of path. At most eval.num_prompts are asked."""


OneTaskSettings = (
    AdditionSettings
    | FactsSettings
    | QuestionsSettings
    | OnePromptSettings
    | RowsSettings
    | GSM8KSettings
    | ReasoningGymSettings
    | PythonTaskSettings
    | EnvironmentSettings
)


@settings_dataclass
class TaskPartSettings:
    """A part of a mixture: the keys of a task, and its weight beside them."""

    prompts: Annotated[OneTaskSettings, ByKind(), Flat()]
    weight: Positive
    """Share of the tickets, in proportion to the other parts' weights."""


@settings_dataclass
class MixtureSettings:
    kind: Literal["mixture"]
    parts: dict[str, Annotated[TaskPartSettings, ByKind()]]
    """Tasks by names of your own: name -> kind, weight (1 if not given) and the keys of that
    kind. Keys that are not given have the values of conf/task/KIND.yaml (docs/data.md).
    """

    chat: ClassVar[bool] = False  # each part says this for its own prompts
    system_prompt: ClassVar[None] = None

    @property
    def max_prompt_tokens(self) -> int:
        """The largest of the parts'."""
        return max((part.prompts.max_prompt_tokens for part in self.parts.values()), default=1)


AnyTaskSettings = Annotated[OneTaskSettings | MixtureSettings, ByKind()]

HeldOutTaskSettings = (
    AdditionSettings
    | FactsSettings
    | QuestionsSettings
    | OnePromptSettings
    | FileSettings
    | GSM8KFileSettings
    | ReasoningGymSettings
    | PythonTaskSettings
    | PlayedSettings
)


@settings_dataclass
class EvalSetSettings:
    """A set of held-out prompts: a task without training rows, and how many are asked."""

    prompts: Annotated[HeldOutTaskSettings, ByKind(), Flat()]
    num_prompts: Count


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
