"""A run's last checkpoint waits for room where the disk is full; any other is given up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from llamarl.comm.control import Control
from llamarl.disk.space import is_full, shown_free

_POLL_S = 1.0  # between two looks at a full disk
Written = TypeVar("Written")

log = logging.getLogger(__name__)


class DiskRoom:
    """Waits for room on the disk of `folder`, on one rank. got_on: called at each look at a full
    disk, so that the ranks that wait for this one go on waiting.
    """

    def __init__(self, folder: Path, control: Control, got_on: Callable[[], None]):
        self._folder = folder
        self._control = control
        self._got_on = got_on
        self._step = -1  # of the checkpoint that waits
        self._deadline = 0.0
        self._has_said = False

    def wait_for(self, step: int, seconds: float) -> None:
        """Let writes of `step` wait for room, for so many seconds from now on."""
        self._step = step
        self._deadline = time.monotonic() + seconds
        self._has_said = False

    def may_wait(self, step: int, error: Exception) -> bool:
        """Return whether a write of `step` is to be tried again, and say so the first time."""
        seconds = self._deadline - time.monotonic()
        if step != self._step or seconds <= 0 or not is_full(error):
            return False
        if not self._has_said:
            self._has_said = True
            log.warning(
                "%s: the disk is full (%s), and this is the run's last checkpoint: it waits %.0f s "
                "(timeout_s) for room. Make room there",
                self._folder,
                shown_free(self._folder),
                seconds,
            )
        return True

    def until_there(self, step: int, write: Callable[[], Written]) -> Written:
        """Return the result of `write`; repeat it while the disk is full and `step` may wait."""
        while True:
            try:
                return write()
            except (OSError, SafetensorError) as error:
                if not self.may_wait(step, error):
                    raise
            self._got_on()
            self._control.check()
            self._control.wait(_POLL_S)
