r"""Thoughts and marked answers: how a completion is taken apart, and the rewards of its form.

"<think>2+2 is 4</think>The sum is \boxed{4}."
    split_thoughts --> ("2+2 is 4", "The sum is \boxed{4}.")
    last_boxed     --> "4"

    thinking_form   1 if thoughts and answer are marked as they should be, else 0
    soft_length     0 for a completion that is short enough, down to -1 for one that fills its room
    one_language    1 if prompt, thoughts and answer are in one language, else 0

Magistral adds these to the reward of a right answer; here that is a reward of several scorers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Literal

from llamarl.tasks.forms import (
    MESSAGES,
    SAMPLED,
    WorkerLimits,
    checked_by,
    import_package,
    need_count,
    need_word,
)

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


AnswerForm = Literal["any", "boxed", "program"]
_ANSWER_FORMS: tuple[AnswerForm, ...] = ("any", "boxed", "program")
# What no language can be told by: programs, formulas and their commands, marks of special tokens.
_NO_LANGUAGE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\\[.*?\\\]|\\\(.*?\\\)"
    r"|\\boxed\s*\{[^{}]*\}|\\[A-Za-z]+|<[^<>\s]{1,40}>|https?://\S+",
    re.DOTALL,
)


def _check_form(
    limits: WorkerLimits, *, thinking: Thinking = "opens", answer: AnswerForm = "any"
) -> None:
    need_word("thinking", thinking, THINKING)
    need_word("answer", answer, _ANSWER_FORMS)


@checked_by(_check_form)
def thinking_form(
    prompt: str,
    completion_text: str,
    meta: dict,
    *,
    thinking: Thinking = "opens",
    answer: AnswerForm = "any",
) -> float:
    """Return 1 if a completion marks its thoughts as `thinking` says, once, and an answer of the
    form follows them, else 0.

    answer: any text, one with a box whose braces match, or one with a fenced program.
    """
    parts = split_thoughts(whole_text(completion_text, meta), thinking)
    if parts is None:
        return 0.0
    text = parts[1]
    if answer == "boxed":
        return float(last_boxed(text) is not None)
    if answer == "program":
        return float(last_program(text) is not None)
    return float(bool(text.strip()))


def _check_length(
    limits: WorkerLimits, *, max_tokens: int | None = None, cache_tokens: int | None = None
) -> None:
    need_count("max_tokens", max_tokens)
    if cache_tokens is None:
        return
    need_count("cache_tokens", cache_tokens)
    assert max_tokens is not None, "it is a count"
    if cache_tokens > max_tokens:
        what = "the penalty would begin before the first token"
        raise ValueError(f"option cache_tokens={cache_tokens}: {what}; at most {max_tokens}")


@checked_by(_check_length)
def soft_length(
    prompt: str,
    completion_text: str,
    meta: dict,
    *,
    max_tokens: int | None = None,
    cache_tokens: int | None = None,
) -> float:
    """Return the soft length penalty of a completion of n tokens.

    0                                        n <= max_tokens - cache_tokens
    -(n - max_tokens + cache_tokens) / cache_tokens     up to max_tokens
    -1                                       beyond

    (DAPO, eq. 13; Magistral takes it times 0.1.) Tokens count, the end token included, not signs.
    cache_tokens: a quarter of max_tokens by default. ValueError for a text without tokens.
    """
    if SAMPLED not in meta:
        raise ValueError("only a text is known of this completion, and its tokens are counted")
    assert max_tokens is not None, "it was checked"
    if cache_tokens is None:
        cache_tokens = math.ceil(max_tokens / 4)
    excess = meta[SAMPLED]["num_tokens"] - (max_tokens - cache_tokens)
    return -min(max(excess / cache_tokens, 0.0), 1.0)


def _check_language(
    limits: WorkerLimits, *, thinking: Thinking = "opens", min_letters: int = 20
) -> None:
    need_word("thinking", thinking, THINKING)
    need_count("min_letters", min_letters)
    _identifier()


@checked_by(_check_language)
def one_language(
    prompt: str,
    completion_text: str,
    meta: dict,
    *,
    thinking: Thinking = "opens",
    min_letters: int = 20,
) -> float:
    """Return 1 if the prompt, the thoughts and the answer are in one language, else 0.

    The package py3langid tells the languages, of which it knows 97, by the words that are left
    without programs and formulas. A part of fewer than min_letters letters fits any language. What
    does not mark its thoughts as `thinking` says is 0. Of a conversation the user's last turn
    counts.
    """
    parts = split_thoughts(whole_text(completion_text, meta), thinking)
    if parts is None:
        return 0.0
    languages = set()
    for text in (_asked(prompt, meta), *parts):
        words = _words(text)
        if sum(map(str.isalpha, words)) >= min_letters:
            languages.add(_identifier().classify(words)[0])
    return float(len(languages) <= 1)


def _asked(prompt: str, meta: dict) -> str:
    """Return the prompt; of a conversation the user's last turn."""
    turns = meta.get(MESSAGES) or []
    said = [turn["content"] for turn in turns if turn["role"] == "user"]
    return said[-1] if said else prompt


def _words(text: str) -> str:
    """Return what of a text a language can be told by, with single blanks."""
    return " ".join(_NO_LANGUAGE.sub(" ", text).split())


def _identifier() -> ModuleType:
    """Return the module py3langid, which tells languages."""
    return import_package("py3langid", user="one_language", package="py3langid", extra="language")
