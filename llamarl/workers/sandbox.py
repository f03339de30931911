"""Runs one Python program inside walls: what it may see, take and leave behind.

    run(source, ...) --> sandbox_init.py, in namespaces of its own --> the program --> Ran

With isolation "namespaces" (Linux 5.14 and later, x86_64 and aarch64) a program has a user, a
process table, a network without interfaces and a file system of its own: of the machine it sees the
system's libraries and this interpreter's, which it cannot change, and an empty folder, which goes
with it. It starts nothing that outlives it. Limits hold for memory and CPU time of a process, for
processes and files, and for what it prints; the clock ends all of it. Calls that a program does not
need are refused.

With isolation "limits" only the limits of a process and the clock hold: the network, the files of
this user and the number of processes are open to it.

What neither protects from: a hole in the kernel; the load that a program puts on the machine for as
long as it may run.

Standard library only: reward workers use it.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from llamarl.workers import sandbox_init

Isolation = Literal["namespaces", "limits"]
ISOLATIONS: tuple[Isolation, ...] = ("namespaces", "limits")
START_S = 10.0  # for the walls to be made
END_S = 5.0  # for a killed sandbox to be gone
_OUTER_NOBODY = 65534  # whom root becomes: the kernel limits no process of root itself
_READ_BYTES = 1 << 16
_ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PATH": "/usr/bin:/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}


class NoSandbox(RuntimeError):
    """The walls could not be made; the message says which, and what to do."""


@dataclass(frozen=True, slots=True)
class Walls:
    """What a program may have."""

    isolation: Isolation = "namespaces"
    memory_mb: int = 384  # MiB of address space, of each process
    processes: int = 4  # threads count too; not limited with isolation "limits"
    files_mb: int = 16  # MiB of all that it writes
    output_kb: int = 256  # KiB that it prints
    site_packages: bool = False  # whether it may import what is installed beside this interpreter


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a program.

    end: "exit" by itself; "time", "output" for a limit that it ran into and was killed for.
    """

    end: Literal["exit", "time", "output"]
    code: int | None = None  # of its exit, or minus the signal; None unless end is "exit"
    printed: bytes = field(default=b"", repr=False)


def run(
    source: str,
    walls: Walls,
    *,
    until: float,
    cpu_s: float,
    stdin: str = "",
    files: dict[str, str] | None = None,
) -> Ran:
    """Run a program of Python in a sandbox of its own.

    until: the time.monotonic() at which it is killed. cpu_s: seconds of CPU time that each of its
    processes may use. files: further texts by name, in its folder. NoSandbox if the walls cannot be
    made, whatever the program is.
    """
    contents = {"program.py": source, "stdin": stdin, **(files or {})}
    command = [sys.executable, "-P", "-s"]
    if not walls.site_packages:
        command = [getattr(sys, "_base_executable", sys.executable), "-P", "-s", "-S"]
    job: dict[str, object] = {
        "isolation": walls.isolation,
        "is_root": os.geteuid() == 0,
        "memory_mb": walls.memory_mb,
        # init is one of them, and so is its parent, unless root has become another user inside.
        "processes": walls.processes + (1 if os.geteuid() == 0 else 2),
        "files_mb": walls.files_mb,
        "cpu_s": math.ceil(cpu_s),
        "shown": _shown(walls),
        "files": contents,
        "command": [*command, "program.py"],
        "environment": _ENVIRONMENT,
    }
    if walls.isolation == "namespaces":
        with closing(_Started(job)) as started:
            return started.ran(walls, until)
    with tempfile.TemporaryDirectory(prefix="llamarl-") as folder:
        for name, text in contents.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        job["folder"] = folder
        job["environment"] = _ENVIRONMENT | {"HOME": folder}
        with closing(_Started(job)) as started:
            return started.ran(walls, until)


