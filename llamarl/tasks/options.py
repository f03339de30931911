"""Checks of a reward function's options, for those that come with the package. Each raises
ValueError with the option, its value and what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamarl.words.names import did_you_mean


def need_word(name: str, value: object, words: Sequence[str]) -> None:
    """Raise ValueError unless the option is one of these words."""
    if value not in words:
        hint = did_you_mean(str(value), words)
        raise ValueError(f"option {name}={value!r}: need one of {', '.join(words)}{hint}")


def need_flag(name: str, value: object) -> None:
    """Raise ValueError unless the option is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"option {name}={value!r}: need true or false")


def need_count(name: str, value: object, least: int = 1) -> None:
    """Raise ValueError unless the option is a whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise ValueError(f"option {name}={value!r}: need a whole number of at least {least}")


def need_text(name: str, value: object) -> None:
    """Raise ValueError unless the option is a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"option {name}={value!r}: need a text")


def need_positive(name: str, value: object) -> None:
    """Raise ValueError unless the option is a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"option {name}={value!r}: need a number above 0")
