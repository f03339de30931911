"""Finds an environment by its import path, and describes the tools of its class.

    textarena:GuessTheNumber-v0      a game for one player, by its name there
    verifiers:my_module:Sums         a taskset of verifiers v1: questions, and rewards of an answer
    my_module:Game                   anything else is a module of the user's

    schema_of(Calculator.add)                     what a chat template shows of a method
    arguments_of(Calculator.add, ["12", "34"])    {"a": 12, "b": 34}

Standard library only, because the workers of environments import it and start in a moment.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from llamarl.words.names import NoFunction, did_you_mean, import_function

_FROM_GAME = -1  # textarena's id of who says what is no player's
_MOST_TASKS = 100_000  # of a taskset without an end


def import_environment(path: str) -> Callable:
    """Return the factory of environments at an import path. NoFunction like import_function's, and
    for a missing package, game or taskset.
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


Schema = dict[str, Any]  # JSON
ChatTurn = dict[str, Any]  # {"role": ..., "content": ...}
Arguments = Mapping[str, object] | Sequence[str]  # by name, or as words in the order of parameters

_JSON_TYPES: dict[object, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}
_NO_TOOLS = ("reset", "get_reward", "close")  # public methods of an environment beside its tools
_ARGUMENT = re.compile(r"^\s+(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_TRUE = ("true", "yes", "1")
_FALSE = ("false", "no", "0")


def is_dialogue(made: object) -> bool:
    """Whether an environment, or its class, has the contract of dialogues. ValueError if it has
    neither.
    """
    if callable(getattr(made, "init", None)) and callable(getattr(made, "step", None)):
        return True
    if callable(getattr(made, "reset", None)):
        return False
    kind = made if isinstance(made, type) else type(made)
    raise ValueError(
        f"{kind.__name__} has neither reset(), as an environment with tools, nor init() and "
        "step(message), as a dialogue (docs/data.md)"
    )


def tools_of(made: object) -> dict[str, Callable]:
    """Return the tools of an environment, or of its class, by name: its public methods."""
    kind = made if isinstance(made, type) else type(made)
    found = {}
    for name, member in inspect.getmembers(kind, callable):
        if not name.startswith("_") and name not in _NO_TOOLS:
            found[name] = getattr(made, name)
    return found


def schemas_of(factory: Callable) -> list[Schema]:
    """Return the schemas of the tools of a factory's environments; [] for dialogues, which send
    their own when they begin. A class is inspected; another factory is called once. ValueError says
    what is wrong.
    """
    made = factory if isinstance(factory, type) else factory()
    if is_dialogue(made):
        return []
    return [schema_of(tool) for tool in tools_of(made).values()]


def schema_of(function: Callable) -> Schema:
    """Return the description of a function that chat templates take as a tool. ValueError for one
    without a docstring, or with a parameter without a type.
    """
    name = function.__name__
    description, described = _read_docstring(inspect.getdoc(function) or "")
    if not description:
        raise ValueError(f"the tool {name} has no docstring; say what it does, for the policy")
    hints = typing.get_type_hints(function)
    properties = {}
    required = []
    for parameter in parameters_of(function):
        if parameter.name not in hints:
            raise ValueError(f"the tool {name}: its parameter {parameter.name} has no type")
        properties[parameter.name] = {
            **_type_of(hints[parameter.name]),
            "description": described.get(parameter.name, ""),
        }
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def arguments_of(function: Callable, given: Arguments) -> dict[str, object]:
    """Return the arguments of a call by name. Words are read as their parameters' types say.
    ValueError or TypeError says which does not fit.
    """
    if isinstance(given, Mapping):
        inspect.signature(function).bind(**given)
        return dict(given)
    parameters = parameters_of(function)
    if len(given) > len(parameters):
        raise TypeError(
            f"{function.__name__} takes {len(parameters)} arguments and was given {len(given)}"
        )
    hints = typing.get_type_hints(function)
    found = {}
    for parameter, word in zip(parameters, given):
        found[parameter.name] = _read_word(word, hints.get(parameter.name, str))
    inspect.signature(function).bind(**found)
    return found


def parameters_of(function: Callable) -> list[inspect.Parameter]:
    """Return the parameters of a function or a method, without self."""
    return [one for one in inspect.signature(function).parameters.values() if one.name != "self"]


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description of a docstring, and what it says of each argument under "Args:"."""
    before, _, after = text.partition("\nArgs:")
    described = {}
    for line in after.splitlines():
        if line and not line[0].isspace():
            break  # the next section
        found = _ARGUMENT.match(line)
        if found:
            described[found.group(1)] = found.group(2)
    description = re.split(r"\n(?:Returns|Raises):", before)[0]
    return " ".join(description.split()), described


def _type_of(hint: object) -> Schema:
    """Return the JSON schema of a type; {} if JSON schema has none."""
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        known = [_type_of(one) for one in inner if one is not type(None)]
        return known[0] if len(known) == 1 else {}
    if origin is list:
        return {"type": "array", "items": _type_of(inner[0])} if inner else {"type": "array"}
    if origin is dict:
        return {"type": "object"}
    return {}


def _read_word(word: str, hint: object) -> object:
    """Parse a word as a value of a type. ValueError if it is not one."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next((one for one in typing.get_args(hint) if one is not type(None)), str)
    if hint is bool:
        if word.lower() in (*_TRUE, *_FALSE):
            return word.lower() in _TRUE
        raise ValueError(f"{word!r} is neither true nor false")
    if hint in (int, float):
        return typing.cast(type, hint)(word)
    if hint in (list, dict) or typing.get_origin(hint) in (list, dict):
        return json.loads(word)
    return word
