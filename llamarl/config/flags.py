"""Flags that recipes took in earlier releases, and what to write instead. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamarl.config.conversion import Problem


def problems_of_flags(words: Sequence[str], now: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each word of a command line that is a flag of an earlier release. Each
    says what to write now.

    now: flag -> the key that took its place ("--lr": "lr"), or a sentence where there is none; ""
    stands for a word without a key.
    """
    found = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, has_value, value = word.partition("=")
        if flag in now and flag.startswith("-"):
            if not has_value and rest and not rest[0].startswith("-") and "=" not in rest[0]:
                value = rest.pop(0)
            shown = f"{flag} {value}".strip()
        elif "" in now and not word.startswith("-") and not has_value:
            flag = ""
            value = word
            shown = word
        else:
            continue
        key = now[flag]
        is_sentence = " " in key
        if not is_sentence and "=" not in key:
            key = f"{key}={value or 'VALUE'}"
        found.append(Problem(shown, key if is_sentence else f"write {key}"))
    return found
