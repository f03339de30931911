"""Ranks that act as one: the first of them decides, and all do the same in one order.

Lockstep is the order of the commands. RankCalls makes calls of it, whose collectives keep the ranks
together:

    first rank: call(name, value) --to_message----> broadcast --> run(value) --> what that returns
    the others: follow()          <--from_message-- broadcast --> run(value)

JSON messages over the control (data never goes there):

    message     from -> to        taken by             meaning
    lockstep/X  leader -> peers   the peer's step      do this next, in executor X
    held/X      peer -> leader    the leader's step    this version is staged here
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.executor import POLL_S, Executor, ExecutorGroup, Messages

LAST = "end"  # the command after which nothing more comes
END_S = 15.0  # a peer waits no longer for LAST than this


class StagedVersion(Protocol):
    """A whole version that waits to be swapped in."""

    @property
    def version(self) -> int: ...


class Lockstep:
    """A rank's place among the ranks that do the same in one order: all ranks of its executor if
    these act as one, else those that share a copy of the model. The first of them leads.
    """

    def __init__(self, group: ExecutorGroup, control: Messages, *, as_one: bool = False):
        first = group.data_index * group.tensor_parallel
        together = group.ranks if as_one else group.ranks[first : first + group.tensor_parallel]
        self.leader, *self.peers = together
        self.follows = group.rank != self.leader
        self.ended = False  # nothing more comes
        self._control = control
        # Each executor has its own topics, because a rank may lead or follow in several.
        self._topic = f"lockstep/{group.name}"
        self._held_topic = f"held/{group.name}"
        self._is_torn = False  # a command has failed midway
        self._told: deque[dict] = deque()  # peer: commands to do
        self._held: dict[int, int] = {}  # leader: peer -> the version that is staged there
        self._reported: int | None = None  # peer: what it last said of that

    # --- Commands ---

    def tell(self, do: str, **what) -> None:
        """Leader: have the peers do this next.

        Whatever is collective in it begins when the leader does it too.
        """
        for peer in self.peers:
            self._control.post(peer, self._topic, {"do": do, **what})

    def next(self) -> dict | None:
        """Peer: return the next command, or None as long as there is none."""
        self._told.extend(command for _, command in self._control.take(self._topic))
        if not self._told:
            return None
        if self._told[0]["do"] == LAST:
            self.ended = True
        return None if self.ended else self._told.popleft()

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Peer: wrap the work of a command. After a failure in it no command can follow."""
        self._is_torn = True
        yield
        self._is_torn = False

    def leave(self, follow: Callable[[], bool]) -> None:
        """Leave: the last call. The leader says that it begins nothing more; a peer takes part, by
        `follow`, in what the leader has begun.
        """
        try:
            if not self.follows:
                self.tell(LAST)
                return
            until = time.monotonic() + END_S
            while time.monotonic() < until:
                if self.ended or self._is_torn or self._control.failure:
                    return
                if not follow():
                    self._control.wait(POLL_S)
        except RuntimeError:
            pass  # the others have left already, and say why

    # --- Versions ---

    # New weights come to every rank on its own, and all must swap the same version. Were one rank
    # to skip a version that another keeps, the newer one could not come, because a sender serves
    # its receivers together. So a staged version stays until all hold it and the leader decides.

    def report(self, staged: StagedVersion | None) -> None:
        """Peer: tell the leader of a version that is staged here."""
        if staged is not None and staged.version != self._reported:
            self._reported = staged.version
            self._control.post(self.leader, self._held_topic, {"version": staged.version})

    def agreed(self, staged: StagedVersion | None) -> int | None:
        """Leader: return the staged version if every rank of the replica has it, else None."""
        for peer, message in self._control.take(self._held_topic):
            self._held[peer] = message["version"]
        if staged is None or any(self._held.get(peer) != staged.version for peer in self.peers):
            return None
        return staged.version


