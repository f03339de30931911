"""TicketService: messages between generators, trainers and the leader's ledger; who is granted how
much, and which tickets take too long.
"""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from llamarl.comm.control import Control
from llamarl.errors import PeerDied, TimedOut
from llamarl.tickets.service import TicketService
from llamarl.tickets.stragglers import TicketTimes
from llamarl.types import Verdict
from tests.build.ledger import WAIT_S, build_ledger, lone_desk
from tests.simulated_mail import SimulatedMail


def indices(tickets):
    return [ticket.index for ticket in tickets]


def eventually(predicate):
    deadline = time.monotonic() + WAIT_S
    while not (value := predicate()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)
    return value


@pytest.fixture
def asks(monkeypatch):
    """[(rank, count, version)] of all that were sent to a leader."""
    sent, post = [], Control.post

    def noted(self, rank, topic, payload):
        if topic == "ask":
            sent.append((self.rank, payload["count"], payload["version"]))
        post(self, rank, topic, payload)

    monkeypatch.setattr(Control, "post", noted)
    return sent


# --- A world of one rank ---


def test_after_a_stop_request_no_step_is_begun():
    desk = lone_desk()
    assert desk.waits_for() == "new tickets to start"
    desk.finish(indices(desk.ask(0, 3, version=0)) + indices(desk.ask(0, 1, version=0)))
    desk._control.request_stop()
    assert desk.take(0) is None
    desk._control.stopping = False
    assert desk.take(0) is not None


def test_a_refused_ask_is_repeated_only_with_newer_weights_or_when_a_take_has_made_room(asks):
    desk = lone_desk(build_ledger(groups_per_step=2, overcommit=1))
    assert not desk.is_refused
    assert indices(desk.ask(0, 5, version=0)) == [0, 1, 2] and desk.is_refused
    for _ in range(3):
        assert desk.ask(0, 2, version=0) == []
    desk.finish([0, 1])
    assert desk.ask(0, 2, version=0) == [] and asks == [(0, 5, 0)], "no room before a take"
    assert desk.take(0) == [0, 1]
    assert desk.granted() == [] and not desk.is_refused
    assert indices(desk.ask(0, 5, version=0)) == [3] and len(asks) == 2
    assert desk.waits_for() == "tickets [2, 3] in work"
    assert desk.ask(0, 4, version=0) == [] and len(asks) == 2
    assert indices(desk.ask(0, 4, version=1)) == [4] and desk.ask(0, 3, version=1) == []
    assert asks[2:] == [(0, 4, 1)]


def test_a_synchronous_ask_in_vain_is_repeated_with_new_weights_alone(asks):
    desk = lone_desk(build_ledger(max_lag=0, overcommit=0))
    desk.finish(indices(desk.ask(0, 100, version=0)))
    assert desk.ask(0, 100, version=0) == []
    assert desk.take(0) is not None and desk.ask(0, 100, version=0) == [] and len(asks) == 1
    assert indices(desk.ask(0, 100, version=1)) == [4, 5, 6, 7] and len(asks) == 2


@pytest.mark.parametrize("max_lag", [0, 1])
def test_trainers_are_told_which_groups_are_given_back_and_generators_that_there_is_room(max_lag):
    desk = lone_desk(build_ledger(max_lag=max_lag, overcommit=2 * max_lag, max_refill=2))
    started = indices(desk.ask(0, 100, 0))
    assert desk.ask(0, 100, 0) == [] and desk.yield_row() == {}
    said = dict.fromkeys(started, Verdict(4, 1.0, teaches=True, solved=1.0))
    said[1] = Verdict(4, 0.0, teaches=False, solved=0.0)
    desk.finish(started, said)
    assert desk.given_back() == [1] and desk.given_back() == []
    (replaced,) = indices(desk.ask(0, 100, 0))
    desk.finish([replaced])
    assert desk.take(0) is not None
    row = desk.yield_row()
    assert (row["tickets/given_back"], row["groups/kept_equal"]) == (1, 0)


@pytest.mark.parametrize("truncate", [True, False])
def test_a_straggler_that_alone_holds_up_its_last_step_is_ordered_to_end_once(truncate):
    desk = lone_desk(truncate=truncate)
    desk.ask(0, 6, version=0)
    desk.finish([1, 2, 3, 4])
    assert desk.take(0) == [1, 2, 3, 4]
    assert indices(desk.ask(0, 10, version=1)) == [6, 7, 8, 9]
    desk.finish([5, 6, 7, 8])
    assert desk.take(1) is None and desk.to_truncate() == [0] * truncate
    assert desk.take(1) is None and desk.to_truncate() == []


