"""A pool of reward workers: a hard timeout, and an error that is never a score.

    submit(key, item) [--> release(keys)]
      --> queue --> up to _most_calls in a worker's pipe --> poll() --> [(key, Outcome)]

A call scores one item, or all of a prompt's that were released together, if the function takes them
so (forms.py). A worker (worker.py) is a subprocess in a session of its own, with limits on memory
and CPU time. It makes its calls in order and reports each as it completes. If a call takes longer
than `timeout_s` an item, the worker is killed with all that it started, and another worker starts.
Only the items of that call are errors; the calls behind it go back to the head of the queue. The
clock of a call starts when the call before it finished, by the worker's own time stamps, so that a
pool that is polled rarely kills no worker early.

The first call of a worker may load what the function needs, so it may take as long as a start
(Patience). If first calls are killed on several prompts and nothing was ever scored,
`poll` raises RewardError.

An async function of one completion is called for up to BATCH at a time, side by side. The worker
ends each that takes longer than `timeout_s`. If one cannot be ended, because it computes or blocks,
the worker is killed ASYNC_GRACE_S later, and the items beside it are then scored one at a time.

What this protects from: exceptions, hangs (also in C code), NaN, exit, crashes, runaway memory,
prints without end (guard.MAX_PRINTED_BYTES a worker), and processes that a call starts and leaves
running: they are killed when the call ends, and when the worker or this process does, however that
is. A process that is to serve many items is started while the module is imported.

What this does not protect from: it is no sandbox. A reward function, and code that it runs, has
this user's rights: files, network, signals. Some processes survive: those that a service outside
the worker started, those that the kernel does not let die, and those whose worker's guard is killed
by SIGKILL; on other systems than Linux also those that leave the process group, and those of a
killed rank. A function that looks for the worker's pipes can forge scores. Completions that are
programs are run in a sandbox by the reward python_tests (llamarl/tasks/programs.py). Memory is
bounded only on Linux (memory_limit.py).
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamarl.errors import RewardError
from llamarl.scoring.scorer import Item, Outcomes, Scorer, score_all, text_item, try_scorer
from llamarl.scoring.worker import TOO_LATE
from llamarl.tasks.forms import SAMPLED, Takes
from llamarl.types import Outcome, OutcomeKind
from llamarl.workers.pool import WorkerPool
from llamarl.workers.process import START_S, WorkerProcess

FIRST_CALL_S = START_S  # for the first call of a worker, where timeout_s gives it less
FIRST_CALL_FACTOR = 10.0  # machines are sometimes busier
MAX_FIRST_KILLS = 2
ASYNC_GRACE_S = 2.0  # for a worker to end by itself what overruns


@dataclass(frozen=True, slots=True)
class TextItem:
    """One completion to score, each field as JSON."""

    prompt: str
    completion: str
    meta: str  # of the prompt's row
    sampled: str  # what meta gets about the completion, or null


@dataclass(slots=True)
class Call:
    """Completions to score together. Once it is handed out, it has the line that a worker reads."""

    items: dict[int, TextItem]  # by key; answered ones are removed
    # Whether they are scored side by side, each with its own time limit and answer.
    is_several: bool = False
    may_join: bool = True  # whether calls that are is_several may be joined with it
    is_first: bool = False  # whether it is its worker's first
    limit_s: float = math.inf  # from its start, or its last answer, to its next answer
    line: bytes = b""
    sent_at: float = math.inf  # when the last byte of it was in the worker's pipe

    def hand_out(self, *, timeout_s: float, first_s: float | None) -> None:
        """Set its limits and its line. timeout_s: the limit for an item. first_s: the least time to
        allow if it is its worker's first; otherwise None.
        """
        self.is_first = first_s is not None
        item_s = max(timeout_s, first_s or 0.0)
        if self.is_several:
            told_s = item_s
            self.limit_s = item_s + ASYNC_GRACE_S
        else:
            told_s = max(timeout_s * len(self.items), first_s or 0.0)
            self.limit_s = told_s
        columns = [_array(map(str, self.items))]
        for name in ("prompt", "completion", "meta", "sampled"):
            columns.append(_array(getattr(item, name) for item in self.items.values()))
        columns.append(json.dumps(told_s))
        self.line = _array(columns).encode() + b"\n"
        self.sent_at = math.inf

    @property
    def prompts(self) -> set[str]:
        """The prompts of its items, as JSON."""
        return {item.prompt for item in self.items.values()}

    def is_answered_by(self, keys: list[object]) -> bool:
        """Whether an answer may be about these keys."""
        if not self.is_several:
            return keys == list(self.items)
        return len(keys) == 1 and type(keys[0]) is int and keys[0] in self.items


class Patience:
    """How long a worker's first call may take, from the experience with earlier first calls.

    A call that loads what the function needs may take FIRST_CALL_S. Once a first call has come
    back, the next ones may take timeout_s and FIRST_CALL_FACTOR times as long as the slowest of
    them did, twice that after each in a row that was killed, and never more than FIRST_CALL_S: so a
    completion that hangs a new worker does not cost minutes each time.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self.has_answered = False  # whether any call has come back
        self.num_kills = 0  # first calls that were killed since one came back
        self.hung: set[str] = set()  # the prompts of first calls that were killed, as JSON
        self._slowest_s: float | None = None  # of the first calls that came back

    @property
    def seconds(self) -> float:
        """The time that the next first call may take, whatever timeout_s is."""
        if self._slowest_s is None:
            return FIRST_CALL_S
        patience_s = self._timeout_s + FIRST_CALL_FACTOR * self._slowest_s
        for _ in range(self.num_kills):
            patience_s = min(2 * patience_s, FIRST_CALL_S)
        return min(patience_s, FIRST_CALL_S)

    @property
    def is_at_end(self) -> bool:
        """Whether the next first call would fail too, as far as can be known."""
        has_tried = self.num_kills >= MAX_FIRST_KILLS and len(self.hung) > 1
        return has_tried and not self.has_answered

    def note_return(self, took_s: float) -> None:
        """Note that a first call has come back."""
        self._slowest_s = max(took_s, self._slowest_s or 0.0)
        self.num_kills = 0

    def note_kill(self, call: Call) -> None:
        """Note that a first call was killed for its time."""
        self.num_kills += 1
        self.hung |= call.prompts

    def puts_off(self, call: Call) -> bool:
        """Whether other calls should be tried before this one: all its prompts have hung before,
        and nothing was ever scored.
        """
        return not self.has_answered and call.prompts <= self.hung


