"""TicketService: asking, granting, finishing, taking and giving back, in one process and between
ranks.
"""

import json
import time

import pytest
import torch.distributed as dist

from llamarl.comm.channel import dp_rank_of
from llamarl.comm.control import Control
from llamarl.errors import PeerDied, TimedOut
from llamarl.tickets.ledger import TicketLedger
from llamarl.tickets.service import TicketService

WAIT_S = 10.0


def ledger(**settings):
    return TicketLedger(**{"groups_per_step": 4, "max_lag": 1, "overcommit": 2, **settings})


@pytest.fixture
def alone():
    """desk(**ledger settings) of a world of one."""

    def make(desk={}, **settings):
        control = Control(None, rank=0, world_size=1, leader=0, names=["everything"])
        return TicketService(
            ledger(**settings), control, trainer_ranks=(0,), timeout_s=WAIT_S, **desk
        )

    return make


@pytest.fixture
def desks():
    """make(trainer_ranks, count, start, ...): a desk for each of `count` ranks, the
    leader first.
    """
    controls, stores = [], []  # a store serves for as long as it is referred to

    def make(trainer_ranks=(0,), count=2, start=True, timeout_s=WAIT_S, desk={}, **settings):
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        stores.append(store)
        names = [f"executor {rank}" for rank in range(count)]
        made = [
            Control(
                store.clone(),
                rank=r,
                world_size=count,
                leader=0,
                names=names,
                heartbeat_timeout_s=60,
            )
            for r in range(count)
        ]
        controls.extend(made)
        dp_ranks = len(trainer_ranks)
        options = {"trainer_ranks": trainer_ranks, "timeout_s": timeout_s, **desk}
        out = [TicketService(ledger(num_pools=dp_ranks, **settings), c, **options) for c in made]
        for control in made if start else ():
            control.start()
        return out, made

    yield make
    for control in controls:
        control.close()


def eventually(predicate):
    deadline = time.monotonic() + WAIT_S
    while not (value := predicate()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)
    return value


def indices(tickets):
    return [t.index for t in tickets]


def test_tickets_are_granted_in_order_up_to_the_bound_with_the_version_plus_max_lag_as_deadline(
    alone,
):
    desk = alone()
    granted = desk.ask(0, 3, version=0) + desk.ask(0, 100, version=0)
    assert indices(granted) == list(range(6))  # groups_per_step + overcommit
    assert {t.deadline for t in granted} == {1}
    assert desk.ask(0, 100, version=0) == []


def test_a_refused_ask_is_forgotten_and_a_later_one_is_granted_with_newer_weights(alone):
    desk = alone()
    desk.finish(indices(desk.ask(0, 6, version=0)))
    assert desk.ask(0, 1, version=0) == []
    assert desk.take(0) == [0, 1, 2, 3]
    assert desk.granted() == []
    assert [(t.index, t.deadline) for t in desk.ask(0, 1, version=1)] == [(6, 2)]


def test_a_step_is_taken_only_when_its_batch_is_finished_and_each_group_once(alone):
    desk = alone()
    desk.ask(0, 6, version=0)
    desk.finish([0, 1, 5])
    assert desk.take(0) is None
    assert desk.waits_for() == "tickets [2, 3, 4] in work"
    desk.finish([3])
    assert sorted(desk.take(0)) == [0, 1, 3, 5]
    with pytest.raises(ValueError, match="step 0 taken, but the next is 1"):
        desk.take(0)
    with pytest.raises(ValueError, match="ticket 5 finished, but it is not in work"):
        desk.finish([5])


def test_a_step_given_up_can_be_taken_again_with_the_same_groups(alone):
    desk = alone()
    desk.finish(indices(desk.ask(0, 6, version=0)))
    before = desk.state_dict()
    taken = desk.take(0)
    assert desk.state_dict() != before
    desk.untake(0)
    assert desk.state_dict() == before
    assert desk.take(0) == taken
    with pytest.raises(ValueError, match="step 3 was not the last to be taken"):
        desk.untake(3)


def test_after_a_stop_request_no_step_is_begun(alone):
    desk = alone()
    desk.finish(indices(desk.ask(0, 4, version=0)))
    desk._control.request_stop()
    assert desk.take(0) is None
    desk._control.stopping = False
    assert desk.take(0) is not None


