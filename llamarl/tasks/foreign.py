"""Environments of other packages, as dialogues (docs/environments.md), by their import path.

    textarena:GuessTheNumber-v0      a game for one player, by its name there
    verifiers:my_module:Sums         a taskset of verifiers v1: questions, and rewards of an answer
    my_module:Game                   anything else is a module of the user's

Standard library only, until such an environment is made: workers import this file.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from llamarl.words.names import NoFunction, did_you_mean, import_function

_FROM_GAME = -1  # textarena's id of who says what is no player's
_MOST_TASKS = 100_000  # of a taskset without an end


def import_environment(path: str) -> Callable:
    """Return what makes the environments at an import path. NoFunction as import_function, also
    for a package that is not installed, and for a game or taskset that is not there.
    """
    package, _, name = path.partition(":")
    if package == "textarena":
        games = _package("textarena.envs.registration", "textarena").ENV_REGISTRY
        if f"{name}-raw" not in games:
            raise NoFunction(f"textarena has no game {name}{did_you_mean(name, games)}")
        return partial(TextArenaGame, name)
    if package == "verifiers":
        _package("verifiers.v1", "verifiers")
        return partial(VerifiersTask, import_function(name))
    return import_function(path)


def _package(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise NoFunction(f"no module {error.name}; pip install 'llamarl[{extra}]'") from error


class TextArenaGame:
    """A game of textarena for one player, without its wrappers: each thing it says comes once.

    The reward is the player's, at the end.
    """

    def __init__(self, name: str):
        self._name = name

    def init(self) -> tuple[list[dict[str, str]], list]:
        """Begin a game, drawn by `random`."""
        textarena = importlib.import_module("textarena")
        self._game = textarena.make(f"{self._name}-raw")
        self._game.reset(num_players=1, seed=random.getrandbits(31))
        return self._said(), []

    def step(self, message: dict[str, Any]) -> tuple[list[dict[str, str]], bool, float | None]:
        """Move, and return what the game says."""
        is_done, _ = self._game.step(action=message["content"])
        if not is_done:
            return self._said(), False, None
        rewards, _ = self._game.close()
        return [], True, float(rewards[0])

    def _said(self) -> list[dict[str, str]]:
        """Return what the game has said since it was last asked, as a user's message."""
        _, observed = self._game.get_observation()
        texts = [text for speaker, text, _ in observed if speaker == _FROM_GAME]
        return [{"role": "user", "content": "\n".join(texts)}]


class VerifiersTask:
    """A task of a taskset of verifiers v1, drawn by `random`: its prompt, one answer, and the
    weighted sum of its rewards. A task that needs a runtime or a tool server is a TypeError.

    taskset: the class; its configuration is the default one. Its tasks are loaded once a process.
    """

    _loaded: dict[Callable, list[Any]] = {}

    def __init__(self, taskset: Callable):
        self._taskset = taskset

    def init(self) -> tuple[list[dict[str, str]], list]:
        """Draw a task, and return its messages."""
        self._task = random.choice(self._tasks())
        if self._task.NEEDS_CONTAINER or self._task.toolsets(self._task.config):
            what = type(self._task).__name__
            raise TypeError(f"{what} needs a runtime or tool servers, which are not there")
        return self._messages(), []

    async def step(self, message: dict[str, Any]) -> tuple[list, bool, float]:
        """Score the answer, which ends the task."""
        return [], True, await self._score(message["content"])

    def _messages(self) -> list[dict[str, str]]:
        data = self._task.data
        messages = []
        if data.system_prompt:
            messages.append({"role": "system", "content": data.system_prompt})
        if isinstance(data.prompt, str):
            messages.append({"role": "user", "content": data.prompt})
            return messages
        for message in data.prompt or []:
            messages.append({"role": message.role, "content": message.content})
        return messages

    async def _score(self, answer: str) -> float:
        vf = importlib.import_module("verifiers.v1")
        kinds = {
            "system": vf.SystemMessage,
            "user": vf.UserMessage,
            "assistant": vf.AssistantMessage,
        }
        nodes: list[Any] = []
        for message in [*self._messages(), {"role": "assistant", "content": answer}]:
            said = kinds[message["role"]](content=message["content"])
            parent = len(nodes) - 1 if nodes else None
            nodes.append(vf.MessageNode(parent=parent, message=said))
        nodes[-1].sampled = True
        trace = vf.Trace(
            task=vf.TraceTask(type=type(self._task).__name__, data=self._task.data),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=nodes,
        )
        await self._task.score(trace, None)
        return float(trace.reward)

    def _tasks(self) -> list[Any]:
        if self._taskset not in self._loaded:
            vf = importlib.import_module("verifiers.v1")
            made = self._taskset(vf.TasksetConfig())
            self._loaded[self._taskset] = list(made.take(_MOST_TASKS))
        return self._loaded[self._taskset]
