"""JSON that somebody else wrote: a policy, a tool, a worker, a judge."""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 64  # of lists and objects in one another


def read_json(text: str | bytes) -> Any:
    """Return a text's JSON value, in time linear in its length. ValueError for whatever is none,
    and for one nested deeper than MAX_DEPTH, at which others who walk through it could fail.
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
