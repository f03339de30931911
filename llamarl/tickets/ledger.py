"""TicketLedger: decides which prompts may start and which groups a step trains on. Pure: no
processes, no clocks.

Two numbers bound asynchrony. `max_lag` is hard: no token is trained on that was sampled more than
max_lag optimizer steps ago. `overcommit` is the number of groups beyond one batch that may be
started and not yet trained on.

B is groups_per_step, v the next step, g the version of the weights that a ticket starts with. Its
deadline is g + max_lag: the last step that may train on it. R(d) counts the started, untrained
tickets with a deadline <= d. Two rules keep

    R(d) <= (d - v + 1) * B   for every d >= v,   and   R(v - 1) = 0                            (1)

  admission   A ticket may start if (1) still holds with it, and at most B + overcommit tickets are
              then started and untrained.
  take        Step v trains on B finished groups, the earliest deadlines first, if (1) holds for
              v + 1 without them. It waits otherwise.

So every started ticket can be trained on in time, B a step. A step waits for a straggler only when
no later step could train on it. docs/asynchrony.md proves both, and that the rules cannot deadlock.

A pool holds the tickets of one buffer. If each of n data-parallel trainer ranks has a buffer, there
are n pools: ticket t belongs to pool t mod n, and the rules hold for each pool with B / n.

With max_lag None a replay buffer bounds staleness instead. All deadlines are NEVER. A ticket may
start while fewer than B + overcommit are unfinished. Step v takes everything that is finished. Step
0 waits for the initial fill; steps k, 2k, ... (k is sync_period) wait until a NEWS-th of a batch
has arrived since the last of them.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain
from types import MappingProxyType

from llamarl.tickets.choices import PromptChoices
from llamarl.tickets.governors import DEFAULTS, GOVERNORS, Governor, GovernorSettings
from llamarl.tickets.pool import NEVER, TicketPool
from llamarl.tickets.sampler import PromptSampler
from llamarl.tickets.verdicts import Yield
from llamarl.types import Ticket, Verdict


def free_overcommit(groups_per_step: int, num_generators: int) -> int:
    """Return what overcommit=auto is without a bound on lag, in groups: two batches on their way
    or, if that is more, two groups a generator, one that is sampled and one behind it.
    """
    return max(groups_per_step, 2 * num_generators - groups_per_step)


class TicketLedger:
    """Starts and takes tickets under the rules above. Each is consumed once. Thread-safe.

    >>> ledger = TicketLedger(groups_per_step=2, max_lag=1, overcommit=1)
    >>> [(ticket.index, ticket.deadline) for ticket in ledger.start(5, version=0)]
    [(0, 1), (1, 1), (2, 1)]
    >>> ledger.finish([2])  # a ticket may finish before an older one
    []
    >>> ledger.take(0) is None  # one group is no batch
    True
    >>> ledger.finish([0])
    []
    >>> ledger.take(0)  # ticket 1 can still be trained on by step 1
    [0, 2]
    >>> [(ticket.index, ticket.deadline) for ticket in ledger.start(5, version=1)]
    [(3, 2), (4, 2)]
    >>> ledger.finish([3, 4])
    []
    >>> ledger.take(1) is None  # step 1 is the last that may train on ticket 1
    True
    >>> ledger.waits_for()
    [1]

    overcommit: groups, or the name of a governor, with its settings; with max_lag None a number or
    auto (`free_overcommit`). num_pools: buffers. max_steps: T, the last step; None: no end.
    num_generators: with max_lag 0 a pool's tickets are dealt to them in turn. resume_in_work: keep
    tickets started over a resume if their partial completions were saved. initial_groups,
    sync_period: for max_lag None. max_refill: batches of groups of equal outcomes that may be given
    back for a step. sampler: chooses prompts; None: a ticket's prompt is a function of its number.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_lag: int | None,
        overcommit: int | str,
        governor: GovernorSettings = DEFAULTS,
        num_pools: int = 1,
        num_generators: int = 1,
        resume_in_work: bool = False,
        initial_groups: int = 1,
        sync_period: int = 1,
        max_steps: int | None = None,
        max_refill: int = 0,
        sampler: PromptSampler | None = None,
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
            self.governor = GOVERNORS[overcommit](groups_per_step, max_lag, governor)
        self.num_generators = num_generators
        self.synchronous = max_lag == 0
        # Rows that are equal to the bit must not depend on which generator asks first.
        self._num_shares = num_generators if self.synchronous else 1
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
                max_refill=max_refill,
            )
            for first in range(num_pools)
        ]
        self._choices = PromptChoices(sampler)
        self.refills = max_refill > 0  # whether groups are given back
        self.newest_yield: Yield | None = None  # of the groups that the last take was made of
        self._taken: dict[int, int] | None = None  # by the step before this one, until it is final
        self._turns: dict[tuple[int, int], list[tuple[int, int]]] = {}  # see _turns_of
        self._num_started = 0  # and untrained, of all pools
        self._num_finished = 0  # of these
        self._changed = set(range(num_pools))  # pools that may have some to give back
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
            turns = self._turns_of(share, deadline)
            while turns and len(granted) < count:
                ticket, index = turns[0]
                pool = self._pools[index]
                following = pool.next_ticket(share)
                if following != ticket:  # started with another deadline meanwhile
                    heapq.heapreplace(turns, (following, index))
                elif pool.may_start(share, deadline, self.step, self._limit(index)):
                    pool.start(share, deadline)
                    granted.append(Ticket(ticket, deadline, self._choices.of(ticket)))
                    self._num_started += 1
                    heapq.heapreplace(turns, (pool.next_ticket(share), index))
                else:
                    heapq.heappop(turns)  # what others start makes no room in this one
        return granted

    def _turns_of(self, share: int, deadline: int) -> list[tuple[int, int]]:
        """Return a heap of (next ticket, pool) for pools in which a ticket of this deadline may
        start; the lowest ticket comes first.

        It is kept until something makes room, since starting makes none: so one ask need not look
        at all pools again, where as many generators ask as there are pools.
        """
        turns = self._turns.get((share, deadline))
        if turns is None:
            turns = [(pool.next_ticket(share), index) for index, pool in enumerate(self._pools)]
            heapq.heapify(turns)
            self._turns[share, deadline] = turns
        return turns

    @property
    def room(self) -> int:
        """How many tickets may start, by their number alone: the deadline of a generator with older
        weights may allow fewer.
        """
        with self._lock:
            window = self.groups_per_step + self.overcommit
            if self.max_lag is None:
                window = 0 if self.step == self.max_steps else window
                return max(0, window - self._num_started + self._num_finished)
            window = min(window, (self.max_lag + 1) * self.groups_per_step)
            if self.max_steps is not None:
                window = min(window, max(0, self.max_steps - self.step) * self.groups_per_step)
            return max(0, window - self._num_started)

    def _recount(self) -> None:
        """Count what is started and finished anew, after more than one start or end."""
        self._num_started = sum(len(pool.deadlines) for pool in self._pools)
        self._num_finished = sum(len(pool.finished) for pool in self._pools)

    def _limit(self, index: int) -> int:
        """Return how many tickets of a pool may be started."""
        n = len(self._pools)
        steps_left = None
        if self.max_steps is not None:
            steps_left = max(0, self.max_steps - self.step)
        # The first pools have one more where overcommit does not split.
        overcommit = (self.overcommit + n - 1 - index) // n
        return self._pools[index].limit(overcommit, steps_left)

    def finish(
        self, tickets: list[int], verdicts: Mapping[int, Verdict] = MappingProxyType({})
    ) -> list[int]:
        """Note groups that have reached the trainer, scored, and what is known of them. Return the
        tickets that are given back: their groups are not wanted.

        ValueError for one that was never started, or twice.
        """
        with self._lock:
            if self.max_lag is None:
                self._turns.clear()  # without a bound what has finished makes room
            for ticket in tickets:
                pool = self._pool(ticket)
                if ticket not in pool.deadlines or ticket in pool.finished:
                    raise ValueError(
                        f"ticket {ticket} finished, but it is not in work: started twice, or "
                        "trained on already"
                    )
                pool.finish(ticket, verdicts.get(ticket))
                self._changed.add(ticket % len(self._pools))
                self._num_finished += 1
            return self._give_back() if self.refills else []

    def _give_back(self) -> list[int]:
        """Take groups of equal outcomes out of the started tickets. Return their tickets, which
        never start again.

        (1) stays true: if it holds for a set of tickets, it holds for every subset. Beyond
        max_refill batches a step such groups are kept, so that the step comes.
        """
        # Which tickets are then sampled side by side must not depend on timing.
        if self.synchronous and not all(pool.has_batch for pool in self._pools):
            return []
        given_back: dict[int, Verdict] = {}
        for index in sorted(self._changed):  # one call of many must not ask all of 1,000 ranks
            given_back |= self._pools[index].give_back()
        self._changed.clear()
        if given_back:
            self._choices.ended(given_back)
            self._num_started -= len(given_back)
            self._num_finished -= len(given_back)
            self._turns.clear()
        return list(given_back)

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
            batch_verdicts: list[Verdict | None] = []
            given_back: list[Verdict] = []
            for pool, batch in zip(self._pools, chosen):
                batch_verdicts += [pool.verdicts.get(ticket) for ticket in batch]
                given_back += pool.given_back
            self.newest_yield = Yield.of(batch_verdicts, given_back)
            nothing = Verdict(num_scored=0, total=0.0, teaches=False, solved=0.0)
            taken = chain.from_iterable(chosen)
            self._choices.taken(
                {ticket: verdict or nothing for ticket, verdict in zip(taken, batch_verdicts)}
            )
            consumed: dict[int, int] = {}
            for pool, batch in zip(self._pools, chosen):
                consumed |= pool.hand_over(step, batch)
            self.step += 1
            self._recount()
            self._turns.clear()
            self._changed.update(range(len(self._pools)))
            self._taken = consumed
            if self.governor:
                num_finished = sum(len(pool.finished) for pool in self._pools)
                self.governor.taken(waited=waited, num_finished=num_finished)
            return list(consumed)

    def trained(self, reward: float) -> None:
        """Note that the step taken last was trained on, at this mean reward (NaN: no completion had
        one).
        """
        with self._lock:
            self._choices.trained()
            if self.governor:
                self.governor.trained(reward)
                self._turns.clear()

    def untake(self, step: int) -> None:
        """Give up step `step`, the last to be taken, before it has changed the weights.

        Its groups are finished and untrained again.
        """
        with self._lock:
            if self._taken is None or step != self.step - 1:
                raise ValueError(f"step {step} was not the last to be taken")
            for pool in self._pools:
                pool.take_back(step, self._taken)
            self._choices.untaken()
            self.step = step
            self._recount()
            self._turns.clear()
            self._changed.update(range(len(self._pools)))
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
            self._recount()
            self._turns.clear()
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
            verdicts: list[list] = []
            given_back: list[list] = []
            # One frontier for all pools: what lies between is listed, so that another number of
            # pools can go on.
            top = max(max(pool.cursors) for pool in self._pools)
            for pool in self._pools:
                unfinished = pool.unfinished()
                again += [*pool.untouched(top), *pool.again, *unfinished]
                in_work += [[t, unfinished[t]] for t in sorted(unfinished)]
                finished += [[t, pool.deadlines[t]] for t in sorted(pool.finished)]
                verdicts += [[t, *pool.verdicts[t].to_json()] for t in sorted(pool.verdicts)]
                given_back.append([verdict.to_json() for verdict in pool.given_back])
            return {
                "step": self.step,
                "overcommit": self.overcommit,
                "rewards": list(self.governor.rewards) if self.governor else [],
                "frontier": top,
                "again": sorted(again),
                "finished": finished,
                "in_work": in_work,
                "verdicts": verdicts,
                "given_back": given_back,
                **self._choices.state_dict(),
            }

    def load_state_dict(self, state: dict, saved: Set[int] = frozenset()) -> list[int]:
        """Go on from a checkpoint; another number of pools or generators is fine.

        saved: tickets whose partial completions it holds. Returns those that start again although
        it has their group, or what there is of it: in other pools than before, more
        may be due in one than it can train on in time. They are as few as can be, and so are the
        finished ones among them (docs/asynchrony.md); with as many pools as before there
        are none.
        """
        n = len(self._pools)
        with self._lock:
            self._turns.clear()
            self._changed.update(range(n))
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
            self._choices.load_state_dict(state)
            given_back = state["given_back"]
            if len(given_back) != n:
                every = list(chain.from_iterable(given_back))
                given_back = [every[index::n] for index in range(n)]
            for pool, own in zip(self._pools, given_back):
                pool.given_back = [Verdict.from_json(one) for one in own]
            verdicts = {t: Verdict.from_json(one) for t, *one in state["verdicts"]}
            # What is finished has cost most: it goes first, what is in work takes the room that is
            # left.
            dropped = []
            for ticket, deadline in [*finished.items(), *in_work.items()]:
                pool = self._pool(ticket)
                if not pool.go_on(ticket, deadline, self.step):
                    dropped.append(ticket)
                elif ticket in finished:
                    pool.finish(ticket, verdicts.get(ticket))
            self._recount()
            return sorted(dropped)


def _by_deadline(pairs: Iterable[Sequence[int]]) -> dict[int, int]:
    """Return ticket -> deadline of [ticket, deadline] pairs, the earliest deadline first."""
    in_order = sorted(pairs, key=lambda pair: (pair[1], pair[0]))
    return {ticket: deadline for ticket, deadline in in_order}
