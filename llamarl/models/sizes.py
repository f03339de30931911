"""Sizes that come again, for products on a CPU.

oneDNN compiles a product's code for each new shape and keeps it: a fifth of a millisecond and some
400 kB each, for as many as 1,024 shapes. Batches are never of the same number of tokens twice, so a
training step of the tiny model met 25 new shapes, and their code, in between its activations, broke
the heap up. Few sizes, each a little too large, make nearly all products known after some steps.
"""

from __future__ import annotations


def rounded_up(size: int, *, steps: int) -> int:
    """Return the least size that is at least `size`, of those that lie at `steps` equal distances
    between a power of two and the next. It is less than size (1 + 1 / steps).

    steps: a power of two; sizes below it are their own.
    """
    unit = max(1, (1 << size.bit_length() - 1) // steps) if size > 0 else 1
    return -(-size // unit) * unit
