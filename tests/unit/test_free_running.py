"""Free-running asynchrony under random schedules: the real ledger and service between stations that
are slow or fast. How old a group is when it is handed over follows from how much is on its way, not
from who is slow (docs/asynchrony.md, "Without a bound").
"""

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


class Run:
    """Generators, a scorer and trainer ranks, looked at between any two events.

    speeds: how likely each of sample, arrive and train is to come next, where it can. in_order:
    groups leave each station as they came. swaps: the share of generators that take new weights.
    """

    def __init__(self, *, B, ranks, together, generators, slots, fill, overcommit, sync_period,
                 steps, speeds, in_order, swaps, seed):  # fmt: skip
        self.random = random.Random(seed)
        self.pools = 1 if together else ranks
        self.B = B * ranks
        self.ranks = ranks
        self.steps = steps
        self.speeds = speeds
        self.in_order = in_order
        self.swaps = swaps
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
            given = {"trainer_ranks": tuple(range(ranks)), "timeout_s": 1.0}
            self.desks.append(TicketService(ledger, world[rank], **given))
        self.ledger = ledgers[0]
        # What may be on its way, as the documents say.
        self.limit = self.B + overcommit if overcommit != "auto" else 2 * max(self.B, generators)
        self.free = [slots] * generators
        self.held = [0] * generators
        self.sampling = []  # (generator, ticket)
        self.scoring = []
        self.started = {}  # ticket -> (version held, step, groups that had arrived)
        self.arrived = []
        self.on_way = Counter()  # by pool
        self.is_training = False
        self.taken = []  # (lag, behind)
        self.handed = []  # of each step, groups by pool

    def go(self):
        """All steps, and then all that is still on its way."""
        while True:
            self.try_step()
            self.ask()
            places = {"sample": self.sampling, "arrive": self.scoring, "train": self.is_training}
            ready = [what for what, place in places.items() if place]
            if not ready:
                return self
            weights = [self.speeds[what] for what in ready]
            (what,) = self.random.choices(ready, weights)
            getattr(self, what)()

    def next_of(self, waiting):
        return waiting.pop(0 if self.in_order else self.random.randrange(len(waiting)))

    def ask(self):
        is_new = True
        while is_new:
            is_new = False
            for generator, free in enumerate(self.free):
                desk = self.desks[self.ranks + generator]
                for ticket in desk.ask(generator, free, self.held[generator]):
                    is_new = True
                    self.start(generator, ticket.index)
        assert self.on_way.total() <= self.limit, f"{self.on_way} groups are on their way"
        # Where a pool has room, no generator has: nobody waits who might work, so there is always a
        # next arrival.
        for pool in range(self.pools) if self.ledger.step < self.steps else ():
            room = self.limit // self.pools - self.on_way[pool]
            assert room <= 0 or not any(self.free), (self.on_way, self.free)

    def start(self, generator, ticket):
        assert self.ledger.step < self.steps, "a ticket starts that no step can use"
        assert ticket not in self.started
        self.started[ticket] = (self.held[generator], self.ledger.step, len(self.arrived))
        self.on_way[ticket % self.pools] += 1
        self.free[generator] -= 1
        self.sampling.append((generator, ticket))

    def sample(self):
        generator, ticket = self.next_of(self.sampling)
        self.free[generator] += 1
        self.scoring.append(ticket)

    def arrive(self):
        ticket = self.next_of(self.scoring)
        self.on_way[ticket % self.pools] -= 1
        self.arrived.append(ticket)
        self.desks[dp_rank_of(ticket, self.ranks)].finish([ticket])
        if self.in_order:
            before = len(self.arrived) - 1 - self.started[ticket][-1]
            assert before < self.limit, "fewer arrive before it than may be on their way"

    def try_step(self):
        step = self.ledger.step
        if self.is_training or step == self.steps:
            return
        batches = [self.desks[rank].take(step) for rank in range(self.ranks)]
        if batches[0] is None:
            return
        tickets = sum(batches, [])
        self.handed.append(Counter(ticket % self.pools for ticket in tickets))
        for ticket in tickets:
            held, start_step, _ = self.started[ticket]
            self.taken.append((step - held, start_step - held))
        self.is_training = True

    def train(self):
        self.is_training = False
        self.desks[0].trained(math.nan)
        for generator in range(len(self.held)):
            if self.random.random() < self.swaps:
                self.held[generator] = self.ledger.step


SPEEDS = st.sampled_from([1, 10, 100])


@settings(max_examples=60)
@given(
    B=st.integers(1, 4),
    ranks=st.integers(1, 3),
    together=st.booleans(),
    generators=st.integers(1, 4),
    slots=st.integers(1, 12),
    fill=st.integers(1, 30),
    overcommit=st.sampled_from(["auto", "auto", 0, 3, 8]),
    sync_period=st.integers(1, 4),
    steps=st.integers(1, 25),
    speeds=st.fixed_dictionaries({what: SPEEDS for what in ("sample", "arrive", "train")}),
    in_order=st.booleans(),
    swaps=st.sampled_from([0.3, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_however_slow_a_station_is_lag_is_what_is_on_its_way_over_what_arrives(**given):
    run = Run(**given).go()
    assert run.ledger.step == run.steps, "it came to a standstill"
    assert set(run.arrived) == set(run.started), "nothing is left behind"
    # Each take passes what is on its way then, at most limit groups, and makes each a step older;
    # a group starts as many steps old as its generator's weights are behind.
    steps_on_the_way = sum(lag - behind for lag, behind in run.taken)
    assert steps_on_the_way <= run.limit * run.steps
    assert all(lag >= behind >= 0 for lag, behind in run.taken)
    # And no station is so slow that a sync brings nothing, which would make the buffer old.
    k, quarter = given["sync_period"], math.ceil(run.B / run.pools / 4)
    for sync in range(k, run.steps, k):
        brought = sum(run.handed[sync - k + 1 : sync + 1], Counter())
        assert all(brought[pool] >= quarter for pool in range(run.pools))


@pytest.mark.parametrize("slow", ["sample", "arrive"])
def test_a_slow_station_makes_a_run_slower_and_never_older(slow):
    """Steps of two groups at least, of 16 on their way: what they cost is 8 steps."""
    speeds = dict.fromkeys(("sample", "arrive", "train"), 10**9) | {slow: 1}
    sizes = {"B": 8, "fill": 8, "slots": 16, "overcommit": "auto", "sync_period": 1}
    alone = {"ranks": 1, "together": False, "generators": 1}
    lags = {}
    for steps in (40, 120):
        how = {"steps": steps, "speeds": speeds, "in_order": True, "swaps": 1.0, "seed": 0}
        lags[steps] = [lag for lag, _ in Run(**sizes, **alone, **how).go().taken]
    assert len(lags[40]) >= 80 and max(lags[120]) == max(lags[40])
    assert max(lags[120]) <= 16 / 2 + 1, "what is on its way over what comes, and a step"
