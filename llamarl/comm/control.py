"""Control: small JSON messages between ranks over the c10d Store, and the watch over who is alive.

Every rank has a mailbox, a queue in the Store. A listener thread takes its messages and either
hands them to a handler (the ledger's, which must answer while executors compute) or keeps them by
topic until the loop asks. Data never comes here.

    thread      consumes              waits for                 unblocked by
    listener    mailbox of this rank  a message                 post() of any rank; close()
    heartbeat   -                     1 s; the Store            close(); what serves the Store
    watch       -                     1 s                       close()

Liveness: every rank beats once a second. The leader watches all ranks, and they watch the leader. A
rank without a beat for heartbeat_timeout_s is reported to every rank by name, and each ends with
PeerDied: in its loop or, if it is stuck in a collective with the dead rank, by its watch thread
GRACE_S later. The watch thread also ends a rank whose Store is silent for STORE_PATIENCE times as
long, because the heartbeat thread then hangs in it.

A rank may take long to write a checkpoint as long as it makes progress. Its watch thread measures
the progress once a second and tells the leader, which tells all. Meanwhile no wait for that rank
times out (`saving`, `progressed_at`).

    message   from -> to               handled                     meaning
    writing   a rank -> leader -> all  by the listener, at once    what it writes gets on

An error is a failure or a loss. A failure ends this rank's loop at once. After a loss all keepers
live: the ranks whose state a checkpoint needs (llamarl.ending). They seal a checkpoint within
last_words_s, and then every rank ends. The other ranks wait for them, because a launcher kills all
ranks soon after the first has ended.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from llamarl.errors import PeerDied, cause_of

Failure = TypeVar("Failure", bound=BaseException)

BEAT_S = 1.0
GRACE_S = 10.0
JOIN_S = 5.0  # a thread that is told to end has so long
EXIT_PEER_DIED = 70
NAMED_S = 2.0  # the name of a dead rank comes within so long of what its death broke
STORE_PATIENCE = 3  # times heartbeat_timeout_s that the Store may be silent
_OF_GLOO = re.compile(r"gloo|Connection (closed|reset) by peer")  # gloo raises plain RuntimeErrors
_WAITS = ("torch", "threading", "concurrent", "queue")  # where a rank stands while it waits
_FOREVER = timedelta(days=7)


class Control:
    """A rank's control: its mailbox, and its watch over other ranks. `store` is None in a world of
    one, where messages go through a local queue.

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
        self.rank = rank
        self.world_size = world_size
        self.leader = leader
        self.is_leader = rank == leader
        self.names = names
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.failure: Exception | None = None  # ends this rank now
        # Ends this rank once the keepers have sealed a checkpoint.
        self.loss: Exception | None = None
        self.keepers: frozenset[int] = (
            frozenset()
        )  # empty while there is no state worth a checkpoint
        self._beaten_at = math.inf  # the last time that the Store took this rank's beat
        self._last_words_until = math.inf
        self._last_words_s = 0.0
        self._let_go_until = math.inf
        self._joined_until = math.inf
        # When a rank's writing of a checkpoint was last seen to get on; -inf: never.
        self.progressed_at = -math.inf
        # What this rank has written of a checkpoint so far; None while it writes none.
        self._measure: Callable[[], object] | None = None
        self._measured: object = None  # at the last look
        self._passed_on_at = -math.inf  # the progress that the leader has told all others of
        self.stopping = False  # every rank has been asked to end
        self.signalled = False  # this process has a stop signal that its loop has not passed on yet
        self._messages: dict[str, deque] = defaultdict(deque)
        self._handlers: dict[str, Callable[[int, dict], None]] = {
            "failed": self._on_failed,
            "lost": self._on_lost,
            "stop": self._on_stop,
            "writing": self._on_writing,
        }
        self._changed = threading.Condition()
        self._news = False  # something has come since the last wait
        self._closing = threading.Event()
        self._store = store
        self._threads: list[threading.Thread] = []

    def _shared_store(self) -> dist.Store:
        """Return the Store, where there are other ranks."""
        assert self._store is not None, "a world of one rank has no Store"
        return self._store

    def _own_store(self) -> dist.Store:
        """Return a connection to the Store for one thread alone."""
        # Every Store of several processes has it; torch's annotations give it to two kinds.
        clone: Callable[[], dist.Store] = getattr(self._shared_store(), "clone")
        return clone()

    def start(self) -> None:
        """Begin to listen and beat. Call it once all handlers are in place."""
        if self._store is not None and not self._threads:
            self._threads = [
                self.thread("control-listen", self._listen),
                self.thread("control-beat", self._beat),
                self.thread("control-watch", self._watch),
            ]

    # --- Messages ---

    def post(self, rank: int, topic: str, payload: dict) -> None:
        """Put a JSON message into a rank's mailbox. Never waits; messages of one sender keep their
        order.
        """
        if rank == self.rank:
            self._deliver(self.rank, topic, payload)
            return
        message = json.dumps([self.rank, topic, payload])
        store = self._shared_store()
        try:
            store.queue_push(f"mail/{rank}", message.encode())
        except dist.DistError as error:
            raise PeerDied(self._store_gone(error)) from error

    def _store_gone(self, error: Exception | str) -> str:
        first_line = str(error).splitlines()[0]
        return (
            f"{self._named(self.rank)}: the control store is gone ({first_line}). Was the "
            "launcher, which serves it, stopped, its host lost or the network to it cut? Start "
            "again with resume=auto"
        )

    def _named(self, rank: int) -> str:
        """Return a rank's number and what it hosts, for people."""
        return f"rank {rank} ({self.names[rank]})"

    def post_all(self, topic: str, payload: dict, but: Iterable[int] = ()) -> None:
        """Put a JSON message into the mailbox of every rank, except those in `but`."""
        for rank in range(self.world_size):
            if rank not in but:
                self.post(rank, topic, payload)

    def take(self, topic: str) -> list[tuple[int, dict]]:
        """Return all messages of a topic that have come, as (sender, payload). Does not wait."""
        box = self._messages[topic]
        return [box.popleft() for _ in range(len(box))]

    def has(self, topic: str) -> bool:
        """Whether a message of a topic waits to be taken."""
        return bool(self._messages[topic])

    def on(self, topic: str, handler: Callable[[int, dict], None]) -> None:
        """Have a topic's messages handled at once.

        The handler runs on the listener thread; for what a rank posts to itself, on the thread that
        posts it.
        """
        self._handlers[topic] = handler

    def wake(self) -> None:
        """End a running `wait`: something has come for this rank."""
        if self._news:
            return  # the next `wait` ends at once already, and after it all is looked at
        with self._changed:
            self._news = True
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Wait until something comes for this rank, at most timeout_s."""
        with self._changed:
            if not self._news:
                self._changed.wait(timeout_s)
            self._news = False

    # --- Stop and failure ---

    @property
    def ending(self) -> bool:
        """Whether a step that is under way had better be given up, because it would be the last."""
        return self.stopping or self.signalled or self.loss is not None

    def request_stop(self) -> None:
        """Ask every rank to checkpoint at the next boundary and end.

        Not from a signal handler: it takes locks.
        """
        self.post_all("stop", {})

    def report_failure(self, error: BaseException) -> None:
        """Tell every other rank why this one ends, so that nobody waits for it."""
        why = f"{self._named(self.rank)} failed: {type(error).__name__}: {error}"
        gone = {self.rank, *getattr(error, "ranks", ())}
        self.post_all("failed", {"why": why, "ranks": sorted(gone)}, but=[self.rank])

    def report_loss(self) -> None:
        """Tell every other rank of this one's loss: keepers seal a checkpoint, the others end."""
        self.post_all("lost", {"why": str(self.loss)}, but=[self.rank])

    def keep(self, keepers: Iterable[int], last_words_s: float) -> None:
        """Note that there is state from now on which a checkpoint of these ranks saves.

        After a loss they have last_words_s for that.
        """
        self.keepers = frozenset(keepers)
        self._last_words_s = last_words_s

    def fail(self, error: Exception) -> None:
        """Make this rank's loop end with `error`, from a channel's thread.

        It ends at once, or as a loss if the dead are known to be none of the keepers.
        """
        dead = error.ranks if isinstance(error, PeerDied) else frozenset()
        dead_keepers = sorted(dead & self.keepers)
        if dead and not dead_keepers:
            self.lose(error)
            return
        if self.failure is None:
            for rank in dead_keepers:
                error.add_note(
                    "No checkpoint was made of the steps since the last one: "
                    f"{self._named(rank)} held a part of it."
                )
        self.fail_now(error)

    def lose(self, error: Exception) -> None:
        """Make this rank's loop end with `error`, which leaves the keepers whole.

        They have a checkpoint to seal before, and the other ranks wait until the leader says so.
        """
        if not self.keepers:
            self.fail_now(error)
        elif self.loss is None:
            patience_s = self._last_words_s
            if self.rank not in self.keepers:
                patience_s += GRACE_S  # so that the leader's word comes first
            self._last_words_until = time.monotonic() + patience_s
            self.loss = error
            self.wake()

    def fail_now(self, error: Exception) -> None:
        """Make this rank's loop end with `error`, whatever it leaves undone."""
        self.failure = self.failure or error
        self.wake()

    def let_go(self) -> None:
        """Note that this rank's loop has ended, and that it only lets go of what it holds.

        After a loss its last words are said by then. Letting go may take GRACE_S.
        """
        self._last_words_until = math.inf
        if self.loss is not None:
            self._let_go_until = time.monotonic() + GRACE_S

    def join(self, thread: threading.Thread) -> None:
        """Wait until a thread that ends with this rank has ended, for JOIN_S at most.

        After a failure or a loss its peer may hang. All such waits together take JOIN_S then.
        """
        until = time.monotonic() + JOIN_S
        if self.failure is not None or self.loss is not None:
            self._joined_until = min(self._joined_until, until)
            until = self._joined_until
        thread.join(max(0.0, until - time.monotonic()))

    def thread(self, name: str, target: Callable[..., None], *args) -> threading.Thread:
        """Start a daemon thread. Its failure ends this rank's loop: none may die unheard."""

        def run() -> None:
            try:
                target(*args)
            except Exception as error:
                self.fail(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def gone(self, error: PeerDied) -> str:
        """Return what a broken link means, for people."""
        who = " and ".join(self._named(rank) for rank in sorted(error.ranks))
        return (
            f"the link with {who} broke: {error}. That rank has ended; its own output says why. "
            "Start again with resume=auto"
        )

    def explained(self, error: Failure, doing: str, *, is_loss: bool = False) -> Failure | PeerDied:
        """Return the error, or the PeerDied that it means if a collective broke, with the place and
        the remedy.

        gloo, NCCL or the Store raise plain errors when a peer is gone. doing: "in trainer, step 3,
        among ranks [0, 1]". is_loss: the keepers save a checkpoint after it, and its result is
        noted then.
        """
        text = str(error).split(". ")[0]
        is_of_gloo = type(error) is RuntimeError and _OF_GLOO.search(text)
        if not is_of_gloo and not isinstance(error, dist.DistError):
            if isinstance(error, PeerDied):
                error.add_note(f"{self._named(self.rank)} noticed it {doing}.")
            return error
        until = time.monotonic() + NAMED_S
        while self.failure is None and self.loss is None and time.monotonic() < until:
            time.sleep(0.05)
        unknown = "A rank that takes part has ended; its own output says why"
        cause = self.failure or self.loss or unknown
        remedy = "Start again with resume=auto"
        if not is_loss and (self.rank in self.keepers or not self.keepers):
            remedy = f"No checkpoint was made of the steps since the last one. {remedy}"
        broke = f"a collective broke: {cause_of(error)}"
        return PeerDied(
            f"{self._named(self.rank)} {doing}: {broke}\n{cause}\n{remedy}",
            getattr(cause, "ranks", ()),
        )

    @contextmanager
    def saving(self, measure: Callable[[], object]) -> Iterator[None]:
        """Have all ranks be patient with this one while it writes a checkpoint and gets on.

        measure: how much it has written so far, as anything that can be compared. Called on the
        watch thread.
        """
        self._measured = None
        self.progressed_at = time.monotonic()
        self._measure = measure
        try:
            yield
        finally:
            self._measure = None

    def check(self) -> None:
        """Raise the error that ends this rank, if there is one."""
        if self.failure is not None:
            raise self.failure

    def _on_failed(self, sender: int, payload: dict) -> None:
        self.fail(PeerDied(payload["why"], payload["ranks"]))

    def _on_lost(self, sender: int, payload: dict) -> None:
        self.lose(PeerDied(payload["why"]))

    def _on_stop(self, sender: int, payload: dict) -> None:
        self.stopping = True

    def _on_writing(self, sender: int, payload: dict) -> None:
        self.progressed_at = time.monotonic()

    # --- Threads ---

    def _deliver(self, sender: int, topic: str, payload: dict) -> None:
        handler = self._handlers.get(topic)
        if handler:
            handler(sender, payload)
        else:
            self._messages[topic].append((sender, payload))
        self.wake()

    def _listen(self) -> None:
        store = self._own_store()
        store.set_timeout(_FOREVER)
        while not self._closing.is_set():
            try:
                sender, topic, payload = json.loads(store.queue_pop(f"mail/{self.rank}"))
            except dist.DistError as error:
                if not self._closing.is_set():
                    self.fail(PeerDied(self._store_gone(error)))
                return
            if topic == "close":
                return
            self._deliver(sender, topic, payload)

    def _beat(self) -> None:
        store = self._own_store()
        watched = {self.leader}
        if self.is_leader:
            watched = set(range(self.world_size)) - {self.rank}
        seen = {rank: (b"", time.monotonic()) for rank in watched}
        count = 0
        while self.failure is None:
            try:
                count += 1
                store.set(f"beat/{self.rank}", str(count))
                self._beaten_at = time.monotonic()
                self._look_for_silent(store, seen)
            except PeerDied as error:  # the store, while others were told
                self.fail(error)
            except dist.DistError as error:
                if not self._closing.is_set():
                    self.fail(PeerDied(self._store_gone(error)))
            overslept_s = self._sleep()
            if self._closing.is_set():
                return
            for rank, (beat, since) in seen.items():
                seen[rank] = (beat, since + overslept_s)

    def _sleep(self) -> float:
        """Sleep until the next beat. Returns by how many seconds that took longer: this host may
        have been held up, and other ranks with it, so that their silence in that time means
        nothing.
        """
        began = time.monotonic()
        self._closing.wait(BEAT_S)
        return max(0.0, time.monotonic() - began - BEAT_S)

    def _watch(self) -> None:
        while self.failure is None:
            self._look_at_writing()
            now = time.monotonic()
            if now > max(self._last_words_until, self.progressed_at + self._last_words_s):
                loss = self.loss
                assert loss is not None, "last words end after a loss"
                loss.add_note(
                    f"No checkpoint could be sealed within the {self._last_words_s:.0f} s of "
                    "stop_s after that, or after its writing last got on."
                )
                self.fail_now(loss)
            if self.loss is not None and now > self._let_go_until:
                self.fail_now(self.loss)
            silent_s = now - self._beaten_at
            if silent_s > STORE_PATIENCE * self.heartbeat_timeout_s:
                text = self._store_gone(f"it has not answered for {silent_s:.0f} s")
                self.fail_now(PeerDied(text))
            overslept_s = self._sleep()
            if self._closing.is_set():
                return
            self._beaten_at += overslept_s
        self._end_if_stuck()

    def _look_at_writing(self) -> None:
        """Look whether this rank's writing gets on, and pass it on if so."""
        measure = self._measure
        done = None if measure is None else measure()
        gets_on = measure is not None and done != self._measured
        if gets_on:
            self._measured = done
            self.progressed_at = time.monotonic()
        try:
            if self.is_leader and self.progressed_at > self._passed_on_at:
                self._passed_on_at = self.progressed_at
                self.post_all("writing", {}, but=[self.rank])
            elif gets_on and not self.is_leader:
                self.post(self.leader, "writing", {})
        except PeerDied as error:
            self.fail(error)

    def _look_for_silent(self, store: dist.Store, seen: dict[int, tuple[bytes, float]]) -> None:
        """Report the ranks whose beat has stopped, each once.

        seen: rank -> its last beat and when it came, of those that this rank watches.
        """
        now = time.monotonic()
        said: dict[int, str] = {}
        beats = _beats_of(store, list(seen))
        for rank, (beat, since) in seen.items():
            new = beats[rank]
            # Before its first beat the meeting waits for it (ExecutorController).
            if new != beat or new in (b"", b"done"):
                seen[rank] = (new, now)
            elif now - since > self.heartbeat_timeout_s:
                said[rank] = f"{self._named(rank)} has not been heard of for {now - since:.0f} s"
        if not said:
            return
        for rank in said:
            del seen[rank]
        why = (
            f"{'; '.join(said.values())}. It hangs or has ended, which its own output says, or its "
            "host or the network to it is gone. Start again with resume=auto"
        )
        if self.is_leader:
            self.post_all("failed", {"why": why, "ranks": sorted(said)}, but=[self.rank, *said])
        self.fail(PeerDied(why, said))

    def _end_if_stuck(self) -> None:
        """End this process GRACE_S after its loop should have ended, unless it is writing."""
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until:
            if self._closing.wait(min(BEAT_S, GRACE_S)):
                return
            self._look_at_writing()
            if self._measure is not None:
                until = max(until, self.progressed_at + GRACE_S)
        where = f"at {_place_of(threading.main_thread())}"
        if self._measure is not None:
            where = f"in the writing of a checkpoint: nothing was written for {GRACE_S:.0f} s"
        said = "\n".join([str(self.failure), *getattr(self.failure, "__notes__", ())])
        text = f"llamarl: rank {self.rank} is stuck {where}; ending it. {said}"
        print(text, file=sys.stderr, flush=True)
        os._exit(EXIT_PEER_DIED)

    def close(self) -> None:
        """Stop listening. The rank counts as done, not dead."""
        self._closing.set()
        if self._store is None or not self._threads:
            return
        listener, beat, _ = self._threads
        beat.join(JOIN_S)  # or its last beat could overwrite the word that it was
        farewell = json.dumps([self.rank, "close", {}])
        try:
            self._store.set(f"beat/{self.rank}", "done")
            self._store.queue_push(f"mail/{self.rank}", farewell.encode())
        except dist.DistError:
            return  # the launcher is gone already
        listener.join(JOIN_S)


def _place_of(thread: threading.Thread) -> str:
    """Return the line at which a thread stands, "FILE:LINE, in FUNCTION": the innermost that is
    neither torch's nor of a wait.
    """
    frame = sys._current_frames().get(thread.ident or 0)
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _WAITS:
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno}, in {code.co_name}"


def _beats_of(store: dist.Store, ranks: list[int]) -> dict[int, bytes]:
    """Return the last beat of each of these ranks, empty for one that has not beaten yet.

    Two questions to the store for any number of ranks, once all have beaten.
    """
    keys = [f"beat/{rank}" for rank in ranks]
    if not store.check(keys):
        keys = [key for key in keys if store.check([key])]
    beats = store.multi_get(keys) if keys else []
    found = dict(zip(keys, beats))
    return {rank: found.get(f"beat/{rank}", b"") for rank in ranks}
