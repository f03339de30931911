"""What Magistral rewards besides a right answer: the form of a completion, its length, and that it
keeps to the language of its prompt. Each is made for a reward of kind parts, with a weight there.

    thinking_form   1 if thoughts and answer are marked as they should be, else 0
    soft_length     0 for a completion that is short enough, down to -1 for one that fills its room
    one_language    1 if prompt, thoughts and answer are in one language, else 0

The right answer is math_match's (math_answers.py) or python_tests' (programs.py), which have the
option `thinking` too: what is not of the form is not right.
"""

from __future__ import annotations

import importlib
import math
import re
from typing import Literal

from llamarl.tasks.forms import Limits, checked_by
from llamarl.tasks.marked import (
    THINKING,
    Thinking,
    last_boxed,
    last_program,
    split_thoughts,
    whole_text,
)
from llamarl.tasks.options import need_count, need_word
from llamarl.tasks.sampled import SAMPLED

AnswerForm = Literal["any", "boxed", "program"]
_ANSWER_FORMS: tuple[AnswerForm, ...] = ("any", "boxed", "program")
_MESSAGES = "prompt_messages"  # of a conversation's meta: llamarl.types.MESSAGES_KEY
# What no language can be told by: programs, formulas and their commands, marks of special tokens.
_NO_LANGUAGE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\\[.*?\\\]|\\\(.*?\\\)"
    r"|\\boxed\s*\{[^{}]*\}|\\[A-Za-z]+|<[^<>\s]{1,40}>|https?://\S+",
    re.DOTALL,
)


def _check_form(
    limits: Limits, *, thinking: Thinking = "opens", answer: AnswerForm = "any"
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
    limits: Limits, *, max_tokens: int | None = None, cache_tokens: int | None = None
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


def _check_language(limits: Limits, *, thinking: Thinking = "opens", min_letters: int = 20) -> None:
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
    turns = meta.get(_MESSAGES) or []
    said = [turn["content"] for turn in turns if turn["role"] == "user"]
    return said[-1] if said else prompt


def _words(text: str) -> str:
    """Return what of a text a language can be told by, with single blanks."""
    return " ".join(_NO_LANGUAGE.sub(" ", text).split())


def _identifier():
    """Return the module py3langid. ValueError that names the extra if it is not there."""
    try:
        return importlib.import_module("py3langid")
    except ModuleNotFoundError as error:
        if error.name != "py3langid":
            raise
        remedy = "pip install 'llamarl[language]'"
        raise ValueError(f"one_language needs the package py3langid: {remedy}") from error
