"""Turns the errors that gloo, NCCL or the store raise when a rank is gone into plain words."""

from __future__ import annotations

import re

# Where in their source it was noticed, such as "[/pytorch/third_party/gloo/pair.cc:553] ".
_SOURCE_PLACE = re.compile(r"(in: )?\[?[^\s\[\]]+\.(c|cc|cpp|cu|h|hpp):\d+[\],]?\s*")


def cause_of(error: BaseException) -> str:
    """Return the first sentence of an error, without the lines of source that it came from.

    cause_of(RuntimeError("[/gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:21. This ..."))
    # "Connection closed by peer [10.0.0.1]:21"
    """
    sentence, _, _ = str(error).partition(". ")
    line, _, _ = sentence.strip().partition("\n")
    cause = _SOURCE_PLACE.sub("", line).strip()
    return cause or type(error).__name__
