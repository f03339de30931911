"""The ledger without a bound on lag: everything is handed over once, searchers go on, and only the
first step waits.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.tickets.ledger import NEVER, TicketLedger


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
    assert len(started(ledger(overcommit="auto"), 500)) == 500


def test_the_first_step_waits_for_the_fill_and_no_other_for_anything():
    ours = ledger(initial_groups=3, overcommit="auto")
    started(ours, 20)
    ours.finish([4, 1])
    assert ours.take(0) is None and ours.waits_for()[:2] == [0, 2] and ours.overdue() == []
    ours.finish([7])
    assert ours.take(0) == [1, 4, 7]
    assert ours.take(1) == [] and ours.take(2) == []
    ours.finish([0])
    assert ours.take(3) == [0]


def test_every_lane_waits_for_its_share_of_the_fill():
    ours = ledger(num_pools=2, initial_groups=5, overcommit="auto")
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
    ours, working, finished, handed = TicketLedger(**make), [], set(), []
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
            shares = [sum(t % dp_ranks == i for t in finished) for i in range(dp_ranks)]
            assert (taken is None) == (first and min(shares) < max(1, -(-fill // dp_ranks)))
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


def test_without_a_bound_auto_is_no_limit():
    assert ledger(overcommit="auto").overcommit is None and ledger().overcommit == 2
