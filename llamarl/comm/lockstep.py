"""Lockstep: the ranks of one replica, which share a copy of the model, do the same in one order.

The first of them leads: it alone decides. Its peers follow, command by command; the collectives
inside the model's forward keep them together. JSON messages over the control (data never goes
there):

    message     from -> to        taken by             meaning
    lockstep/X  leader -> peers   the peer's step      do this next, in executor X
    held/X      peer -> leader    the leader's step    this version is staged here

New weights reach every rank of a replica on its own, and all must swap the same version. So what is
staged stays until the leader, once all hold it, has all swap it, or skip it for a newer one that
waits behind it while the replica is pinned. Were one rank to skip a version while another keeps it,
the newer one could not come: a sender serves its receivers together. A replica of one rank posts
nothing and takes the newest.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from llamarl.executor import POLL_S, ExecutorGroup, Messages

LAST = "end"  # the command after which nothing more comes
END_S = 15.0  # a peer waits no longer for LAST than this


class StagedVersion(Protocol):
    """A whole version that waits to be swapped in."""

    @property
    def version(self) -> int: ...


class Lockstep:
    """A rank's place among the ranks that move in step: all ranks of its executor if these act as
    one, else those that share a copy of the model.
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
