"""Finished groups that wait at a trainer rank for their step. The ledger decides which are taken, and how stale they may be."""

from __future__ import annotations

from llamarl import wire
from llamarl.types import Group


class GroupBuffer:
    """fifo: groups by ticket. Which leave is the ledger's word (earliest deadline first)."""

    def __init__(self):
        self._groups: dict[int, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, groups: list[Group]) -> None:
        """ValueError for a ticket that is here already: each is trained on once."""
        for group in groups:
            if group.ticket in self._groups:
                raise ValueError(f"group {group.ticket} came twice")
            self._groups[group.ticket] = group

    def take(self, tickets: list[int]) -> list[Group]:
        """These groups, in ticket order. KeyError for one that has not come."""
        missing = [t for t in tickets if t not in self._groups]
        if missing:
            raise KeyError(f"groups {missing[:4]} were taken by the ledger but have not reached this rank")
        return [self._groups.pop(t) for t in sorted(tickets)]

    def tickets(self) -> list[int]:
        return sorted(self._groups)

    def to_bytes(self) -> bytes:
        """All groups as one wire message; empty bytes when there are none."""
        return wire.encode([self._groups[t] for t in self.tickets()]) if self._groups else b""

    def load_bytes(self, message: bytes) -> None:
        self._groups = {}
        if message:
            self.put(wire.decode(message))


BUFFERS: dict[str, type[GroupBuffer]] = {"fifo": GroupBuffer}
