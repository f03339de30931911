"""Free-running asynchrony on a virtual clock: the real ledger and service between stations of
random speeds. How old a group is when it is handed over follows from how much is on its way, not
from who is slow (docs/asynchrony.md, "No bound").
"""

import heapq
import itertools
import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.comm.channel import dp_rank_of
from llamarl.tickets.ledger import TicketLedger
from llamarl.tickets.service import TicketService


class Mail:
    """A rank's control whose messages arrive at once."""

    leader = 0
    stopping = False

    def __init__(self, rank, world):
        self.rank, self._world = rank, world
        self.is_leader = rank == self.leader
        self._handlers, self._boxes = {}, {}

    def on(self, topic, handler):
        self._handlers[topic] = handler

    def post(self, rank, topic, payload):
        there = self._world[rank]
        if topic in there._handlers:
            there._handlers[topic](self.rank, payload)
        else:
            there._boxes.setdefault(topic, []).append((self.rank, payload))

    def take(self, topic):
        return self._boxes.pop(topic, [])


class Station:
    """Takes so many groups at a time, first come, first served; `seconds` each."""

    def __init__(self, servers, seconds):
        self._free_at, self._seconds = [0] * servers, seconds

    def done_at(self, now):
        began = max(now, heapq.heappop(self._free_at))
        done = began + self._seconds()
        heapq.heappush(self._free_at, done)
        return done


