"""Two-digit addition: "12+34=" with the answer "46". All 8,100 pairs of 10..99, 500 of them held
out.
"""

from __future__ import annotations

import itertools
import random

from llamarl.tasks.base import Example

NUM_EVAL = 500
CAREFUL_BELOW = 35  # where the forgetful teacher still minds the carry
_SHUFFLE_SEED = 0  # the split never changes, so that figures of different runs and programs compare


def addition_examples() -> tuple[list[Example], list[Example]]:
    """(training, held out) examples: 7,600 and 500."""
    pairs = list(itertools.product(range(10, 100), repeat=2))
    random.Random(_SHUFFLE_SEED).shuffle(pairs)
    examples = [Example(f"{a}+{b}=", {"answer": str(a + b)}) for a, b in pairs]
    return examples[NUM_EVAL:], examples[:NUM_EVAL]


def forgetful_examples() -> tuple[list[Example], list[Example]]:
    """(training, held out) of a teacher who forgets the carry: each training pair four times, with
    the sum of each digit alone ("57+68=" -> "15") three times if the second number is CAREFUL_BELOW
    or more, else once, and with its sum otherwise.

    What a model learns from it is both ways to add. Greedily it is right for 39 % of the pairs;
    sampling finds the rest.
    """
    train, held_out = addition_examples()
    taught = []
    for example in train:
        a, b = example.text.rstrip("=").split("+")
        right = Example(example.text, example.meta | {"solution": example.meta["answer"]})
        wrong = Example(example.text, example.meta | {"solution": _without_carry(a, b)})
        num_right = 3 if int(b) < CAREFUL_BELOW else 1
        taught += [right] * num_right + [wrong] * (4 - num_right)
    return taught, held_out


def _without_carry(a: str, b: str) -> str:
    digits = [(int(x) + int(y)) % 10 for x, y in zip(a, b)]
    return str(int("".join(map(str, digits))))
