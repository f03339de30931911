"""The pool's side of one worker: a subprocess in a session of its own, its pipes, and its end."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from llamarl.words.texts import read_json
from llamarl.workers import guard
from llamarl.workers.memory_limit import Note

START_S = 120.0  # for a worker to import the user's module

# Time for a worker whose output has ended to exit by itself, so that its own exit code is reported.
EXIT_S = 0.5
KILL_S = 5.0  # for a killed worker to be gone; after that it is left to the kernel
_READ_BYTES = 1 << 16
# That the pipe of calls holds: what does not fit into it waits for the next poll. Linux lets a user
# have 64 MiB in all pipes.
_PIPE_BYTES = 1 << 18

# Where llamarl is. A worker's own sys.path comes later, with what the user's code is to find.
ROOT = str(Path(__file__).resolve().parents[2])
_START = """\
import importlib, json, sys
root, module, path, setup, note = sys.argv[1:]
sys.path.insert(0, root)
importlib.import_module(module).main(path, json.loads(setup), int(note))
"""

log = logging.getLogger(__name__)


class Sendable(Protocol):
    """A command as its worker's pipe takes it: a reward pool's call, or one to an environment."""

    line: bytes
    limit_s: float  # from its start to its answer
    sent_at: float  # when the last byte of it was in the pipe; infinite before


Command = TypeVar("Command", bound=Sendable)


class WorkerProcess(Generic[Command]):
    """One subprocess and its pipes. Nothing here blocks, except waiting for the end of a process
    that is ending or killed.

    module: its main(path, setup, note) runs there. path: the import path of the user's code.
    """

    def __init__(self, module: str, path: str, setup: dict):
        # A worker uses one core, and freed memory that an arena keeps would count as held.
        few_threads = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        self.note = Note()
        note = self.note.writer
        self._process = subprocess.Popen(
            # -P keeps the current directory off sys.path until the worker takes over the pool's.
            [sys.executable, "-P", "-c", _START, ROOT, module, path, json.dumps(setup), str(note)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
            env=few_threads | os.environ,
            pass_fds=[setup["notify"], note],
        )
        self.note.hand_over()
        output = self._process.stdout
        commands = self._process.stdin
        assert output is not None and commands is not None, "both are pipes"
        self._output = output
        self._commands = commands
        self.stdout = output.fileno()
        self.stdin = commands.fileno()
        os.set_blocking(self.stdout, False)
        os.set_blocking(self.stdin, False)
        _widen(self.stdin)
        self._received = b""
        self.in_flight: deque[Command] = deque()  # oldest first; the first is the one being scored
        self.unsent: deque[Command] = deque()  # the last of these, for which the pipe was too full
        self._num_written = 0  # bytes of the first unsent one that are in the pipe
        self.ready = False  # it has imported the function
        self.ended = False  # whether its output has ended
        self.astray = False  # whether it sent what it was not asked; its output is then ignored
        self.is_fresh = True  # whether it has got no call yet
        self.free_at = time.monotonic()  # when it started, was ready, or finished its last answer

    def send(self, call: Command) -> None:
        """Queue a call for it, behind those that it has; `flush` writes it."""
        self.is_fresh = False
        self.in_flight.append(call)
        self.unsent.append(call)

    def flush(self) -> None:
        """Write as much as the pipe takes now."""
        try:
            while self.unsent:
                call = self.unsent[0]
                self._num_written += os.write(self.stdin, call.line[self._num_written :])
                if self._num_written == len(call.line):
                    self.unsent.popleft().sent_at = time.monotonic()
                    self._num_written = 0
        except (BlockingIOError, BrokenPipeError):
            pass  # the pipe is full, or it died, which the reader notices

    def read(self) -> Iterator[Any]:
        """Yield the messages that have come, as JSON values, with None for a line that is no JSON.
        Sets `ended` at the end of the output.
        """
        while not self.ended:
            try:
                chunk = os.read(self.stdout, _READ_BYTES)
            except BlockingIOError:
                return
            self.ended = not chunk
            *lines, self._received = (self._received + chunk).split(b"\n")
            for line in lines:
                try:
                    message = read_json(line)
                except ValueError:
                    message = None
                yield message

    def current(self) -> Command | None:
        """Return the call that is being made; None while the worker has no whole call."""
        if not self.in_flight:
            return None
        first = self.in_flight[0]
        return first if first.sent_at < math.inf else None

    @property
    def deadline(self) -> float:
        """The time.monotonic() by which it must send something; infinite while it owes nothing."""
        if not self.ready:
            return self.free_at + START_S
        call = self.current()
        if call is None:
            return math.inf
        return max(call.sent_at, self.free_at) + call.limit_s

    def kill(self) -> str:
        """End it and all that it started, within 2 KILL_S. Return how the worker itself ended, in
        words.
        """
        lingers = False
        code = None
        if guard.GUARDED:
            lingers = self.ended and self._wait(EXIT_S) is None
            # Its guard kills what is below it.
            self._process.terminate()
            code = self._wait(KILL_S)
        elif self.ended:
            time.sleep(EXIT_S)
        if code is None:
            # Before it is reaped, because until then no other process can have its id or its
            # group's.
            os.killpg(self._process.pid, signal.SIGKILL)
            code = self._wait(KILL_S)
        self._commands.close()
        if code is None:
            pid = self._process.pid
            log.warning("worker %d was killed and has not ended in %g s", pid, KILL_S)
            return f"was killed and has not ended in {KILL_S:g} s"
        if lingers:
            return "closed its output and was killed"
        if code >= 0:
            return f"exited with code {code}"
        if code == -signal.SIGXCPU:
            return "was ended for its CPU time"
        return f"died of signal {-code} ({signal.strsignal(-code)})"

    def _wait(self, timeout_s: float) -> int | None:
        """Wait for the process's exit code; None if it is still there after so long."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Kill it if that was not done, and close its output."""
        if not self._commands.closed:
            self.kill()
        self._output.close()
        self.note.close()


def _widen(pipe: int) -> None:
    """Have a pipe hold _PIPE_BYTES. It stays as it is where the system has no such call or refuses
    it, for a user may have too much in pipes: then more of what is sent waits.
    """
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def wait_for(workers: Sequence[WorkerProcess], timeout_s: float) -> bool:
    """Block until a worker can be read or written, or the first deadline of one has passed, at most
    timeout_s. Return whether there may be something to do.
    """
    now = time.monotonic()
    until = now + timeout_s
    first_deadline = min((worker.deadline for worker in workers), default=math.inf)
    with selectors.DefaultSelector() as pipes:
        for worker in workers:
            pipes.register(worker.stdout, selectors.EVENT_READ)
            if worker.unsent:
                pipes.register(worker.stdin, selectors.EVENT_WRITE)
        events = pipes.select(max(0.0, min(until, first_deadline) - now))
    return bool(events) or time.monotonic() < until
