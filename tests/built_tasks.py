"""Tasks from their settings, with defaults for what a test does not say."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest

from llamarl.config.sections import task as sections
from llamarl.launch.tasks import TaskBuilder
from llamarl.tasks.base import Task
from llamarl.tasks.list_task import here

NAMES = {
    "addition": "Addition",
    "facts": "Facts",
    "questions": "Questions",
    "one_prompt": "OnePrompt",
    "jsonl": "Rows",
    "hf_dataset": "Rows",
    "gsm8k": "GSM8K",
    "reasoning_gym": "ReasoningGym",
    "python": "PythonTask",
    "environment": "Environment",
}
HELD_OUT = {"jsonl": "File", "hf_dataset": "File", "gsm8k": "GSM8KFile", "environment": "Played"}
PLAY = sections.PlaySettings(
    max_turns=8,
    max_turn_tokens=None,
    calls="auto",
    num_workers=1,
    timeout_s=10.0,
    memory_mb=2048,
    kept_tokens=None,
)
DEFAULTS = {
    "chat": True,
    "system_prompt": None,
    "max_prompt_tokens": 512,
    "path": None,
    "eval_path": None,
    "prompt_key": "prompt",
    "answer_key": "answer",
    "options": {},
    "least": 1,
    "most": 20,
    "num_prompts": 1,
    "play": PLAY,
}


def set_of(kind: str, *, num_prompts: int, **given: object) -> sections.EvalSetSettings:
    """Return the settings of a set of held-out prompts."""
    prompts = settings_of(kind, HELD_OUT.get(kind, NAMES[kind]), **given)
    return sections.EvalSetSettings(prompts=prompts, num_prompts=num_prompts)


def settings_of(kind: str, record: str = "", **given: object) -> Any:
    """Return the settings of a kind. record: its name; "": a whole task's."""
    made = getattr(sections, f"{record or NAMES[kind]}Settings")
    fields = get_type_hints(made)
    for key in ("path", "eval_path"):
        if given.get(key) is not None:
            given[key] = str(given[key])
    used = {key: value for key, value in DEFAULTS.items() if key in fields}
    return made(**{**used, "kind": kind, **given})


def need_reasoning_gym() -> None:
    """Skip a test where the package is not installed: one of its own needs a compiler."""
    pytest.importorskip("reasoning_gym", reason="needs the extra reasoning_gym")


def build_task(
    kind: str,
    tokenizer: Any,
    *,
    num_eval: int = 500,
    seed: int = 0,
    remembered: Any = here,
    parts: dict[str, dict[str, Any]] | None = None,
    **given: object,
) -> Task:
    """Build the task of a kind. parts: of a mixture, the settings by name."""
    if kind == "reasoning_gym":
        need_reasoning_gym()
    builder = TaskBuilder(tokenizer, seed, remembered)
    if parts is None:
        return builder.task(settings_of(kind, **given), num_eval)
    of_parts = {}
    for name, part in parts.items():
        keys = {"weight": 1.0, **part}
        weight = keys.pop("weight")
        of_parts[name] = sections.TaskPartSettings(prompts=settings_of(**keys), weight=weight)
    return builder.task(sections.MixtureSettings(kind="mixture", parts=of_parts), num_eval)
