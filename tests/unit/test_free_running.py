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
from tests.simulated_mail import SimulatedMail


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
        self.sync_period = sync_period
        world, ledgers = [], []
        self.desks = []
        for rank in range(ranks + generators):
            world.append(SimulatedMail(rank, world, lambda: None))
            ledger = TicketLedger(
                groups_per_step=self.B,
                max_lag=None,
                overcommit=overcommit,
                num_pools=self.pools,
                num_generators=generators,
                initial_groups=fill,
                sync_period=sync_period,
                max_steps=steps,
            )
            ledgers.append(ledger)
            there = {"trainer_ranks": tuple(range(ranks)), "timeout_s": 1.0}
            self.desks.append(TicketService(ledger, world[rank], **there))
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
        self.started, self.arrived = {}, {}  # ticket -> (held, step, time); -> time
        self.on_way = Counter()  # by pool
        self.inbox = [[] for _ in range(ranks)]
        self.is_training = False
        self.taken = []  # (lag, behind)
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
        self.started[ticket] = (self.held[generator], self.ledger.step, self.now)
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
                self.arrived[ticket] = self.now
                self.desks[rank].finish([ticket])
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
            held, start_step, _ = self.started[ticket]
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
SETTINGS = {
    "B": st.integers(1, 4),
    "ranks": st.integers(1, 3),
    "together": st.booleans(),
    "generators": st.integers(1, 4),
    "slots": st.integers(1, 12),
    "seconds": SECONDS,
    "jitter": st.booleans(),
    "servers": st.integers(1, 3),
    "steps": st.integers(1, 25),
    "microbatches": st.integers(1, 3),
    "fill": st.integers(1, 30),
    "overcommit": st.sampled_from(["auto", "auto", 0, 3, 8]),
    "sync_period": st.integers(1, 4),
    "seed": st.integers(0, 10**6),
}


class Watched(Run):
    """Looks at every moment between two events."""

    def __init__(self, *, generators, overcommit, **given):
        super().__init__(generators=generators, overcommit=overcommit, **given)
        # What may be on its way, as the documents say.
        self.limit = max(2 * self.B, 2 * generators)
        if overcommit != "auto":
            self.limit = self.B + overcommit
        self.go()

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


@settings(max_examples=60)
@given(**SETTINGS)
def test_however_slow_a_station_is_lag_is_what_is_on_its_way_over_what_arrives(**given):
    run = Watched(**given)
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
    if not given["jitter"]:  # then stations work in order
        for ticket, arrived in run.arrived.items():
            began = run.started[ticket][-1]
            between = sum(began < other < arrived for other in run.arrived.values())
            assert between <= run.limit - 1, "fewer arrive before it than may be on their way"


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
        assert run.now >= steps * 2 * max(1, scorer - 1), "it is as slow as its scorer"
        lags[steps] = [lag for lag, _ in run.taken[-10:]]
    assert lags[40] == lags[120]
    assert max(lags[120]) <= 16 / 2 + 1, "what is on its way over what comes, and a step"
