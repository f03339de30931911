"""Texts that others wrote, and texts for people: the answers of rows, JSON, urls, long lists.

Standard library only: reward workers use it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

MAX_DEPTH = 64  # of lists and objects in one another
_URL_FORM = "needs the form http://HOST:PORT/v1"


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


def read_json(text: str | bytes) -> Any:
    """Return a text's JSON value, in linear time. ValueError for a text that is no JSON, or is
    nested deeper than MAX_DEPTH, at which recursive readers could fail.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}") from error
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        if not level:
            break
        deeper = []
        for one in level:
            inner = one.values() if isinstance(one, dict) else one
            deeper += [value for value in inner if isinstance(value, dict | list)]
        level = deeper
    if level:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
    return value


def url_problem(url: str) -> str | None:
    """Return the problem of an endpoint's url, in words that do not repeat the url; None if there
    is none.
    """
    if " " in url or not url.isprintable():
        return f"holds a space or a sign that cannot be printed; it {_URL_FORM}"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # whose message repeats the host, or what stands in the port's place
        return f"is no url; it {_URL_FORM}"
    if "@" in parts.netloc or parts.query or parts.fragment:
        return (
            "holds a user name, a password or a query, which would stand in logs and checkpoints; "
            "put the key into an environment variable and name that: api_key_env=NAME"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return _URL_FORM
    return None


def first_of(items: Sequence[str], most: int) -> list[str]:
    """Return the first `most` items and, if that leaves some out, how many more there are."""
    shown = list(items[:most])
    if len(items) > most:
        shown.append(f"and {len(items) - most} more")
    return shown
