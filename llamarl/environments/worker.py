"""The worker of environments: a subprocess in which many of them are played, call by call. pool.py
starts it as a script, below a guard as reward workers are (llamarl.scoring.worker).

    argv    the import path of what makes an environment; {"path", "memory_mb", "parent", "bell"};
            and the descriptor of the note of its memory
    stdin   [number, key, do, what, limit_s], a call each
            do: "begin" with [row, seed], "step" with a turn, "end", or "forget", unanswered
    stdout  ["ready"] or ["failed", why], once
            [number, ["answer", values] or ["error", reason], finished_at], in the calls' order
    bell    one byte after each line of stdout

An error is of that environment alone, and ends it. One JSON value a line; half a surrogate pair is
"?" in an answer. Standard library only: it starts in some 50 ms.

What a call leaves running is killed before it is answered. Processes that `begin` started belong to
the environment, and are killed at its end; those that the module started as it was imported, at the
worker's.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

MAX_ANSWER_BYTES = 1 << 22  # of a line
_OUR_ROOT = str(Path(__file__).resolve().parents[2])  # where llamarl is


def main(path: str, setup: dict, note: int) -> None:
    """Play the environments of standard input until there is no more."""
    sys.path.insert(0, _OUR_ROOT)
    # Not at the top: this file runs as a script, which finds llamarl once sys.path is set.
    from llamarl.scoring.worker import (
        GUARDED,
        children,
        describe,
        end_if_over,
        guard,
        held_by_multiprocessing,
        kill_children,
        limit_cpu,
        private_pipes,
        short,
    )

    commands, results = private_pipes()
    bell = setup["bell"]
    os.set_inheritable(bell, False)
    os.set_inheritable(note, False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory_bytes = setup["memory_mb"] << 20
    if GUARDED:
        guard(setup["parent"], [commands.fileno(), results.fileno(), bell], memory_bytes, note)
    sys.path[:] = setup["path"]

    own = os.getpid()

    def send(message: list) -> None:
        if os.getpid() != own:
            os._exit(0)  # the user's code forked and both returned; the original process answers
        results.write(line_of(message))
        results.flush()
        try:
            os.write(bell, b".")
        except BlockingIOError:
            pass  # it is full of rings that were not heard yet, so one more is not needed

    from llamarl.environments.contracts import Played
    from llamarl.tasks.foreign import import_environment

    try:
        factory = import_environment(path)
    except BaseException as error:  # a module may raise anything while it is imported
        send(["failed", short(describe(error))])
        return
    end_if_over(memory_bytes, note)
    of_module = children()
    send(["ready"])
    played: dict[int, Played] = {}
    started: dict[int, frozenset[int]] = {}  # by an environment as it began: processes

    def sweep() -> None:
        """Kill the processes that neither the module nor a living environment needs."""
        for key in started.keys() - played.keys():
            del started[key]
        kill_children(but=of_module.union(held_by_multiprocessing(), *started.values()))

    for line in commands:
        number, key, do, what, limit_s = json.loads(line)
        if do == "forget":
            played.pop(key, None)
            sweep()
            continue
        limit_cpu(limit_s)
        try:
            if do == "begin":
                row, seed = what
                played[key] = Played(factory, seed)
                answer = played[key].begin(row)
                started[key] = children() - of_module.union(*started.values())
            elif do == "step":
                answer = played[key].step(what)
            else:
                answer = played.pop(key).end()
            answer.cut()
            said = ["answer", answer.values]
            size = len(line_of(said))
            if size > MAX_ANSWER_BYTES:
                raise ValueError(f"an answer of {size} bytes; at most {MAX_ANSWER_BYTES}")
        except BaseException as error:  # the user's code may raise anything
            played.pop(key, None)
            said = ["error", short(describe(error))]
        sweep()
        end_if_over(memory_bytes, note)
        send([number, said, time.monotonic()])


def line_of(message: list) -> bytes:
    """Return a message as the pool reads it."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
