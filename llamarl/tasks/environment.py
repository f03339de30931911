"""Prompts of a task whose answers go to an environment: `task=environment`.

    rows of a file -----------> DialogueMaker: the prompt up to the end of the user's text
    an environment's own -----> OwnTask: a number, by which the environment draws its game

What an environment says first follows a prompt as context, which each completion has for itself. So
a prompt is a function of its number alone here too, and no environment has to be asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from llamarl.tasks.base import PromptMaker, Tokenizer
from llamarl.tasks.environment_class import import_environment, is_dialogue, schemas_of
from llamarl.tasks.python_task import described
from llamarl.tasks.turns import TurnTokens
from llamarl.types import Message, Prompt
from llamarl.words.names import NoFunction

GAME = "game"  # the key of a prompt's meta for the number of an environment's own game
# The default reward of prompts that an environment plays: what it gives. No function's import path.
GIVEN = "environment"


class OwnTask:
    """A Task of an environment that makes its own prompts: `num_train` games to train on, and
    others to hold out, by number.
    """

    name = "environment"
    default_reward = GIVEN
    train_digest = eval_digest = ""

    def __init__(self, turns: TurnTokens, *, num_train: int, num_eval: int):
        self.num_train = num_train
        self.num_eval = num_eval
        self._first = torch.tensor(turns.first(), dtype=torch.int64)

    def train_prompt(self, i: int) -> Prompt:
        """Return the prompt of game i."""
        return self._game(i)

    def eval_prompt(self, j: int) -> Prompt:
        """Return the prompt of held-out game j, which is none of the others."""
        return self._game(-1 - j)

    def _game(self, number: int) -> Prompt:
        return Prompt(self._first, f"game {number}", {GAME: number})


class DialogueMaker(PromptMaker):
    """Makes prompts that end where the first words of an environment follow.

    environment: its import path. ValueError for one that cannot be used.
    """

    def __init__(
        self,
        environment: str,
        tokenizer: Tokenizer,
        *,
        chat: bool,
        system_prompt: str | None,
        max_prompt_tokens: int,
    ):
        self._turn_tokens = turn_tokens(
            environment, tokenizer, chat=chat, system_prompt=system_prompt
        )
        self._is_own = makes_prompts(environment)
        super().__init__(
            tokenizer,
            chat=chat,
            system_prompt=system_prompt,
            max_prompt_tokens=max_prompt_tokens,
        )

    def own_task(self, *, num_train: int, num_eval: int) -> OwnTask:
        """Return the task of prompts that the environment makes itself."""
        return OwnTask(self._turn_tokens, num_train=num_train, num_eval=num_eval)

    @property
    def identity(self) -> dict[str, object]:
        """As PromptMaker has it, with the schemas of the tools."""
        return {**super().identity, "tools": self._turn_tokens.tools}

    def ids(self, question: str | tuple[Message, ...]) -> list[int]:
        """Return the prompt ids [P] of a question, up to the end of its last text."""
        if self._is_own:
            return self._turn_tokens.first()
        return self._turn_tokens.prompt(question)[0]

    def num_tokens(self, questions: Sequence[str | tuple[Message, ...]]) -> list[int]:
        """Return how long the prompts of questions are, in tokens."""
        return [len(self.ids(question)) for question in questions]


def factory_of(path: str) -> Callable:
    """Return the factory at an import path. ValueError begins with the configuration's key."""
    key = f"task.environment={path}"
    try:
        return import_environment(path)
    except NoFunction as error:
        raise ValueError(f"{key}: {error}") from error
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ValueError(f"{key}: importing it failed: {described(error)}") from error


def turn_tokens(path: str, tokenizer: Any, *, chat: bool, system_prompt: str | None) -> TurnTokens:
    """Return the encoder of dialogues with an environment, which shows its tools to the model.
    ValueError for an environment or tools that cannot be used.
    """
    factory = factory_of(path)
    try:
        tools = schemas_of(factory)
    except Exception as error:  # a factory is the user's code
        raise ValueError(f"task.environment={path}: {error}") from error
    return TurnTokens(tokenizer, chat=chat, system_prompt=system_prompt, tools=tools)


def makes_prompts(path: str) -> bool:
    """Whether the environment has the contract of dialogues and so makes its own prompts."""
    factory = factory_of(path)
    return is_dialogue(factory if isinstance(factory, type) else factory())
