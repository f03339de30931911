"""Two-digit addition: "12+34=" with the answer "46". All 8,100 pairs of 10..99, 500 of them held
out.
"""

from __future__ import annotations

import itertools
import random

from llamarl.tasks.base import Example

NUM_EVAL = 500
_SHUFFLE_SEED = 0  # the split never changes, so that figures of different runs and programs compare


def addition_examples() -> tuple[list[Example], list[Example]]:
    """Return (training, held out) examples: 7,600 and 500."""
    pairs = list(itertools.product(range(10, 100), repeat=2))
    random.Random(_SHUFFLE_SEED).shuffle(pairs)
    examples = []
    for a, b in pairs:
        examples.append(Example(f"{a}+{b}=", {"answer": str(a + b)}))
    return examples[NUM_EVAL:], examples[:NUM_EVAL]
