"""What the ranks of one executor do together: commands in one order, calls, shares and sums.

The first of the ranks that act as one decides, and all do the same in one order. Lockstep is the
order of the commands. RankCalls makes calls of it, whose collectives keep the ranks together:

    first rank: call(name, value) --to_message----> broadcast --> run(value) --> what that returns
    the others: follow()          <--from_message-- broadcast --> run(value)

JSON messages over the control (data never goes there):

    message     from -> to        taken by             meaning
    lockstep/X  leader -> peers   the peer's step      do this next, in executor X
    held/X      peer -> leader    the leader's step    this version is staged here
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.executor import POLL_S, Executor, ExecutorGroup, Messages
from llamarl.models.tp import TensorParallel

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


# --- Sums over the ranks that train together ---

Number = Tensor | float  # a tensor of one element
Name = TypeVar("Name", bound=Hashable)


class TrainerRanks:
    """The ranks that train together: those of `group`, or one alone where it is None.

    Every method is collective over them. Ranks that share a tensor-parallel decoder are given the
    same groups; in sums they count once.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, tp: TensorParallel | None
    ):
        self._group = group
        self._device = device
        self.size = group.size() if group is not None else 1
        self.data_size = self.size // (tp.size if tp else 1)
        self._is_counted = tp is None or tp.rank == 0

    def any(self, wanted: bool) -> bool:
        """Whether any rank wants it."""
        return self.max(wanted=wanted)["wanted"] > 0

    def sum(self, **values: Number) -> dict[str, float]:
        """Return the sum of each value over the ranks, in float64; all ranks give the same
        names.
        """
        if not self._is_counted:
            values = dict.fromkeys(values, 0.0)
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, **values: Number) -> dict[str, float]:
        """Return the largest of each value over the ranks; all ranks give the same names."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def max_each(self, values: Sequence[int]) -> list[int]:
        """Return, for each value, the largest over the ranks; all ranks give as many."""
        largest = self._reduced(dict(enumerate(values)), dist.ReduceOp.MAX)
        return [int(value) for value in largest.values()]

    def total(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over the ranks of values of one shape, without gradient.
        ValueError for values that have one: it would be lost.
        """
        if values.requires_grad:
            raise ValueError("a sum over the trainer's ranks has no gradient: detach its values")
        total = values.clone() if self._is_counted else torch.zeros_like(values)
        if self.size > 1:
            dist.all_reduce(total, group=self._group)
        return total

    def union(self, names: list[str]) -> list[str]:
        """Return the names that any rank gives, sorted where there are several ranks. Ranks that
        share a decoder give the same ones.
        """
        if self.size == 1:
            return names
        known: set[str] = set()
        for message in self.gather(json.dumps(names).encode()):
            if message:  # ranks that share a decoder with another say nothing
                known.update(json.loads(message))
        return sorted(known)

    def gather(self, message: bytes) -> list[bytes]:
        """Return what each rank gives, in the order of ranks; of ranks that share a decoder only
        the first one's.
        """
        if self.size == 1:
            return [message]
        own = message if self._is_counted else b""
        size_1 = torch.tensor([len(own)], device=self._device)
        sizes = [torch.empty_like(size_1) for _ in range(self.size)]
        dist.all_gather(sizes, size_1, group=self._group)
        longest = max(int(size) for size in sizes)
        if not longest:
            return [b""] * self.size
        padded = bytearray(own.ljust(longest, b"\0"))
        mine = torch.frombuffer(padded, dtype=torch.uint8).to(self._device)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self._group)
        messages = []
        for part, size in zip(parts, sizes):
            messages.append(part[: int(size)].cpu().numpy().tobytes())
        return messages

    def _reduced(
        self, values: Mapping[Name, Number], operation: dist.ReduceOp.RedOpType
    ) -> dict[Name, float]:
        numbers = [float(value) for value in values.values()]
        if self.size > 1 and numbers:
            packed = torch.tensor(numbers, dtype=torch.float64, device=self._device)
            dist.all_reduce(packed, operation, group=self._group)
            numbers = packed.tolist()
        return dict(zip(values, numbers))
