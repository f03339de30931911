"""Jobs that start at once: their processes are forked from one that has imported what they import,
for a fresh interpreter spends more on imports than a small job on all else.

    given = {"ranks": 2, "environment": environment(), "log": log, "cwd": ROOT}
    process = the_forkery().start([PROGRAM, "max_steps=3"], **given)
    code = process.wait(timeout=60)
    process.end()

Each pytest process has one. It takes one connection a job, and forks a launcher for it, which forks
the ranks and does what torchrun does: it hosts their store, ends all when one fails, and says how
it ended. A connection that its client closes ends the job.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from functools import cache
from pathlib import Path

IMPORTED = (
    "hydra",
    "hypothesis",
    "pytest",
    "transformers",
    "torch._dynamo",
    "executors.build",
    "executors.trainer",
)
START_S = 240  # to import that: a busy machine is slow
END_S = 60  # for what is killed, or has nothing more to do, to be gone
GRACE_S = 30  # from SIGTERM to SIGKILL, as torchrun has it
POLL_S = 0.02
FAILED = 1
PORT_DIGITS = 5


class ForkedProcess:
    """A started job: what of subprocess.Popen a test asks for, and its ranks' pids."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._answers = connection.makefile("rb")
        self._code: int | None = None
        self.pids: list[int] = self._answer()

    def poll(self) -> int | None:
        """The exit code: torchrun's for several ranks, the process's for one; None: it runs."""
        if self._code is None and select.select([self._connection], [], [], 0)[0]:
            self._code = self._answer()
        return self._code

    def wait(self, timeout: float) -> int:
        """The exit code. TimeoutExpired if it does not end."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked job", timeout)
            time.sleep(POLL_S)
        return self._code

    def _answer(self):
        line = self._answers.readline()
        assert line, "the launcher of a forked job has ended"
        return json.loads(line)

    def stop(self) -> None:
        """Send SIGTERM to all ranks, as torchrun does with one that it gets."""
        self._connection.sendall(b"stop")

    def end(self) -> None:
        """Kill what still runs; afterwards nothing does."""
        if self._connection.fileno() < 0:
            return
        self._connection.shutdown(socket.SHUT_WR)
        self._answers.read()  # until the launcher has ended
        self._answers.close()
        self._connection.close()


class Forkery:
    """The process to fork from, started with the first job."""

    def __init__(self):
        self._process: subprocess.Popen | None = None
        self._folder: tempfile.TemporaryDirectory | None = None

    def start(
        self,
        argv: list[str],
        *,
        ranks: int | None,
        environment: dict[str, str],
        log: Path,
        cwd: Path,
    ) -> ForkedProcess:
        """A program of the checkout, as one process or on `ranks` of them.

        environment: all of theirs; but what is read at import was read from this process's own.
        """
        if self._process is None:
            self._start()
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(END_S)
        connection.connect(self._address)
        job = {
            "argv": argv,
            "ranks": ranks,
            "environment": environment,
            "log": str(log),
            "cwd": str(cwd),
        }
        connection.sendall(json.dumps(job).encode() + b"\n")
        return ForkedProcess(connection)

    def close(self) -> None:
        if self._process is None:
            return
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
        self._process.stdout.close()
        self._process = None
        self._folder.cleanup()

    @property
    def _address(self) -> str:
        return f"{self._folder.name}/jobs"

    def _start(self) -> None:
        from tests.launching import environment

        self._folder = tempfile.TemporaryDirectory()
        process = subprocess.Popen(
            [sys.executable, __file__, self._address],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        up = select.select([process.stdout], [], [], START_S)[0]
        assert up and process.stdout.readline(), "the process to fork from did not come up"
        self._process = process


@cache
def the_forkery() -> Forkery:
    """This process's, which ends with it."""
    made = Forkery()
    atexit.register(made.close)
    return made


# --- what that process runs ---


def serve(address: str) -> None:
    """Until standard input ends, which it does with the tests."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    for module in IMPORTED:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for launchers
    print("up", flush=True)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            launch(connection)
        connection.close()


def launch(connection: socket.socket) -> None:
    """Fork the ranks of a job, and see it to its end. Does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection.makefile("rb") as lines:
        job = json.loads(lines.readline())
    ranks = job["ranks"] or 1
    # A process that has threads, as a store's host does, is not one to fork: ranks come first.
    port_reader, port_writer = os.pipe()
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            connection.close()
            os.close(port_writer)
            run_rank(job, rank, port_reader)
        pids.append(pid)
    store = None  # which lives as long as this process
    if job["ranks"]:
        from torch.distributed import TCPStore

        minute = timedelta(minutes=1)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=minute)
        os.write(port_writer, f"{store.port:0{PORT_DIGITS}}".encode() * ranks)
    answer(connection, pids)
    code = supervise(connection, pids)
    if job["ranks"] and code:
        code = FAILED
    answer(connection, code)
    os._exit(0)


def answer(connection: socket.socket, value: object) -> None:
    try:
        connection.sendall(json.dumps(value).encode() + b"\n")
    except BrokenPipeError:
        pass  # the tests have ended


def supervise(connection: socket.socket, pids: list[int]) -> int:
    """0, or how the first of these that failed did: its exit code, or minus a signal's number."""
    living = set(pids)
    code = 0
    kill_at = float("inf")
    is_watched = True
    while living:
        if is_watched and select.select([connection], [], [], POLL_S)[0]:
            if connection.recv(64):
                send(signal.SIGTERM, living)
            else:  # closed
                send(signal.SIGKILL, living)
                is_watched = False
        if time.monotonic() > kill_at:
            send(signal.SIGKILL, living)
        for pid in list(living):
            ended, status = os.waitpid(pid, os.WNOHANG if is_watched else 0)
            if not ended:
                continue
            living.remove(pid)
            if status and not code:
                code = os.waitstatus_to_exitcode(status)
                kill_at = time.monotonic() + GRACE_S
                send(signal.SIGTERM, living)
    return code


def send(number: signal.Signals, pids: set[int]) -> None:
    for pid in pids:
        os.kill(pid, number)  # our own child, which is not waited for yet


def run_rank(job: dict, rank: int, port_reader: int) -> None:
    """The program, as this process. Does not return."""
    code = FAILED
    try:
        become(job)
        if job["ranks"]:
            os.environ.update(place(rank, job["ranks"], port_reader))
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code
        elif end.code is None:
            code = 0
        else:
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as an interpreter does: say it, and end
        traceback.print_exc()
    finally:  # whatever happened, a rank never goes on as its launcher
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def become(job: dict) -> None:
    """Have a job's output, folder, environment and arguments, and the paths that follow from
    them.
    """
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # A line is written at once: ranks share the log, and pieces of their lines would mix.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.argv = job["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in folders if folder and folder not in sys.path]


def place(rank: int, ranks: int, port_reader: int) -> dict[str, str]:
    """What llamarl asks of all that torchrun tells a rank. Waits for the store's port; ValueError
    if the launcher ends before.
    """
    port = os.read(port_reader, PORT_DIGITS).decode()
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(int(port)),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


if __name__ == "__main__":
    serve(sys.argv[1])