def test_a_synchronous_ask_is_answered_with_nothing_when_nothing_may_start(alone):
    desk = alone(max_lag=0, overcommit=0)
    assert desk.synchronous
    assert indices(desk.ask(0, 100, version=0)) == [0, 1, 2, 3]
    assert desk.ask(0, 100, version=0) == []


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


def test_a_refused_ask_is_repeated_only_with_newer_weights_or_when_a_take_has_made_room(
    alone, asks
):
    desk = alone(groups_per_step=2, overcommit=1)
    assert indices(desk.ask(0, 5, version=0)) == [0, 1, 2]
    for _ in range(3):
        assert desk.ask(0, 2, version=0) == []
    desk.finish([0, 1])
    assert desk.ask(0, 2, version=0) == [] and asks == [(0, 5, 0)], (
        "what has come makes no room, a take does"
    )
    assert desk.take(0) == [0, 1]
    assert desk.granted() == []
    assert indices(desk.ask(0, 5, version=0)) == [3] and len(asks) == 2, (
        "of deadline 1: step 1 is full"
    )
    assert desk.ask(0, 4, version=0) == [] and len(asks) == 2
    assert indices(desk.ask(0, 4, version=1)) == [4] and desk.ask(0, 3, version=1) == []
    assert asks[2:] == [(0, 4, 1)]


