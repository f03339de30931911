"""The engine of dialogues from a config: environments, with their workers, around an engine that
samples turns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from executors.generator import TRAIN
from llamarl.config.sections.task import PlayedSettings
from llamarl.environments.calls import FORMATS
from llamarl.environments.dialogues import Dialogues, Environment
from llamarl.environments.engine import DialogueEngine
from llamarl.environments.pool import EnvironmentPool
from llamarl.inference import Engine
from llamarl.launch.inputs import JobInputs
from llamarl.tasks.environment import makes_prompts, turn_tokens
from llamarl.tasks.parts import section_of
from llamarl.types import Prompt


def dialogue_engine(inner: Engine, inputs: JobInputs) -> DialogueEngine:
    """Build the engine of dialogues around one that samples turns and has its weights."""
    sections = inputs.config.environments.keys()
    return DialogueEngine(
        inner,
        partial(_dialogues, inputs),
        prompt_of=partial(_prompt_of, inputs),
        is_played=lambda prompt: section_of(prompt) in sections,
        reproducible=inputs.config.reproducible,
    )


def _prompt_of(inputs: JobInputs, stream: int, ticket: int) -> Prompt:
    """Return the prompt of a ticket, or in a stream of evaluations the held-out one."""
    return inputs.prompts[ticket] if stream == TRAIN else inputs.held_out.prompt(ticket)


def _dialogues(inputs: JobInputs, on_answer: Callable[[], None]) -> Dialogues:
    """Build the dialogues of a replica with all its environments, and their workers."""
    config = inputs.config
    environments = {}
    for section, task in config.environments.items():
        environments[section] = _environment(task, section, inputs, on_answer)
    return Dialogues(
        environments,
        decode=inputs.decode,
        seed=config.seed,
        reproducible=config.reproducible,
    )


def _environment(
    task: PlayedSettings, section: str, inputs: JobInputs, on_answer: Callable[[], None]
) -> Environment:
    """Build what plays the prompts of a section."""
    play = task.play
    turns = turn_tokens(
        task.environment, inputs.tokenizer, chat=task.chat, system_prompt=task.system_prompt
    )
    calls = play.calls
    if calls == "auto":
        calls = "json" if turns.has_template else "words"
    has_own_messages = makes_prompts(task.environment)
    return Environment(
        pool=EnvironmentPool(
            task.environment,
            num_workers=play.num_workers,
            timeout_s=play.timeout_s,
            memory_mb=play.memory_mb,
            on_answer=on_answer,
            section=section,
        ),
        turns=turns,
        read_calls=FORMATS[calls],
        prompt_key=task.prompt_key,
        is_own=task.path is None or has_own_messages,
        is_dialogue=has_own_messages,
        max_turns=play.max_turns,
        max_turn_tokens=play.max_turn_tokens,
    )
