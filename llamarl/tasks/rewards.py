"""Reward functions that come with llamarl. Each is (prompt, completion_text, meta) -> float, or
None to abstain.

    exact_match numeric_match contains_words reasoning_gym_score    here
    zero                                                            here
    math_match                                                      math_answers.py
    python_tests                                                    programs.py
    thinking_form soft_length one_language                          thinking.py

"rewards:NAME" is short for "llamarl.tasks.rewards:NAME". They run in worker processes (pool.py), so
none imports torch. Whatever one raises is counted as an
error of the reward, not as a score.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from functools import lru_cache

from llamarl.tasks.forms import answer_in, form_of
from llamarl.tasks.math_answers import math_match
from llamarl.tasks.programs import python_tests
from llamarl.tasks.thinking import one_language, soft_length, thinking_form
from llamarl.words.names import import_function

__all__ = [
    "contains_words",
    "exact_match",
    "math_match",
    "numeric_match",
    "one_language",
    "part_reward",
    "python_tests",
    "reasoning_gym_score",
    "soft_length",
    "thinking_form",
    "zero",
]

_NUMBER = re.compile(
    # a minus after a number, a word or a bracket subtracts; elsewhere it is a sign
    r"(?:(?<![\w.)\]])-)?"
    r"(?:[$€£]-?)?"
    # 1,234.50 | 1234 | .5
    r"([0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    # 1.5e3 | 1e-05; more digits would be a word
    r"((?:[eE][+-]?[0-9]{1,4}(?!\w|\.[0-9]))?)"
)
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def exact_match(prompt: str, completion_text: str, meta: dict) -> float:
    """Return 1 if the completion is the answer, apart from white space around it, else 0."""
    return float(completion_text.strip() == answer_in(meta).strip())


def numeric_match(prompt: str, completion_text: str, meta: dict) -> float:
    """Return 1 if the final number of the completion equals the answer's, else 0 (GSM8K).

    The final number is the first one after the last "####"; without that mark, the last one of the
    text. "1,000" equals "1000.0", "$5" equals "5", "1.5e3" equals "1500". Compared as decimals,
    exactly.
    """
    return float(final_number(completion_text) == _number(meta))


def contains_words(prompt: str, completion_text: str, meta: dict) -> float:
    """Return 1 if the completion holds one of meta["words"], in upper or lower case, else 0."""
    text = completion_text.casefold()
    return float(any(word.casefold() in text for word in meta["words"]))


def reasoning_gym_score(prompt: str, completion_text: str, meta: dict) -> float:
    """Return reasoning_gym's own score, 0 to 1, of the text in the last <answer></answer>, or of
    the last line if there is none.

    Its consolation of 0.01 and less for any wrong answer counts as 0; its partial credit stays.
    """
    made_from = (meta["dataset"], meta["size"], meta["seed"], meta["options"])
    entry = _reasoning_gym_entry(*made_from, meta["index"])
    if entry["question"] != prompt:
        what = f"{meta['dataset']} asked another question for the same seed"
        raise ValueError(f"reasoning_gym's {what}; it cannot be scored")
    tagged = _ANSWER_TAG.findall(completion_text)
    candidates = tagged or completion_text.strip().splitlines()
    answer = candidates[-1].strip() if candidates else ""
    score = float(_reasoning_gym_dataset(*made_from).score_answer(answer, entry))
    return score if score > 0.01 else 0.0


def zero(prompt: str, completion_text: str, meta: dict) -> float:
    """Return 0, for prompts without answers and a loss that learns from a teacher (distill)."""
    return 0.0


def final_number(text: str) -> Decimal | None:
    """Return the number that a text ends in, or None. See numeric_match."""
    _, mark, tail = text.replace("\N{MINUS SIGN}", "-").rpartition("####")
    numbers = list(_NUMBER.finditer(tail))
    if not numbers:
        return None
    found = numbers[0] if mark else numbers[-1]
    magnitude = Decimal(found[1].replace(",", "") + found[2])
    sign = tail[found.start() : found.start(1)]
    return -magnitude if "-" in sign else magnitude


def _number(meta: dict) -> Decimal:
    answer = answer_in(meta)
    expected = final_number(answer)
    if expected is None:
        raise ValueError(
            f"the answer {answer[:60]!r} holds no number; use exact_match for this task"
        )
    return expected


@lru_cache(maxsize=8)
def _reasoning_gym_dataset(name: str, size: int, seed: int, options: str):
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=size, seed=seed, **json.loads(options))


@lru_cache(maxsize=1024)
def _reasoning_gym_entry(name: str, size: int, seed: int, options: str, index: int) -> dict:
    return _reasoning_gym_dataset(name, size, seed, options)[index]


def part_reward(prompt: str, completion: str, meta: dict) -> float | None:
    """Return the reward of the prompt's part, for a mixture whose parts have rewards of different
    kinds. ValueError if that reward takes all completions of a prompt together.
    """
    path = meta["part_reward"]
    function = import_function(path)
    if form_of(function) != "single":
        raise ValueError(
            f"{path} scores whole groups, which a mixture's parts do not; set reward.fn"
        )
    return function(prompt, completion, meta)


# --- Checks of a row, before a run: a function that raises ValueError for a row whose right answer
# --- could get no score. It is called as the reward is, with the same options.


def check_text_row(prompt: str, completion_text: str, meta: dict) -> float:
    """Check a row for exact_match."""
    answer_in(meta)
    return 1.0


def check_number_row(prompt: str, completion_text: str, meta: dict) -> float:
    """Check a row for numeric_match."""
    _number(meta)
    return 1.0


def check_part_row(prompt: str, completion_text: str, meta: dict) -> float:
    """Check a row for the reward of its part."""
    path = row_check_of(meta["part_reward"])
    return 1.0 if path is None else import_function(path)(prompt, completion_text, meta)


_ROW_CHECKS = {
    "exact_match": "llamarl.tasks.rewards:check_text_row",
    "numeric_match": "llamarl.tasks.rewards:check_number_row",
    "math_match": "llamarl.tasks.math_answers:check_row",
    "python_tests": "llamarl.tasks.programs:check_row",
    "part_reward": "llamarl.tasks.rewards:check_part_row",
}


def row_check_of(path: str) -> str | None:
    """Return the import path of the function that checks rows for a reward of llamarl's; None if it
    has none, or is not llamarl's.
    """
    module, _, name = path.partition(":")
    return _ROW_CHECKS.get(name) if module in ("rewards", "llamarl.tasks.rewards") else None