def test_an_ask_that_was_granted_in_full_is_followed_by_the_next(alone, asks):
    desk = alone()
    assert [indices(desk.ask(0, 2, version=0)) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert len(asks) == 3


def test_a_synchronous_ask_in_vain_is_repeated_with_new_weights_alone(alone, asks):
    desk = alone(max_lag=0, overcommit=0)
    desk.finish(indices(desk.ask(0, 100, version=0)))
    for _ in range(2):
        assert desk.ask(0, 100, version=0) == []
    assert desk.take(0) is not None and desk.ask(0, 100, version=0) == [] and len(asks) == 1
    assert indices(desk.ask(0, 100, version=1)) == [4, 5, 6, 7] and len(asks) == 2


def test_without_a_bound_what_has_come_makes_room(alone, asks):
    desk = alone(max_lag=None)
    assert len(desk.ask(0, 8, version=0)) == 6
    desk.finish([0])
    assert indices(desk.ask(0, 2, version=0)) == [6] and len(asks) == 2


def test_a_governor_that_starts_more_ahead_makes_room(alone, asks):
    desk = alone(max_lag=2, overcommit="oppo")
    before = len(desk.ask(0, 100, version=0))
    for reward in range(11):
        desk.trained(reward)
    assert desk.ask(0, 1, version=0) and len(asks) == 2 and before == 6


def test_before_anything_has_started_the_next_step_waits_for_new_tickets(alone):
    assert alone().waits_for() == "new tickets to start"


def test_a_restored_desk_starts_again_what_was_in_work_or_lost_and_keeps_what_was_saved(alone):
    desk = alone()
    desk.ask(0, 6, version=0)
    desk.finish([1, 2])
    state, other = desk.state_dict(), alone()
    other.load_state_dict(state)
    assert other.reconcile([2]) == {2}
    assert sorted(indices(other.ask(0, 5, version=0))) == [0, 1, 3, 4, 5]
    assert other.ask(0, 1, version=0) == []


def test_a_restored_desk_does_not_start_again_what_goes_on(alone):
    desk = alone()
    desk.ask(0, 6, version=0)
    desk.finish([1, 2])
    other = alone(resume_in_work=True)
    other.load_state_dict(
        desk.state_dict(), {0, 1, 4, 77}
    )  # 1 had finished meanwhile, and was lost on its way
    assert other.resumed_step == 0 and other.in_work() == {0, 4}
    assert other.reconcile([2]) == {2}
    assert sorted(indices(other.ask(0, 9, version=0))) == [1, 3, 5]
    other.finish([0, 4])
    with pytest.raises(ValueError, match="ticket 0 finished, but it is not in work"):
        other.finish([0])


def test_groups_that_start_again_on_another_number_of_trainer_ranks_are_counted_in_the_log(
    desks, caplog
):
    (leader, other), _ = desks(trainer_ranks=(0, 1))
    state = leader.state_dict() | {
        "step": 3,
        "frontier": 8,
        "finished": [[0, 3], [2, 3], [4, 3], [7, 4]],
    }
    for desk in (leader, other):
        desk.load_state_dict(state)
    (record,) = caplog.records
    want = (
        "step 3: 1 of 4 finished groups start again, and 0 that were begun: on another number of "
        "trainer ranks, "
    )
    assert record.levelname == "WARNING" and record.getMessage().startswith(want)
    assert record.getMessage().endswith("Tickets 4")


def straggling(desk):
    """Step 1 waits for ticket 0 alone, its last step; 4 to 7 are finished or may be."""
    assert indices(desk.ask(0, 6, version=0)) == [0, 1, 2, 3, 4, 5]
    desk.finish([1, 2, 3, 4])
    assert desk.take(0) == [1, 2, 3, 4]
    assert indices(desk.ask(0, 10, version=1)) == [6, 7, 8, 9]
    desk.finish([5, 6, 7])
    assert desk.take(1) is None and desk.to_truncate() == [], (
        "without a batch of others it waits for data"
    )
    desk.finish([8])
    assert desk.take(1) is None


def test_a_straggler_that_alone_holds_up_its_last_step_is_ordered_to_end_once(alone):
    desk = alone(desk={"truncate": True})
    straggling(desk)
    assert desk.to_truncate() == [0]
    assert desk.take(1) is None and desk.to_truncate() == []
    desk.finish([0])
    assert sorted(desk.take(1)) == [0, 5, 6, 7]


def test_without_truncate_the_step_waits(alone):
    desk = alone()
    straggling(desk)
    assert desk.to_truncate() == []


def test_stragglers_are_named_in_the_log_once_with_generator_and_seconds(
    alone, monkeypatch, caplog
):
    now = [0.0]
    monkeypatch.setattr("llamarl.tickets.service._SHOWN", 5)
    options = {"straggler_factor": 4.0, "clock": lambda: now[0]}
    desk = alone(groups_per_step=8, overcommit=8, desk=options)
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
    want = (
        f"stragglers of generator rank 0: tickets {late}, and 3 more have taken more than 4 x the "
        "median of 2.00 s; "
    )
    assert record.getMessage().startswith(want)


def test_tickets_that_start_again_make_room_for_whoever_was_refused(alone):
    desk = alone(groups_per_step=2, overcommit=0)
    assert indices(desk.ask(0, 4, version=0)) == [0, 1]
    assert desk.ask(0, 2, version=0) == []  # refused, until there is news
    desk.start_again([1])
    assert desk.granted() == []
    assert indices(desk.ask(0, 2, version=0)) == [1]


# --- between ranks ---


def test_a_generator_elsewhere_is_granted_by_the_leaders_listener(desks):
    (_, generator), _ = desks()
    granted = generator.ask(0, 2, version=0)  # it asks ahead and does not wait
    eventually(lambda: granted.extend(generator.granted()) or len(granted) == 2)
    assert indices(granted) == [0, 1]


def test_a_synchronous_generator_elsewhere_waits_for_its_answer(desks):
    (_, generator), _ = desks(max_lag=0, overcommit=0)
    assert indices(generator.ask(0, 100, version=0)) == [0, 1, 2, 3]
    assert generator.ask(0, 100, version=0) == []


def test_a_synchronous_ask_that_nobody_answers_ends_at_the_deadline_and_names_the_leader(desks):
    (_, generator), _ = desks(max_lag=0, overcommit=0, start=False, timeout_s=0.2)
    with pytest.raises(TimedOut, match="generator 0 on rank 1 waited .* for the ledger on rank 0"):
        generator.ask(0, 1, version=0)


def test_a_synchronous_ask_ends_at_once_when_the_leader_fails(desks):
    (_, generator), (_, control) = desks(max_lag=0, overcommit=0, start=False)
    control.fail(PeerDied("rank 0 failed"))
    with pytest.raises(PeerDied):
        generator.ask(0, 1, version=0)


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


def test_room_is_told_to_the_generators_that_were_refused_and_whoever_asks_then_is_granted_it(
    desks, asks
):
    (leader, one, two), _ = desks(count=3, groups_per_step=4, overcommit=0)
    ones, twos = [], []
    eventually(lambda: ones.extend(one.ask(0, 4, version=0)) or len(ones) == 4)
    assert asks == [(1, 4, 0)]
    twos += two.ask(1, 4, version=0)
    eventually(lambda: twos.extend(two.granted()) or not two._num_asked)
    assert two.ask(1, 4, version=0) == twos == [] and len(asks) == 2, "refused"
    leader.finish([0, 1, 2, 3])
    assert leader.take(0) == [0, 1, 2, 3]
    eventually(lambda: twos.extend(two.ask(1, 3 - len(twos), version=0)) or len(twos) == 3)
    eventually(lambda: ones.extend(one.ask(0, 1, version=0)) or len(ones) == 5)
    assert indices(twos) == [4, 5, 6] and asks[2:] == [(2, 3, 0), (1, 1, 0)]


def test_every_trainer_rank_takes_its_own_lane_of_what_the_leader_took(desks):
    (leader, other), _ = desks(trainer_ranks=(0, 1))
    tickets = indices(leader.ask(0, 6, version=0))
    dp_ranks = []
    for dp_rank in range(2):
        dp_ranks.append([t for t in tickets if dp_rank_of(t, 2) == dp_rank])
    assert other.take(0) is None and leader.take(0) is None
    assert other.waits_for() == "the ledger on rank 0"
    leader.finish(dp_ranks[0])
    other.finish(dp_ranks[1])
    mine = eventually(lambda: leader.take(0))
    eventually(lambda: other.has_batch)
    theirs = eventually(lambda: other.take(0))
    assert not (leader.has_batch or other.has_batch)
    assert set(mine) <= set(dp_ranks[0]) and set(theirs) <= set(dp_ranks[1])
    assert len(mine) == len(theirs) == 2
    assert other.take(1) is None


def test_an_order_to_end_goes_to_the_generator_that_was_granted_the_ticket_after_its_grant(desks):
    (leader, idle, generator), _ = desks(
        count=3, desk={"truncate": True}, groups_per_step=1, overcommit=1
    )
    granted = generator.ask(1, 2, version=0)
    eventually(lambda: granted.extend(generator.granted()) or len(granted) == 2)
    leader.finish([1])
    assert leader.take(0) == [1]
    granted += idle.ask(0, 1, version=1)
    eventually(lambda: granted.extend(idle.granted()) or len(granted) == 3)
    leader.finish([2])
    assert leader.take(1) is None
    assert eventually(generator.to_truncate) == [0] and idle.to_truncate() == []


def test_what_a_resumed_run_goes_on_with_is_ended_at_its_deadline_like_any_other(desks):
    how = {"count": 2, "groups_per_step": 2, "resume_in_work": True}
    (first, generator), _ = desks(**how)
    granted = generator.ask(0, 4, version=0)
    eventually(lambda: granted.extend(generator.granted()) or len(granted) == 4)
    state = json.loads(json.dumps(first.state_dict()))
    (leader, generator), _ = desks(**how, desk={"truncate": True, "straggler_factor": 5.0})
    for desk in (leader, generator):
        desk.load_state_dict(state, {0, 1, 2, 3})
    assert generator.in_work() == {0, 1, 2, 3}
    generator.go_on([0, 1, 2, 3])
    leader.finish([0, 1])
    assert leader.take(0) == [0, 1]
    newer = generator.ask(0, 2, version=1)
    eventually(lambda: newer.extend(generator.granted()) or len(newer) == 2)
    leader.finish([4, 5])
    assert leader.take(1) is None
    assert sorted(eventually(generator.to_truncate)) == [2, 3]


def test_the_reward_reaches_the_governor_of_the_leader_alone(desks):
    (leader, other), _ = desks(overcommit="oppo")
    before = leader.overcommit, other.overcommit
    for i in range(12):
        other.trained(i)
    assert (leader.overcommit, other.overcommit) == before
    for i in range(12):
        leader.trained(i)
    assert leader.overcommit > before[0]


def test_a_group_finished_twice_ends_the_leaders_loop(desks):
    (leader, other), (control, _) = desks(trainer_ranks=(0, 1))
    leader.ask(0, 4, version=0)
    other.finish([1])
    other.finish([1])
    eventually(lambda: control.failure)
    with pytest.raises(ValueError, match="ticket 1 finished, but it is not in work"):
        control.check()
