"""A pool of reward workers: a hard timeout, and an error that is never a score.

    submit(key, prompt, completion, meta) [--> release(keys)]
      --> queue --> up to BATCH calls in a worker's pipe --> poll() --> [(key, Outcome)]

A call scores one item, or all of a prompt's that were released together, if the function takes them
so (forms.py). A worker (worker.py) is a subprocess in a session of its own, with limits on memory
and CPU time. It makes its calls in order and answers each as it completes. When one overruns
`timeout_s` an item, it is killed with all that it started, and another worker starts; the items of
that call alone are errors, the calls behind it go back to the head of the queue. The clock of a
call starts when the call before it finished, by the worker's own time stamps, so that a pool that
is polled rarely kills nobody early.

What this protects from: exceptions, hangs (also in C code), NaN, exit, crashes, runaway memory,
prints without end (worker.MAX_PRINTED_BYTES a worker), and processes that a call starts and leaves
running: they are killed when the call ends, and when the worker or this process does, however that
is. A process that is to serve many items is started while the module is imported.

What it does not: it is no sandbox. A reward function, and code it runs, has this user's rights:
files, network, signals. Processes survive that were started by one outside the worker (a service),
that the kernel does not let die, or whose worker's guard is itself killed by SIGKILL; on other
systems than Linux also those that leave the process group, and those of a killed rank. A function
that looks for the worker's pipes can forge scores. Run completions that are programs in a sandbox
of your own. Memory is bounded on Linux alone (memory.py).
"""

from __future__ import annotations

import json
import logging
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llamarl.errors import RewardError
from llamarl.tasks import worker as worker_script
from llamarl.tasks.forms import Form
from llamarl.tasks.memory import Note, too_much
from llamarl.tasks.source import Outcome, Outcomes, score_all, try_source

BATCH = 64  # calls in flight a worker
BUSY_S = 3.0  # of calls that a worker is given ahead; two at least, BATCH at most
START_S = 120.0  # for a worker to import the user's module
# For a worker whose output has ended to exit by itself, so that its own exit code is told.
EXIT_S = 0.5
KILL_S = 5.0  # for a killed worker to be gone; one that the kernel holds is left to it
MAX_FAILED_STARTS = 3  # in a row
_READ_BYTES = 1 << 16
_BELL_REST_S = 0.001  # between two rings: one call of on_result serves all results of that time
# Where llamarl is, for a worker whose parent found it in what was then the current directory.
_OUR_ROOT = str(Path(worker_script.__file__).resolve().parents[2])

log = logging.getLogger(__name__)

Sample = tuple[str, str, dict]  # prompt, completion and meta


@dataclass(slots=True)
class _Call:
    """Completions to score together, as the line that a worker reads."""

    keys: list[int]
    line: bytes
    sent_at: float = math.inf  # when the last byte of it was in the worker's pipe

    @classmethod
    def of(cls, items: Mapping[int, _Item]) -> _Call:
        """The call for items, by key."""
        columns = [
            json.dumps(list(items)),
            _array(item.prompt for item in items.values()),
            _array(item.completion for item in items.values()),
            _array(item.meta for item in items.values()),
        ]
        return cls(list(items), _array(columns).encode() + b"\n")


@dataclass(frozen=True, slots=True)
class _Item:
    """One completion to score, each field as JSON."""

    prompt: str
    completion: str
    meta: str


def _array(values: Iterable[str]) -> str:
    """JSON values as a JSON array."""
    return f"[{', '.join(values)}]"


