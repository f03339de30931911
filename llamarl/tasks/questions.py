"""Questions about two numbers, in words that a chat model knows, and no more than it can read:

    sum      "What is 7+12? Answer with the number only."
    larger   "Which number is larger, 7 or 12? Answer with the number only."

All pairs of least..most in both orders; `larger` without those of equal numbers.
"""

from __future__ import annotations

import itertools

from llamarl.tasks.base import Example
from llamarl.words.names import did_you_mean

INSTRUCTION = "Answer with the number only."
NAMES = ("sum", "larger")


def question_examples(name: str | None, least: int, most: int) -> list[Example]:
    """Return the examples of a kind of question, in the order of their numbers.

    question_examples("sum", 7, 8)[1].text    # What is 7+8? Answer with the number only.

    ValueError for an unknown name, or a range that holds fewer than two numbers.
    """
    if name not in NAMES:
        hint = did_you_mean(str(name), NAMES)
        raise ValueError(f"task.name={name}: no kind of question{hint}; there is sum and larger")
    if least >= most:
        raise ValueError(f"task.most={most}: need more than task.least={least}")
    examples = []
    for a, b in itertools.product(range(least, most + 1), repeat=2):
        if name == "sum":
            examples.append(Example(f"What is {a}+{b}? {INSTRUCTION}", {"answer": str(a + b)}))
        elif a != b:
            question = f"Which number is larger, {a} or {b}? {INSTRUCTION}"
            examples.append(Example(question, {"answer": str(max(a, b))}))
    return examples
