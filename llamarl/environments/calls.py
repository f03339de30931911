"""How a policy writes a call of a tool, and how it is read. FORMATS has them by name.

    json     <tool_call>{"name": "add", "arguments": {"a": 12, "b": 34}}</tool_call>
    words    add 12 34?

"words" is for a model whose tokens have no braces: a turn that ends with a question mark is a call,
of the tool that it begins with, or whose name begins so, with words for arguments. If there is one
tool, its name may be left out: "?" calls it.

A turn may be any text. It is read by methods of str alone, because a regular expression that goes
back and forth in it holds the interpreter's lock for minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llamarl.words.texts import read_json

ToolCall = dict[str, Any]  # {"type": "function", "function": {"name", "arguments"}}
_BEGIN = "<tool_call>"
_END = "</tool_call>"


class Unreadable(ValueError):
    """A turn has the beginning of a call and no call that can be read."""


def json_calls(text: str) -> list[ToolCall]:
    """Return the calls of a turn's text; none if it calls no tool. Unreadable."""
    calls = []
    for block in _blocks(text):
        try:
            call = read_json(block)
        except ValueError as error:
            raise Unreadable(f"a call is no JSON: {error}") from error
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise Unreadable("a call has no name")
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            raise Unreadable("a call's arguments are no object")
        calls.append(_call(call["name"], arguments))
    return calls


def _blocks(text: str) -> Iterator[str]:
    """Yield the texts of a turn's calls. That of the last may have no end."""
    begin = text.find(_BEGIN)
    while begin >= 0:
        begin += len(_BEGIN)
        end = text.find(_END, begin)
        if end < 0:
            end = len(text)
        yield text[begin:end]
        begin = text.find(_BEGIN, end)


def word_calls(text: str) -> list[ToolCall]:
    """Return the call of a turn's text; none if it does not end with a question mark."""
    before, mark, after = text.partition("?")
    if not mark or after.strip() or before.rstrip().endswith(","):
        return []
    words = before.replace(",", " ").split()
    if words and _is_name(words[0]) and not before.lstrip().startswith(","):
        return [_call(words[0], words[1:])]
    # Words alone are told from any other question by what separates them from a name.
    has_separator = not before or before[0] == "," or before[0].isspace()
    return [_call("", words)] if has_separator else []


def _is_name(word: str) -> bool:
    """Whether a word may be a tool's name."""
    first = word[0]
    is_letter = first == "_" or (first.isascii() and first.isalpha())
    return is_letter and word.replace("_", "a").isalnum()


def _call(name: str, arguments: dict | list[str]) -> ToolCall:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


FORMATS: dict[str, Callable[[str], list[ToolCall]]] = {"json": json_calls, "words": word_calls}
