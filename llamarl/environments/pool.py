"""A pool of workers in which environments are played, many in each.

    begin(key, row, seed), step(key, turn), end(key) --> poll() --> [(key, Answer or Failure)]

An environment stays in the worker where it began. A call that takes longer than timeout_s, or that
the worker does not survive, is a Failure of that environment alone: the worker is killed with all
that it started, and the other environments that were in it are played again in a new one, call by
call, from their beginning. One that answers otherwise then has lost its state, which is a Failure
too. A worker (worker.py) has limits on memory and CPU time, and is no sandbox: what a reward
worker does not protect from (llamarl.scoring.pool), this does not either.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from llamarl.environments.worker import Answer, ChatTurn, answer_from
from llamarl.workers.pool import WorkerPool
from llamarl.workers.process import START_S, WorkerProcess, wait_for

WORKER = "llamarl.environments.worker"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an environment cannot go on."""

    kind: Literal["timeout", "lost"]
    reason: str


@dataclass(slots=True, eq=False)
class EnvironmentCall:
    """A call to an environment. Once it is handed out, it has the line that a worker reads."""

    key: int
    do: str
    what: object
    # What it answered the first time, as JSON values; None: it was not answered yet.
    answered: list | None = None
    number: int = -1
    line: bytes = b""
    limit_s: float = math.inf
    sent_at: float = math.inf


@dataclass(slots=True, eq=False)
class _Player:
    """An environment that was begun, and its calls so far, by which it can be played again."""

    place: int  # of its worker
    calls: list[EnvironmentCall] = field(default_factory=list)


