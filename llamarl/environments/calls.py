"""How a policy writes a call of a tool, and how it is read. FORMATS has them by name.

    json     <tool_call>{"name": "add", "arguments": {"a": 12, "b": 34}}</tool_call>
    words    add 12 34?

"words" is for a model whose tokens have no braces: a turn that ends with a question mark is a call,
of the tool that it begins with, or whose name begins so, with words for arguments. If there is one
tool, its name may be left out: "?" calls it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

ToolCall = dict[str, Any]  # {"type": "function", "function": {"name", "arguments"}}
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_WORDS = re.compile(r"\s*([A-Za-z_]\w*)?((?:[\s,]+[^\s,?]+)*)\s*\?\s*")


class Unreadable(ValueError):
    """A turn has the beginning of a call and no call that can be read."""


def json_calls(text: str) -> list[ToolCall]:
    """Return the calls of a turn's text; none if it calls no tool. Unreadable."""
    calls = []
    for block in _BLOCK.findall(text):
        try:
            call = json.loads(block)
        except ValueError as error:
            raise Unreadable(f"a call is no JSON: {error}") from error
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise Unreadable("a call has no name")
        arguments = call.get("arguments", {})
        if not isinstance(arguments, Mapping):
            raise Unreadable("a call's arguments are no object")
        calls.append(_call(call["name"], dict(arguments)))
    return calls


def word_calls(text: str) -> list[ToolCall]:
    """Return the call of a turn's text; none if it does not end with a question mark."""
    found = _WORDS.fullmatch(text)
    if found is None:
        return []
    words = re.split(r"[\s,]+", found.group(2).strip()) if found.group(2).strip() else []
    return [_call(found.group(1) or "", words)]


def _call(name: str, arguments: dict | list[str]) -> ToolCall:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


FORMATS: dict[str, Callable[[str], list[ToolCall]]] = {"json": json_calls, "words": word_calls}
