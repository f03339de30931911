"""Buffers of finished groups, which wait at a trainer rank for their step. The ledger decides which
are handed over, and when.

A buffer is put what comes, and at each step it takes what the ledger hands over and gives what the
step trains on:

    fifo      the groups that were handed over, once                          this file
    replay    completions of everything that was, drawn anew at each step     TBA, replay.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from llamarl.comm import wire
from llamarl.comm.together import TrainerRanks
from llamarl.errors import LagExceeded
from llamarl.types import Group

MESSAGE = "buffer/"


@dataclass(eq=False, repr=False)
class GroupBuffer:
    """Holds groups by ticket (buffer=fifo). The ledger decides which leave, the earliest deadline
    first.

    max_lag: steps that a group's oldest token may be old when it is handed over; None: no bound.
    """

    max_lag: int | None = None

    def __post_init__(self):
        self._groups: dict[int, Group] = {}  # come, and not handed over

    def attach(self, ranks: TrainerRanks) -> None:
        """Set the ranks that train together. Call it before the first `take`."""

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, groups: list[Group]) -> None:
        """Add groups. ValueError for a ticket that is here already: each is handed over once."""
        for group in groups:
            if group.ticket in self._groups:
                raise ValueError(f"group {group.ticket} came twice")
            self._groups[group.ticket] = group

    def take(self, tickets: list[int], step: int) -> list[Group]:
        """Return the groups that step `step` trains on, given those that the ledger hands over;
        here these themselves, in ticket order.

        KeyError for one that has not come; LagExceeded for tokens of more than max_lag steps ago.
        """
        missing = [t for t in tickets if t not in self._groups]
        if missing:
            raise KeyError(
                f"groups {missing[:4]} were taken by the ledger but have not reached this rank"
            )
        groups = [self._groups[t] for t in sorted(tickets)]
        for group in groups:
            versions = group.policy_versions
            if self.max_lag is None or not versions.numel():
                continue
            if step - group.oldest_version > self.max_lag:
                raise LagExceeded(
                    f"step {step} was to train on ticket {group.ticket}, whose tokens are of "
                    f"versions {group.oldest_version} to {int(versions.max())}: with "
                    f"max_lag={self.max_lag} none may be older than version "
                    f"{step - self.max_lag}. It was not trained on. The ledger hands over no such "
                    "group (docs/asynchrony.md), so this is an error in llamarl and not in the "
                    "run: please report it with this line, config.yaml, what the ranks printed, "
                    "and the ledger in the newest checkpoint's controller.rank*.json"
                )
        for ticket in tickets:
            del self._groups[ticket]
        return groups

    def drop(self, tickets: list[int]) -> None:
        """Forget groups that the ledger has given back: it hands none of them over."""
        for ticket in tickets:
            del self._groups[ticket]

    def untake(self, groups: list[Group]) -> None:
        """Restore everything as it was before the step just taken, which is given up. groups: what
        `take` returned.
        """
        self.put(groups)

    def tickets(self) -> list[int]:
        """Return the tickets of the groups that wait to be handed over."""
        return sorted(self._groups)

    def metrics(self, ranks: TrainerRanks) -> dict[str, float]:
        """Collective over ranks: return metrics of all ranks' buffers, after `take`."""
        return {}

    # --- Checkpoints ---

    def stored(self) -> list[Group]:
        """Return every group that a checkpoint must hold."""
        return [self._groups[t] for t in self.tickets()]

    def state_dict(self) -> dict:
        """Return groups as wire messages `buffer/0`, `buffer/1`, ... (uint8); `buffered`: tickets
        not handed over.
        """
        state: dict = {"buffered": self.tickets()}
        for i, group in enumerate(self.stored()):
            # One a message: encoding one holds up all other threads, and must keep no rank from
            # being heard of.
            message = bytearray(wire.encode([group]))
            state[f"{MESSAGE}{i}"] = torch.frombuffer(message, dtype=torch.uint8)
        return state

    def load(
        self, parts: Iterable[Mapping], finished: set[int], is_mine: Callable[[int], bool]
    ) -> None:
        """Take this rank's groups from what all ranks stored. finished: tickets that the ledger
        counts as finished and not handed over.
        """
        for part in parts:
            for number, ticket in enumerate(part["buffered"]):
                if ticket in finished and is_mine(ticket):
                    self.put([stored_group(part, number)])


def stored_group(part: Mapping, number: int) -> Group:
    """Return one group of a stored part, and read no other: those of `buffered` come first, in its
    order.
    """
    (group,) = wire.decode(part[f"{MESSAGE}{number}"].numpy().tobytes())
    return group