def _is_verdict(value: object) -> bool:
    """Whether a JSON value is a Verdict (worker.py), because the worker's process may write
    anything.
    """
    match value:
        case ["score", float(), str()] | ["abstain" | "error", None, str()]:
            return True
    return False


def _array(values: Iterable[str]) -> str:
    """Join JSON values to a JSON array."""
    return f"[{', '.join(values)}]"


BATCH = 64  # calls in flight a worker; of quick ones more
PIPE_S = 0.1  # of calls that a worker gets at once, for a rank that computes between two polls
MOST_CALLS = 512  # in flight a worker, however quick they are: its answers must fit its pipe
BUSY_S = 3.0  # of calls that a worker gets ahead; at least two calls, at most those in flight
WORKER = "llamarl.scoring.worker"

Sample = tuple[str, str, dict]  # prompt, completion and meta


class RewardPool(WorkerPool[Call], Scorer):
    """A Scorer that calls a function, given by its import path, in processes.

        with RewardPool("llamarl.tasks.rewards:exact_match", num_workers=2) as pool:
            pool.score([("12+34=", "46", {"answer": "46"})])    # [Outcome("score", 1.0, "")]

    options: further arguments of the function, as JSON. num_workers: processes. timeout_s: seconds
    by the clock for an item; a call for n of them may take n times as long, and the first call of a
    worker longer. memory_mb: MiB that a worker and what it starts may hold (memory_limit.py). chat:
    the prompts were turns of a chat template, after system_prompt if there is one; a function of
    TRL's form then gets messages.
    on_result: called in a thread of the pool's when there is something to poll, so that a waiting
    loop need not ask. section: of the configuration, which messages name keys of. fn_key: the key
    that names the function, where it is not section.fn; no key then names the limits. traced:
    errors tell the lines of code that they came through.
    """

    def __init__(
        self,
        fn: str,
        *,
        options: Mapping[str, object] | None = None,
        num_workers: int = 1,
        timeout_s: float = 5.0,
        memory_mb: int = 1024,
        chat: bool = False,
        system_prompt: str | None = None,
        on_result: Callable[[], None] = lambda: None,
        section: str = "reward",
        fn_key: str = "",
        traced: bool = False,
    ):
        self.name = fn
        self._timeout_s = timeout_s
        # What a call of the function scores; None until a worker has imported it.
        self._takes: Takes | None = None
        self._patience = Patience(timeout_s)
        self._held: dict[int, TextItem] = {}  # items that are in no call yet, by key
        self._released: list[Sequence[int]] = []  # keys released before the form was known
        self._queue: deque[Call] = deque()
        self._outcomes: Outcomes = []  # returned by the next poll
        self._call_s: float | None = None  # seconds that recent calls took
        setup = {
            "options": dict(options or {}),
            "timeout_s": timeout_s,
            "chat": chat,
            "system_prompt": system_prompt,
            "traced": traced,
        }
        super().__init__(
            WORKER,
            fn,
            setup,
            num_workers=num_workers,
            memory_mb=memory_mb,
            on_message=on_result,
            given=f"{fn_key or section + '.fn'}={fn}",
            limits="" if fn_key else f"{section}.",
        )

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def pending(self) -> int:
        """The number of items that were submitted and that `poll` has not returned, not counting
        those that wait for the rest of their batch.
        """
        calls = list(self._queue)
        for worker in self._workers:
            calls += worker.in_flight
        num_held = len(self._held) if self._takes is None else 0
        return num_held + sum(len(call.items) for call in calls)

    @property
    def is_busy(self) -> bool:
        """Whether every worker has calls for BUSY_S."""
        if self._call_s is None:
            ahead = BATCH
        else:
            ahead = min(self._most_calls, max(2, int(BUSY_S / max(self._call_s, 1e-6))))
        num_calls = len(self._queue)
        for worker in self._workers:
            for call in worker.in_flight:
                num_calls += len(call.items) if call.is_several else 1
        return num_calls >= ahead * len(self._workers)

    def submit(self, key: int, item: Item) -> None:
        """Queue an item; `poll` starts it. The key is for the caller's use. TypeError if meta is
        not JSON.
        """
        assert self._workers, "submit on a closed pool"
        row = dict(item.meta)
        sampled = row.pop(SAMPLED, None)
        text = TextItem(
            prompt=json.dumps(item.prompt.text),
            completion=json.dumps(item.text),
            meta=json.dumps(row),
            sampled=json.dumps(sampled),
        )
        if self._takes in (None, "group"):
            self._held[key] = text
        else:
            self._queue.append(self._call_for(key, text))

    def release(self, keys: Sequence[int]) -> None:
        """Note that these items make a batch. A function that takes a prompt's completions together
        is called with them now.
        """
        if self._takes is None:
            self._released.append(keys)
        elif self._takes == "group":
            self._queue.extend(self._calls_of(keys))

    def poll(self) -> Outcomes:
        """Return the outcomes that have become known since the last call, by key. Hands out queued
        items too; does not block.

        ValueError if the function cannot be used, RewardError if workers do not start.
        """
        self._poll_workers()
        self._hand_out()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def start(self) -> None:
        """Block until a worker has imported the function. ValueError says what is wrong with the
        function if none can.
        """
        assert not self.pending, "start comes before the first submit"
        super().start()

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return the outcomes of (prompt, completion, meta) samples, in order, as one batch.
        Blocks; nothing else may be pending.
        """
        return score_all(self, [text_item(*sample) for sample in samples])

    def close(self) -> None:
        """Kill all workers. What is pending is dropped."""
        self._queue.clear()
        self._held.clear()
        self._released.clear()
        super().close()

    def _answer(self, worker: WorkerProcess[Call], message: Any) -> bool:
        match message:
            case [[*keys], [*verdicts], float(finished_at)] if (
                worker.in_flight
                and worker.in_flight[0].is_answered_by(keys)
                and len(verdicts) == len(keys)
                and all(map(_is_verdict, verdicts))
                and 0.0 <= finished_at <= time.monotonic()
            ):
                call = worker.in_flight[0]
                self._enter(worker, keys, finished_at)
                for key, verdict in zip(keys, verdicts):
                    self._outcomes.append((key, self._outcome(call, *verdict)))
                return True
        return False

    def _outcome(self, call: Call, kind: OutcomeKind, value: float | None, reason: str) -> Outcome:
        """Return a worker's verdict on an item of a call as an outcome."""
        if kind == "abstain":
            return Outcome.abstain(reason)
        if kind == "error":
            return Outcome.error(self._late(call, count=1) if reason == TOO_LATE else reason)
        assert value is not None, "a score has a value"
        return Outcome.score(value)

    def _enter(self, worker: WorkerProcess[Call], keys: list[int], finished_at: float) -> None:
        """Note that a worker has scored these items of its call, at this time."""
        call = worker.in_flight[0]
        if not call.is_first:  # a first call may have loaded something
            seconds = finished_at - max(call.sent_at, worker.free_at)  # by the worker's clock
            call_s = seconds if self._call_s is None else self._call_s
            self._call_s = call_s + 0.2 * (seconds - call_s)  # newer calls count more
        worker.free_at = finished_at
        self._failed_starts = 0
        self._patience.has_answered = True
        for key in keys:
            del call.items[key]
        if call.items:
            return
        worker.in_flight.popleft()
        if call.is_first:
            self._patience.note_return(finished_at - call.sent_at)

    def _note_ready(self, told: list) -> None:
        """Learn from a worker what one call scores, and queue the items that came before."""
        if self._takes is not None:
            return
        (takes,) = told
        self._takes = takes
        if takes == "group":
            for keys in self._released:
                self._queue.extend(self._calls_of(keys))
        else:
            for key, item in self._held.items():
                self._queue.append(self._call_for(key, item))
            self._held.clear()
        self._released.clear()

    def _call_for(self, key: int, item: TextItem) -> Call:
        """Make a call for one item. Others may join it if several are scored side by side."""
        return Call({key: item}, is_several=self._takes == "several")

    def _calls_of(self, keys: Sequence[int]) -> list[Call]:
        """Return the calls for held items: one for each prompt, in the order in which these
        came.
        """
        by_prompt: dict[tuple[str, str], dict[int, TextItem]] = {}
        for key in keys:
            item = self._held.pop(key)
            by_prompt.setdefault((item.prompt, item.meta), {})[key] = item
        return [Call(items) for items in by_prompt.values()]

    def _lost(
        self, place: int, worker: WorkerProcess[Call], suspect: Call | None, why: str | None
    ) -> None:
        """Make errors of the items of the suspect, and put the worker's other calls back into the
        queue.
        """
        if suspect is not None:
            worker.in_flight.popleft()
            if why is None and suspect.is_first:
                self._count_first_kill(suspect)
            if len(suspect.items) > 1 and suspect.is_several:
                # One of them is to blame, and it is not known which, so each is tried alone.
                for key, item in reversed(suspect.items.items()):
                    worker.in_flight.appendleft(Call({key: item}, is_several=True, may_join=False))
            else:
                if why is None:
                    why = self._late(suspect, count=len(suspect.items))
                for key in suspect.items:
                    self._outcomes.append((key, Outcome.error(why)))
        self._queue.extendleft(reversed(worker.in_flight))
        worker.in_flight.clear()

    def _count_first_kill(self, call: Call) -> None:
        """Count a first call that was killed. RewardError if another one would fail too."""
        patience = self._patience
        patience.note_kill(call)
        if patience.is_at_end:
            raise RewardError(
                f"{self.given}: the first calls of {patience.num_kills} workers "
                f"took longer than {call.limit_s:g} s each, and nothing was ever scored; "
                f"{self._loading}"
            )

    @property
    def _loading(self) -> str:
        """The remedy if the first call takes too long."""
        module = self.name.partition(":")[0]
        top = f"if it loads something slow, load it at the top of the module {module}"
        return f"{top}, or raise {self._limits}timeout_s" if self._limits else top

    def _late(self, call: Call, *, count: int) -> str:
        """Return why so many items of a call have no score."""
        limit = f"took longer than {self._limits}timeout_s={self._timeout_s:g}"
        if count > 1:
            limit = f"{limit} for each of the {count} completions of a call"
        if not call.is_first:
            return limit
        reason = f"{limit}, and than the {call.limit_s:g} s of a worker's first call"
        num_kills = self._patience.num_kills
        if num_kills < MAX_FIRST_KILLS:
            return reason
        return f"{reason}, {num_kills} times in a row; {self._loading}"

    def _hand_out(self) -> None:
        num_items = len(self._queue) + sum(len(worker.in_flight) for worker in self._workers)
        if self._takes == "several":
            num_items = self.pending
        share = min(self._most_calls, math.ceil(num_items / len(self._workers)))
        for worker in self._workers:
            if worker.ready:
                for call in self._next_calls(worker, share):
                    first_s = self._patience.seconds if worker.is_fresh else None
                    call.hand_out(timeout_s=self._timeout_s, first_s=first_s)
                    worker.send(call)
            worker.flush()

    @property
    def _most_calls(self) -> int:
        """How many calls a worker may have in flight, or items side by side. Several workers get no
        more ahead: what lies behind a slow call does not go to another.
        """
        if self._call_s is None or self._takes == "several" or len(self._workers) > 1:
            return BATCH
        in_time = int(PIPE_S / max(self._call_s, 1e-6))
        return max(BATCH, min(MOST_CALLS, in_time))

    def _next_calls(self, worker: WorkerProcess[Call], share: int) -> list[Call]:
        """Return the calls that a worker gets from the queue now. share: how many calls, or items
        side by side, it may have.
        """
        if self._takes == "several":
            return [] if worker.in_flight else self._joined(share)
        count = min(len(self._queue), share - len(worker.in_flight))
        return [self._next_call() for _ in range(count)]

    def _next_call(self) -> Call:
        """Return the next call of the queue that is not put off; otherwise the first."""
        for place, call in enumerate(self._queue):
            if not self._patience.puts_off(call):
                del self._queue[place]
                return call
        return self._queue.popleft()

    def _joined(self, most: int) -> list[Call]:
        """Return the next call for at most so many items side by side; none if nothing waits."""
        if not self._queue:
            return []
        call = self._next_call()
        while call.may_join and len(call.items) < most and self._queue:
            if not self._queue[0].may_join:
                break
            call.items.update(self._queue.popleft().items)
        return [call]


def check_reward(
    fn: str,
    items: Sequence[Item],
    *,
    section: str = "reward",
    fn_key: str = "",
    remedy: str = "correct what scores",
    must_score: bool = True,
    wait_longer: Callable[[], bool] = lambda: True,
    **limits,
) -> list[Outcome]:
    """Return the outcomes of items by the function at import path `fn`, in order. Blocks.

    section, fn_key and limits, which are options, timeout_s, memory_mb, chat and system_prompt: as
    RewardPool's. remedy, must_score, wait_longer: as try_scorer's. ValueError names what is wrong:
    no module, no function (and the nearest name), parameters that do not fit, or the same error on
    every item, with the lines of code that it came through.
    """
    pool = RewardPool(fn, section=section, fn_key=fn_key, traced=True, **limits)
    return try_scorer(
        pool, items, given=pool.given, remedy=remedy, must_score=must_score, wait_longer=wait_longer
    )
