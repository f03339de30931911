"""Tools: functions that a policy may call, described by their types and docstrings.

    class Calculator:
        def add(self, a: int, b: int) -> str:
            \"\"\"Add two numbers.

            Args:
                a: the first one
                b: the second one
            \"\"\"

    schema_of(Calculator.add)    # what a chat template shows: name, description, parameters
    arguments_of(Calculator.add, ["12", "34"])    # {"a": 12, "b": 34}

Standard library only: the workers of environments use it, and start in a moment.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Schema = dict[str, Any]  # JSON
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
        "step(message), as a dialogue (docs/environments.md)"
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
    """Return the schemas of the tools of what a factory makes; none for a dialogue, whose own come
    with its beginning. A class is only looked at, and another factory is called once. ValueError
    says what is wrong.
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
    """Return a type as JSON schema has it; {} for one that it has no word for."""
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
    """Return a word as a value of a type. ValueError if it is none."""
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