# --- Calls ---


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One kind of call that all ranks make.

    run: does this rank's share. to_message, from_message: turn a value into whole numbers [n]
    int64, which are broadcast, and back; None: the value is JSON, and travels with the command.
    is_ready: whether a rank other than the first may make the call now; it waits until it may.
    """

    run: Callable[[Any], Any]
    to_message: Callable[[Any], Tensor] | None = None
    from_message: Callable[[Tensor], Any] | None = None
    is_ready: Callable[[], bool] = lambda: True


class Alone:
    """The calls of a single process."""

    def __init__(self):
        self._calls: dict[str, CollectiveCall] = {}

    def add(self, name: str, call: CollectiveCall) -> None:
        """Let calls of this name be made."""
        assert name not in self._calls, name
        self._calls[name] = call

    def call(self, name: str, value: Any) -> Any:
        """Run it."""
        return self._calls[name].run(value)


class Apart:
    """Calls with names of their own among those of others. prefix: comes before each name."""

    def __init__(self, together: Together, prefix: str):
        self._together = together
        self._prefix = prefix

    def add(self, name: str, call: CollectiveCall) -> None:
        """Let calls of this name be made."""
        self._together.add(self._prefix + name, call)

    def call(self, name: str, value: Any) -> Any:
        """On the first rank: have all ranks run it. Returns what `run` does here."""
        return self._together.call(self._prefix + name, value)


class RankCalls:
    """The calls of an executor's ranks. as_one: all act as one; otherwise each alone."""

    def __init__(self, executor: Executor, *, as_one: bool = True):
        self._executor = executor
        self._group = executor.group
        self._as_one = as_one or executor.group.size == 1
        self.lockstep = Lockstep(executor.group, executor.control, as_one=as_one)
        self._calls: dict[str, CollectiveCall] = {}
        self._told: dict | None = None  # a command that has come and is not ready yet

    @property
    def follows(self) -> bool:
        """Whether another rank begins the calls."""
        return self.lockstep.follows

    def add(self, name: str, call: CollectiveCall) -> None:
        """Let calls of this name be made."""
        assert self._as_one, f"{name}: ranks that act each by itself share no calls"
        assert name not in self._calls, name
        self._calls[name] = call

    def call(self, name: str, value: Any) -> Any:
        """On the first rank: have all ranks run it. Returns what `run` does here."""
        call = self._calls[name]
        step = self._executor.step_at
        if call.to_message is None:
            self.lockstep.tell(name, value=value, step=step)
            self._executor.claim_device()
            return call.run(value)
        words = call.to_message(value)
        self.lockstep.tell(name, size=words.numel(), step=step)
        self._executor.claim_device()
        self._broadcast(words)
        return call.run(value)

    def follow(self) -> bool:
        """On ranks other than the first: make the next call. False if there is none."""
        command = self._told or self.lockstep.next()
        self._told = None
        if command is None:
            return False
        call = self._calls[command["do"]]
        if not call.is_ready():
            self._told = command
            return False
        with self.lockstep.taking_part():
            self._executor.note_version(command["step"])
            self._executor.claim_device()
            if call.from_message is None:
                call.run(command["value"])
            else:
                words = torch.empty(command["size"], dtype=torch.int64)
                self._broadcast(words)
                call.run(call.from_message(words))
        return True

    def leave(self) -> None:
        """Leave, as the last call: the first rank begins nothing more, the others make what it has
        begun.
        """
        self.lockstep.leave(self.follow)

    def _broadcast(self, words: Tensor) -> None:
        if self._group.size > 1:
            dist.broadcast(words, self._group.ranks[0], group=self._group.process_group)


Together = Alone | Apart | RankCalls  # the part of its ranks that a scorer sees


# --- Work that the ranks divide among them ---

Microbatch = TypeVar("Microbatch")


def own_share(
    microbatches: list[Microbatch], filler: Microbatch, group: ExecutorGroup
) -> list[Microbatch]:
    """Return this rank's share of all microbatches. Every rank gets as many, with fillers at the
    end, because all must run the same number where the model is sharded.
    """
    own = microbatches[group.data_index :: group.data_size]
    most = math.ceil(len(microbatches) / group.data_size)
    return own + [filler] * (most - len(own))


def join_shares(values_N: Tensor, group: ExecutorGroup) -> None:
    """Collective over the executor's ranks: fill values on the CPU, of which each rank has those of
    its share and zeros elsewhere, with the values of all ranks.
    """
    if group.size == 1:
        return
    if group.tensor_index:
        values_N.zero_()  # the first of those that share a copy speaks for them
    dist.all_reduce(values_N, group=group.process_group)