def test_stragglers_are_named_in_the_log_once_with_generator_and_seconds(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr("llamarl.tickets.service._SHOWN", 5)
    ledger = build_ledger(groups_per_step=8, overcommit=8)
    desk = lone_desk(ledger, straggler_factor=4.0, clock=lambda: now[0])
    desk.ask(0, 16, version=0)
    now[0] = 2.0
    desk.finish([0, 1, 2, 3, 5, 6, 7, 8])
    now[0] = 8.0
    assert desk.take(0) is not None and not caplog.records
    now[0] = 8.5
    for _ in range(3):
        assert desk.take(1) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    late = ", ".join(f"{ticket} (8.5 s)" for ticket in [4, *range(9, 13)])
    assert f"generator rank 0: tickets {late}, and 3 more have taken" in record.getMessage()


def finished_in(seconds, factor):
    """Tickets 100, 101, ... of rank 1 have taken these times; now is 0."""
    times = TicketTimes(factor)
    for ticket, s in enumerate(seconds, 100):
        times.granted([ticket], 1, -s)
        times.finished([ticket], 0.0)
    return times


def test_a_ticket_is_a_straggler_once_when_it_has_taken_factor_times_the_median():
    times = finished_in([1, 1, 2, 2, 2, 3, 3, 90], factor=5)  # median 2
    times.granted([0, 1], 1, 0.0)
    times.granted([2], 3, 4.0)
    # Whole times of tickets that were resumed are not known.
    times.granted(range(20, 60), 1, 0.0, is_resumed=True)
    times.finished(range(20, 60), 0.1)
    assert times.new_stragglers(10.0) == {}
    assert times.new_stragglers(10.5) == {1: [(0, 10.5), (1, 10.5)]}
    assert times.new_stragglers(14.0) == {}
    assert times.new_stragglers(14.5) == {3: [(2, 10.5)]}


def test_a_finished_ticket_is_no_straggler_and_a_few_times_say_nothing():
    times = finished_in([1] * 7, factor=5)
    times.granted([0, 1], 1, 0.0)
    assert times.new_stragglers(1000.0) == {}
    times.finished([0], 1.0)
    assert times.new_stragglers(1000.0) == {1: [(1, 1000.0)]}


# --- Shares of several generators ---


class CountingMail(SimulatedMail):
    """Mail that counts what generators send."""

    num_asks = 0

    def post(self, rank, topic, payload):
        self.num_asks += topic in ("ask", "waits")
        super().post(rank, topic, payload)


class Run:
    """Generators that ask in any order, have room for so many groups each, and finish them."""

    def __init__(self, rooms):
        self.rooms = rooms
        self.has = [[] for _ in rooms]
        self.version = 0
        self.ledger = build_ledger(groups_per_step=12, max_lag=2, num_generators=len(rooms))
        self.mail = []
        for rank in range(1 + len(rooms)):
            self.mail.append(CountingMail(rank, self.mail, lambda: None))
        self.desks = [
            TicketService(self.ledger, mail, trainer_ranks=(0,), timeout_s=1.0)
            for mail in self.mail
        ]

    def ask(self, generator):
        own = self.has[generator]
        room = self.rooms[generator] - len(own)
        granted = self.desks[1 + generator].ask(generator, room, self.version, is_idle=not own)
        own += indices(granted)
        return len(granted)

    def next_step(self):
        assert self.desks[0].take(self.ledger.step) is not None
        self.version += 1
        self.desks[0].trained(0.0)

    def finish(self, generator, count):
        done, self.has[generator] = self.has[generator][:count], self.has[generator][count:]
        self.desks[0].finish(done)


def test_who_asks_first_gets_an_even_share_and_who_waits_what_others_have_no_room_for():
    run = Run([100, 100, 100])
    assert [run.ask(generator) for generator in (0, 0, 1, 2)] == [5, 0, 5, 4]
    assert run.ledger.room == 0
    run = Run([100, 3])
    assert [run.ask(generator) for generator in (0, 1, 0)] == [7, 3, 4]


def begun():
    """Two generators with seven groups each."""
    run = Run([100, 100])
    assert [run.ask(0), run.ask(1)] == [7, 7]
    return run


def test_no_share_is_kept_for_a_generator_that_is_at_work():
    """It would ask at the end of its chunk."""
    run = begun()
    run.finish(0, 7)
    run.finish(1, 6)
    assert run.ask(0) == 0, "it waits"
    assert run.ask(1) == 0, "it works"
    run.next_step()
    assert run.ask(0) == 12


def test_a_share_is_kept_until_the_other_has_worked_off_its_own():
    """The generator that waits may stand on a rank that trains meanwhile."""
    run = begun()
    for generator in range(2):
        run.finish(generator, 7)
        assert run.ask(generator) == 0
    run.next_step()
    assert run.ask(1) == 6
    run.finish(1, 5)
    assert run.ask(1) == 0, "it is at work"
    run.finish(1, 1)
    assert run.ask(1) == 0, "it says that it waits, and is told to ask"
    assert run.ask(1) == 6


def test_nobody_asks_again_without_news():
    """A generator calls between any two chunks: it sends a message only where that may help."""
    run = begun()
    run.finish(0, 7)
    for number in range(3):
        run.ask(0), run.ask(1)
        if not number:
            asks = [mail.num_asks for mail in run.mail]
    assert [mail.num_asks for mail in run.mail] == asks
    assert sum(asks) == 3, "two at first, and one that says that it is idle now"


# --- Between ranks, over a Store ---


@pytest.fixture
def desks():
    """make(count, ...): a desk for each rank, the leader and trainer first."""
    controls, stores = [], []  # a store serves for as long as it is referred to

    def make(count=2, start=True, timeout_s=WAIT_S, **settings):
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        stores.append(store)
        made = []
        names = [f"executor {rank}" for rank in range(count)]
        shared = {"world_size": count, "leader": 0, "names": names, "heartbeat_timeout_s": 60}
        for rank in range(count):
            made.append(Control(store.clone(), rank=rank, **shared))
        controls.extend(made)
        how = {"trainer_ranks": (0,), "timeout_s": timeout_s}
        out = [TicketService(build_ledger(**settings), one, **how) for one in made]
        for control in made if start else ():
            control.start()
        return out, made

    yield make
    for control in controls:
        control.close()


def test_a_synchronous_generator_elsewhere_waits_for_its_answer(desks):
    (_, generator), _ = desks(max_lag=0, overcommit=0)
    assert indices(generator.ask(0, 100, version=0)) == [0, 1, 2, 3]
    assert generator.ask(0, 100, version=0) == []


def test_a_synchronous_ask_that_nobody_answers_ends_at_the_deadline_and_names_the_leader(desks):
    (_, generator), (_, control) = desks(max_lag=0, overcommit=0, start=False, timeout_s=0.2)
    with pytest.raises(TimedOut, match="generator 0 on rank 1 waited .* for the ledger on rank 0"):
        generator.ask(0, 1, version=0)
    control.fail(PeerDied("rank 0 failed"))
    with pytest.raises(PeerDied):
        generator.ask(0, 1, version=1)


def test_while_an_answer_is_under_way_a_generator_asks_for_no_more(desks, asks):
    (_, generator), (leader, listening) = desks(start=False, groups_per_step=64)
    for _ in range(20):
        assert generator.ask(1, 4, version=0) == []
    assert asks == [(1, 4, 0)], "before it is answered"
    leader.start(), listening.start()
    granted = []
    eventually(lambda: granted.extend(generator.granted()) or granted)
    assert len(granted) == 4
    granted += generator.ask(1, 3, version=0)
    assert asks[1:] == [(1, 3, 0)]
    eventually(lambda: granted.extend(generator.granted()) or len(granted) > 4)
    assert indices(granted) == list(range(7))


def test_only_the_leader_counts_rewards_and_a_group_finished_twice_ends_its_loop(desks):
    (leader, other), (control, _) = desks(overcommit="oppo")
    before = leader.overcommit
    for desk in (other, leader):
        for reward in range(12):
            desk.trained(reward)
    assert leader.overcommit > before == other.overcommit
    assert other.waits_for() == "the ledger on rank 0"
    leader.ask(0, 4, version=0)
    other.finish([1])
    other.finish([1])
    eventually(lambda: control.failure)
    with pytest.raises(ValueError, match="ticket 1 finished, but it is not in work"):
        control.check()


def test_groups_that_start_again_on_another_number_of_trainer_ranks_are_counted_in_the_log(caplog):
    def desk(ledger):
        mail = SimulatedMail(0, [], lambda: None)
        return TicketService(ledger, mail, trainer_ranks=(0, 1), timeout_s=1.0)

    finished = [[0, 3], [2, 3], [4, 3], [7, 4]]
    state = desk(build_ledger()).state_dict() | {"step": 3, "frontier": 8, "finished": finished}
    desk(build_ledger(num_pools=2)).load_state_dict(state)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "1 of 4 finished groups start again, and 0 that were begun" in record.getMessage()
    assert record.getMessage().endswith("Tickets 4")
