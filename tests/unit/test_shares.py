"""Shares of what may start: alike for all who want as much, and none is left that one wants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.tickets.ledger import TicketLedger
from llamarl.tickets.service import TicketService
from tests.simulated_mail import SimulatedMail

STEP = 12  # groups
OVERCOMMIT = 4


class Mail(SimulatedMail):
    """Mail that counts what generators send."""

    num_asks = 0

    def post(self, rank, topic, payload):
        self.num_asks += topic in ("ask", "waits")
        super().post(rank, topic, payload)


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
            world.append(Mail(rank, world, lambda: None))
        self.mail = world
        self.desks = [
            TicketService(self.ledger, mail, trainer_ranks=(0,), timeout_s=1.0) for mail in world
        ]

    def ask(self, generator):
        room = self.rooms[generator] - len(self.has[generator])
        desk = self.desks[1 + generator]
        is_idle = not self.has[generator]
        granted = desk.granted()
        if room > 0:
            granted += desk.ask(generator, room, self.version, is_idle=is_idle)
            if not (granted or desk.is_refused):  # it was told that there is something
                granted += desk.ask(generator, room, self.version, is_idle=is_idle)
        granted += desk.granted()
        self.has[generator] += [ticket.index for ticket in granted]
        return len(granted)

    def all_ask(self, order=None):
        """All ask, in this order and again, until nobody gets any more."""
        while sum(self.ask(generator) for generator in order or range(len(self.rooms))):
            pass
        return [len(tickets) for tickets in self.has]

    def next_step(self):
        """Take the next step's batch and train on it, if it is there."""
        if self.desks[0].take(self.ledger.step) is not None:
            self.version += 1
            self.desks[0].trained(0.0)

    def finish(self, generator, count):
        done, self.has[generator] = self.has[generator][:count], self.has[generator][count:]
        self.desks[0].finish(done)


def test_who_asks_first_gets_an_even_share_and_who_waits_the_rest():
    run = Run([100, 100, 100])
    assert run.ask(0) == 6 and run.ask(0) == 0
    assert run.ask(1) == 5 and run.ask(2) == 5
    assert run.ledger.room == 0


def test_what_one_has_no_room_for_another_gets_as_soon_as_that_is_known():
    run = Run([100, 3])
    assert run.ask(0) == 8
    assert run.ask(1) == 3
    assert run.ask(0) == 5


def test_nothing_is_kept_for_one_that_is_at_work():
    """It would ask at the end of its chunk."""
    run = Run([100, 100])
    run.all_ask()
    run.finish(0, 8)
    run.finish(1, 7)
    assert run.ask(0) == 0, "it waits"
    assert run.ask(1) == 0, "it works"
    run.next_step()
    assert run.ask(0) == STEP


def waiting():
    """Two generators with nothing to do, and room for a step's groups."""
    run = Run([100, 100])
    run.all_ask()
    for generator in range(2):
        run.finish(generator, 8)
        assert run.ask(generator) == 0
    run.next_step()
    return run


def test_those_that_wait_share_what_a_step_makes_room_for():
    run = waiting()
    assert run.ask(1) == STEP // 2
    assert run.ask(0) == STEP // 2


def test_what_was_kept_for_one_that_waits_and_does_not_ask_is_not_kept_for_long():
    """It may stand on a rank that trains meanwhile."""
    run = waiting()
    assert run.ask(1) == STEP // 2
    run.finish(1, STEP // 2)
    assert run.ask(1) == STEP // 2


def test_who_has_worked_off_its_share_gets_what_was_kept_for_one_that_never_asks():
    """One that trains meanwhile, evaluates or hangs: it holds up nobody."""
    run = Run([100, 100])
    assert run.ask(0) == 8
    run.finish(0, 7)
    assert run.ask(0) == 0, "it is at work"
    run.finish(0, 1)
    assert run.ask(0) == 8
    run.finish(0, 4)
    assert run.desks[0].take(0) is not None, "so that a step comes of one generator alone"
    assert run.ask(1) > 0, "it may still come"


@given(
    rooms=st.lists(st.integers(1, 20), min_size=2, max_size=6),
    order=st.randoms(use_true_random=False),
    steps=st.lists(st.integers(0, STEP), max_size=6),
)
def test_nothing_that_may_start_is_left_while_one_has_room_for_it(rooms, order, steps):
    run = Run(rooms)
    for finished in [0, *steps]:
        numbers = list(range(len(rooms)))
        for _ in range(finished):
            working = [number for number in numbers if run.has[number]]
            if working:
                run.finish(order.choice(working), 1)
        run.next_step()
        order.shuffle(numbers)
        found = run.all_ask(numbers)
        assert run.ledger.room == 0 or found == rooms, "nobody waits who might work"
        assert sum(found) <= STEP + OVERCOMMIT


@pytest.mark.parametrize("overcommit", [0, 4, 40])
def test_room_is_what_the_ledger_starts(overcommit):
    ledger = TicketLedger(
        groups_per_step=STEP, max_lag=1, overcommit=overcommit, num_pools=4, max_steps=3
    )
    for step in range(3):
        room = ledger.room
        assert len(ledger.start(1000, step)) == room and ledger.room == 0
        assert ledger.finish(ledger.waits_for()) == []
        assert ledger.room == 0
        assert len(ledger.take(step)) == STEP
        after = ledger.room
        ledger.untake(step)
        assert ledger.room == 0
        ledger.take(step)
        ledger.trained(0.0)
        assert ledger.room == after
    assert ledger.room == 0


def test_room_without_a_bound_on_lag_is_made_by_what_arrives():
    ledger = TicketLedger(groups_per_step=STEP, max_lag=None, overcommit=0, num_pools=2)
    started = [ticket.index for ticket in ledger.start(1000, 0)]
    assert len(started) == STEP and ledger.room == 0
    ledger.finish(started[:5])
    assert ledger.room == 5 == len(ledger.start(1000, 0))


def test_nobody_asks_again_without_news():
    """A generator calls between any two chunks: it sends a message only where that may help."""
    run = Run([100, 100])
    run.all_ask()
    run.finish(0, 8)
    for number in range(5):
        run.ask(0), run.ask(1)
        if not number:
            asks = [mail.num_asks for mail in run.mail]
    assert [mail.num_asks for mail in run.mail] == asks
    assert sum(asks) == 3, "two at first, and one that says that it is idle now"


def test_what_starts_again_makes_room():
    run = Run([100, 100])
    run.all_ask()
    lost = run.has[1]
    run.rooms[1], run.has[1] = 0, []
    run.desks[0].start_again(lost)
    assert run.ledger.room == len(lost)
    run.all_ask([0])
    assert set(lost) <= set(run.has[0]) and run.ledger.room == 0