def check(walls: Walls) -> None:
    """Run an empty program. NoSandbox if the walls cannot be made here."""
    if sys.platform != "linux":
        raise NoSandbox(f"{sys.platform} has no sandbox here: it needs Linux")
    ran = run("print(2)", walls, until=time.monotonic() + START_S, cpu_s=START_S)
    if ran != Ran(end="exit", code=0, printed=b"2\n"):
        told = ran.printed.decode("utf-8", "replace")
        raise NoSandbox(f"an empty program ended with {ran} and printed {told!r:.60}")


def _shown(walls: Walls) -> list[str]:
    """Return the folders of this interpreter, which its programs read."""
    folders = [sys.base_prefix, sys.base_exec_prefix]
    if walls.site_packages:
        folders += [sys.prefix, sys.exec_prefix]
        folders += [path for path in sys.path if path.endswith("site-packages")]
    return list(dict.fromkeys(folders))


class _Started:
    """A process of sandbox_init.py, with what it prints and tells."""

    def __init__(self, job: dict):
        told, tells = os.pipe()
        interpreter = getattr(sys, "_base_executable", sys.executable)
        self.process = subprocess.Popen(
            [interpreter, "-I", "-S", sandbox_init.__file__, str(tells)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[tells],
            bufsize=0,
        )
        os.close(tells)
        self.told = told
        self._heard = b""  # of a line that is not whole
        self._code: int | None = None
        self.is_root = job["is_root"]
        assert self.process.stdin is not None and self.process.stdout is not None, "both are pipes"
        self._stdin = self.process.stdin
        self.printed = self.process.stdout
        self._send(json.dumps(job).encode() + b"\n")

    def _send(self, line: bytes) -> None:
        try:
            while line:
                line = line[os.write(self._stdin.fileno(), line) :]
        except BrokenPipeError:
            pass  # it has ended; the status says why

    def map_user(self) -> None:
        """Say who the program's user is outside, and let it go on."""
        outside = (os.geteuid(), os.getegid())
        folder = Path("/proc", str(self.process.pid))
        if self.is_root:
            outside = (_OUTER_NOBODY, _OUTER_NOBODY)
        else:
            (folder / "setgroups").write_text("deny")
        inner = sandbox_init.INNER_ID
        for name, number in zip(("uid_map", "gid_map"), outside):
            try:
                (folder / name).write_text(f"{inner} {number} 1")
            except OSError as error:
                raise NoSandbox(f"{name} of a user namespace: {error}") from error
        self._send(b"mapped\n")

    def close(self) -> None:
        """Kill all of it, and wait until it is gone."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            pass  # the kernel does not let it die; the worker's guard goes on trying
        self._stdin.close()
        self.printed.close()
        os.close(self.told)

    def ran(self, walls: Walls, until: float) -> Ran:
        """Read what it prints and tells until both have ended. Return what came of it."""
        printed = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self.printed, selectors.EVENT_READ)
            selector.register(self.told, selectors.EVENT_READ)
            while selector.get_map():
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return Ran(end="time")
                for key, _ in selector.select(left_s):
                    piece = os.read(key.fd, _READ_BYTES)
                    if not piece:
                        selector.unregister(key.fd)
                    elif key.fd == self.told:
                        self._hear(piece)
                    else:
                        printed += piece
                if len(printed) > walls.output_kb << 10:
                    return Ran(end="output")
        if walls.isolation == "limits":  # the program has closed its output and may go on
            try:
                self._code = self.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                return Ran(end="time")
        if self._code is None:
            raise NoSandbox("the sandbox ended without a word")
        return Ran(end="exit", code=self._code, printed=bytes(printed))

    def _hear(self, piece: bytes) -> None:
        *lines, self._heard = (self._heard + piece).split(b"\n")
        for line in lines:
            word, _, rest = line.decode("utf-8", "replace").partition(" ")
            if word == "unshared":
                self.map_user()
            elif word == "ended":
                self._code = int(rest)
            else:
                raise NoSandbox(rest)
