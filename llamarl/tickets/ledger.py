"""Tickets: which prompt is next, and how stale what is trained on may be. Pure: no processes, no
clocks.

Two numbers bound asynchrony. `max_lag` is hard: no token older than that many optimizer steps is
trained on. `overcommit` is how many groups beyond one batch may be started and not yet trained on.

The rules. B is groups_per_step, v the next step to be taken, g the version of the generator that
starts a ticket. A ticket started at g has deadline g + max_lag: the last step that may train on it.
R(d) counts started, untrained tickets with deadline <= d. Always

    R(d) <= (d - v + 1) * B   for every d >= v,   and   R(v - 1) = 0,                           (1)

that is: everything started can still be trained on in time, B a step. Two rules keep (1):
  admission   a ticket may start if (1) still holds with it, and
              started-and-untrained <= B + overcommit, and <= (T - v) * B: what the steps that are
              left of T train on;
  take        step v trains on B finished groups, earliest deadline first, if (1) holds for v + 1
              without them.
Taking moves v to v + 1 at once, before training on it ends, so generation goes on meanwhile. (1) at
v says that at most B started tickets are due at v, so the earliest-deadline batch always holds all
that are due: a step waits for stragglers only when their own deadlines leave no later step room for
them (docs/staleness.md). No deadlock: by (1) the tickets due at v fit into step v, and when fewer
than B are started, one more may always start (its deadline g + max_lag >= v once the generator
holds recent weights).

A pool is the tickets whose groups one buffer is handed. Where each of n data-parallel trainer ranks
has its own buffer there are n pools: ticket t is of pool t mod n, and the rules hold for each pool
with B/n and its share of overcommit. Where all draw from one buffer there is one. All pools are
taken from together. To which rank a ticket's group goes is said elsewhere
(llamarl.comm.channel.dp_rank_of).

max_lag None is for a replay buffer, which is handed everything and bounds staleness by its size.
Every deadline is NEVER, so that (1) says nothing, and what is left of the rules is
  admission   a ticket may start while started-and-unfinished < B + overcommit, and v < T: what is
              on its way to the trainer is bounded, and each arrival there makes room for one;
  take        step v hands over all that is finished; step 0 waits for an initial fill, and steps k,
              2k, ..., the syncs, until a NEWS-th of a batch has come since the last sync.
A ticket is unfinished until it is with the trainer. At most B + overcommit are, and some of them
arrive between two syncs, so that a slow scorer makes a run slower and not older; how old it may
become is derived in docs/staleness.md.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

from llamarl.tickets.governors import GOVERNORS, Constants, Governor
from llamarl.types import Ticket

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
    """Applies the rules of this module to one pool. Not thread-safe; TicketLedger is.

    first, stride: its tickets are first, first + stride, ... num_shares > 1: they are dealt to that
    many generators in turn, each with a cursor of its own. fill: groups that step 0 waits for where
    a take hands over everything; None: a take is one batch. sync_period: k, with a fill.
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
    ):
        self.groups_per_step = groups_per_step
        self.fill = fill
        self.deadlines: dict[int, int] = {}  # started and untrained
        self._num_due: dict[int, int] = {}  # deadline -> how many of these have it, if any
        self.finished: set[int] = set()
        self.again: list[int] = []  # to start once more, before new ones
        self.handed: dict[int, int] = {}  # step -> groups, of those since the last sync
        self._sync_period = sync_period
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
            end_of_batch = self._first + self._stride * self.groups_per_step * (step + 1)
            if self.next_ticket(share) >= end_of_batch:
                return False  # its share of this batch is started
        if deadline < step or len(self.deadlines) >= limit:
            return False
        return self._fits(deadline, step)

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

    def start(self, share: int, deadline: int) -> Ticket:
        """Start the share's next ticket with this deadline, and return it."""
        ticket = self.next_ticket(share)
        if ticket in self.again:
            self.again.remove(ticket)
        else:
            self.cursors[share] += self._turn
        self._add(ticket, deadline)
        return Ticket(ticket, deadline)

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
        return {ticket: self._remove(ticket) for ticket in tickets}

    def take_back(self, step: int, taken: dict[int, int]) -> None:
        """Undo `hand_over` of what is among these: ticket -> deadline."""
        self.handed.pop(step)
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
        self.again = again
        self.cursors = [frontier + (at - frontier) % self._turn for at in self.cursors]


def free_overcommit(groups_per_step: int, num_generators: int) -> int:
    """Return what overcommit=auto is without a bound on lag, in groups: two batches on their way
    or, if that is more, two groups a generator, one that is sampled and one behind it.
    """
    return max(groups_per_step, 2 * num_generators - groups_per_step)


