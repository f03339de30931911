"""Calls that all ranks of an executor make together, begun by the first.

    first rank: call(name, value) --to_message----> broadcast --> run(value) --> what that returns
    the others: follow()          <--from_message-- broadcast --> run(value)

Collectives in `run` keep the ranks together. A scorer adds its calls when it is made, on every rank
and in the same order. Afterwards only the first rank decides which call is next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from llamarl.comm.lockstep import Lockstep
from llamarl.executor import Executor
from llamarl.learning.asking import broadcast


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Call:
    """One kind of call that all ranks make.

    run: does this rank's share. to_message, from_message: turn a value into whole numbers [n]
    int64, which are broadcast, and back; None: the value is JSON, and travels with the command.
    is_ready: whether a rank other than the first may make the call now; it waits until it may.
    """

    run: Callable[[Any], Any]
    to_message: Callable[[Any], Tensor] | None = None
    from_message: Callable[[Tensor], Any] | None = None
    is_ready: Callable[[], bool] = _always


class Together(Protocol):
    """The part of its ranks that a scorer sees."""

    def add(self, name: str, call: Call) -> None:
        """Let calls of this name be made. Called on every rank, before the first such call."""

    def call(self, name: str, value: Any) -> Any:
        """On the first rank: have all ranks run it. Returns what `run` does here."""


class Alone:
    """The calls of a single process."""

    def __init__(self):
        self._calls: dict[str, Call] = {}

    def add(self, name: str, call: Call) -> None:
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

    def add(self, name: str, call: Call) -> None:
        """Let calls of this name be made."""
        self._together.add(self._prefix + name, call)

    def call(self, name: str, value: Any) -> Any:
        """On the first rank: have all ranks run it. Returns what `run` does here."""
        return self._together.call(self._prefix + name, value)


class Ranks:
    """The calls of an executor's ranks. as_one: all act as one; otherwise each alone."""

    def __init__(self, executor: Executor, *, as_one: bool = True):
        self._executor = executor
        self._group = executor.group
        self._as_one = as_one or executor.group.size == 1
        self.lockstep = Lockstep(executor.group, executor.control, as_one=as_one)
        self._calls: dict[str, Call] = {}
        self._told: dict | None = None  # a command that has come and is not ready yet

    @property
    def follows(self) -> bool:
        """Whether another rank begins the calls."""
        return self.lockstep.follows

    def add(self, name: str, call: Call) -> None:
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
        if self.lockstep.peers or self.lockstep.follows:
            broadcast(words, self._group)
