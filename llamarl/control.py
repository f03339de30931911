"""Control: small JSON messages between ranks over the c10d Store, and the watch over who is alive.

Every rank has a mailbox, a queue in the Store. A listener thread takes its messages and either hands them to a handler
(the ledger's, which must answer while executors compute) or keeps them by topic until the loop asks. Data never comes here.

    thread      consumes              waits for                 unblocked by
    listener    mailbox of this rank  a message                 post() of any rank; close()
    heartbeat   -                     1 s                       close()

Liveness: every rank beats once a second. The leader watches all, the others watch the leader; one whose beat stands still
for heartbeat_timeout_s is reported to every rank by name, and each ends with PeerDied: in its loop, or, if it is
stuck inside a collective with the dead, by the heartbeat thread itself, GRACE_S later.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict, deque
from datetime import timedelta
from typing import Callable

import torch.distributed as dist

BEAT_S = 1.0
GRACE_S = 10.0
EXIT_PEER_DIED = 70
_FOREVER = timedelta(days=7)


class PeerDied(RuntimeError):
    """Another rank stopped answering or failed; the message names it."""


class DeadlineExceeded(TimeoutError):
    """Somebody waited too long; the message names executor, rank, step, what for and from whom."""


class Control:
    """One per rank. `store` is None in a world of one, where mail is a local queue.

    names: what each rank hosts, for messages ("rank 1 (generator, reward)").
    """

    def __init__(
        self,
        store: dist.Store | None,
        *,
        rank: int,
        world_size: int,
        leader: int,
        names: list[str],
        heartbeat_timeout_s: float = 30.0,
    ):
        self.rank, self.world_size, self.leader, self.names = rank, world_size, leader, names
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.failure: Exception | None = None
        self.stop_reason: str | None = None
        self.signalled = False  # this process has a stop signal that its loop has not passed on yet
        self._mail: dict[str, deque] = defaultdict(deque)
        self._handlers: dict[str, Callable[[int, dict], None]] = {}
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._store = store
        self._threads: list[threading.Thread] = []
        self.on("failed", self._on_failed)
        self.on("stop", self._on_stop)

    @property
    def is_leader(self) -> bool:
        return self.rank == self.leader

    def start(self) -> None:
        """Begin to listen and beat; after all handlers are in place."""
        if self._store is not None and not self._threads:
            self._threads = [self.thread("control-listen", self._listen), self.thread("control-beat", self._beat)]

    # -- messages -------------------------------------------------------------------------------------------------

    def post(self, rank: int, topic: str, payload: dict) -> None:
        """Put a JSON message into a rank's mailbox. Never waits; in order per sender."""
        if rank == self.rank:
            self._deliver(self.rank, topic, payload)
        else:
            self._store.queue_push(f"mail/{rank}", json.dumps([self.rank, topic, payload]).encode())

    def post_all(self, topic: str, payload: dict) -> None:
        for rank in range(self.world_size):
            self.post(rank, topic, payload)

    def take(self, topic: str) -> list[tuple[int, dict]]:
        """All messages of a topic that have come, as (sender, payload). Does not wait."""
        box, out = self._mail[topic], []
        while box:
            out.append(box.popleft())
        return out

    def has(self, topic: str) -> bool:
        """Whether a message of a topic waits to be taken."""
        return bool(self._mail[topic])

    def on(self, topic: str, handler: Callable[[int, dict], None]) -> None:
        """Have a topic's messages handled at once, on the listener thread (or the poster's, in one process)."""
        self._handlers[topic] = handler

    def wake(self) -> None:
        """Something came for this rank: end a running `wait`."""
        with self._changed:
            self._news = True
            self._changed.notify_all()

    _news = False

    def wait(self, timeout_s: float) -> None:
        """Until something comes for this rank, or timeout_s."""
        with self._changed:
            if not self._news:
                self._changed.wait(timeout_s)
            self._news = False

    # -- stop and failure -----------------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        return self.stop_reason is not None

    def request_stop(self, reason: str) -> None:
        """Ask every rank to checkpoint at the next boundary and end. Not from a signal handler: it takes locks."""
        self.post_all("stop", {"reason": reason})

    def report_failure(self, error: BaseException) -> None:
        """Tell every other rank why this one ends, so that nobody waits for it."""
        text = f"rank {self.rank} ({self.names[self.rank]}) failed: {type(error).__name__}: {error}"
        for rank in range(self.world_size):
            if rank != self.rank:
                self.post(rank, "failed", {"why": text})

    def fail(self, error: Exception) -> None:
        """Make this rank's loop end with `error` (from a channel's thread)."""
        self.failure = self.failure or error
        self.wake()

    def thread(self, name: str, target: Callable[..., None], *args) -> threading.Thread:
        """Start a daemon thread whose failure ends this rank's loop: a thread must not die unheard."""

        def run() -> None:
            try:
                target(*args)
            except Exception as error:
                self.fail(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def check(self) -> None:
        """Raise what went wrong elsewhere, if anything did."""
        if self.failure is not None:
            raise self.failure

    def _on_failed(self, sender: int, payload: dict) -> None:
        self.fail(PeerDied(payload["why"]))

    def _on_stop(self, sender: int, payload: dict) -> None:
        self.stop_reason = self.stop_reason or payload["reason"]
        self.wake()

    # -- threads --------------------------------------------------------------------------------------------------

    def _deliver(self, sender: int, topic: str, payload: dict) -> None:
        handler = self._handlers.get(topic)
        if handler:
            handler(sender, payload)
        else:
            self._mail[topic].append((sender, payload))
        self.wake()

    def _listen(self) -> None:
        store = self._store.clone()
        store.set_timeout(_FOREVER)
        while not self._closing.is_set():
            try:
                sender, topic, payload = json.loads(store.queue_pop(f"mail/{self.rank}"))
            except dist.DistError as error:
                if not self._closing.is_set():
                    self.fail(PeerDied(f"rank {self.rank}: the control store is gone ({error}); was the launcher stopped?"))
                return
            if topic == "close":
                return
            self._deliver(sender, topic, payload)

    def _beat(self) -> None:
        store = self._store.clone()
        watched = [r for r in range(self.world_size) if r != self.rank] if self.is_leader else [self.leader]
        seen = {r: (b"", time.monotonic()) for r in watched}
        count = 0
        while not self._closing.wait(BEAT_S):
            try:
                count += 1
                store.set(f"beat/{self.rank}", str(count))
                dead = self._silent(store, seen)
            except dist.DistError as error:
                dead = [f"the control store is gone ({error})"] if not self._closing.is_set() else []
            if dead:
                text = f"{'; '.join(dead)}. Its own output says why; start again with resume=auto"
                if self.is_leader:
                    for rank in range(self.world_size):
                        if rank != self.rank and not any(f"rank {rank} " in d for d in dead):
                            self.post(rank, "failed", {"why": text})
                self.fail(PeerDied(text))
            if self.failure is not None:
                self._end_if_stuck()
                return

    def _silent(self, store: dist.Store, seen: dict[int, tuple[bytes, float]]) -> list[str]:
        dead, now = [], time.monotonic()
        for rank, (beat, since) in seen.items():
            new = store.get(f"beat/{rank}") if store.check([f"beat/{rank}"]) else b""
            if new == b"done":
                seen[rank] = (new, now)
            elif new != beat:
                seen[rank] = (new, now)
            elif now - since > self.heartbeat_timeout_s:
                dead.append(f"rank {rank} ({self.names[rank]}) has not been heard of for {now - since:.0f} s")
        return dead

    def _end_if_stuck(self) -> None:
        if not self._closing.wait(GRACE_S):
            print(f"llamarl: rank {self.rank} is stuck in a collective; ending it. {self.failure}", file=sys.stderr, flush=True)
            os._exit(EXIT_PEER_DIED)

    def close(self) -> None:
        """Stop listening. The rank counts as done, not dead."""
        self._closing.set()
        if self._store is None or not self._threads:
            return
        try:
            self._store.set(f"beat/{self.rank}", "done")
            self._store.queue_push(f"mail/{self.rank}", json.dumps([self.rank, "close", {}]).encode())
        except dist.DistError:
            return  # the launcher is gone already
        for thread in self._threads:
            thread.join(timeout=5)