class TicketLedger:
    """Starts and takes tickets of all pools under the rules above. Thread-safe.

    Each ticket is consumed once.

    overcommit: groups, or the name of a governor, with its constants. num_generators: with max_lag
    0 a pool's tickets are dealt to them in turn, so that what is sampled does not
    depend on who asks first; otherwise a ticket goes to whoever asks. resume_in_work: over a
    resume, tickets whose partial completions were saved stay started, with their deadlines. max_lag
    None: a replay buffer takes everything, step 0 waits for initial_groups, and what comes joins it
    every sync_period steps; overcommit is then a number of groups, or auto: `free_overcommit`.
    max_steps: T, the steps of the run, after the last of which nothing starts; None: it has no end.
    Which of these go together, the config checks.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_lag: int | None,
        overcommit: int | str,
        constants: Constants = Constants(),
        num_pools: int = 1,
        num_generators: int = 1,
        resume_in_work: bool = False,
        initial_groups: int = 1,
        sync_period: int = 1,
        max_steps: int | None = None,
    ):
        self.groups_per_step = groups_per_step
        self.max_lag = max_lag
        self.max_steps = max_steps
        self.step = 0  # v, the next step to be taken
        self.governor: Governor | None = None
        if not isinstance(overcommit, str):
            self._overcommit = overcommit
        elif max_lag is None:
            self._overcommit = free_overcommit(groups_per_step, num_generators)
        else:
            self.governor = GOVERNORS[overcommit](groups_per_step, max_lag, constants)
        self._num_shares = num_generators if max_lag == 0 else 1
        self._resume_in_work = resume_in_work
        fill = None
        if max_lag is None:
            fill = max(1, math.ceil(initial_groups / num_pools))
        self._pools = [
            TicketPool(
                first=first,
                stride=num_pools,
                groups_per_step=groups_per_step // num_pools,
                num_shares=self._num_shares,
                fill=fill,
                sync_period=sync_period,
            )
            for first in range(num_pools)
        ]
        self._taken: dict[int, int] | None = None  # by the step before this one, until it is final
        self._lock = threading.RLock()

    @property
    def overcommit(self) -> int:
        """How many groups beyond one batch may be started."""
        return self.governor.value if self.governor else self._overcommit

    def _pool(self, ticket: int) -> TicketPool:
        return self._pools[ticket % len(self._pools)]

    def _unfinished(self) -> dict[int, int]:
        """Return ticket -> deadline of all in work."""
        found: dict[int, int] = {}
        for pool in self._pools:
            found |= pool.unfinished()
        return found

    def start(self, count: int, version: int, generator: int = 0) -> list[Ticket]:
        """Start up to `count` tickets for a generator that holds weights `version`, and return
        them.

        Fewer, or none, if the rules forbid more.
        """
        granted: list[Ticket] = []
        share = generator % self._num_shares
        deadline = NEVER if self.max_lag is None else version + self.max_lag
        with self._lock:
            # What pool starts next; the lowest ticket comes first.
            turns = [(pool.next_ticket(share), index) for index, pool in enumerate(self._pools)]
            heapq.heapify(turns)
            while turns and len(granted) < count:
                _, index = turns[0]
                pool = self._pools[index]
                if pool.may_start(share, deadline, self.step, self._limit(index)):
                    granted.append(pool.start(share, deadline))
                    heapq.heapreplace(turns, (pool.next_ticket(share), index))
                else:
                    heapq.heappop(turns)  # what others start makes no room in this one
        return granted

    def _limit(self, index: int) -> int:
        """Return how many tickets of a pool may be started."""
        n = len(self._pools)
        steps_left = None
        if self.max_steps is not None:
            steps_left = max(0, self.max_steps - self.step)
        # The first pools have one more where overcommit does not split.
        overcommit = (self.overcommit + n - 1 - index) // n
        return self._pools[index].limit(overcommit, steps_left)

    def finish(self, tickets: list[int]) -> None:
        """Note groups that have reached the trainer, scored.

        ValueError for one that was never started, or twice.
        """
        with self._lock:
            for ticket in tickets:
                pool = self._pool(ticket)
                if ticket not in pool.deadlines or ticket in pool.finished:
                    raise ValueError(
                        f"ticket {ticket} finished, but it is not in work: started twice, or "
                        "trained on already"
                    )
                pool.finished.add(ticket)

    def start_again(self, tickets: Iterable[int]) -> None:
        """Forget that these were started: whoever granted them next starts them anew, before any
        new ticket.

        What stays started is part of what was, so that (1) holds as before. ValueError for one that
        is not in work.
        """
        with self._lock:
            for ticket in tickets:
                pool = self._pool(ticket)
                if ticket not in pool.deadlines or ticket in pool.finished:
                    raise ValueError(f"ticket {ticket} is to start again, but it is not in work")
                pool.restart([ticket])

    def take(self, step: int, waited: bool = False) -> list[int] | None:
        """Return what all pools hand over to step `step`; None while one of them must wait.

        One pool's tickets after another's, earliest deadline first. Taking is final unless `untake`
        follows. ValueError if `step` is not the next one.
        """
        with self._lock:
            if step != self.step:
                raise ValueError(f"step {step} taken, but the next is {self.step}")
            chosen = []
            for pool in self._pools:
                batch = pool.choose(step)
                if batch is None:
                    return None
                chosen.append(batch)
            consumed: dict[int, int] = {}
            for pool, batch in zip(self._pools, chosen):
                consumed |= pool.hand_over(step, batch)
            self.step += 1
            self._taken = consumed
            if self.governor:
                num_finished = sum(len(pool.finished) for pool in self._pools)
                self.governor.taken(waited=waited, num_finished=num_finished)
            return list(consumed)

    def trained(self, reward: float) -> None:
        """Note that the step taken last was trained on, at this mean reward (NaN: no completion had
        one).
        """
        if self.governor:
            with self._lock:
                self.governor.trained(reward)

    def untake(self, step: int) -> None:
        """Give up step `step`, the last to be taken, before it has changed the weights.

        Its groups are finished and untrained again.
        """
        with self._lock:
            if self._taken is None or step != self.step - 1:
                raise ValueError(f"step {step} was not the last to be taken")
            for pool in self._pools:
                pool.take_back(step, self._taken)
            self.step = step
            self._taken = None

    def waits_for(self) -> list[int]:
        """Return the tickets that hold up the next step: those in work with the earliest
        deadlines.
        """
        with self._lock:
            unfinished = self._unfinished()
        by_deadline = sorted(unfinished, key=lambda t: (unfinished[t], t))
        return by_deadline[: self.groups_per_step]

    def in_work(self) -> set[int]:
        """Return the tickets that are started and not finished."""
        with self._lock:
            return set(self._unfinished())

    def overdue(self) -> list[int]:
        """Return unfinished tickets whose last step is the next one.

        There are none until every pool that waits could do without them.
        """
        tickets = []
        with self._lock:
            for pool in self._pools:
                overdue = pool.overdue(self.step)
                if not overdue and pool.choose(self.step) is None:
                    return []
                tickets += overdue
        return tickets

    def reconcile(self, buffered: list[int]) -> set[int]:
        """After a resume: start finished groups again whose data was not saved.

        Returns the finished ones that were.
        """
        saved = set()
        with self._lock:
            for pool in self._pools:
                pool.restart(pool.finished - set(buffered))
                saved |= pool.finished
        return saved

    def state_dict(self) -> dict:
        """Return the ledger's state as JSON values.

        Tickets in work are among those to start again; in_work has the deadlines of those that need
        not.
        """
        with self._lock:
            again: list[int] = []
            finished: list[list[int]] = []
            in_work: list[list[int]] = []
            # One frontier for all pools: what lies between is listed, so that another number of
            # pools can go on.
            top = max(max(pool.cursors) for pool in self._pools)
            for pool in self._pools:
                unfinished = pool.unfinished()
                again += [*pool.untouched(top), *pool.again, *unfinished]
                in_work += [[t, unfinished[t]] for t in sorted(unfinished)]
                finished += [[t, pool.deadlines[t]] for t in sorted(pool.finished)]
            return {
                "step": self.step,
                "overcommit": self.overcommit,
                "rewards": list(self.governor.rewards) if self.governor else [],
                "frontier": top,
                "again": sorted(again),
                "finished": finished,
                "in_work": in_work,
            }

    def load_state_dict(self, state: dict, saved: Set[int] = frozenset()) -> list[int]:
        """Go on from a checkpoint; another number of pools or generators is fine.

        saved: tickets whose partial completions it holds. Returns those that start again although
        it has their group, or what there is of it: in other pools than before, more
        may be due in one than it can train on in time. They are as few as can be, and so are the
        finished ones among them (docs/staleness.md); with as many pools as before there
        are none.
        """
        n = len(self._pools)
        with self._lock:
            self.step = state["step"]
            if self.governor:
                self.governor.resume(state["overcommit"], state["rewards"])
            finished = _by_deadline(state["finished"])
            resumable = saved if self._resume_in_work else frozenset()
            in_work = _by_deadline(pair for pair in state["in_work"] if pair[0] in resumable)
            again = sorted([*state["again"], *finished])  # until they are found to fit
            for index, pool in enumerate(self._pools):
                of_pool = [t for t in again if t % n == index]
                pool.resume_at(state["frontier"], of_pool)
            # What is finished has cost most: it goes first, what is in work takes the room that is
            # left.
            dropped = []
            for ticket, deadline in [*finished.items(), *in_work.items()]:
                pool = self._pool(ticket)
                if not pool.go_on(ticket, deadline, self.step):
                    dropped.append(ticket)
                elif ticket in finished:
                    pool.finished.add(ticket)
            return sorted(dropped)


def _by_deadline(pairs: Iterable[Sequence[int]]) -> dict[int, int]:
    """Return ticket -> deadline of [ticket, deadline] pairs, the earliest deadline first."""
    in_order = sorted(pairs, key=lambda pair: (pair[1], pair[0]))
    return {ticket: deadline for ticket, deadline in in_order}
