"""Ranks that the tests of one session share: to start one, with torch and all that a model needs,
takes longer than most tests.

    # what exchange(rank, ...) returned, by rank
    answers = pool.call(__file__, "exchange", ranks=4, timeout_s=60, scenario=scenario)

Each rank is this file run as a script. It takes one call a line from its connection, answers with
one line, and makes a world of its own for each call: nothing of one is left for the next but what
was imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import socket
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from tests.forkery import ForkedProcess, the_forkery
from tests.launching import ROOT, environment

RANKS = 4
START_S = 240  # for the processes to come up: a busy machine is slow
FAREWELL_S = 5  # of a rank that failed, so that its peers tell their part before its sockets close


class Pool:
    """The processes, started with the first call, and anew after a call that failed."""

    def __init__(self, size: int = RANKS):
        self.size = size
        self._processes: list[ForkedProcess] = []
        self._connections: list[socket.socket] = []
        self._lines: list[queue.Queue] = []
        self._folder: tempfile.TemporaryDirectory | None = None
        self._calls = 0

    def call(self, file: str, function: str, *, ranks: int, timeout_s: float, **arguments) -> list:
        """What `function` of `file`, called with (rank, **arguments) on each of the first ranks,
        returned; all of it is JSON.

        AssertionError with all ranks' words if one raised or did not answer in time.
        """
        if not self._processes:
            self._start()
        self._calls += 1
        store = f"{self._folder.name}/store{self._calls}"
        call = {
            "file": file,
            "function": function,
            "ranks": ranks,
            "store": store,
            "arguments": arguments,
        }
        for connection in self._connections[:ranks]:
            connection.sendall(json.dumps(call).encode() + b"\n")
        answers = self._answers(ranks, timeout_s)
        failed = []
        for rank, answer in enumerate(answers):
            if answer is None:
                failed.append(f"rank {rank}: no answer\n{self._log(rank).read_text()}")
            elif "error" in answer:
                failed.append(f"rank {rank}: {answer['error']}")
        if failed:
            self.close()
            raise AssertionError("\n".join(failed))
        return [answer["returned"] for answer in answers]

    @property
    def pids(self) -> list[int]:
        found = []
        for process in self._processes:
            found += process.pids
        return found

    def close(self) -> None:
        for process in self._processes:
            process.end()
        for connection in self._connections:
            connection.close()
        self._processes = []
        self._connections = []
        if self._folder:
            self._folder.cleanup()

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"{rank}.log"

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._lines = [queue.Queue() for _ in range(self.size)]
        address = f"{self._folder.name}/ranks"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            listener.settimeout(START_S)
            for rank, lines in enumerate(self._lines):
                process = the_forkery().start(
                    [__file__, address, str(rank)],
                    ranks=None,
                    environment=environment(GLOO_SOCKET_IFNAME="lo"),
                    log=self._log(rank),
                    cwd=ROOT,
                )
                self._processes.append(process)
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    said = self._log(rank).read_text()
                    raise AssertionError(f"rank {rank} did not come up:\n{said}") from None
                self._connections.append(connection)
                threading.Thread(target=_read, args=(connection, lines), daemon=True).start()

    def _answers(self, ranks: int, timeout_s: float) -> list[dict | None]:
        until = time.monotonic() + timeout_s
        answers = []
        for lines in self._lines[:ranks]:
            try:
                answer = json.loads(lines.get(timeout=max(0.1, until - time.monotonic())))
            except queue.Empty:
                answer = None
            if answer is None or "error" in answer:
                until = min(until, time.monotonic() + FAREWELL_S)  # the others wait for this one
            answers.append(answer)
        return answers


def _read(connection: socket.socket, lines: queue.Queue) -> None:
    try:
        with connection.makefile("r") as answers:
            for line in answers:
                lines.put(line)
    except OSError:
        pass  # closed
    lines.put("null")


# --- what a rank runs ---


def serve(address: str, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    calls = connection.makefile("r")

    def answer(values: dict) -> None:
        connection.sendall(json.dumps(values).encode() + b"\n")

    for line in calls:
        call = json.loads(line)
        try:
            world = dist.FileStore(call["store"], call["ranks"])
            dist.init_process_group("gloo", store=world, rank=rank, world_size=call["ranks"])
            returned = getattr(_module(call["file"]), call["function"])(rank, **call["arguments"])
            dist.barrier()
            dist.destroy_process_group()
            answer({"returned": returned})
        except Exception:
            answer({"error": traceback.format_exc()})
            time.sleep(FAREWELL_S)
            os._exit(1)
    os._exit(0)  # threads of gloo's groups need no farewell


def _module(file: str):
    """A test file, which is no module that can be imported by name; each is loaded once."""
    name = f"pooled_{Path(file).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
