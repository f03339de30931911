"""A terminal and a clock of the test's own, and what a terminal shows."""

from __future__ import annotations

import io
import re


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


class Clock:
    """A clock that shows what the test sets: clock.now += 2.0."""

    now = 0.0

    def __call__(self):
        return self.now


def plain(text: str) -> str:
    """Return a terminal's text without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
