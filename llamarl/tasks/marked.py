r"""Finds what a completion marks: its thoughts, its boxed answer, its program.

"<think>2+2 is 4</think>The sum is \boxed{4}."
    split_thoughts --> ("2+2 is 4", "The sum is \boxed{4}.")
    last_boxed     --> "4"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from llamarl.tasks.sampled import SAMPLED

# none: a completion is its answer. opens: it begins with <think>. opened: its prompt ends in that.
Thinking = Literal["none", "opens", "opened"]
THINKING: tuple[Thinking, ...] = ("none", "opens", "opened")
OPENING, CLOSING = "<think>", "</think>"
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_FENCED = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_OF_PYTHON = ("", "python", "python3", "py")


def whole_text(completion: str, meta: Mapping) -> str:
    """Return the text of a completion with its marks, which may be special tokens."""
    sampled = meta.get(SAMPLED)
    if CLOSING in completion or sampled is None:
        return completion
    return sampled["raw_text"]


def split_thoughts(text: str, thinking: Thinking) -> tuple[str, str] | None:
    """Return thoughts and answer; None where the marks are not as `thinking` says, each once."""
    if thinking == "none":
        return "", text
    opening = 1 if thinking == "opens" else 0
    if text.count(OPENING) != opening or text.count(CLOSING) != 1:
        return None
    thoughts, _, answer = text.partition(CLOSING)
    thoughts = thoughts.lstrip()
    if not thoughts.startswith(OPENING * opening):
        return None
    return thoughts.removeprefix(OPENING * opening), answer


def answer_of(completion: str, meta: Mapping, thinking: Thinking) -> str | None:
    """Return the part of a completion that answers; None where its marks are wrong."""
    if thinking == "none":
        return completion
    parts = split_thoughts(whole_text(completion, meta), thinking)
    return None if parts is None else parts[1]


def last_boxed(text: str) -> str | None:
    """Return what is in the last box of a text whose braces match; None without one."""
    for start in reversed([found.end() for found in _BOXED.finditer(text)]):
        end = _closing_brace(text, start)
        if end is not None:
            return text[start:end]
    return None


def _closing_brace(text: str, start: int) -> int | None:
    """Return the place of the brace that closes the one before `start`; None if none does."""
    depth = 1
    place = start
    while place < len(text):
        sign = text[place]
        if sign == "\\":
            place += 1  # what follows is no brace of its own
        elif sign == "{":
            depth += 1
        elif sign == "}":
            depth -= 1
        if depth == 0:
            return place
        place += 1
    return None


def last_program(text: str) -> str | None:
    """Return the last fenced block of Python, or of no language; None without one."""
    programs = [body for language, body in _FENCED.findall(text) if language.lower() in _OF_PYTHON]
    return programs[-1] if programs else None
