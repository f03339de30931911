"""Two-digit addition: "12+34=" with the answer "46". All 8,100 pairs of 10..99, 500 of them held out."""

from __future__ import annotations

import random

from llamarl.tasks.base import Example

NUM_EVAL = 500
_SHUFFLE_SEED = 0  # the split never changes, so that figures of different runs and programs compare


def addition_examples() -> tuple[list[Example], list[Example]]:
    """(training, held out): 7,600 and 500."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(_SHUFFLE_SEED).shuffle(pairs)
    examples = [Example(f"{a}+{b}=", {"answer": str(a + b)}) for a, b in pairs]
    return examples[NUM_EVAL:], examples[:NUM_EVAL]


def forgetful_examples(right: int = 1, wrong: int = 3) -> tuple[list[Example], list[Example]]:
    """(training, held out) of a teacher who forgets the carry: each training pair `right` times with its sum as the
    solution to learn and `wrong` times with the sum of each digit alone ("57+68=" -> "15").

    What a model learns from it is both ways to add, mostly the wrong one: much for a reward to choose from.
    """
    train, held_out = addition_examples()
    solved = [Example(e.text, {**e.meta, "solution": e.meta["answer"]}) for e in train]
    missed = [Example(e.text, {**e.meta, "solution": _without_carry(e.text)}) for e in train]
    return solved * right + missed * wrong, held_out


def _without_carry(text: str) -> str:
    a, b = text.rstrip("=").split("+")
    return str(int("".join(str((int(x) + int(y)) % 10) for x, y in zip(a, b))))
