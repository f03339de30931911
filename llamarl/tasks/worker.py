"""The reward worker: a subprocess that scores completions with the user's function. pool.py starts
it as a script.

    rank -- guard, which the pool starts -- worker, its fork, in a session of its own -- children

    stdin   {"path", "memory_mb", "timeout_s", "parent", "bell"}, once
            [key, prompt, completion, meta], an item each
    stdout  ["ready"] or ["failed", why], once
            [key, kind, value or null, reason, finished_at], in the order of the items
    bell    one byte after each line of stdout, if the pool gave a descriptor for it

One JSON value a line; finished_at is time.monotonic(), which all processes of a machine share. Both
pipes are moved to descriptors of their own before the user's code is imported, so that its prints
go to stderr and its reads find an empty stdin. Standard library only: it starts in some 50 ms.

On Linux the guard runs none of the user's code. It passes on what the worker prints, at most
MAX_PRINTED_BYTES. When the worker ends, the pool asks for its end (SIGTERM) or the rank dies, it
kills all that is left below it, whatever session that is in, and ends as the worker ended. The
worker kills what an item left running before it answers for the item; what was started while the
module was imported lives on. Elsewhere there is no guard: the worker notices the end of its stdin.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import math
import numbers
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

# Results of a full batch of items then fit into a pipe, so that none waits for its reader.
MAX_REASON_BYTES = 400
MAX_PRINTED_BYTES = 1 << 16  # by a worker, to stderr
SWEEP_S = 0.5  # for killed processes to end; one that the kernel holds is left to it
GUARDED = sys.platform == "linux"
# prctl's options, by Linux's numbers.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

RewardFunction = Callable[[str, str, dict], "float | None"]


class BadFunction(Exception):
    """The import path does not lead to a function that can be called as a reward."""


class Verdict(NamedTuple):
    """What became of one item; pool.py makes an Outcome of it."""

    kind: str  # "score", "abstain" or "error"
    value: float | None  # None unless kind is "score"
    reason: str  # why, for "abstain" and "error"


def main(path: str) -> None:
    """Score the items of standard input with the function at `path` until there are no more."""
    commands, results = _private_pipes()
    setup = json.loads(commands.readline())
    bell = setup["bell"]
    pipes = [commands.fileno(), results.fileno()]
    if bell is not None:
        os.set_inheritable(bell, False)
        pipes.append(bell)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if GUARDED:
        _guard(setup["parent"], pipes)
    _limit_memory(setup["memory_mb"])
    sys.path[:] = setup["path"]
    sys.stdout.reconfigure(line_buffering=True)  # a killed worker's prints would otherwise be lost

    own = os.getpid()

    def send(message: list) -> None:
        if os.getpid() != own:
            os._exit(0)  # the user's code forked and came back twice; the original answers
        results.write(json.dumps(message, ensure_ascii=False).encode() + b"\n")
        results.flush()
        _ring(bell)

    try:
        function = resolve(path)
    except BadFunction as error:
        send(["failed", str(error)])
        return
    kept = _children()
    send(["ready"])
    for line in commands:
        key, prompt, completion, meta = json.loads(line)
        _limit_cpu(setup["timeout_s"])
        verdict = score(function, prompt, completion, meta)
        if os.getpid() == own:
            kill_children(but=kept)
        send([key, *verdict, time.monotonic()])


def score(function: RewardFunction, prompt: str, completion: str, meta: dict) -> Verdict:
    """The verdict on one item. Only a finite number is a score."""
    try:
        return _verdict(function(prompt, completion, meta))
    # The user's code may raise anything; whatever it is becomes a typed error of this item and ends
    # nothing else.
    except BaseException as error:
        return Verdict("error", None, _short(_describe(error)))


def _verdict(value: object) -> Verdict:
    if value is None:
        return Verdict("abstain", None, "the reward returned None")
    if not isinstance(value, numbers.Real):
        what = f"{type(value).__name__} {value!r:.60}"
        reason = f"returned {what}; need a float, or None to abstain"
        return Verdict("error", None, _short(reason))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        reason = f"returned {number}; need a finite number, or None to abstain"
        return Verdict("error", None, reason)
    return Verdict("score", number, "")


def resolve(path: str) -> RewardFunction:
    """The reward function at the import path "module:function".

    BadFunction says what is wrong with the path, the module or the function's parameters.
    """
    # Not at the top: this file runs as a script, which finds llamarl once `main` has set sys.path.
    from llamarl.words.names import NoFunction, import_function

    module_name, _, name = path.partition(":")
    try:
        function = import_function(path)
    except NoFunction as error:
        raise BadFunction(str(error)) from error
    except BaseException as error:  # a module may raise anything while it is imported
        is_missing = isinstance(error, ModuleNotFoundError)
        remedy = "; install it, or change the module" if is_missing else ""
        raise BadFunction(f"importing {module_name} failed: {_describe(error)}{remedy}") from error
    _check_signature(function, name)
    return function


def _check_signature(function: RewardFunction, name: str) -> None:
    if inspect.iscoroutinefunction(function):
        raise BadFunction(
            f"{name} is async; a reward is a plain function (prompt, completion, meta) -> float"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none; calling will tell
        return
    try:
        signature.bind("prompt", "completion", {})
    except TypeError as error:
        raise BadFunction(
            f"{name}{signature} cannot be called as {name}(prompt, completion, meta): {error}"
        ) from error


def _describe(error: BaseException) -> str:
    """The type, message and innermost place of an exception, with a remedy where the memory limit
    is the likely cause.
    """
    try:
        message = str(error)
    except BaseException as failure:  # it is the user's code too
        message = f"(its message raises {type(failure).__name__})"
    text = f"{type(error).__name__}: {message}".removesuffix(": ")
    signs = ("failed to map segment", "annot allocate memory")
    is_of_memory = isinstance(error, MemoryError) or any(sign in text for sign in signs)
    remedy = "; reward.memory_mb is its limit" if is_of_memory else ""
    return text + _place_of(error) + remedy


def _place_of(error: BaseException) -> str:
    """The file and line in which an exception was raised, as " (FILE:LINE)"; "" if not known."""
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next:
        trace = trace.tb_next
    return f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"


def _short(reason: str) -> str:
    """One printable line of at most MAX_REASON_BYTES, which JSON at most doubles."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(reason.split()))
    return line.encode("utf-8", "replace")[:MAX_REASON_BYTES].decode("utf-8", "ignore")


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Standard input and output, moved to descriptors that children do not inherit."""
    commands = os.fdopen(os.dup(0), "rb")
    results = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return commands, results


def _ring(bell: int | None) -> None:
    if bell is None:
        return
    try:
        os.write(bell, b".")
    except BlockingIOError:
        pass  # it is full of rings that were not heard yet; one more says nothing new


def _limit_memory(memory_mb: int) -> None:
    limit_bytes = memory_mb << 20
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    except (ValueError, OSError) as error:  # macOS does not offer it
        reason = f"reward.memory_mb={memory_mb} is not in force here: {error}"
        print(f"llamarl: {reason}", file=sys.stderr)


def _limit_cpu(timeout_s: float) -> None:
    """Let the kernel end a spinning item even while the pool is not looking: CPU time so far plus
    timeout_s on every core.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    num_cores = os.cpu_count() or 1
    limit_s = math.ceil(time.process_time() + timeout_s * num_cores) + 1
    if hard != resource.RLIM_INFINITY:
        limit_s = min(limit_s, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, hard))


