"""BreakableSteps: steps of an executor that the loop can leave, should one never end.

A collective with a hung rank (a stopped process, a host without network) ends only with its group's
timeout, because gloo cannot abort one from outside. A rank that must save a checkpoint after such a
loss cannot wait so long. So if an executor shares ranks with others than keepers, it makes its
steps in a thread of its own, one at a time, and the loop waits for each. After a loss the loop
leaves a step that does not end.

    thread          consumes                waits for              unblocked by
    the loop        what a step returned    the step; a loss       the executor's thread; LOOK_S
    the executor's  a step to make          a step to make         the loop
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

import torch

LOOK_S = 0.05  # between two looks at whether a step is still wanted
LAST_S = 2.0  # a step that is no longer wanted has so long to end by itself


class BreakableSteps:
    """Makes the steps of one executor.

    is_over: whether the run ends, so that a step that is under way is no longer wanted. device:
    what the executor computes on.
    """

    def __init__(self, name: str, *, device: torch.device, is_over: Callable[[], bool]):
        self.left = False  # a step was left: it may stand in a collective until this process ends
        self._device = device
        self._num_threads = torch.get_num_threads()
        self._is_over = is_over
        self._asked: queue.SimpleQueue[tuple[Callable[[], bool], Future]] = queue.SimpleQueue()
        # A daemon: one that is stuck must not keep the process from its end.
        self._thread = threading.Thread(target=self._run, name=f"step-{name}", daemon=True)

    def make(self, step: Callable[[], bool]) -> bool:
        """Make one step, and return what it returns or raise what it raises.

        Returns False once the step was left (`left`). Make no other then.
        """
        assert not self.left, "a step was left before"
        if not self._thread.is_alive():
            self._thread.start()
        made: Future[bool] = Future()
        self._asked.put((step, made))
        unwanted_since: float | None = None
        while not wait([made], LOOK_S).done:
            now = time.monotonic()
            if not self._is_over():
                continue
            if unwanted_since is None:
                unwanted_since = now
            if now - unwanted_since > LAST_S:
                self.left = True
                return False
        return made.result()

    def _run(self) -> None:
        # OpenMP keeps this number for each thread, and sums depend on it.
        torch.set_num_threads(self._num_threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has its own
        while True:
            step, made = self._asked.get()
            try:
                made.set_result(step())
            except BaseException as error:  # raised in the loop, which waits for it
                made.set_exception(error)
