"""Bell: the processes of a reward pool ring it when there is something to poll.

worker --a byte--> pipe --a thread hears it--> on_result()
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

_READ_BYTES = 1 << 16
REST_S = 0.001  # between two rings, so that one call of on_result serves all results of that time


class Bell:
    """A pipe that workers ring after each result, and the thread that hears it."""

    def __init__(self, on_result: Callable[[], None]):
        self._hears, self.rings = os.pipe()
        os.set_blocking(self.rings, False)  # the workers' end too, because they share it
        self._on_result = on_result
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name="reward-bell", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            os.read(self._hears, _READ_BYTES)
            if self._closing:
                return
            self._on_result()
            time.sleep(REST_S)

    def close(self) -> None:
        """End the thread and close the pipe."""
        self._closing = True
        try:
            os.write(self.rings, b".")
        except BlockingIOError:
            pass  # the pipe is full, so the thread will wake anyway
        self._thread.join()
        os.close(self._hears)
        os.close(self.rings)
