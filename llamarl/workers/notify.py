"""NotifyPipe: the processes of a pool write to it when there is something to poll.

worker --a byte--> pipe --a thread reads it--> on_result()
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

_READ_BYTES = 1 << 16
REST_S = 0.001  # between two reads, so that one call of on_result serves all results of that time


class NotifyPipe:
    """A pipe into which workers write a byte after each result, and the thread that reads it."""

    def __init__(self, on_result: Callable[[], None]):
        self._reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)  # the workers' end too, because they share it
        self._on_result = on_result
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name="pool-notify", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            os.read(self._reader, _READ_BYTES)
            if self._closing:
                return
            self._on_result()
            time.sleep(REST_S)

    def close(self) -> None:
        """End the thread and close the pipe."""
        self._closing = True
        try:
            os.write(self.writer, b".")
        except BlockingIOError:
            pass  # the pipe is full, so the thread will wake anyway
        self._thread.join()
        os.close(self._reader)
        os.close(self.writer)
