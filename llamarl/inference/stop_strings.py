"""StopStrings: finds the token at which a stop string is complete, by searching the text.

    stops = StopStrings(("\\n\\n", "Q:"), decode)
    stops.end_of([12, 7, 7, 9], seen=2, least=1)    # -> 3, if the third token completes "\\n\\n"

A stop string may begin inside one token and end inside another, so tokens are decoded and the text
is searched. Only the end of the text is decoded, so the work per token does not grow with the
completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

# What a tokenizer writes for the bytes of a character that is not complete.
_INCOMPLETE = "\ufffd"
# Text before the new tokens that is decoded beside the longest stop string. The first characters
# of a text that begins inside a completion may differ: a cut character, a space that is left out.
_MARGIN = 8


class StopStrings:
    """Finds the token that completes a stop string.

    strings: at least one, none of them empty (ValueError). decode: token ids -> their text.
    """

    def __init__(self, strings: Sequence[str], decode: Decode):
        if not strings or "" in strings:
            raise ValueError(f"stop_strings={list(strings)}: need strings that are not empty")
        self._strings = tuple(strings)
        self._decode = decode
        self._longest = max(map(len, strings))

    def end_of(self, token_ids: Sequence[int], *, seen: int, least: int = 1) -> int | None:
        """Returns how many tokens to keep: the fewest whose text ends behind a stop string, that
        string included. None if no stop string is complete.

        token_ids: [L], all of a completion. seen: its first tokens, in which nothing was found.
        least: a stop string that is complete before so many tokens does not count.
        """
        ids = list(token_ids)
        seen = max(seen, least - 1)
        if len(ids) <= seen:
            return None
        begin, before = self._text_before(ids, seen)
        if not self._is_complete(self._decode(ids[begin:]), before):
            return None
        for end in range(seen + 1, len(ids)):
            if self._is_complete(self._decode(ids[begin:end]), before):
                return end
        return len(ids)

    def _text_before(self, ids: list[int], seen: int) -> tuple[int, int]:
        """Returns where to begin to decode, and the characters from there to token `seen`."""
        width = self._longest + _MARGIN
        while True:
            begin = max(0, seen - width)
            text = self._decode(ids[begin:seen]).rstrip(_INCOMPLETE)
            if begin == 0 or len(text) >= self._longest + _MARGIN:
                return begin, len(text)
            width *= 2

    def _is_complete(self, text: str, before: int) -> bool:
        """Whether a stop string ends behind the first `before` characters."""
        for string in self._strings:
            first = max(0, before - len(string) + 1)
            if text.find(string, first) >= 0:
                return True
        return False


def unescaped(string: str) -> str:
    r"""Return a stop string as it was meant: \n, \t, \r and \\ are what they are in Python.

    A command line has no other way to say a line break.
    """
    meant = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    parts = []
    place = 0
    while place < len(string):
        pair = string[place : place + 2]
        if len(pair) == 2 and pair[0] == "\\" and pair[1] in meant:
            parts.append(meant[pair[1]])
            place += 2
        else:
            parts.append(string[place])
            place += 1
    return "".join(parts)
