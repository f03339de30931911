"""The worker's side of a pool: its pipes, its limits, its guard, and the end of what it starts.

    rank -- guard, which the pool starts -- worker, its fork, in a session of its own -- children

    stdin   one command a line, as JSON; what a command holds is the worker's own
    stdout  one message a line, as JSON; first ["ready", ...] or ["failed", why]
    notify  one byte after each line of stdout, into the descriptor that the pool gave for it

`begin` moves both pipes to descriptors of their own before the user's code is imported, so that its
prints go to stderr and its reads find an empty stdin. Half a surrogate pair is "?" in a message.
Standard library only: a worker starts in some 50 ms.

On Linux the guard runs none of the user's code. It passes on what the worker prints, at most
MAX_PRINTED_BYTES. When the worker ends, the pool asks for its end (SIGTERM) or the rank dies, it
kills all that is left below it, whatever session that is in, and ends as the worker ended. The
worker kills what a call left running before it answers for the call. Elsewhere there is no guard:
the worker notices the end of its stdin.
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from llamarl.workers.memory_limit import (
    Watch,
    be_first_to_go,
    parent_of,
    peak_bytes,
    processes,
    write_note,
)

# So results of a full batch of items fit into a pipe, and none waits for its reader.
MAX_REASON_BYTES = 400
MAX_PRINTED_BYTES = 1 << 16  # by a worker, to stderr
SWEEP_S = 0.5  # for killed processes to end; after that they are left to the kernel
GUARDED = sys.platform == "linux"
# prctl's options, by Linux's numbers.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_HEARD = (signal.SIGCHLD, signal.SIGTERM)  # by the guard

Send = Callable[[list], None]


def begin(setup: dict, note: int) -> tuple[BinaryIO, Send]:
    """Fork the guard, and set up this process as its worker. Return the commands, a line each, and
    what sends a message.

    setup: "path" is its sys.path; "memory_mb" its limit; "parent" the process that made the pool;
    "notify" a descriptor. note: the descriptor to which the guard writes that the limit was passed.
    """
    commands, results = private_pipes()
    notify = setup["notify"]
    os.set_inheritable(notify, False)
    os.set_inheritable(note, False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory_mb = setup["memory_mb"]
    if GUARDED:
        pipes = [commands.fileno(), results.fileno(), notify]
        guard(setup["parent"], pipes, memory_mb << 20, note)
    else:
        reason = f"memory_mb={memory_mb} is not in force here: it needs Linux"
        print(f"llamarl: {reason}", file=sys.stderr)
    sys.path[:] = setup["path"]
    assert isinstance(sys.stdout, io.TextIOWrapper), "prints go to the interpreter's own stream"
    sys.stdout.reconfigure(line_buffering=True)  # a killed worker's prints would otherwise be lost
    own = os.getpid()

    def send(message: list) -> None:
        if os.getpid() != own:
            os._exit(0)  # the user's code forked and both returned; the original process answers
        results.write(line_of(message))
        results.flush()
        try:
            os.write(notify, b".")
        except BlockingIOError:
            pass  # it is full of bytes that were not read yet, so one more is not needed

    return commands, send


def line_of(message: list) -> bytes:
    """Return a message as the pool reads it."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def describe(error: BaseException) -> str:
    """Return the type, message and innermost place of an exception that was caught."""
    text = f"{type(error).__name__}: {message_of(error)}".removesuffix(": ")
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{text} ({Path(frame.f_code.co_filename).name}:{line})"


def describe_in_worker(error: BaseException) -> str:
    """Return what `describe` does, and that the machine refused memory where it did: a worker has
    a limit of its own.
    """
    text = describe(error)
    signs = ("failed to map segment", "annot allocate memory", "can't allocate memory")
    if isinstance(error, MemoryError) or any(sign in text for sign in signs):
        text = f"out of memory: {text}; the machine refused it, not the limit memory_mb"
    return text


def message_of(error: BaseException) -> str:
    """Return the message of an exception that was caught."""
    try:
        return str(error)
    except BaseException as failure:  # it is the user's code too
        return f"(its message raises {type(failure).__name__})"


def short(reason: str) -> str:
    """Return one printable line of at most MAX_REASON_BYTES, which JSON at most doubles."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(reason.split()))
    return line.encode("utf-8", "replace")[:MAX_REASON_BYTES].decode("utf-8", "ignore")


def private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move standard input and output to descriptors that children do not inherit."""
    commands = os.fdopen(os.dup(0), "rb")
    results = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return commands, results


def end_if_over(memory_bytes: int, note: int) -> None:
    """End this worker if it ever held more, however shortly, because an item's outcome must not
    depend on when its guard looked.
    """
    if not GUARDED:
        return
    peak = peak_bytes()
    if peak > memory_bytes:
        write_note(note, peak)
        os._exit(1)


