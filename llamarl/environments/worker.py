"""The worker of environments: a process in which many of them are played, call by call.
EnvironmentPool starts it, and llamarl/workers/guard.py says what it is below and what it may use.

    commands [number, key, do, what, limit_s], a call each
             do: "begin" with [row, seed], "step" with a turn, "end", or "forget", unanswered
    messages ["ready"] or ["failed", why], once
             [number, ["answer", values] or ["error", reason], finished_at], in the calls' order

An error is of that environment alone, and ends it. Standard library only, as guard.py.

Processes that a call leaves running are killed before the call is answered. Those that `begin`
started belong to the environment and are killed at its end. Those that the module started while it
was imported are killed at the worker's end.
"""

from __future__ import annotations

import json
import time

from llamarl.environments.contracts import Played
from llamarl.tasks.environment_class import import_environment
from llamarl.workers import guard
from llamarl.workers.guard import children, describe, kill_children, short

MAX_ANSWER_BYTES = 1 << 22  # of a line


def main(path: str, setup: dict, note: int) -> None:
    """Play the environments of the commands until there are no more. setup: guard.begin's."""
    commands, send = guard.begin(setup, note)
    memory_bytes = setup["memory_mb"] << 20
    try:
        factory = import_environment(path)
    except BaseException as error:  # a module may raise anything while it is imported
        send(["failed", short(describe(error))])
        return
    guard.end_if_over(memory_bytes, note)
    of_module = children()
    send(["ready"])
    played: dict[int, Played] = {}
    started: dict[int, frozenset[int]] = {}  # by an environment as it began: processes

    def sweep() -> None:
        """Kill the processes that neither the module nor a living environment needs."""
        for key in started.keys() - played.keys():
            del started[key]
        kill_children(but=of_module.union(guard.held_by_multiprocessing(), *started.values()))

    for line in commands:
        number, key, do, what, limit_s = json.loads(line)
        if do == "forget":
            played.pop(key, None)
            sweep()
            continue
        guard.limit_cpu(limit_s)
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
            size = len(guard.line_of(said))
            if size > MAX_ANSWER_BYTES:
                raise ValueError(f"an answer of {size} bytes; at most {MAX_ANSWER_BYTES}")
        except BaseException as error:  # the user's code may raise anything
            played.pop(key, None)
            said = ["error", short(describe(error))]
        sweep()
        guard.end_if_over(memory_bytes, note)
        send([number, said, time.monotonic()])
