"""Requests to stop: SIGTERM and SIGINT, heard by the loop of a run, and remembered before it.

launch      the run has a directory: remembered_stops
  recipe    builds executors
    loop    heard_stops: each signal, and one that came before
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

_Handlers = Mapping[signal.Signals, Any]  # as signal.signal gives and takes them

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Memory:
    """A handler that remembers which signals came. The same one again goes to the handler before
    it: whoever presses Ctrl-C twice does not wait for a model to load. torchrun sends one of each.
    """

    def __init__(self):
        self.come: set[int] = set()
        self.earlier = _install(self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number in self.come:
            _restore(self.earlier)
            os.kill(os.getpid(), number)
            return
        self.come.add(number)
        # A print may be what the signal came into.
        os.write(2, b"llamarl: the run stops before its first step\n")


@contextmanager
def remembered_stops() -> Iterator[None]:
    """Remember the signals of the body for heard_stops, up to the end of that. Without this they
    would kill a run that has a directory, and its outcome.json would be absent.
    """
    memory = _Memory()
    try:
        yield
    finally:
        _restore(memory.earlier)


@contextmanager
def heard_stops(hear: Callable[[], None]) -> Iterator[None]:
    """Call `hear` at each signal in the body, and now if one is remembered."""
    earlier = _install(lambda number, frame: hear())
    memory = earlier[signal.SIGTERM]
    if isinstance(memory, _Memory):
        earlier = memory.earlier  # what comes after the loop may end the process
        if memory.come:
            hear()
    try:
        yield
    finally:
        _restore(earlier)


def _install(handler: Callable[[int, FrameType | None], None]) -> _Handlers:
    return {number: signal.signal(number, handler) for number in _SIGNALS}


def _restore(handlers: _Handlers) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