# --- The guard, and the end of processes ---


class _Signals:
    """SIGCHLD and SIGTERM as something that select sees. A worker that ends early is not missed."""

    def __init__(self):
        self.told_to_end = False
        self.hears, self._rings = os.pipe()
        os.set_blocking(self.hears, False)
        os.set_blocking(self._rings, False)
        signal.set_wakeup_fd(self._rings, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, self._note)
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, _frame: object) -> None:
        self.told_to_end |= number == signal.SIGTERM

    def forget(self) -> None:
        """As if there had been none: for the fork that runs the user's code."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(self.hears)
        os.close(self._rings)


class _Prints:
    """What the worker and its children print, to stderr; after MAX_PRINTED_BYTES it is dropped."""

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
        self._show(text)
        return bool(text)

    def _show(self, text: bytes) -> None:
        shown = text[: self._left]
        if self._left and len(text) > self._left:
            note = f"a reward worker printed {MAX_PRINTED_BYTES} bytes; the rest is dropped"
            shown += f"\nllamarl: {note}\n".encode()
        self._left = max(0, self._left - len(text))
        try:
            while shown:
                shown = shown[os.write(2, shown) :]
        except OSError:
            self._left = 0  # nobody reads stderr any more, which is no reason to end


def _guard(parent: int, pipes: list[int]) -> None:
    """Fork. The call returns in the worker, which has a session of its own, and never in the guard,
    which closes its `pipes`.
    """
    _set_for_process(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _set_for_process(_PR_SET_CHILD_SUBREAPER, 1)
    printed, prints = os.pipe()
    signals = _Signals()
    guard = os.getpid()
    worker = os.fork()
    if worker:
        for descriptor in (*pipes, prints):
            os.close(descriptor)
        _watch(worker, parent, signals, _Prints(printed))
    signals.forget()
    os.setsid()
    _set_for_process(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _set_for_process(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != guard:  # it died before the call
        os._exit(1)
    os.dup2(prints, 1)
    os.dup2(prints, 2)
    os.close(printed)
    os.close(prints)


def _watch(worker: int, parent: int, signals: _Signals, prints: _Prints) -> None:
    """Wait until the worker ends, or must end; then end all that it leaves, and this process in the
    way in which the worker ended.
    """
    sources = [signals.hears, prints.source]
    status = None
    while status is None and not signals.told_to_end and os.getppid() == parent:
        ready, _, _ = select.select(sources, [], [])
        if signals.hears in ready:
            os.read(signals.hears, 1 << 10)
        if prints.source in ready and not prints.pass_on():
            sources.remove(prints.source)
        status = _reap(worker)
    if status is None:
        _kill_group(worker)
    kill_children()
    prints.pass_on()
    _end_as(status)


def _reap(worker: int) -> int | None:
    """The worker's wait status if it has ended, else None. Its orphans, which come to the guard,
    are reaped too.
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
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(1)


def kill_children(but: frozenset[int] = frozenset()) -> bool:
    """Kill all children but some, and who become children by their end. False if that takes longer
    than SWEEP_S.
    """
    until = time.monotonic() + SWEEP_S
    strays = _children() - but
    while strays:
        if time.monotonic() > until:
            return False
        for pid in strays:
            _kill(pid)
        time.sleep(0.001)
        strays = _children() - but
    return True


def _kill(pid: int) -> None:
    """Kill a child and reap it if it has ended. Meanwhile the user's code may have reaped it."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)
    except (ProcessLookupError, ChildProcessError):
        pass


def _kill_group(worker: int) -> None:
    try:
        os.killpg(worker, signal.SIGKILL)
    except ProcessLookupError:  # it has not made its session yet
        os.kill(worker, signal.SIGKILL)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _children() -> frozenset[int]:
    """The ids of this process's children, also of those that have ended and are not reaped; none
    but on Linux.
    """
    if not (GUARDED and _has_children()):
        return frozenset()
    own = os.getpid()
    found = set()
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == own:
            found.add(int(entry))
    return frozenset(found)


def _set_for_process(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1])