def limit_cpu(timeout_s: float) -> None:
    """Let the kernel end a spinning call even while the pool is not looking: CPU time so far plus
    timeout_s on every core.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    num_cores = os.cpu_count() or 1
    limit_s = math.ceil(time.process_time() + timeout_s * num_cores) + 1
    if hard != resource.RLIM_INFINITY:
        limit_s = min(limit_s, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, hard))


# --- The guard, and the end of processes ---


class _Prints:
    """Prints of the worker and its children, which go to stderr; after MAX_PRINTED_BYTES they are
    dropped.
    """

    def __init__(self, source: int):
        self.source = source
        self._left = MAX_PRINTED_BYTES
        os.set_blocking(source, False)

    def pass_on(self) -> bool:
        """Pass on one pipe full at most, so that who prints without end holds up nothing. False
        when no more can come.
        """
        try:
            text = os.read(self.source, 1 << 16)
        except BlockingIOError:
            return True
        shown = text[: self._left]
        if self._left and len(text) > self._left:
            note = f"a worker printed {MAX_PRINTED_BYTES} bytes; the rest is dropped"
            shown += f"\nllamarl: {note}\n".encode()
        self._left = max(0, self._left - len(text))
        try:
            while shown:
                shown = shown[os.write(2, shown) :]
        except OSError:
            self._left = 0  # nobody reads stderr any more; go on without it
        return bool(text)


def guard(parent: int, pipes: list[int], memory_bytes: int, note: int) -> None:
    """Fork. The call returns in the worker, which has a session of its own, and never in the guard,
    which closes its `pipes` and writes to `note` how much memory was more than memory_bytes.
    """
    _set_for_process(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _set_for_process(_PR_SET_CHILD_SUBREAPER, 1)
    printed, prints = os.pipe()
    # The numbers of signals, for select: a worker that ends early is not missed.
    signals, rings = os.pipe()
    os.set_blocking(signals, False)
    os.set_blocking(rings, False)
    signal.set_wakeup_fd(rings, warn_on_full_buffer=False)
    for number in _HEARD:
        signal.signal(number, lambda *_: None)
    own = os.getpid()
    worker = os.fork()
    if worker:
        for descriptor in (*pipes, prints):
            os.close(descriptor)
        held = Watch(worker, memory_bytes, note)
        _watch(worker, parent, signals, _Prints(printed), held)
    signal.set_wakeup_fd(-1)
    for number in _HEARD:
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    _set_for_process(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _set_for_process(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != own:  # the guard died before the call
        os._exit(1)
    be_first_to_go()
    os.dup2(prints, 1)
    os.dup2(prints, 2)
    for descriptor in (signals, rings, printed, prints):
        os.close(descriptor)


def _watch(worker: int, parent: int, signals: int, prints: _Prints, held: Watch) -> None:
    """Wait until the worker ends, or must end, as it must when too much memory is held; then end
    all that it leaves, and this process in the way in which the worker ended.
    """
    sources = [signals, prints.source]
    heard = b""
    status = None
    while status is None and signal.SIGTERM not in heard and os.getppid() == parent:
        if held.is_too_much():
            break
        ready, _, _ = select.select(sources, [], [], held.wait_s())
        if signals in ready:
            heard = os.read(signals, 1 << 16)
        if prints.source in ready and not prints.pass_on():
            sources.remove(prints.source)
        status = _reap(worker)
    held.check_peak()
    if status is None:
        try:
            os.killpg(worker, signal.SIGKILL)
        except ProcessLookupError:  # the worker has not made its session yet
            os.kill(worker, signal.SIGKILL)
    kill_children()
    prints.pass_on()
    _end_as(status)


def _reap(worker: int) -> int | None:
    """Return the worker's wait status if it has ended, else None. Its orphans, which come to the
    guard, are reaped too.
    """
    status = None
    while _has_children():
        pid, found = os.waitpid(-1, os.WNOHANG)
        if not pid:
            break
        if pid == worker:
            status = found
    return status


def _end_as(status: int | None) -> None:
    """End this process with the exit code, or by the signal, of a wait status; None: killed."""
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(1)


def kill_children(but: frozenset[int] = frozenset()) -> None:
    """Kill all children but some, and who become children by their end; for SWEEP_S at most."""
    until = time.monotonic() + SWEEP_S
    strays = children() - but
    while strays and time.monotonic() < until:
        for pid in strays:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
            except (ProcessLookupError, ChildProcessError):
                pass  # the user's code has reaped the child meanwhile
        time.sleep(0.001)
        strays = children() - but


def held_by_multiprocessing() -> frozenset[int]:
    """Return the processes of pools, executors and managers that the user's code still has, and
    those by which multiprocessing serves later calls. An executor starts its own at its first use.
    """
    # Names and members of the standard library's modules, if the user's code has imported them.
    found: set[int | None] = set()
    users = sys.modules.get("multiprocessing")
    for process in users.active_children() if users else ():
        if "PoolWorker" in process.name or "Manager" in process.name:
            found.add(process.pid)
    executors = sys.modules.get("concurrent.futures.process")
    for thread in list(getattr(executors, "_threads_wakeups", ())):
        found |= set(thread.processes or ())
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    found.add(getattr(getattr(tracker, "_resource_tracker", None), "_pid", None))
    server = sys.modules.get("multiprocessing.forkserver")
    found.add(getattr(getattr(server, "_forkserver", None), "_forkserver_pid", None))
    return frozenset(pid for pid in found if pid is not None)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def children() -> frozenset[int]:
    """Return the ids of this process's children, also of those that have ended and are not reaped;
    none but on Linux.
    """
    if not (GUARDED and _has_children()):
        return frozenset()
    own = os.getpid()
    return frozenset(pid for pid in processes() if parent_of(pid) == own)


def _set_for_process(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