class EnvironmentPool(WorkerPool[EnvironmentCall]):
    """Plays environments, which the function or class at an import path makes, in processes.

        pool = EnvironmentPool("my_module:Game", num_workers=2)
        pool.start()
        pool.begin(0, {"prompt": "12+34="}, seed="7")
        pool.wait(1.0)
        pool.poll()                  # [(0, Answer(messages=[], ...))], or [] as long as it thinks

    num_workers: processes. timeout_s: seconds by the clock for a call; the first of a worker may
    take longer. memory_mb: MiB that a worker and what it starts may hold. on_answer: called in a
    thread of the pool's when there is something to poll. section: of the configuration, which
    messages name keys of. RewardError if workers do not start.
    """

    def __init__(
        self,
        path: str,
        *,
        num_workers: int = 1,
        timeout_s: float = 10.0,
        memory_mb: int = 2048,
        on_answer: Callable[[], None] = lambda: None,
        section: str = "task",
    ):
        self.name = f"{section}.environment={path}"  # as the configuration has it, for messages
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._players: dict[int, _Player] = {}
        self._found: list[tuple[int, Answer | Failure]] = []  # returned by the next poll
        self._has_answered = False
        self.num_replayed = 0  # environments that were played again, ever
        super().__init__(
            WORKER,
            path,
            {},
            num_workers=num_workers,
            memory_mb=memory_mb,
            on_message=on_answer,
            given=self.name,
            limits=f"{section}.play.",
        )

    @property
    def pending(self) -> int:
        """The number of environments whose calls `poll` has not answered, those that are played
        again included.
        """
        asked = {key for key, found in self._found if isinstance(found, Failure)}
        for worker in self._workers:
            asked.update(call.key for call in worker.in_flight if call.key in self._players)
        return len(asked)

    def begin(self, key: int, row: Mapping[str, object], seed: str) -> None:
        """Begin an environment: over a row, with the random numbers of a seed."""
        assert key not in self._players, f"environment {key} has begun"
        sizes = [0] * len(self._workers)
        for player in self._players.values():
            sizes[player.place] += 1
        self._players[key] = _Player(place=sizes.index(min(sizes)))
        self._call(key, "begin", [dict(row), seed])

    def step(self, key: int, turn: ChatTurn) -> None:
        """Give it the policy's turn."""
        self._call(key, "step", turn)

    def end(self, key: int) -> None:
        """End it. Its answer has the reward of the whole, and it is gone then."""
        self._call(key, "end", None)

    def forget(self, key: int) -> None:
        """Let go of an environment, whatever it is doing. It answers nothing any more."""
        player = self._players.pop(key, None)
        if player is None:
            return
        self._found = [found for found in self._found if found[0] != key]
        self._hand_out(player.place, EnvironmentCall(key, "forget", None))

    def poll(self) -> list[tuple[int, Answer | Failure]]:
        """Return the answers that have come, and the failures, by key. ValueError if the module
        cannot be used.
        """
        self._poll_workers()
        for worker in self._workers:
            if worker.ready:
                worker.flush()
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        """Kill all workers. What is played is lost."""
        self._players.clear()
        super().close()

    def _call(self, key: int, do: str, what: object) -> None:
        player = self._players[key]
        call = EnvironmentCall(key, do, what)
        player.calls.append(call)
        self._hand_out(player.place, call)

    def _hand_out(self, place: int, call: EnvironmentCall) -> None:
        """Queue a call for its worker, which makes its calls in order."""
        worker = self._workers[place]
        call.limit_s = self._timeout_s
        if worker.is_fresh and not self._has_answered:
            call.limit_s = max(self._timeout_s, START_S)  # it may load what it needs
        call.number = next(self._numbers)
        call.sent_at = math.inf
        values = [call.number, call.key, call.do, call.what, call.limit_s]
        call.line = json.dumps(values).encode() + b"\n"
        if call.do == "forget":
            call.limit_s = math.inf
        worker.send(call)
        if worker.ready:
            worker.flush()

    def _collect(self, worker: WorkerProcess[EnvironmentCall]) -> None:
        super()._collect(worker)
        self._drop_forgotten(worker)

    def _answer(self, worker: WorkerProcess[EnvironmentCall], message: Any) -> bool:
        self._drop_forgotten(worker)
        match message:
            case [int(number), ["error", str() as said], float(finished_at)] if (
                number == self._expected(worker) and 0.0 <= finished_at <= time.monotonic()
            ):
                call = self._answered(worker, finished_at)
                if self._is_open(call):
                    self._fail(call.key, Failure("lost", said))
                return True
            case [int(number), ["answer", list() as said], float(finished_at)] if (
                number == self._expected(worker)
                and 0.0 <= finished_at <= time.monotonic()
                and (answer := answer_from(said))
            ):
                self._enter(self._answered(worker, finished_at), said, answer)
                return True
        return False

    def _drop_forgotten(self, worker: WorkerProcess[EnvironmentCall]) -> None:
        """Take away the calls at the head that are never answered, once they are in the pipe."""
        while worker.in_flight and worker.in_flight[0].do == "forget":
            if worker.in_flight[0].sent_at == math.inf:
                return
            worker.in_flight.popleft()

    def _expected(self, worker: WorkerProcess[EnvironmentCall]) -> int | None:
        """Return the number of the call that a worker answers next; None: it owes nothing."""
        return worker.in_flight[0].number if worker.in_flight else None

    def _answered(
        self, worker: WorkerProcess[EnvironmentCall], finished_at: float
    ) -> EnvironmentCall:
        """Note that a worker has made its oldest call, and return it."""
        worker.free_at = finished_at
        self._failed_starts = 0
        self._has_answered = True
        return worker.in_flight.popleft()

    def _is_open(self, call: EnvironmentCall) -> bool:
        """Whether a call's environment was not let go of meanwhile."""
        player = self._players.get(call.key)
        return player is not None and call in player.calls

    def _enter(self, call: EnvironmentCall, said: list, answer: Answer) -> None:
        """Note what a call answered. said: the answer as JSON values."""
        if not self._is_open(call):
            return
        if call.answered is None:
            call.answered = said
            if call.do == "end":
                del self._players[call.key]
            self._found.append((call.key, answer))
        elif call.answered != said:
            why = "its worker was killed, and played again it answered otherwise"
            self._fail(call.key, Failure("lost", why))

    def _fail(self, key: int, failure: Failure) -> None:
        del self._players[key]
        self._found.append((key, failure))

    def _lost(
        self,
        place: int,
        worker: WorkerProcess[EnvironmentCall],
        suspect: EnvironmentCall | None,
        why: str | None,
    ) -> None:
        """Fail the environment whose call it was at. The others are played again."""
        if suspect is not None and suspect.key in self._players:
            failure = Failure("timeout", f"took longer than {self._limits}timeout_s")
            if why is not None:
                failure = Failure("lost", why)
            self._fail(suspect.key, failure)
        for player in self._players.values():
            if player.place != place:
                continue
            self.num_replayed += 1
            for call in player.calls:
                self._hand_out(place, call)


def wait_for_any(pools: Sequence[EnvironmentPool], timeout_s: float) -> bool:
    """Block until one of these has something to poll, at most timeout_s; False if none has."""
    workers = []
    for pool in pools:
        workers += pool._workers
    return wait_for(workers, timeout_s)
