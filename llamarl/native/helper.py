"""A thread that computes beside its owner what nobody needs before the end of a pass.

    with Helper() as helper:
        helper.give(job)      # any number of them; the owner goes on
        helper.finish()       # the owner takes what is left, until all are done

    thread   consumes   waits for          unblocked by        produces
    helper   jobs       a job; its core    give(); close()     what the jobs write
    owner    jobs       the last of them   the helper          the same, in finish()

Several threads in a product meet at its end, and wait there for the one whose core was busy. A
helper meets its owner once in a pass: a core that another process leaves idle now and then is used
while it is idle, and where it is never idle the owner does it all. Jobs must not depend on each
other, since the two take them in no fixed order; then it makes no difference to any result who does
which.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Self

import torch

from llamarl.errors import TimedOut

LONGEST_S = 600.0  # for one job: a product of two matrices, or a pass over some rows
Job = Callable[[], object]


class Helper:
    """Does jobs in a thread of its own, with one intra-op thread and without gradients. owner: the
    executor that it helps, for messages.
    """

    def __init__(self, owner: str = "trainer"):
        self.num_done = 0  # jobs that the thread did, and not the owner
        self._owner = owner
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._is_busy = False
        self._closing = False
        self._error: BaseException | None = None  # of a job in the thread, for `finish`
        # A daemon: its owner may end by an error at any time.
        self._thread = threading.Thread(target=self._run, name="helper", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def give(self, job: Job) -> None:
        """Have a job done until `finish` returns. Never waits."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def finish(self) -> None:
        """Do what is left, and wait for the job that the thread is at. Raise what a job raised."""
        while (job := self._next()) is not None:
            job()
        with self._changed:
            self._until_idle()
            error = self._error
            self._error = None
        if error is not None:
            raise error

    def drop(self) -> None:
        """Forget what is left, and wait for the job that the thread is at."""
        with self._changed:
            self._jobs.clear()
            self._until_idle()
            self._error = None

    def close(self) -> None:
        """End the thread; one that is at a job for longer than LONGEST_S is left behind."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(LONGEST_S)

    def _until_idle(self) -> None:
        """Wait for the job that the thread is at. TimedOut if it takes longer than LONGEST_S."""
        if not self._changed.wait_for(lambda: not self._is_busy, LONGEST_S):
            raise TimedOut(
                f"the {self._owner}'s helper thread has been at one job for {LONGEST_S:g} s; the "
                "machine may be out of memory. placement.adapt=false does without the helper"
            )

    def _next(self) -> Job | None:
        """Return a job that nobody does yet: the newest, whose tensors are still in the cache."""
        with self._changed:
            return self._jobs.pop() if self._jobs else None

    @torch.no_grad()
    def _run(self) -> None:
        # OpenMP keeps this number for each thread; more of them would wait for each other.
        torch.set_num_threads(1)
        torch.get_num_threads()  # else the first job would take over what is set elsewhere by then
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if self._closing:
                    return
                job = self._jobs.popleft()
                self._is_busy = True
            try:
                job()
            except BaseException as error:  # raised in `finish`, which the owner calls
                self._error = self._error or error
            self.num_done += 1
            del job  # and the tensors that it holds