class Run:
    """Generators, a victim, a scorer, and trainer ranks."""

    def __init__(self, *, B, ranks, together, generators, slots, seconds, jitter, servers, steps,
                 microbatches, fill, overcommit, sync_period, seed):  # fmt: skip
        self.random = random.Random(seed)
        self.pools = 1 if together else ranks
        self.B = B * ranks
        self.ranks = ranks
        self.steps = steps
        world = []
        world += [Mail(rank, world) for rank in range(ranks + generators)]
        ledgers = [
            TicketLedger(
                groups_per_step=self.B,
                max_lag=None,
                overcommit=overcommit,
                num_pools=self.pools,
                num_generators=generators,
                initial_groups=fill,
                sync_period=sync_period,
                max_steps=steps,
            )
            for _ in world
        ]
        trainer_ranks = tuple(range(ranks))
        self.sync_period = sync_period
        self.desks = [
            TicketService(ledger, mail, trainer_ranks=trainer_ranks, timeout_s=1.0)
            for ledger, mail in zip(ledgers, world)
        ]
        self.ledger = ledgers[0]
        self.seconds = seconds
        self.jitter = jitter
        self.microbatches = microbatches
        self.stations = [
            Station(servers, lambda name=name: self.time_of(name)) for name in ("victim", "scorer")
        ]
        self.free = [slots] * generators
        self.held = [0] * generators
        self.events = []
        self.order = itertools.count()
        self.now = 0
        self.started, self.arrived = {}, {}  # ticket -> (number, held, step, time); -> time
        self.on_way = Counter()  # by pool
        self.inbox = [[] for _ in range(ranks)]
        self.is_training = False
        self.taken, self.num_arrived = [], 0  # (lag, behind)
        self.handed = []  # of each step, groups by pool

    def time_of(self, what):
        if not self.jitter:
            return self.seconds[what]
        return 1 + int(self.seconds[what] * self.random.expovariate(1.0))

    def at(self, when, what, *args):
        heapq.heappush(self.events, (when, next(self.order), what, args))

    def go(self):
        """All steps, and then all that is still on its way."""
        self.try_step()
        while True:
            self.ask()
            if not self.events:
                return
            self.now, _, what, args = heapq.heappop(self.events)
            what(*args)

    def ask(self):
        is_new = True
        while is_new:
            is_new = False
            for generator, free in enumerate(self.free):
                for ticket in self.desks[self.ranks + generator].ask(
                    generator, free, self.held[generator]
                ):
                    is_new = True
                    self.start(generator, ticket.index)

    def start(self, generator, ticket):
        assert self.ledger.step < self.steps, "a ticket starts that no step can use"
        assert ticket not in self.started
        self.started[ticket] = (self.num_arrived, self.held[generator], self.ledger.step, self.now)
        self.on_way[ticket % self.pools] += 1
        self.free[generator] -= 1
        self.at(self.now + self.time_of("generator"), self.sampled, generator, ticket)

    def sampled(self, generator, ticket):
        self.free[generator] += 1
        self.pass_on(ticket, 0)

    def pass_on(self, ticket, number):
        if number < len(self.stations):
            done = self.stations[number].done_at(self.now)
            self.at(done, self.pass_on, ticket, number + 1)
        else:
            self.at(self.now + self.seconds["transport"], self.deliver, ticket)

    def deliver(self, ticket):
        self.inbox[dp_rank_of(ticket, self.ranks)].append(ticket)
        if not self.is_training:
            self.receive()
            self.try_step()

    def receive(self):
        for rank, tickets in enumerate(self.inbox):
            for ticket in tickets:
                self.on_way[ticket % self.pools] -= 1
                self.arrived[ticket] = (self.num_arrived, self.now)
                self.desks[rank].finish([ticket])
            self.num_arrived += len(tickets)
            tickets.clear()

    def try_step(self):
        step = self.ledger.step
        if step == self.steps:
            return
        batches = [self.desks[rank].take(step) for rank in range(self.ranks)]
        if batches[0] is None:
            return
        tickets = list(itertools.chain(*batches))
        self.handed.append(Counter(ticket % self.pools for ticket in tickets))
        for ticket in tickets:
            _, held, start_step, _ = self.started[ticket]
            self.taken.append((step - held, start_step - held))
        self.is_training = True
        seconds = self.time_of("trainer")
        for part in range(1, self.microbatches):
            self.at(self.now + seconds * part // self.microbatches, self.receive)
        self.at(self.now + seconds, self.trained, step)

    def trained(self, step):
        self.is_training = False
        self.desks[0].trained(math.nan)
        for generator in range(len(self.held)):
            self.at(self.now + self.seconds["transport"], self.swap, generator, step + 1)
        self.receive()
        self.try_step()

    def swap(self, generator, version):
        self.held[generator] = max(self.held[generator], version)


SECONDS = st.fixed_dictionaries(
    {name: st.integers(1, 60) for name in ("generator", "victim", "scorer", "trainer")}
    | {"transport": st.integers(0, 30)}
)
SETTINGS = dict(
    B=st.integers(1, 4),
    ranks=st.integers(1, 3),
    together=st.booleans(),
    generators=st.integers(1, 4),
    slots=st.integers(1, 12),
    seconds=SECONDS,
    jitter=st.booleans(),
    servers=st.integers(1, 3),
    steps=st.integers(1, 25),
    microbatches=st.integers(1, 3),
    fill=st.integers(1, 30),
    sync_period=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)


def limit_of(run, generators, overcommit):
    """What may be on its way, as the documents say."""
    if overcommit == "auto":
        return max(2 * run.B, 2 * generators)
    return run.B + overcommit


class Watched(Run):
    """Looks at every moment between two events."""

    limit = 0

    def ask(self):
        super().ask()
        on_way = self.on_way.total()
        assert on_way <= self.limit, f"{on_way} groups are on their way"
        if self.ledger.step == self.steps:
            return
        # Where a pool has room, no generator has: nobody waits who might work, so there is always a
        # next arrival.
        for pool in range(self.pools):
            room = self.limit // self.pools - self.on_way[pool]
            assert room <= 0 or not any(self.free), (self.on_way, self.free)


@settings(max_examples=50, deadline=None)
@given(overcommit=st.sampled_from(["auto", "auto", 0, 3, 8]), **SETTINGS)
def test_however_slow_a_station_is_lag_is_what_is_on_its_way_over_what_arrives(overcommit, **given):
    run = Watched(overcommit=overcommit, **given)
    run.limit = limit_of(run, given["generators"], overcommit)
    run.go()
    assert run.ledger.step == run.steps, "it came to a standstill"
    assert set(run.arrived) == set(run.started), "nothing is left behind"
    # Each take passes what is on its way then, at most limit groups, and makes each a step older;
    # a group starts as many steps old as its generator's weights are behind.
    steps_on_the_way = sum(lag - behind for lag, behind in run.taken)
    assert steps_on_the_way <= run.limit * run.steps
    assert all(lag >= behind >= 0 for lag, behind in run.taken)
    # And no station is so slow that a sync brings nothing, which would make the buffer old.
    k, quarter = run.sync_period, math.ceil(run.B / run.pools / 4)
    for sync in range(k, run.steps, k):
        brought = sum(run.handed[sync - k + 1 : sync + 1], Counter())
        assert all(brought[pool] >= quarter for pool in range(run.pools))


@settings(max_examples=30, deadline=None)
@given(overcommit=st.sampled_from(["auto", 0, 8]), **{**SETTINGS, "jitter": st.just(False)})
def test_in_order_fewer_groups_arrive_before_each_than_may_be_on_their_way(overcommit, **given):
    run = Watched(overcommit=overcommit, **given)
    run.limit = limit_of(run, given["generators"], overcommit)
    run.go()
    arrivals = sorted(when for _, when in run.arrived.values())
    for ticket, (_, when) in run.arrived.items():
        _, _, _, began = run.started[ticket]
        between = sum(1 for other in arrivals if began < other < when)
        assert between <= run.limit - 1


@pytest.mark.parametrize("scorer", [1, 8])
def test_a_slow_scorer_makes_a_run_slower_and_never_older(scorer):
    """A generator of 1 s for 16 groups at a time, steps of 2 s of 8 groups each, one scorer of so
    many seconds a group: what 16 groups on their way cost is 8 steps, where each brings two.
    """
    seconds = dict(generator=1, victim=1, scorer=scorer, trainer=2, transport=0)
    lags = {}
    for steps in (40, 120):
        run = Watched(
            B=8,
            ranks=1,
            together=False,
            generators=1,
            slots=16,
            seconds=seconds,
            jitter=False,
            servers=1,
            steps=steps,
            microbatches=2,
            fill=8,
            sync_period=1,
            overcommit="auto",
            seed=0,
        )
        run.limit = 16
        run.go()
        assert run.now >= steps * 2 * max(1, scorer - 1), "it is as slow as its scorer"
        lags[steps] = [lag for lag, _ in run.taken[-10:]]
    assert lags[40] == lags[120]
    assert max(lags[120]) <= 16 / 2 + 1, "what is on its way over what comes, and a step"
