"""The tickets of a run. A state machine has trainers, generators and their ledger do anything in
any order, and checks each answer against the inequality of docs/asynchrony.md, written out anew.
Examples follow, one for each rule that a user meets.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llamarl.comm.channel import dp_rank_of
from llamarl.learning.buffer import GroupBuffer
from llamarl.learning.targets import verdict_of
from llamarl.tickets.governors import DEFAULTS, GOVERNORS
from llamarl.tickets.ledger import TicketLedger
from llamarl.tickets.pool import NEVER
from llamarl.tickets.prompts import PromptStream
from llamarl.tickets.service import TicketService
from llamarl.types import Verdict
from tests.build.group import build_group
from tests.build.ledger import build_ledger
from tests.simulated_mail import SimulatedMail

TEACHES = Verdict(num_scored=4, total=1.0, teaches=True, solved=1.0)
EQUAL = Verdict(num_scored=4, total=0.0, teaches=False, solved=0.0)
STEP = 4  # groups of a step


def indices(tickets):
    return [ticket.index for ticket in tickets]


def holds(deadlines, step, B):
    """R(d) <= (d - step + 1) B for every d >= step, and R(step - 1) = 0: by counting."""
    if any(deadline < step for deadline in deadlines):
        return False
    in_order = sorted(deadlines)
    return all(due <= (d - step + 1) * B for due, d in enumerate(in_order, start=1))


class Pool:
    """The tickets of one data-parallel rank, by the letter of the rules."""

    def __init__(self, B, given_back):
        self.B = B
        self.started = {}  # and untrained: ticket -> deadline
        self.finished = set()
        self.num_given_back = given_back  # since the last take
        self.handed = {}  # step -> groups; without a bound on lag

    def may_start(self, deadline, step, limit, steps_left):
        if deadline == NEVER:
            return len(self.started) - len(self.finished) < limit
        fits = len(self.started) < min(limit, steps_left * self.B)
        return fits and holds([*self.started.values(), deadline], step, self.B)

    def batch(self, step):
        first = sorted(self.finished, key=lambda t: (self.started[t], t))[: self.B]
        rest = [d for t, d in self.started.items() if t not in first]
        return first if len(first) == self.B and holds(rest, step + 1, self.B) else None

    def everything(self, step, fill, period):
        """The batch without a bound on lag."""
        least = fill
        if step:
            newest = [n for at, n in self.handed.items() if at > step - period]
            least = 0 if step % period else math.ceil(self.B / 4) - sum(newest)
        return sorted(self.finished) if len(self.finished) >= least else None

    def overdue(self, step):
        has_enough = len(self.finished) >= self.B
        return (
            {t for t, d in self.started.items() if d == step} - self.finished
            if has_enough
            else set()
        )


class Tickets(RuleBasedStateMachine):
    @initialize(
        max_lag=st.sampled_from([0, 1, 1, 2, 3, None]),
        overcommit=st.sampled_from([0, 2, 5, 9, "auto", "oppo", "window"]),
        refill=st.integers(0, 2),
        percent=st.sampled_from([0, 30, 80, 100]),
        truncate=st.booleans(),
        last=st.sampled_from([None, None, 3]),
        fill=st.integers(0, 9),
        period=st.integers(1, 2),
        ranks=st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 2)),
    )
    def begin(self, max_lag, overcommit, refill, percent, truncate, last, fill, period, ranks):
        self.max_lag = max_lag
        self.overcommit = overcommit if max_lag or overcommit in GOVERNORS else 0
        if max_lag is None:
            self.overcommit = overcommit if isinstance(overcommit, int) else "auto"
        self.refill = 0 if max_lag is None else refill
        self.equal = {t for t in range(9999) if random.Random(t).randrange(100) < percent}
        self.truncate = truncate
        self.last = None if max_lag is None else last
        self.fill = fill
        self.period = period
        self.step = 0
        self.started_at = {}  # ticket -> version of its generator
        self.ended = []  # trained on or given back
        self.set_up(*ranks, given_back=[0])

    def set_up(self, dp_ranks, generators, peers, given_back):
        self.dp_ranks = dp_ranks
        self.peers = peers
        if len(given_back) != dp_ranks:
            total = sum(given_back)
            given_back = [len(range(i, total, dp_ranks)) for i in range(dp_ranks)]
        self.pools = [Pool(STEP // dp_ranks, share) for share in given_back]
        self.working = [[] for _ in range(generators)]
        self.held = [self.step] * generators  # versions
        self.ordered = set()  # stragglers that were ordered to end
        self.trainers = dp_ranks * peers  # ranks; generators follow
        world = []
        for rank in range(self.trainers + generators):
            world.append(SimulatedMail(rank, world, lambda: None))
        self.ledgers = [self.new_ledger() for _ in world]
        self.desks = []
        for ledger, mail in zip(self.ledgers, world):
            desk = TicketService(
                ledger,
                mail,
                trainer_ranks=tuple(range(self.trainers)),
                tensor_parallel=peers,
                truncate=self.truncate,
                timeout_s=1.0,
                clock=lambda: 0.0,
            )
            self.desks.append(desk)

    def new_ledger(self):
        return TicketLedger(
            groups_per_step=STEP,
            max_lag=self.max_lag,
            overcommit=self.overcommit,
            governor=replace(DEFAULTS, window=2, increase=2),
            num_pools=self.dp_ranks,
            num_generators=len(self.working),
            resume_in_work=self.max_lag != 0,
            initial_groups=self.fill,
            sync_period=self.period,
            max_steps=self.last,
            max_refill=self.refill,
        )

    # --- What the rules allow ---

    def may_start(self, index, deadline):
        overcommit = self.ledgers[0].overcommit
        own = overcommit // self.dp_ranks + (index < overcommit % self.dp_ranks)
        pool = self.pools[index]
        steps_left = 999 if self.last is None else self.last - self.step
        return pool.may_start(deadline, self.step, pool.B + own, steps_left)

    def batch(self, pool):
        if self.max_lag is None:
            return pool.everything(self.step, max(1, -(-self.fill // self.dp_ranks)), self.period)
        return pool.batch(self.step)

    def overdue(self):
        if self.max_lag is None:
            return set()
        due = [pool.overdue(self.step) for pool in self.pools]
        if any(not own and self.batch(pool) is None for own, pool in zip(due, self.pools)):
            return set()
        return set().union(*due)

    # --- What ranks do ---

    @rule(number=st.integers(0, 2), count=st.integers(1, 4))
    def ask(self, number, count):
        self.start(number % len(self.held), count)

    def start(self, number, count):
        desk = self.desks[self.trainers + number]
        version = self.held[number]
        deadline = NEVER if self.max_lag is None else version + self.max_lag
        granted = desk.ask(number, count, version, is_idle=not self.working[number])
        assert len(granted) <= count
        for ticket in granted:
            index = ticket.index % self.dp_ranks
            assert ticket.deadline == deadline
            assert ticket.index not in {*self.ended, *self.pools[index].started}
            assert self.may_start(index, deadline)
            if self.max_lag == 0:
                assert ticket.index // self.dp_ranks % len(self.held) == number, "dealt in turn"
            self.pools[index].started[ticket.index] = deadline
            self.started_at[ticket.index] = version
            self.working[number].append(ticket.index)
        return len(granted)

    @rule()
    def all_ask(self):
        """Nothing that may start is left while a generator has room for it."""
        self.held = [self.step] * len(self.held)
        while sum([self.start(number, 100) for number in range(len(self.held))]):
            pass
        deadline = NEVER if self.max_lag is None else self.step + self.max_lag
        # Shares are of `room`, which is less than the room of all pools where a resume on other
        # ranks left more in one of them than would start there.
        is_counted = len(self.held) == 1 or self.ledgers[0].room
        if self.max_lag != 0 and is_counted:
            assert not any(self.may_start(index, deadline) for index in range(self.dp_ranks))

    @rule(number=st.integers(0, 2), behind=st.integers(0, 1))
    def swap(self, number, behind):
        number %= len(self.held)
        self.held[number] = max(self.held[number], self.step - behind)

    @rule(places=st.lists(st.integers(0, 20), min_size=1, max_size=5))
    def finish(self, places):
        for place in places:
            every = sorted(sum(self.working, []))
            if every:
                # Hypothesis draws small numbers most: mostly the newest, so that others straggle.
                self.arrive(every[-1 - place % len(every)])

    @rule(places=st.lists(st.integers(0, 20), min_size=3, max_size=6))
    def turn(self, places):
        """What mostly happens: generators are busy, groups arrive, and a step is made of them."""
        self.all_ask()
        self.finish(places)
        self.take(waited=False, gives_up=False, reward=1)

    def arrive(self, ticket):
        """Have a group reach every trainer rank of its data-parallel rank."""
        for own in self.working:
            if ticket in own:
                own.remove(ticket)
        pool = self.pools[ticket % self.dp_ranks]
        first = dp_rank_of(ticket, self.dp_ranks) * self.peers
        for rank in range(first, first + self.peers):
            assert ticket in self.ledgers[0].in_work(), "not before all ranks have it"
            said = EQUAL if ticket in self.equal else TEACHES
            self.desks[rank].finish([ticket], {ticket: said})
        pool.finished.add(ticket)
        told = [self.desks[rank].given_back() for rank in range(self.trainers)]
        for rank, given_back in enumerate(told):
            assert given_back == told[rank // self.peers * self.peers], "peers hear the same"
            if rank % self.peers == 0:
                for one in given_back:
                    self.give_back(one, rank)
        if self.refill and self.max_lag:
            is_used_up = pool.num_given_back == self.refill * pool.B
            assert is_used_up or not self.equal & pool.finished

    def give_back(self, ticket, rank):
        pool = self.pools[ticket % self.dp_ranks]
        assert dp_rank_of(ticket, self.dp_ranks) == rank // self.peers
        assert ticket in self.equal & pool.finished
        if self.max_lag == 0:
            assert not any(self.working), "a part of a batch is still sampled"
        pool.finished.remove(ticket)
        del pool.started[ticket]
        pool.num_given_back += 1
        assert pool.num_given_back <= self.refill * pool.B
        self.ended.append(ticket)

    @rule(waited=st.booleans(), gives_up=st.booleans(), reward=st.integers(0, 3))
    def take(self, waited, gives_up, reward):
        if self.step == self.last:
            return
        batches = [self.batch(pool) for pool in self.pools]
        leader = self.desks[0]
        before = {**leader.state_dict(), "overcommit": 0}
        own = leader.take(self.step, waited)
        if None in batches:
            assert own is None
            self.end_stragglers()
            return
        if gives_up:
            for desk in self.desks[1 : self.trainers]:
                desk.take(self.step)
            leader.untake(self.step)
            assert {**leader.state_dict(), "overcommit": 0} == before
            own = leader.take(self.step, waited)
        given_back = sum(pool.num_given_back for pool in self.pools)
        made_of = self.ledgers[0].newest_yield
        assert made_of.given_back == given_back
        assert made_of.kept_equal == len(self.equal.intersection(sum(batches, [])))
        for rank in range(self.trainers):
            assert rank == 0 or self.desks[rank].has_batch
            taken = own if rank == 0 else self.desks[rank].take(self.step)
            wanted = []
            for batch in batches:
                wanted += [t for t in batch if dp_rank_of(t, self.dp_ranks) == rank // self.peers]
            assert taken == wanted
        for pool, batch in zip(self.pools, batches):
            pool.handed[self.step] = len(batch)
            pool.num_given_back = 0
            for ticket in batch:
                lag = self.step - self.started_at[ticket]
                assert self.max_lag is None or lag <= self.max_lag
                pool.finished.remove(ticket)
                del pool.started[ticket]
        self.ended += sum(batches, [])
        self.step += 1
        leader.trained(reward)

    def end_stragglers(self):
        """Those that are ordered to end do, and no others are."""
        wanted = self.overdue() - self.ordered if self.truncate else set()
        ordered = set()
        for number, own in enumerate(self.working):
            told = self.desks[self.trainers + number].to_truncate()
            assert set(told) <= set(own), "the generator that samples it is told"
            ordered.update(told)
        assert ordered == wanted
        self.ordered |= ordered

    @rule(
        is_killed=st.sampled_from([False, False, True]),
        ranks=st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 2)),
        saved=st.sets(st.integers(0, 7)),
        lost=st.one_of(st.just(set()), st.sets(st.integers(0, 7))),
        longer=st.integers(0, 2),
    )
    def resume(self, is_killed, ranks, saved, lost, longer):
        """Killed, and resumed on other ranks from a checkpoint that has some of the partial
        completions and most of the finished groups.
        """
        if not is_killed:
            return
        state = json.loads(json.dumps(self.desks[0].state_dict()))
        was_working = set(sum(self.working, []))
        saved = {t for t in was_working if t % 8 in saved}
        deadlines = {}
        finished = set()
        for pool in self.pools:
            deadlines |= pool.started
            finished |= pool.finished
        buffered = {t for t in finished if t % 8 not in lost}
        given_back = [pool.num_given_back for pool in self.pools]
        dp_ranks, *others = ranks
        if self.last is not None:
            dp_ranks = self.dp_ranks
            self.last += longer
        same = dp_ranks == self.dp_ranks
        self.set_up(dp_ranks, *others, given_back=given_back)
        for desk in self.desks:
            desk.load_state_dict(state, saved)
            assert desk.resumed_step == self.step
        in_work = self.desks[0].in_work()
        kept = {t for t, _ in self.desks[0].state_dict()["finished"]}
        assert all(desk.in_work() == in_work for desk in self.desks)
        assert in_work <= saved and kept <= finished
        if same:
            assert kept == finished and in_work == (saved if self.max_lag != 0 else set())
        for ticket in finished - kept:
            beside = [deadlines[t] for t in kept if t % dp_ranks == ticket % dp_ranks]
            assert not holds([*beside, deadlines[ticket]], self.step, STEP // dp_ranks)
        assert self.desks[0].reconcile(sorted(buffered)) == kept & buffered
        for ticket in in_work | (kept & buffered):
            self.pools[ticket % dp_ranks].started[ticket] = deadlines[ticket]
        for ticket in kept & buffered:
            self.pools[ticket % dp_ranks].finished.add(ticket)
        for number, own in enumerate(self.working):
            own += sorted(in_work)[number :: len(self.working)]
            self.desks[self.trainers + number].go_on(own)

    # --- What is always true ---

    @invariant()
    def all_that_is_started_can_be_trained_on_in_time(self):
        for pool in self.pools if self.max_lag is not None else ():
            assert holds(list(pool.started.values()), self.step, pool.B)
        assert self.ledgers[0].in_work() == set(sum(self.working, []))
        if self.max_lag is not None:
            assert 0 <= self.ledgers[0].overcommit <= max(9, self.max_lag * STEP)

    def teardown(self):
        """Steps go on, and each ticket ended once."""
        target = self.step + (self.max_lag or 0) + 2
        if self.last is not None:
            target = self.last
        for _ in range(20 * (target - self.step) + 20):
            self.all_ask()
            for ticket in sum(self.working, []):
                self.arrive(ticket)
            if self.step == target:
                break
            self.take(False, False, 0)
        assert self.step == target, "a standstill"
        if self.last is not None:
            assert not any(pool.started for pool in self.pools), "nothing was sampled in vain"
        state = self.desks[0].state_dict()
        still_open = set(state["again"]) | {t for t, _ in state["finished"]}
        assert len(self.ended) == len(set(self.ended)), "a ticket ended twice"
        assert set(self.ended) | still_open == set(range(state["frontier"])), "a ticket was lost"
        assert not still_open & set(self.ended)


TestTickets = Tickets.TestCase
TestTickets.settings = settings(max_examples=50, stateful_step_count=40)


# --- The ledger ---


def test_tickets_whose_partial_completions_are_not_resumed_start_again():
    ledger = build_ledger()
    ledger.start(4, 0)
    resumed = build_ledger()
    resumed.load_state_dict(ledger.state_dict(), {0, 1, 2, 3})
    assert resumed.in_work() == set() and indices(resumed.start(10, 0)) == [0, 1, 2, 3, 4, 5]


def test_groups_that_more_trainer_ranks_cannot_train_on_in_time_start_again():
    def make(dp_ranks):
        return build_ledger(overcommit=4, num_pools=dp_ranks, resume_in_work=True)

    state = make(1).state_dict() | {
        "step": 13,
        "frontier": 60,
        "again": [50, 52, 56, 58],
        "finished": [[51, 14], [53, 13], [54, 13], [55, 13], [57, 13], [59, 14]],
        "in_work": [[58, 14], [56, 14]],
    }
    alone, two = make(1), make(2)
    assert alone.load_state_dict(state, {56, 58}) == [] and alone.in_work() == {56, 58}
    assert alone.take(13) == [53, 54, 55, 57], "the earliest deadlines first"
    # 53, 55 and 57 are due now on one data-parallel rank, which trains on two a step.
    assert two.load_state_dict(state, {56, 58}) == [57]
    assert two.in_work() == {56, 58}
    two.finish([56])
    assert two.take(13) == [54, 56, 53, 55]
    assert indices(two.start(100, 14)) == [50, 52, 57, 60, 61], "started again before new ones"


def test_a_straggler_is_overdue_at_its_last_step_once_others_make_up_the_batch():
    ledger = build_ledger(groups_per_step=2)
    ledger.start(4, 0)  # deadline 1
    ledger.finish([1, 2])
    assert ledger.overdue() == [], "step 0 is not their last"
    assert ledger.take(0) == [1, 2]
    ledger.start(10, 1)  # 4 and 5
    ledger.finish([4])
    assert ledger.take(1) is None and ledger.overdue() == [], "with 4 alone there is no batch"
    ledger.finish([3])
    assert ledger.take(1) is None and ledger.overdue() == [0]
    ledger.finish([0])
    assert ledger.overdue() == [] and ledger.take(1) == [0, 3]


def test_a_rank_that_waits_for_data_keeps_the_others_from_ending_stragglers():
    ledger = build_ledger(groups_per_step=2, overcommit=4, num_pools=2)
    ledger.start(4, 0)  # two a data-parallel rank, deadline 1
    ledger.finish([0, 1])
    assert ledger.take(0) == [0, 1]
    ledger.start(10, 1)
    ledger.finish([4])
    assert ledger.overdue() == [], "the rank of 2 could do without it, but the other has nothing"
    ledger.finish([5])
    assert ledger.overdue() == [2, 3]


def test_groups_that_were_given_back_are_counted_once_after_a_resume_with_more_trainer_ranks():
    ours = build_ledger(max_refill=2)
    ours.start(6, 0)
    assert ours.finish([0, 1, 2], dict.fromkeys(range(3), EQUAL)) == [0, 1, 2]
    again = build_ledger(max_refill=2, num_pools=2)
    again.load_state_dict(json.loads(json.dumps(ours.state_dict())))
    assert [len(of_pool) for of_pool in again.state_dict()["given_back"]] == [2, 1]


def test_a_ticket_cannot_finish_twice_or_unstarted_and_a_step_is_taken_once():
    ledger = build_ledger(groups_per_step=1, max_lag=0, overcommit=0)
    with pytest.raises(ValueError, match="ticket 0 finished, but it is not in work"):
        ledger.finish([0])
    ledger.start(1, 0)
    ledger.finish([0])
    with pytest.raises(ValueError, match="not in work"):
        ledger.finish([0])
    ledger.take(0)
    with pytest.raises(ValueError, match="step 0 taken, but the next is 1"):
        ledger.take(0)
    with pytest.raises(ValueError, match="step 3 was not the last to be taken"):
        ledger.untake(3)


def test_beyond_the_bound_a_batch_is_completed_with_groups_that_do_not_teach():
    ours = build_ledger(max_refill=1)
    num_given_back = 0
    while (taken := ours.take(0)) is None:
        started = indices(ours.start(10, 0))
        num_given_back += len(ours.finish(started, dict.fromkeys(started, EQUAL)))
    assert (num_given_back, len(taken)) == (4, 4)
    made_of = ours.newest_yield
    assert (made_of.given_back, made_of.kept_equal, made_of.teaching) == (4, 4, 0)
    assert (made_of.teaching_fraction, made_of.mean_outcome) == (0, 0)
    # The next step has a bound of its own, also for groups that were kept and not taken.
    assert indices(ours.start(10, 1)) == [10, 11, 12, 13]
    assert ours.finish([10], {10: TEACHES}) == [8, 9]
    assert build_ledger().finish([], {}) == []


@pytest.mark.parametrize("overcommit", [0, 4, 40])
def test_room_is_the_number_of_tickets_that_start(overcommit):
    ledger = build_ledger(groups_per_step=12, overcommit=overcommit, num_pools=4, max_steps=2)
    for step in range(2):
        room = ledger.room
        assert len(ledger.start(1000, step)) == room and ledger.room == 0
        ledger.finish(ledger.waits_for())
        assert ledger.room == 0
        assert len(ledger.take(step)) == 12
        after = ledger.room
        ledger.untake(step)
        assert ledger.room == 0
        ledger.take(step)
        assert ledger.room == after
    free = build_ledger(max_lag=None, overcommit=0)
    free.finish(indices(free.start(1000, 0))[:3])
    assert free.room == 3 == len(free.start(1000, 0))


@pytest.mark.parametrize("kind", sorted(GOVERNORS))
def test_a_resumed_governor_goes_on_as_the_first_would_have(kind):
    def make():
        constants = replace(DEFAULTS, window=3, increase=2)
        return build_ledger(groups_per_step=8, max_lag=4, overcommit=kind, governor=constants)

    def go_on(ledger, steps):
        values = []
        for step in steps:
            ledger.finish(indices(ledger.start(8, step)))
            assert ledger.take(step, waited=step % 3 > 0) is not None
            ledger.trained((step * 7 % 5) / 5)
            values.append(ledger.overcommit)
        return values

    want = go_on(make(), range(20))
    assert len(set(want)) > 1, "it never moved"
    first, second = make(), make()
    go_on(first, range(11))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert go_on(second, range(11, 20)) == want[11:]


# --- Without a bound on lag ---


def test_without_a_bound_nothing_starts_after_the_last_step_and_a_longer_run_goes_on():
    ours = build_ledger(max_lag=None, max_steps=1)
    assert indices(ours.start(99, 0)) == [0, 1, 2, 3, 4, 5]
    ours.finish([0, 1, 2])
    assert ours.take(0) == [0, 1, 2] and ours.start(99, 0) == []
    longer = build_ledger(max_lag=None, max_steps=3, resume_in_work=True)
    longer.load_state_dict(json.loads(json.dumps(ours.state_dict())), {4, 5})
    assert longer.in_work() == {4, 5} and indices(longer.start(99, 0)) == [3, 6, 7, 8]


@pytest.mark.parametrize("num_generators, groups", [(1, 4), (2, 4), (5, 6)])
def test_without_a_bound_auto_is_two_batches_or_two_groups_a_generator(num_generators, groups):
    ours = build_ledger(max_lag=None, overcommit="auto", num_generators=num_generators)
    assert ours.overcommit == groups


# --- Synchronous runs ---


def synchronous_run(seed, *, equal, max_refill=2, num_steps=3, kill_at=None, **sizes):
    """Return (tickets of each step, tickets that started together): ranks ask and work ends in an
    order that the seed draws. At the event `kill_at` the ledger is resumed.
    """
    rng = random.Random(seed)

    def make():
        how = dict(max_lag=0, overcommit=0, max_refill=max_refill)
        return build_ledger(**how, **sizes)

    ours = make()
    steps = []
    waves = [[]]
    working = []
    for event in range(100_000):
        if event == kill_at:
            state = json.loads(json.dumps(ours.state_dict()))
            ours = make()
            ours.load_state_dict(state)
            ours.reconcile([ticket for ticket, _ in state["finished"]])
            working = []
        for generator in rng.choices(range(sizes["num_generators"]), k=rng.randint(0, 3)):
            granted = indices(ours.start(rng.randint(1, 3), ours.step, generator))
            working += granted
            waves[-1] += granted
        rng.shuffle(working)
        ending = [working.pop() for _ in range(min(len(working), rng.randint(0, 2)))]
        said = {ticket: EQUAL if ticket in equal else TEACHES for ticket in ending}
        given_back = ours.finish(ending, said)
        taken = ours.take(ours.step)
        if given_back or taken is not None:
            waves[-1].sort()
            waves.append([])
        if taken is not None:
            steps.append(sorted(taken))
        if len(steps) == num_steps:
            return steps, waves
    raise AssertionError("a standstill")


@settings(max_examples=25)
@given(
    dp_ranks=st.integers(1, 3),
    num_generators=st.integers(1, 3),
    equal=st.sets(st.integers(0, 40)),
    kill_at=st.integers(0, 30),
)
def test_no_timing_and_no_resume_changes_the_batches_of_a_synchronous_run(
    dp_ranks, num_generators, equal, kill_at
):
    sizes = dict(
        groups_per_step=2 * dp_ranks, num_pools=dp_ranks, num_generators=num_generators, equal=equal
    )
    steps, waves = synchronous_run(0, **sizes)
    assert synchronous_run(1, **sizes) == (steps, waves)
    resumed, _ = synchronous_run(0, **sizes, kill_at=kill_at)
    assert resumed == steps
    # With room for all, a rank's batches are its first tickets that teach.
    steps, _ = synchronous_run(0, **sizes, max_refill=100)
    for rank in range(dp_ranks):
        teaching = [ticket for ticket in range(rank, 999, dp_ranks) if ticket not in equal]
        own = [ticket for ticket in sum(steps, []) if ticket % dp_ranks == rank]
        assert own == teaching[:6]


# --- Verdicts and prompts ---


def test_outcomes_and_not_shaped_scores_say_whether_a_group_teaches():
    nan = float("nan")
    assert verdict_of(build_group(rewards=[1.0, 0.0])) == Verdict(2, 1.0, teaches=True, solved=1.0)
    # All failed, and only a penalty on length makes the scores differ.
    shaped = build_group(rewards=[-0.1, -0.3], achieved=torch.zeros(2))
    assert verdict_of(shaped) == Verdict(2, 0.0, teaches=False, solved=0.0)
    # A completion that is not trained on, or was aborted, makes no difference.
    assert not verdict_of(build_group(rewards=[1.0, nan])).teaches
    assert not verdict_of(
        build_group(rewards=[1.0, 0.0], finish_reasons=("stop", "aborted"))
    ).teaches
    # Each outcome beyond 0 and 1 counts as failed or solved.
    said = verdict_of(build_group(rewards=[-1.0, 1.0, 10.0, 0.25]))
    assert said == Verdict(num_scored=4, total=10.25, teaches=True, solved=2.25)
    with pytest.raises(ValueError, match="3.0 of 2 completions solved"):
        Verdict(num_scored=2, total=3.0, teaches=True, solved=3.0)
    with pytest.raises(ValueError, match="2 rewards but 1 outcomes"):
        build_group(rewards=[1.0, 0.0], achieved=torch.ones(1))


def test_a_buffer_forgets_groups_that_are_given_back():
    buffer = GroupBuffer(1)
    buffer.put(
        [build_group(rewards=[1.0, 0.0], ticket=3), build_group(rewards=[1.0, 1.0], ticket=4)]
    )
    buffer.drop([4])
    assert buffer.tickets() == [3]


class Numbers:
    num_train = 7

    def train_prompt(self, i):
        return i


@pytest.mark.parametrize("epoch", [0, 3])
def test_a_prompt_stream_is_a_permutation_an_epoch_and_a_pure_function(epoch):
    stream = PromptStream(Numbers(), 5)
    tickets = range(epoch * 7, epoch * 7 + 7)
    assert sorted(stream[t] for t in tickets) == list(range(7))
    assert [stream[t] for t in tickets] == [PromptStream(Numbers(), 5)[t] for t in tickets]
