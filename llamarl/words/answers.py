"""A row's answer as a text: what rewards compare with, and supervised training learns.

Standard library only: reward workers use it.
"""

from __future__ import annotations

import math
from decimal import Decimal


def answer_text(answer: object) -> str:
    """Return an answer as a text. A number has no exponent, and no zeros behind its last decimal.

        answer_text("42"), answer_text(42.0), answer_text(1e-05)    # "42", "42", "0.00001"

    ValueError for what can be written in several ways: a list, an object, a flag, NaN.
    """
    if isinstance(answer, str):
        return answer
    if isinstance(answer, int) and not isinstance(answer, bool):
        return f"{Decimal(answer):f}"  # str() refuses more than 4,300 digits
    if isinstance(answer, float) and math.isfinite(answer):
        plain = f"{Decimal(repr(answer)):f}"
        return plain.rstrip("0").rstrip(".") if "." in plain else plain
    what = f"{type(answer).__name__} {answer!r:.60}"
    raise ValueError(f"the answer is {what}; need a text, a whole number or a finite decimal")
