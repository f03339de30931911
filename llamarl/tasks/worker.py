"""The reward worker: a subprocess that scores completions with the user's function. pool.py starts it as a script.

    stdin   one object {"path", "memory_mb", "timeout_s", "parent", "bell"}, then items   [key, prompt, completion, meta]
    stdout  ["ready"] or ["failed", why], then, in item order,                    [key, kind, value or null, reason, finished_at]
    bell    one byte after each line of stdout, if the pool gave a descriptor for it

One JSON value a line; finished_at is time.monotonic(), which all processes of a machine share. Both pipes are moved to
descriptors of their own before the user's code is imported, so that its prints go to stderr and its reads find an
empty stdin. Standard library only: it starts in some 50 ms.
"""

from __future__ import annotations

import ctypes
import difflib
import importlib
import inspect
import json
import math
import numbers
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

MAX_REASON_BYTES = 400  # results of a full batch of items then fit into a pipe, so that none waits for its reader
_PR_SET_PDEATHSIG = 1

RewardFunction = Callable[[str, str, dict], "float | None"]


class BadFunction(Exception):
    """The import path does not lead to a function that can be called as a reward."""


def main(path: str) -> None:
    commands, results = _private_pipes()
    setup = json.loads(commands.readline())
    if setup["bell"] is not None:
        os.set_inheritable(setup["bell"], False)
    _die_with_parent(setup["parent"])
    _limit_resources(setup["memory_mb"])
    sys.path[:] = setup["path"]

    own = os.getpid()

    def send(message: list) -> None:
        if os.getpid() != own:
            os._exit(0)  # the user's code forked and came back twice; the original answers
        results.write(json.dumps(message, ensure_ascii=False).encode() + b"\n")
        results.flush()
        _ring(setup["bell"])

    try:
        function = resolve(path)
    except BadFunction as error:
        send(["failed", str(error)])
        return
    send(["ready"])
    for line in commands:
        key, prompt, completion, meta = json.loads(line)
        _limit_cpu(setup["timeout_s"])
        send([key, *score(function, prompt, completion, meta), time.monotonic()])


def score(function: RewardFunction, prompt: str, completion: str, meta: dict) -> tuple[str, float | None, str]:
    """(kind, value or None, reason) of one item. Only a finite number is a score."""
    try:
        return _verdict(function(prompt, completion, meta))
    # The user's code may raise anything; whatever it is becomes a typed error of this item and ends nothing else.
    except BaseException as error:
        return "error", None, _short(_describe(error))


def _verdict(value: object) -> tuple[str, float | None, str]:
    if value is None:
        return "abstain", None, "the reward returned None"
    if not isinstance(value, numbers.Real):
        return "error", None, _short(f"returned {type(value).__name__} {value!r:.60}; need a float, or None to abstain")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return "error", None, f"returned {number}; need a finite number, or None to abstain"
    return "score", number, ""


def resolve(path: str) -> RewardFunction:
    """Import "module:function". BadFunction says what is wrong with the path, the module or the function's parameters."""
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise BadFunction('need an import path "module:function"')
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise BadFunction(f"no module {error.name} in {os.getcwd()} or on sys.path{_nearest_module(error.name)}") from error
        raise BadFunction(f"importing {module_name} failed: {_describe(error)}; install it, or change the module") from error
    except BaseException as error:  # a module may raise anything while it is imported
        raise BadFunction(f"importing {module_name} failed: {_describe(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        candidates = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(candidates[:8]) or 'no functions'}"
        what = "no function" if function is None else f"{type(function).__name__}, not a function, under the name"
        raise BadFunction(f"{module_name} has {what} {name}; {hint}")
    _check_signature(function, name)
    return function


def _check_signature(function: RewardFunction, name: str) -> None:
    if inspect.iscoroutinefunction(function):
        raise BadFunction(f"{name} is async; a reward is a plain function (prompt, completion, meta) -> float")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none; calling will tell
        return
    try:
        signature.bind("prompt", "completion", {})
    except TypeError as error:
        raise BadFunction(f"{name}{signature} cannot be called as {name}(prompt, completion, meta): {error}") from error


def _nearest_module(name: str) -> str:
    here = [p.stem for p in Path.cwd().glob("*.py")]
    near = difflib.get_close_matches(name, here, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _describe(error: BaseException) -> str:
    """Type, message and the innermost place of an exception, with a remedy where the memory limit is the likely cause."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    place = f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})" if trace else ""
    try:
        message = str(error)
    except BaseException as failure:  # it is the user's code too
        message = f"(its message raises {type(failure).__name__})"
    text = f"{type(error).__name__}: {message}".removesuffix(": ")
    memory = isinstance(error, MemoryError) or "failed to map segment" in text or "annot allocate memory" in text
    return text + place + ("; reward.memory_mb is its limit" if memory else "")


def _short(reason: str) -> str:
    """One printable line of at most MAX_REASON_BYTES, which JSON at most doubles."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(reason.split()))
    return line.encode("utf-8", "replace")[:MAX_REASON_BYTES].decode("utf-8", "ignore")


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    commands, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")  # not inherited by children
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # a killed worker's prints would otherwise be lost
    return commands, results


def _ring(bell: int | None) -> None:
    if bell is not None:
        try:
            os.write(bell, b".")
        except BlockingIOError:
            pass  # it is full of rings that were not heard yet; one more says nothing new


def _die_with_parent(parent: int) -> None:
    """On Linux the kernel kills this process when the thread that started it ends; elsewhere the end of stdin must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            sys.exit(1)


def _limit_resources(memory_mb: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    except (ValueError, OSError) as error:  # macOS does not offer it
        print(f"llamarl: reward.memory_mb={memory_mb} is not in force here: {error}", file=sys.stderr)


def _limit_cpu(timeout_s: float) -> None:
    """Let the kernel end a spinning item even while the pool is not looking: CPU time so far plus timeout_s on every core."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    wanted = math.ceil(time.process_time() + timeout_s * (os.cpu_count() or 1)) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


if __name__ == "__main__":
    main(sys.argv[1])