class _Worker:
    """One subprocess and its pipes. Nothing here blocks, save for the end of a process that is
    ending or killed.
    """

    def __init__(self, fn: str, setup: str, bell: int, timeout_s: float):
        # A worker is one core's work, and freed memory that an arena keeps counts as held.
        few_threads = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        self.note = Note()
        self._process = subprocess.Popen(
            # -P keeps the script's own directory off sys.path; the worker takes over this process's
            # path.
            [sys.executable, "-P", worker_script.__file__, fn, setup, str(self.note.writer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
            env=few_threads | os.environ,
            pass_fds=[bell, self.note.writer],
        )
        self.note.hand_over()
        self.stdout = self._process.stdout.fileno()
        self.stdin = self._process.stdin.fileno()
        os.set_blocking(self.stdout, False)
        os.set_blocking(self.stdin, False)
        self._timeout_s = timeout_s
        self._received = b""
        self.in_flight: deque[_Call] = deque()  # oldest first; the first is the one being scored
        self.unsent: deque[_Call] = deque()  # the last of these, which the pipe was too full for
        self._num_written = 0  # bytes of the first unsent one that are in the pipe
        self.ready = False  # it has imported the function
        self.ended = False  # its output has
        self.astray = False  # it said what it was not asked; nothing more of it counts
        self.free_at = time.monotonic()  # when it started, was ready, or finished its last call

    def send(self, calls: Sequence[_Call]) -> None:
        """Give it calls to make, behind those that it has; `flush` writes them."""
        for call in calls:
            call.sent_at = math.inf
        self.in_flight.extend(calls)
        self.unsent.extend(calls)

    def flush(self) -> None:
        """Write as much as the pipe takes now."""
        try:
            while self.unsent:
                call = self.unsent[0]
                self._num_written += os.write(self.stdin, call.line[self._num_written :])
                if self._num_written == len(call.line):
                    self.unsent.popleft().sent_at = time.monotonic()
                    self._num_written = 0
        except (BlockingIOError, BrokenPipeError):
            pass  # the pipe is full; or it died, which its closed output says to the reader

    def read(self) -> Iterator[object]:
        """The messages that have come, with None for a line that is no JSON. Sets `ended` at the
        end of the output.
        """
        while not self.ended:
            try:
                chunk = os.read(self.stdout, _READ_BYTES)
            except BlockingIOError:
                return
            self.ended = not chunk
            *lines, self._received = (self._received + chunk).split(b"\n")
            for line in lines:
                try:
                    message = json.loads(line)
                except ValueError:
                    message = None
                yield message

    def current(self) -> _Call | None:
        """The call that is being made; None while the worker has none, or not all of it."""
        if not self.in_flight:
            return None
        first = self.in_flight[0]
        return first if first.sent_at < math.inf else None

    @property
    def deadline(self) -> float:
        """When it must have said something, by time.monotonic(); infinite while it owes nothing."""
        if not self.ready:
            return self.free_at + START_S
        call = self.current()
        if call is None:
            return math.inf
        return max(call.sent_at, self.free_at) + self._timeout_s * len(call.keys)

    def kill(self) -> str:
        """End it and all that it started, within 2 KILL_S. Returns how the worker itself ended, in
        words.
        """
        lingers = False
        code = None
        if worker_script.GUARDED:
            lingers = self.ended and self._wait(EXIT_S) is None
            # Its guard kills what is below it.
            self._process.terminate()
            code = self._wait(KILL_S)
        elif self.ended:
            time.sleep(EXIT_S)
        if code is None:
            # Before it is reaped: until then its id, and so its group's, cannot be anybody else's.
            os.killpg(self._process.pid, signal.SIGKILL)
            code = self._wait(KILL_S)
        self._process.stdin.close()
        if code is None:
            pid = self._process.pid
            log.warning("reward worker %d was killed and has not ended in %g s", pid, KILL_S)
            return f"was killed and has not ended in {KILL_S:g} s"
        if lingers:
            return "closed its output and was killed"
        if code >= 0:
            return f"exited with code {code}"
        if code == -signal.SIGXCPU:
            return "was ended for its CPU time"
        return f"died of signal {-code} ({signal.strsignal(-code)})"

    def _wait(self, timeout_s: float) -> int | None:
        """The process's exit code; None if it is still there after so long."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Kill it if that was not done, and close its output."""
        if not self._process.stdin.closed:
            self.kill()
        self._process.stdout.close()
        self.note.close()


class _Bell:
    """A pipe that workers ring after each result, and the thread that hears it."""

    def __init__(self, on_result: Callable[[], None]):
        self._hears, self.rings = os.pipe()
        os.set_blocking(self.rings, False)  # of the workers' end too: they share it
        self._on_result = on_result
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name="reward-bell", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            os.read(self._hears, _READ_BYTES)
            if self._closing:
                return
            self._on_result()
            time.sleep(_BELL_REST_S)

    def close(self) -> None:
        """End the thread and close the pipe."""
        self._closing = True
        try:
            os.write(self.rings, b".")
        except BlockingIOError:
            pass  # full, so the thread has something to read
        self._thread.join()
        os.close(self._hears)
        os.close(self.rings)


class RewardPool:
    """A RewardSource (source.py) that calls a function, given by its import path, in processes.

        with RewardPool("llamarl.tasks.rewards:exact_match", num_workers=2) as pool:
            pool.score([("12+34=", "46", {"answer": "46"})])    # [Outcome("score", 1.0, "")]

    num_workers: processes. timeout_s: seconds by the clock for an item; a call for n of them may
    take n times as long. memory_mb: MiB that a worker and what it starts may hold (memory.py);
    all above 0. chat: the prompts were turns of a chat template, after system_prompt if there is
    one; a function of TRL's form then gets messages. on_result: called in a thread of the pool's
    when there is something to poll, so that a waiting loop need not ask. section: of the
    configuration, which messages name keys of. fn_key: the key that names the function, where it is
    not section.fn; no key then names the limits.

    The function sees this process's sys.path and its current directory. Workers end with the thread
    that made the pool: make it in a thread that lives as long.
    """

    def __init__(
        self,
        fn: str,
        *,
        num_workers: int = 1,
        timeout_s: float = 5.0,
        memory_mb: int = 1024,
        chat: bool = False,
        system_prompt: str | None = None,
        on_result: Callable[[], None] = lambda: None,
        section: str = "reward",
        fn_key: str = "",
    ):
        self.name = fn
        self._fn_key = fn_key or f"{section}.fn"
        self._prefix = "" if fn_key else f"{section}."  # of the limits' names
        self._timeout_s = timeout_s
        self._memory_mb = memory_mb
        here = os.getcwd()
        path = [here, *(folder or here for folder in sys.path), _OUR_ROOT]
        self._bell = _Bell(on_result)
        setup = {
            "path": list(dict.fromkeys(path)),
            "memory_mb": memory_mb,
            "timeout_s": timeout_s,
            "chat": chat,
            "system_prompt": system_prompt,
            "parent": os.getpid(),
            "bell": self._bell.rings,
        }
        self._new_worker = partial(_Worker, fn, json.dumps(setup), self._bell.rings, timeout_s)
        self._form: Form | None = None  # of the function; None until a worker has imported it
        self._held: dict[int, _Item] = {}  # of no call yet, by key
        self._released: list[Sequence[int]] = []  # keys, while the form is not known
        self._queue: deque[_Call] = deque()
        self._failed_starts = 0
        self._call_s: float | None = None  # seconds that a call takes, of late
        self._workers = [self._new_worker() for _ in range(num_workers)]

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def pending(self) -> int:
        """The number of items that were submitted and that `poll` has not returned; without those
        that wait for the rest of their batch.
        """
        calls = list(self._queue)
        for worker in self._workers:
            calls += worker.in_flight
        num_held = len(self._held) if self._form is None else 0
        return num_held + sum(len(call.keys) for call in calls)

    @property
    def is_busy(self) -> bool:
        """Whether each worker has calls for BUSY_S."""
        if self._call_s is None:
            ahead = BATCH
        else:
            ahead = min(BATCH, max(2, int(BUSY_S / max(self._call_s, 1e-6))))
        num_calls = len(self._queue) + sum(len(worker.in_flight) for worker in self._workers)
        return num_calls >= ahead * len(self._workers)

    def submit(self, key: int, prompt: str, completion: str, meta: dict) -> None:
        """Queue an item; `poll` starts it. Keys name items for the caller alone. TypeError if meta
        is not JSON.
        """
        assert self._workers, "submit on a closed pool"
        item = _Item(
            prompt=json.dumps(prompt), completion=json.dumps(completion), meta=json.dumps(meta)
        )
        if self._form == "single":
            self._queue.append(_Call.of({key: item}))
        else:
            self._held[key] = item

    def release(self, keys: Sequence[int]) -> None:
        """These items are all of a batch: a function that takes a prompt's completions together is
        called with them now.
        """
        if self._form is None:
            self._released.append(keys)
        elif self._form != "single":
            self._queue.extend(self._calls_of(keys))

    def poll(self) -> Outcomes:
        """The outcomes that have become known since the last call, by key. Hands out queued items
        too; does not block.

        ValueError if the function cannot be used, RewardError if workers do not start.
        """
        outcomes: Outcomes = []
        for place, worker in enumerate(self._workers):
            self._collect(worker, outcomes)
            if worker.ended or worker.astray or time.monotonic() > worker.deadline:
                self._workers[place] = self._replace(worker, outcomes)
        self._hand_out()
        return outcomes

    def wait(self, timeout_s: float) -> bool:
        """Block until `poll` has something to do, at most timeout_s; False if it has not."""
        now = time.monotonic()
        until = now + timeout_s
        first_deadline = min((worker.deadline for worker in self._workers), default=math.inf)
        with selectors.DefaultSelector() as pipes:
            for worker in self._workers:
                pipes.register(worker.stdout, selectors.EVENT_READ)
                if worker.unsent:
                    pipes.register(worker.stdin, selectors.EVENT_WRITE)
            events = pipes.select(max(0.0, min(until, first_deadline) - now))
        return bool(events) or time.monotonic() < until

    def start(self) -> None:
        """Block until a worker has imported the function. ValueError, saying what is wrong with the
        function, if none can.
        """
        assert not self.pending, "start comes before the first submit"
        while not any(worker.ready for worker in self._workers):
            self.wait(1.0)
            self.poll()

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """The outcomes of (prompt, completion, meta) samples, in order, as one batch. Blocks;
        nothing else may be pending.
        """
        return score_all(self, samples)

    def close(self) -> None:
        """Kill all workers. What is pending is dropped."""
        if not self._workers:
            return
        self._queue.clear()
        self._held.clear()
        self._released.clear()
        while self._workers:
            self._workers.pop(0).close()
        self._bell.close()

    def _collect(self, worker: _Worker, outcomes: Outcomes) -> None:
        for message in worker.read():
            match message:
                case ["failed", why]:
                    raise ValueError(f"{self._fn_key}={self.name}: {why}")
                case ["ready", form]:
                    worker.ready = True
                    worker.free_at = time.monotonic()
                    self._learn(form)
                case [keys, [*verdicts], finished_at] if (
                    worker.in_flight
                    and worker.in_flight[0].keys == keys
                    and len(verdicts) == len(keys)
                ):
                    call = worker.in_flight.popleft()
                    self._note_seconds(finished_at - max(call.sent_at, worker.free_at))
                    worker.free_at = finished_at
                    self._failed_starts = 0
                    for key, (kind, value, reason) in zip(keys, verdicts):
                        number = math.nan if value is None else value
                        outcomes.append((key, Outcome(kind, number, reason)))
                case _:
                    worker.astray = True
                    return

    def _note_seconds(self, seconds: float) -> None:
        """What a call took, by the worker's own time stamps: the newest count most."""
        if self._call_s is None:
            self._call_s = seconds
        self._call_s += 0.2 * (seconds - self._call_s)

    def _learn(self, form: Form) -> None:
        """A worker says which form the function has: what came before is queued now."""
        if self._form is not None:
            return
        self._form = form
        if form == "single":
            self._queue.extend(_Call.of({key: item}) for key, item in self._held.items())
            self._held.clear()
        else:
            for keys in self._released:
                self._queue.extend(self._calls_of(keys))
        self._released.clear()

    def _calls_of(self, keys: Sequence[int]) -> list[_Call]:
        """The calls for held items: one for each prompt, in the order in which they were given."""
        by_prompt: dict[tuple[str, str], dict[int, _Item]] = {}
        for key in keys:
            item = self._held.pop(key)
            by_prompt.setdefault((item.prompt, item.meta), {})[key] = item
        return [_Call.of(items) for items in by_prompt.values()]

    def _replace(self, worker: _Worker, outcomes: Outcomes) -> _Worker:
        """A worker in the place of one that died, overran or is astray. The items of its first call
        are errors, and its other calls go back into the queue. RewardError at the
        MAX_FAILED_STARTS-th in a row that ended before its first call.
        """
        suspect = worker.current()
        has_died = worker.ended
        end = worker.kill()
        if not worker.astray:
            # Its last words: the suspect may have finished meanwhile.
            self._collect(worker, outcomes)
        what = f"the worker {end}" if has_died else None
        if worker.astray:
            what = (
                "the worker sent an answer that is not its item's "
                "(does the function fork, or write to its pipe?)"
            )
        held_bytes = worker.note.read()
        if held_bytes is not None:
            what = too_much(held_bytes, self._memory_mb, self._prefix)
        if suspect is None:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                what = what or f"importing it took longer than {START_S:.0f} s"
                remedy = "call it by hand"
                raise RewardError(
                    f"{self._fn_key}={self.name}: {what} before it scored anything, "
                    f"{MAX_FAILED_STARTS} times in a row; {remedy}"
                )
        elif worker.in_flight and worker.in_flight[0] is suspect:
            worker.in_flight.popleft()
            reason = what or self._late(suspect)
            outcomes += [(key, Outcome.error(reason)) for key in suspect.keys]
        self._queue.extendleft(reversed(worker.in_flight))
        worker.in_flight.clear()
        worker.close()
        return self._new_worker()

    def _late(self, call: _Call) -> str:
        limit = f"took longer than {self._prefix}timeout_s={self._timeout_s:g}"
        count = len(call.keys)
        return limit if count == 1 else f"{limit} for each of the {count} completions of a call"

    def _hand_out(self) -> None:
        num_calls = len(self._queue) + sum(len(worker.in_flight) for worker in self._workers)
        share = min(BATCH, math.ceil(num_calls / len(self._workers)))
        for worker in self._workers:
            count = min(len(self._queue), share - len(worker.in_flight))
            if worker.ready and count > 0:
                worker.send([self._queue.popleft() for _ in range(count)])
            worker.flush()


def check_reward(
    fn: str, samples: Sequence[Sample], *, section: str = "reward", **limits
) -> list[Outcome]:
    """The outcomes of (prompt, completion, meta) samples by the function at import path `fn`, in
    order. Blocks.

    section and limits, which are timeout_s, memory_mb, chat and system_prompt: as RewardPool's.
    ValueError names what is wrong: no module, no function (and the nearest name), parameters that
    do not fit, or an error on every sample.
    """
    pool = RewardPool(fn, section=section, **limits)
    return try_source(pool, samples, given=f"{section}.fn={fn}")
