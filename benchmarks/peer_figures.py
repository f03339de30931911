"""Shared by the tables of peers' step times: a published figure and ours, what a pair of figures
says of asynchrony, and how a value is set on one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from llamarl.planner.sheet import Device, Sheet, read_sheet

ALIKE = 0.02  # a step within 2 % of another is neither faster nor slower


@dataclass(frozen=True, slots=True)
class Figure:
    """A published figure and ours, in seconds. is_set: ours was set on it."""

    peer: str
    job: str
    what: str
    published_s: float
    here_s: float
    is_set: bool = False

    @property
    def error(self) -> float:
        """How much longer ours is, as a share of the published one."""
        return self.here_s / self.published_s - 1

    def record(self) -> dict:
        """Return it for a JSON file."""
        return {
            "peer": self.peer,
            "job": self.job,
            "what": self.what,
            "published_s": self.published_s,
            "here_s": round(self.here_s, 2),
            "error": round(self.error, 4),
            "is_set": self.is_set,
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a peer's figures say of asynchrony, and what ours do: faster, slower or alike, with the
    asynchronous step over the synchronous one. why: what the planner misses, where they differ.
    """

    peer: str
    job: str
    published_ratio: float
    here_ratio: float
    why: str = ""

    @property
    def published(self) -> str:
        """The peer's verdict."""
        return worded(self.published_ratio)

    @property
    def here(self) -> str:
        """The planner's."""
        return worded(self.here_ratio)

    @property
    def agrees(self) -> bool:
        """Whether both see a gain, or neither does."""
        return (self.published == "faster") == (self.here == "faster")

    def record(self) -> dict:
        """Return it for a JSON file."""
        return {
            "peer": self.peer,
            "job": self.job,
            "published_ratio": round(self.published_ratio, 3),
            "here_ratio": round(self.here_ratio, 3),
            "published": self.published,
            "here": self.here,
            "agrees": self.agrees,
            "why": self.why,
        }


def worded(ratio: float) -> str:
    """Return what a ratio of an asynchronous step to a synchronous one says."""
    if ratio > 1 + ALIKE:
        return "slower"
    return "faster" if ratio < 1 - ALIKE else "alike"


def solve(f: Callable[[float], float], goal: float, low: float, high: float) -> float:
    """Return x between low and high at which a rising f is `goal`, by halving on a log scale."""
    for _ in range(30):
        middle = (low * high) ** 0.5
        if f(middle) < goal:
            low = middle
        else:
            high = middle
    return middle


@functools.cache
def _h100() -> Sheet:
    """Return the sheet of H100s, read once."""
    return read_sheet("h100")


def sheet_of(device: Device | None) -> Sheet:
    """Return a sheet of a device, with what is assumed of an H100. None: the sheet of H100s."""
    return _h100() if device is None else replace(_h100(), device=device)
