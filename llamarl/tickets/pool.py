"""TicketPool: one pool of tickets, under the rules that llamarl/tickets/ledger.py lists. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from llamarl.types import Verdict

NEVER = 1 << 62  # deadline of a ticket that any step may train on
NEWS = 4  # the share of a batch, one in so many, that every sync of a replay buffer brings at least


def in_time(num_due: Mapping[int, int], step: int, groups_per_step: int) -> bool:
    """Whether inequality (1) holds: all started tickets can still be trained on, groups_per_step a
    step from `step` on. num_due: how many of them have each deadline.

    It does for every d if it does for the deadlines that there are: R(d) grows at these alone.
    """
    due_by_then = 0  # R(d)
    for deadline in sorted(num_due):
        due_by_then += num_due[deadline]
        if due_by_then > max(0, deadline - step + 1) * groups_per_step:
            return False
    return True


class TicketPool:
    """Applies the rules of llamarl.tickets.ledger to one pool. Not thread-safe; TicketLedger is.

    first, stride: its tickets are first, first + stride, ... num_shares > 1: they are dealt to that
    many generators in turn, each with a cursor of its own. fill: groups that step 0 waits for where
    a take hands over everything; None: a take is one batch. sync_period: k, with a fill.
    max_refill: batches that may be given back from one take to the next; 0: nothing is.
    """

    def __init__(
        self,
        *,
        first: int,
        stride: int,
        groups_per_step: int,
        num_shares: int = 1,
        fill: int | None = None,
        sync_period: int = 1,
        max_refill: int = 0,
    ):
        self.groups_per_step = groups_per_step
        self.fill = fill
        self.deadlines: dict[int, int] = {}  # started and untrained
        self._num_due: dict[int, int] = {}  # deadline -> how many of these have it, if any
        self.finished: set[int] = set()
        self.verdicts: dict[int, Verdict] = {}  # of finished ones, where something is known
        self.given_back: list[Verdict] = []  # of groups since the last take
        self.again: list[int] = []  # to start once more, before new ones
        self.handed: dict[int, int] = {}  # step -> groups, of those since the last sync
        self._sync_period = sync_period
        self._max_given_back = max_refill * groups_per_step
        # What the last take moved on, for `take_back`.
        self._handed_verdicts: dict[int, Verdict] = {}
        self._given_back_before: list[Verdict] = []
        self._first = first
        self._stride = stride
        self._turn = stride * num_shares  # from a share's ticket to its next one
        # The next ticket to start, one a share.
        self.cursors = [first + stride * share for share in range(num_shares)]

    def next_ticket(self, share: int) -> int:
        """Return the ticket that this share starts next."""
        cursor = self.cursors[share]
        for ticket in self.again:
            if (cursor - ticket) % self._turn == 0:
                return ticket
        return cursor

    def unfinished(self) -> dict[int, int]:
        """Return ticket -> deadline of those in work."""
        return {t: d for t, d in self.deadlines.items() if t not in self.finished}

    def limit(self, overcommit: int, steps_left: int | None) -> int:
        """Return how many tickets may be started and untrained; where a take hands over everything,
        unfinished.

        steps_left: to be taken; None: there is always one more.
        """
        window = self.groups_per_step + overcommit
        if steps_left is None:
            return window
        if self.fill is not None:
            return window if steps_left else 0
        return min(window, steps_left * self.groups_per_step)

    def may_start(self, share: int, deadline: int, step: int, limit: int) -> bool:
        """Whether the rules admit this share's next ticket."""
        if self.fill is not None:
            return len(self.deadlines) - len(self.finished) < limit
        if len(self.cursors) > 1:
            until = self._num_ended() + self.groups_per_step
            end_of_batch = self._first + self._stride * until
            if self.next_ticket(share) >= end_of_batch:
                return False  # its share of this batch is started
        if deadline < step or len(self.deadlines) >= limit:
            return False
        return self._fits(deadline, step)

    def _num_ended(self) -> int:
        """Return how many tickets were trained on or given back. Where they are dealt in turn these
        come before all others.
        """
        ways = [cursor - self._first - self._stride * s for s, cursor in enumerate(self.cursors)]
        num_begun = sum(ways) // self._turn
        return num_begun - len(self.again) - len(self.deadlines)

    def _fits(self, deadline: int, step: int) -> bool:
        """Whether (1) holds with one more ticket of this deadline."""
        num_due = dict(self._num_due)
        num_due[deadline] = num_due.get(deadline, 0) + 1
        return in_time(num_due, step, self.groups_per_step)

    def _add(self, ticket: int, deadline: int) -> None:
        """Have a ticket started, with this deadline."""
        self.deadlines[ticket] = deadline
        self._num_due[deadline] = self._num_due.get(deadline, 0) + 1

    def _remove(self, ticket: int) -> int:
        """Have a ticket not started, and return the deadline that it had."""
        deadline = self.deadlines.pop(ticket)
        self._num_due[deadline] -= 1
        if not self._num_due[deadline]:
            del self._num_due[deadline]
        return deadline

    def start(self, share: int, deadline: int) -> None:
        """Start the share's next ticket with this deadline."""
        ticket = self.next_ticket(share)
        if ticket in self.again:
            self.again.remove(ticket)
        else:
            self.cursors[share] += self._turn
        self._add(ticket, deadline)

    def choose(self, step: int) -> list[int] | None:
        """Return what step `step` takes, earliest deadline first, or None if it must wait."""
        if self.fill is not None:
            if len(self.finished) < self._least(step):
                return None
            return sorted(self.finished)
        if len(self.finished) < self.groups_per_step:
            return None
        by_deadline = sorted(self.finished, key=lambda t: (self.deadlines[t], t))
        batch = by_deadline[: self.groups_per_step]
        rest = Counter(self._num_due)
        rest.subtract(self.deadlines[t] for t in batch)
        return batch if in_time(rest, step + 1, self.groups_per_step) else None

    def finish(self, ticket: int, verdict: Verdict | None) -> None:
        """Have a ticket finished. verdict: what is known of its group."""
        self.finished.add(ticket)
        if verdict is not None:
            self.verdicts[ticket] = verdict

    def give_back(self) -> dict[int, Verdict]:
        """Take finished groups that do not teach out of what is started, as many as may be, the
        lowest tickets first. Return what their outcomes say, by ticket.
        """
        room = max(0, self._max_given_back - len(self.given_back))
        equal = sorted(ticket for ticket, one in self.verdicts.items() if not one.teaches)
        given_back: dict[int, Verdict] = {}
        for ticket in equal[:room]:
            self._remove(ticket)
            self.finished.discard(ticket)
            given_back[ticket] = self.verdicts.pop(ticket)
        self.given_back += given_back.values()
        return given_back

    @property
    def has_batch(self) -> bool:
        """Whether all groups of a batch are finished."""
        return len(self.finished) >= self.groups_per_step

    def _least(self, step: int) -> int:
        """Return how many finished groups this step waits for, where a take hands over
        everything.
        """
        if step == 0:
            assert self.fill is not None, "asked where a take hands over everything"
            return self.fill
        if step % self._sync_period:
            return 0
        since = step - self._sync_period
        handed = sum(count for taken, count in self.handed.items() if taken > since)
        return math.ceil(self.groups_per_step / NEWS) - handed

    def hand_over(self, step: int, tickets: list[int]) -> dict[int, int]:
        """Take these tickets out, for a step. Returns ticket -> deadline."""
        self.finished.difference_update(tickets)
        since = step - self._sync_period
        self.handed = {taken: count for taken, count in self.handed.items() if taken > since}
        self.handed[step] = len(tickets)
        known = self.verdicts.keys() & set(tickets)
        self._handed_verdicts = {ticket: self.verdicts.pop(ticket) for ticket in known}
        self._given_back_before, self.given_back = self.given_back, []
        return {ticket: self._remove(ticket) for ticket in tickets}

    def take_back(self, step: int, taken: dict[int, int]) -> None:
        """Undo `hand_over` of what is among these: ticket -> deadline."""
        self.handed.pop(step)
        self.verdicts |= self._handed_verdicts
        self.given_back = [*self._given_back_before, *self.given_back]
        for ticket, deadline in taken.items():
            if ticket % self._stride == self._first:
                self._add(ticket, deadline)
                self.finished.add(ticket)

    def overdue(self, step: int) -> list[int]:
        """Return unfinished tickets whose last step is `step`, once a batch of others is
        finished.
        """
        if len(self.finished) < self.groups_per_step or self.fill is not None:
            return []
        return sorted(t for t, d in self.unfinished().items() if d <= step)

    def restart(self, tickets: Iterable[int]) -> None:
        """Forget that these were started: they start again, first."""
        for ticket in tickets:
            self._remove(ticket)
            self.finished.discard(ticket)
            self.verdicts.pop(ticket, None)
            self.again.append(ticket)
        self.again.sort()

    def go_on(self, ticket: int, deadline: int, step: int) -> bool:
        """After a resume: keep a ticket started that was to start again, if it fits. Returns
        whether it does.

        It fits if it, and all that is started, can still be trained on in time.
        """
        if not self._fits(deadline, step):
            return False
        self.again.remove(ticket)
        self._add(ticket, deadline)
        return True

    def untouched(self, end: int) -> list[int]:
        """Return the tickets below `end` that no share has come to."""
        tickets: list[int] = []
        for cursor in self.cursors:
            tickets += range(cursor, end, self._turn)
        return tickets

    def resume_at(self, frontier: int, again: list[int]) -> None:
        """Have nothing started: from ticket `frontier` on nothing ever was, and these start
        again.
        """
        self.deadlines = {}
        self._num_due = {}
        self.finished = set()
        self.verdicts = {}
        self.given_back = []
        self.again = again
        self.cursors = [frontier + (at - frontier) % self._turn for at in self.cursors]
