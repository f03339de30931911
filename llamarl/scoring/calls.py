"""Calls that a reward pool hands to its workers, and how long a worker's first call may take.

TextItem, TextItem, ... --Call--> a line in a worker's pipe (worker.py)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

from llamarl.workers.process import START_S

FIRST_CALL_S = START_S  # for the first call of a worker, where timeout_s gives it less
FIRST_CALL_FACTOR = 10.0  # machines are sometimes busier
MAX_FIRST_KILLS = 2
ASYNC_GRACE_S = 2.0  # for a worker to end by itself what overruns


@dataclass(frozen=True, slots=True)
class TextItem:
    """One completion to score, each field as JSON."""

    prompt: str
    completion: str
    meta: str  # of the prompt's row
    sampled: str  # what meta gets about the completion, or null


@dataclass(slots=True)
class Call:
    """Completions to score together. Once it is handed out, it has the line that a worker reads."""

    items: dict[int, TextItem]  # by key; answered ones are removed
    # Whether they are scored side by side, each with its own time limit and answer.
    is_several: bool = False
    may_join: bool = True  # whether calls that are is_several may be joined with it
    is_first: bool = False  # whether it is its worker's first
    limit_s: float = math.inf  # from its start, or its last answer, to its next answer
    line: bytes = b""
    sent_at: float = math.inf  # when the last byte of it was in the worker's pipe

    def hand_out(self, *, timeout_s: float, first_s: float | None) -> None:
        """Set its limits and its line. timeout_s: the limit for an item. first_s: the least time to
        allow if it is its worker's first; otherwise None.
        """
        self.is_first = first_s is not None
        item_s = max(timeout_s, first_s or 0.0)
        if self.is_several:
            told_s = item_s
            self.limit_s = item_s + ASYNC_GRACE_S
        else:
            told_s = max(timeout_s * len(self.items), first_s or 0.0)
            self.limit_s = told_s
        columns = [
            _array(map(str, self.items)),
            _array(item.prompt for item in self.items.values()),
            _array(item.completion for item in self.items.values()),
            _array(item.meta for item in self.items.values()),
            _array(item.sampled for item in self.items.values()),
            json.dumps(told_s),
        ]
        self.line = _array(columns).encode() + b"\n"
        self.sent_at = math.inf

    @property
    def prompts(self) -> set[str]:
        """The prompts of its items, as JSON."""
        return {item.prompt for item in self.items.values()}

    def is_answered_by(self, keys: list[object]) -> bool:
        """Whether an answer may be about these keys."""
        if not self.is_several:
            return keys == list(self.items)
        return len(keys) == 1 and type(keys[0]) is int and keys[0] in self.items


class Patience:
    """How long a worker's first call may take, from the experience with earlier first calls.

    A call that loads what the function needs may take FIRST_CALL_S. Once a first call has come
    back, the next ones may take timeout_s and FIRST_CALL_FACTOR times as long as the slowest of
    them did, twice that after each in a row that was killed, and never more than FIRST_CALL_S: so a
    completion that hangs a new worker does not cost minutes each time.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self.has_answered = False  # whether any call has come back
        self.num_kills = 0  # first calls that were killed since one came back
        self.hung: set[str] = set()  # the prompts of first calls that were killed, as JSON
        self._slowest_s: float | None = None  # of the first calls that came back

    @property
    def seconds(self) -> float:
        """The time that the next first call may take, whatever timeout_s is."""
        if self._slowest_s is None:
            return FIRST_CALL_S
        patience_s = self._timeout_s + FIRST_CALL_FACTOR * self._slowest_s
        for _ in range(self.num_kills):
            patience_s = min(2 * patience_s, FIRST_CALL_S)
        return min(patience_s, FIRST_CALL_S)

    @property
    def is_at_end(self) -> bool:
        """Whether the next first call would fail too, as far as can be known."""
        has_tried = self.num_kills >= MAX_FIRST_KILLS and len(self.hung) > 1
        return has_tried and not self.has_answered

    def note_return(self, took_s: float) -> None:
        """Note that a first call has come back."""
        self._slowest_s = max(took_s, self._slowest_s or 0.0)
        self.num_kills = 0

    def note_kill(self, call: Call) -> None:
        """Note that a first call was killed for its time."""
        self.num_kills += 1
        self.hung |= call.prompts

    def puts_off(self, call: Call) -> bool:
        """Whether other calls should be tried before this one: all its prompts have hung before,
        and nothing was ever scored.
        """
        return not self.has_answered and call.prompts <= self.hung


def _array(values: Iterable[str]) -> str:
    """Join JSON values to a JSON array."""
    return f"[{', '.join(values)}]"
