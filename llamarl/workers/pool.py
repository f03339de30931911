"""WorkerPool: what pools of workers have in common.

    commands --> WorkerProcess.send --> a worker's pipe --> messages --> _answer

A worker makes its commands in order and answers each as it completes. If one takes longer than its
limit, or the worker dies, or it answers what it was not asked, then the worker is killed with all
that it started, and another starts in its place. A pool says what becomes of the commands that were
in it (_lost).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic

from llamarl.errors import RewardError
from llamarl.workers.memory_limit import too_much
from llamarl.workers.process import ROOT, START_S, Command, WorkerProcess, wait_for

MAX_FAILED_STARTS = 3  # in a row
_NOTE_BYTES = 1 << 16
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
            os.read(self._reader, _NOTE_BYTES)
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


class WorkerPool(ABC, Generic[Command]):
    """Workers of one module for the user's code at one import path.

    module: its main(path, setup, note) runs in each worker. setup: further values for it, as JSON.
    memory_mb: MiB that a worker and what it starts may hold. on_message: called in a thread of the
    pool's when there is something to poll. given: the key and value that name the user's code in
    messages; limits: the prefix of its limits' keys, or "".

    Workers see this process's sys.path and its current directory. They end with the thread that
    made the pool: make it in a thread that lives as long.
    """

    def __init__(
        self,
        module: str,
        path: str,
        setup: Mapping[str, object],
        *,
        num_workers: int,
        memory_mb: int,
        on_message: Callable[[], None],
        given: str,
        limits: str,
    ):
        self.given = given
        self._limits = limits
        self._memory_mb = memory_mb
        self._failed_starts = 0
        self._notify = NotifyPipe(on_message)
        here = os.getcwd()
        # ROOT is there for a worker whose parent found llamarl by a directory that has changed.
        paths = [here, *(folder or here for folder in sys.path), ROOT]
        common = {
            "path": list(dict.fromkeys(paths)),
            "memory_mb": memory_mb,
            "parent": os.getpid(),
            "notify": self._notify.writer,
        }
        self._new_worker = partial(WorkerProcess[Command], module, path, {**setup, **common})
        self._workers = [self._new_worker() for _ in range(num_workers)]

    def start(self) -> None:
        """Block until a worker has imported the user's module. ValueError says what is wrong with
        it if none can, RewardError that no worker starts.
        """
        while not any(worker.ready for worker in self._workers):
            self.wait(1.0)
            self._poll_workers()

    def wait(self, timeout_s: float) -> bool:
        """Block until `poll` has something to do, at most timeout_s; False if it has not."""
        return wait_for(self._workers, timeout_s)

    def close(self) -> None:
        """Kill all workers. What is pending is dropped."""
        if not self._workers:
            return
        while self._workers:
            self._workers.pop().close()
        self._notify.close()

    def _poll_workers(self) -> None:
        """Read what workers have sent, and replace those that have failed. Does not block."""
        for place, worker in enumerate(self._workers):
            self._collect(worker)
            if worker.ended or worker.astray or time.monotonic() > worker.deadline:
                self._replace(place)

    def _collect(self, worker: WorkerProcess[Command]) -> None:
        """Read a worker's messages until one is astray."""
        for message in worker.read():
            match message:
                # A worker says one of these, once. Later it is the user's code that says so.
                case ["failed", why] if not worker.ready:
                    raise ValueError(f"{self.given}: {why}")
                case ["ready", *told] if not worker.ready:
                    worker.ready = True
                    worker.free_at = time.monotonic()
                    self._note_ready(told)
                case _:
                    if not self._answer(worker, message):
                        worker.astray = True
                        return

    def _replace(self, place: int) -> None:
        """Put a new worker in the place of one that died, overran or is astray. RewardError at the
        MAX_FAILED_STARTS-th in a row that ended before its first command.
        """
        worker = self._workers[place]
        suspect = worker.current()
        has_died = worker.ended
        how = worker.kill()
        if not worker.astray:
            # Read its last output, because the command may have been answered meanwhile.
            self._collect(worker)
        why = None
        held_bytes = worker.note.read()
        if held_bytes is not None:
            why = too_much(held_bytes, self._memory_mb, self._limits)
        elif worker.astray:
            why = (
                "the worker sent what it was not asked; the code must not fork, nor write to the "
                "worker's pipe"
            )
        elif has_died:
            why = f"the worker {how}"
        if suspect is None:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                what = why or f"importing it took longer than {START_S:.0f} s"
                raise RewardError(
                    f"{self.given}: {what} before its first answer, {MAX_FAILED_STARTS} times in "
                    "a row; call it by hand"
                )
        elif not worker.in_flight or worker.in_flight[0] is not suspect:
            suspect = None  # it was answered
        worker.close()
        self._workers[place] = self._new_worker()
        self._lost(place, worker, suspect, why)

    def _note_ready(self, told: list) -> None:
        """Note that a worker has imported the module, and what it told then."""

    @abstractmethod
    def _answer(self, worker: WorkerProcess[Command], message: Any) -> bool:
        """Take a worker's message, a JSON value. Return whether it was asked for it."""

    @abstractmethod
    def _lost(
        self, place: int, worker: WorkerProcess[Command], suspect: Command | None, why: str | None
    ) -> None:
        """Take back the commands in flight of a worker that is replaced. suspect: the one that it
        was making, or None. why: None if that took too long.
        """
