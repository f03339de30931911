"""The ledger without a bound on lag: everything is handed over once, searchers go on, and only the
first step waits.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.tickets.ledger import TicketLedger
from llamarl.tickets.pool import NEVER


def ledger(**changes):
    return TicketLedger(**{"groups_per_step": 4, "max_lag": None, "overcommit": 2, **changes})


def started(made, count, version=0):
    tickets = made.start(count, version)
    assert all(t.deadline == NEVER for t in tickets)
    return [t.index for t in tickets]


def test_only_groups_on_their_way_count_against_overcommit():
    ours = ledger()
    assert started(ours, 10) == [0, 1, 2, 3, 4, 5] and started(ours, 1) == []
    ours.finish([5, 0])
    assert started(ours, 9) == [6, 7], "two have come, though no step has taken them"
    assert started(ledger(overcommit="auto"), 500) == list(range(8)), "two batches"


def test_the_first_step_waits_for_the_fill_and_others_for_a_quarter_of_a_batch_a_sync():
    ours = ledger(initial_groups=3, overcommit=16, groups_per_step=8, sync_period=3)
    started(ours, 20)
    ours.finish([4, 1])
    assert ours.take(0) is None and ours.waits_for()[:2] == [0, 2] and ours.overdue() == []
    ours.finish([7])
    assert ours.take(0) == [1, 4, 7]
    assert ours.take(1) == [] and ours.take(2) == []
    assert ours.take(3) is None, "nothing has come since step 0"
    ours.finish([0])
    assert ours.take(3) is None, "one of two"
    ours.finish([5])
    assert ours.take(3) == [0, 5]
    ours.finish([2])
    assert ours.take(4) == [2] and ours.take(5) == []
    assert ours.take(6) is None, "one, which step 4 took"
    ours.untake(5)
    ours.finish([3])
    assert ours.take(5) == [3] and ours.take(6) == [], "two, which steps 4 and 5 took"
    ours.untake(6)
    assert ours.take(6) == [] and ours.take(7) == []


def test_every_lane_waits_for_its_share_of_the_fill():
    ours = ledger(num_pools=2, initial_groups=5, overcommit=16)
    started(ours, 20)
    ours.finish([0, 2, 4, 6, 1, 3])
    assert ours.take(0) is None
    ours.finish([5])
    assert sorted(ours.take(0)) == [0, 1, 2, 3, 4, 5, 6]


def test_a_step_that_is_given_up_gives_everything_back():
    ours = ledger()
    started(ours, 6)
    ours.finish([0, 1, 2])
    taken = ours.take(0)
    ours.untake(0)
    assert ours.step == 0 and ours.take(0) == taken
    with pytest.raises(ValueError, match="not in work"):
        ours.finish([1])


@settings(max_examples=80)
@given(
    dp_ranks=st.integers(1, 3),
    fill=st.integers(0, 9),
    rolls=st.lists(st.integers(0, 10**6), min_size=30, max_size=120),
)
def test_each_ticket_is_handed_over_once_also_over_resumes(dp_ranks, fill, rolls):
    make = dict(
        groups_per_step=2 * dp_ranks,
        max_lag=None,
        overcommit=dp_ranks,
        initial_groups=fill,
        num_pools=dp_ranks,
        resume_in_work=True,
    )
    ours = TicketLedger(**make)
    working = []
    finished = set()
    handed = []
    for roll in rolls:
        action = roll % 4
        if action == 0:
            granted = [t.index for t in ours.start(1 + roll // 4 % 3, ours.step)]
            assert len(working) + len(granted) <= 3 * dp_ranks
            working += granted
        elif action == 1 and working:
            ticket = working.pop(roll // 4 % len(working))
            ours.finish([ticket])
            finished.add(ticket)
        elif action == 2:
            first = ours.step == 0
            taken = ours.take(ours.step)
            shares = []
            for i in range(dp_ranks):
                shares.append(sum(t % dp_ranks == i for t in finished))
            least = max(1, -(-fill // dp_ranks)) if first else 1  # one of two groups a step
            assert (taken is None) == (min(shares) < least)
            if taken is not None:
                assert set(taken) == finished and len(taken) == len(finished)
                handed += taken
                finished = set()
        # killed, and resumed: what the trainer held is there, some of the partial completions are
        else:
            saved = {t for t in working if (roll >> t % 16) & 1}
            state = json.loads(json.dumps(ours.state_dict()))
            ours = TicketLedger(**make)
            ours.load_state_dict(state, saved)
            assert ours.reconcile(sorted(finished)) == finished and ours.in_work() == saved
            working = sorted(saved)
    assert len(handed) == len(set(handed))
    state = ours.state_dict()
    open_ = set(state["again"]) | {t for t, _ in state["finished"]}
    assert set(handed) | open_ == set(range(state["frontier"])) and not set(handed) & open_


def test_after_the_last_step_nothing_starts_and_a_longer_run_goes_on():
    ours = ledger(max_steps=2)
    assert started(ours, 99) == [0, 1, 2, 3, 4, 5]
    ours.finish([0, 1, 2])
    assert ours.take(0) == [0, 1, 2]
    ours.finish([3])
    assert ours.take(1) == [3]
    assert started(ours, 99) == [], "no step is left, though two alone are on their way"
    ours.untake(1)
    assert started(ours, 1) == [6], "the last step is to come again"
    ours.take(1)
    longer = ledger(max_steps=3, resume_in_work=True)
    longer.load_state_dict(json.loads(json.dumps(ours.state_dict())), {4, 5})
    assert longer.in_work() == {4, 5} and started(longer, 99) == [6, 7, 8, 9]


def test_without_a_bound_auto_is_two_batches_or_two_groups_a_generator():
    assert ledger().overcommit == 2
    assert ledger(overcommit="auto").overcommit == 4
    assert ledger(overcommit="auto", num_generators=2).overcommit == 4
    searchers = ledger(overcommit="auto", num_generators=5)
    assert searchers.overcommit == 6 and len(started(searchers, 99)) == 10
