"""Starts the ranks of a job on this host, and ends them together. Imports no torch.

    ranks = Ranks(["train", "max_steps=3"], num=2)
    with stopping(ranks):
        code = ranks.wait()

The ranks meet at a store on the loopback. This process opens its socket and passes it to rank 0, so
no other program can take the port in between. torchrun's own store listens on all interfaces and
unpickles what it receives.

Each rank has its own session, so a terminal's Ctrl-C reaches this process alone. Each rank also
reads from a pipe that this process holds open. If this process is killed, the pipe closes, and the
ranks stop with a checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

STORE_FD = "LLAMARL_STORE_FD"  # of rank 0: the socket on which it hosts the store
LIFELINE_FD = "LLAMARL_LIFELINE_FD"  # of each rank: ends with the process that started it
ALONE_S = 600.0  # once a rank has failed: until the others get SIGTERM
TOLD_S = 10.0  # once a rank has failed: until the wait is reported
KILL_S = 30.0  # from SIGTERM to SIGKILL
PRINTED_S = 5.0  # for the last lines; an orphan of a rank may hold the pipe open
LOOK_S = 0.05
EXIT_SIGNAL = 128  # plus the signal's number: how a shell shows a killed process
# What launchers set.
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_LAUNCHERS = (*_OF_RANKS, "TORCHELASTIC_USE_AGENT_STORE")


class Ranks:
    """The processes of one job.

    words: of the command line of each, behind those of `program`. show: gets each line that they
    print; None: they print where this process does.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        num: int = 1,
        show: Callable[[str], None] | None = None,
        program: Sequence[str] = (sys.executable, "-m", "llamarl"),
    ):
        self.num_stops = 0  # how often somebody asked for the end
        self._show = show
        self._shown: list[threading.Thread] = []
        held, self._lifeline = os.pipe()
        listener = socket.create_server(("127.0.0.1", 0))
        self._ranks: list[subprocess.Popen] = []
        try:
            for rank in range(num):
                own = _environment(rank, num, listener, held)
                kept = (held, listener.fileno()) if STORE_FD in own else (held,)
                self._ranks.append(self._started([*program, *words], own, kept))
        finally:
            os.close(held)
            listener.close()

    def _started(
        self, command: Sequence[str], own: dict[str, str], kept: Sequence[int]
    ) -> subprocess.Popen:
        """Start one process. own: its environment. kept: the files that it inherits."""
        rank = subprocess.Popen(
            command,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if self._show else None,
            stderr=subprocess.STDOUT if self._show else None,
            pass_fds=kept,
            start_new_session=True,
        )
        if self._show and rank.stdout:
            reader = threading.Thread(target=self._pass_on, args=(rank.stdout,), daemon=True)
            reader.start()
            self._shown.append(reader)
        return rank

    def _pass_on(self, lines: IO[bytes]) -> None:
        for line in lines:
            if self._show:
                self._show(line.decode(errors="replace").rstrip("\n"))

    @property
    def living(self) -> list[int]:
        """The ranks that run."""
        return [rank for rank, process in enumerate(self._ranks) if process.poll() is None]

    def stop(self) -> None:
        """Ask the run to end after its step, with a checkpoint. Asked again, it ends at once."""
        self.num_stops += 1
        if self.num_stops == 1:
            _say("the run ends after its step, with a checkpoint; Ctrl-C again ends it at once")
            self._send(signal.SIGTERM)
        else:
            _say("the run ends at once, without a checkpoint of this step")
            self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to each rank; SIGKILL also to the processes that it started."""
        for rank in self.living:
            process = self._ranks[rank]
            try:
                if number == signal.SIGKILL:
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)
            except ProcessLookupError:
                pass  # it has just ended

    def wait(self) -> int:
        """Wait for all ranks, however long the job is. Return the exit code: of the first that
        failed, or 0.

        After a failure the other ranks get ALONE_S: they notice it, and may save a checkpoint.
        """
        failed: int | None = None
        since = 0.0
        signals = [(TOLD_S, None), (ALONE_S, signal.SIGTERM), (ALONE_S + KILL_S, signal.SIGKILL)]
        while self.living:
            time.sleep(LOOK_S)
            if failed is None:
                failed = self._failed()
                since = time.monotonic()
            elif signals and time.monotonic() - since > signals[0][0]:
                _, number = signals.pop(0)
                self._hasten(failed, number)
        for reader in self._shown:
            reader.join(PRINTED_S)
        os.close(self._lifeline)
        if failed is None:
            failed = self._failed()
        if failed is None:
            return 0
        code = self._ranks[failed].returncode
        return code if code > 0 else EXIT_SIGNAL - code

    def _failed(self) -> int | None:
        """Return a rank that has ended with an error, and say if a signal ended it."""
        for rank, process in enumerate(self._ranks):
            code = process.poll()
            if code is not None and code < 0 and not self.num_stops:
                why = "; was there too little memory?" if code == -signal.SIGKILL else ""
                _say(f"rank {rank} was ended by {signal.Signals(-code).name}{why}")
            if code:
                return rank
        return None

    def _hasten(self, failed: int, number: signal.Signals | None) -> None:
        """Say that the others are still there, and send them a signal, if there is one."""
        others = ", ".join(str(rank) for rank in self.living)
        left = f"rank {failed} has failed, and rank {others} has not ended yet"
        if number is None:
            _say(f"{left}; Ctrl-C twice ends it at once")
            return
        _say(f"{left}: {number.name}")
        self._send(number)


def _environment(rank: int, num: int, listener: socket.socket, held: int) -> dict[str, str]:
    """Return the environment of a rank."""
    own = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
    own[LIFELINE_FD] = str(held)
    # A program's own folder, which Python puts there, is importable in its ranks too.
    program = sys.path[0] if sys.path else ""
    if program and Path(program).is_dir():
        given = own.get("PYTHONPATH")
        own["PYTHONPATH"] = os.pathsep.join([program, *([given] if given else [])])
    if num == 1:
        return own
    host, port = listener.getsockname()
    own |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    own |= {"WORLD_SIZE": str(num), "LOCAL_WORLD_SIZE": str(num)}
    own |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    if rank == 0:
        own[STORE_FD] = str(listener.fileno())
    return own


@contextmanager
def stopping(ranks: Ranks) -> Iterator[None]:
    """In the body, Ctrl-C and SIGTERM ask the ranks to stop. Only the main thread hears signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        earlier[number] = signal.signal(number, lambda *_: ranks.stop())
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def hold_lifeline() -> None:
    """In a rank: end as if SIGTERM had come, once the process that started it has ended."""
    held = os.environ.pop(LIFELINE_FD, None)
    if held is None:
        return

    def watch() -> None:
        os.read(int(held), 1)  # returns when the other end is closed
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _say(text: str) -> None:
    print(f"llamarl: {text}", file=sys.stderr, flush=True)
