"""Shares of what may start: alike for all who want as much, and none is left that one wants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.planner.mail import SimulatedMail
from llamarl.tickets.ledger import TicketLedger
from llamarl.tickets.service import TicketService

STEP = 12  # groups
OVERCOMMIT = 4


class Run:
    """Generators that ask in any order, have room for so many groups each, and finish them."""

    def __init__(self, rooms, **settings):
        self.rooms = list(rooms)
        self.has = [[] for _ in rooms]
        self.version = 0
        settings = {"groups_per_step": STEP, "max_lag": 2, "overcommit": OVERCOMMIT, **settings}
        self.ledger = TicketLedger(num_generators=len(rooms), **settings)
        world = []
        for rank in range(1 + len(rooms)):
            world.append(SimulatedMail(rank, world, lambda: None))
        self.desks = [
            TicketService(self.ledger, mail, trainer_ranks=(0,), timeout_s=1.0) for mail in world
        ]

    def ask(self, generator):
        room = self.rooms[generator] - len(self.has[generator])
        desk = self.desks[1 + generator]
        granted = desk.ask(generator, room, self.version) if room > 0 else desk.granted()
        granted += desk.granted()
        self.has[generator] += [ticket.index for ticket in granted]
        return len(granted)

    def all_ask(self, order=None):
        """All ask, in this order and again, until nobody gets any more."""
        while sum(self.ask(generator) for generator in order or range(len(self.rooms))):
            pass
        return [len(tickets) for tickets in self.has]

    def finish(self, generator, count):
        done, self.has[generator] = self.has[generator][:count], self.has[generator][count:]
        self.desks[0].finish(done)


def level(rooms, most):
    """What each has in work where all have as much as they may, and nothing is left over."""
    filled = [0] * len(rooms)
    for _ in range(min(most, sum(rooms))):
        hungry = [number for number, room in enumerate(rooms) if filled[number] < room]
        filled[min(hungry, key=lambda number: filled[number])] += 1
    return filled


def test_who_asks_first_gets_no_more_than_an_even_share():
    run = Run([100, 100])
    assert run.ask(0) == 8 and run.ask(0) == 0
    assert run.ask(1) == 8
    assert run.ledger.start(1, 0, 0) == []


def test_what_one_has_no_room_for_another_gets_as_soon_as_that_is_known():
    run = Run([100, 3])
    assert run.ask(0) == 8
    assert run.ask(1) == 3
    assert run.ask(0) == 5


def test_who_has_worked_off_its_share_gets_more_though_another_never_asks():
    """One that evaluates, or hangs, holds up nobody."""
    run = Run([100, 100])
    assert run.ask(0) == 8
    run.finish(0, 6)
    assert run.ask(0) == 3, "of the ten that could be in work five each, and it has two"
    run.finish(0, 5)
    assert run.ask(0) == 3
    run.finish(0, 3)
    assert run.desks[0].take(0) is not None, "so that a step comes of one generator alone"


@given(
    rooms=st.lists(st.integers(1, 20), min_size=2, max_size=6),
    order=st.randoms(use_true_random=False),
    steps=st.lists(st.integers(0, STEP), max_size=4),
)
def test_all_have_as_many_in_work_as_all_others_that_want_as_many(rooms, order, steps):
    run = Run(rooms)
    most = STEP + OVERCOMMIT
    for finished in [0, *steps]:
        numbers = list(range(len(rooms)))
        for _ in range(finished):
            working = [number for number in numbers if run.has[number]]
            if working:
                run.finish(order.choice(working), 1)
        if run.desks[0].take(run.ledger.step) is not None:
            run.version += 1
            run.desks[0].trained(0.0)
        order.shuffle(numbers)
        found = run.all_ask(numbers)
        left = run.ledger.most_in_work - sum(found)
        assert left == 0 or found == rooms, "nobody waits who might work"
        assert sum(found) <= most
        if not finished and run.version == 0:
            # Rounding gives the last ones a group less.
            assert all(abs(a - b) <= len(rooms) for a, b in zip(found, level(rooms, most)))
            assert max(found) <= max(level(rooms, most)) + 1


@pytest.mark.parametrize("overcommit", [0, 4, 40])
def test_what_could_be_in_work_is_what_the_ledger_starts(overcommit):
    ledger = TicketLedger(
        groups_per_step=STEP, max_lag=1, overcommit=overcommit, num_pools=4, max_steps=3
    )
    for step in range(3):
        before = len(ledger.in_work())
        started = ledger.start(1000, step)
        assert ledger.most_in_work == before + len(started) == len(ledger.in_work())
        by_deadline = ledger.waits_for()
        assert ledger.finish(by_deadline) == []
        assert ledger.most_in_work == len(ledger.in_work())
        assert len(ledger.take(step)) == STEP
        ledger.untake(step)
        assert ledger.most_in_work == len(ledger.in_work())
        ledger.take(step)
        ledger.trained(0.0)
    assert ledger.most_in_work == 0


def test_a_generator_that_is_gone_wants_nothing_and_its_groups_go_to_the_others():
    run = Run([100, 100, 100])
    assert run.all_ask() == [6, 6, 4]
    lost = run.has[2]
    run.rooms[2], run.has[2] = 0, []
    run.desks[0].start_again(lost)
    found = run.all_ask([0, 1])
    assert sorted(found) == [0, 8, 8]
    assert set(lost) <= {*run.has[0], *run.has[1]}
