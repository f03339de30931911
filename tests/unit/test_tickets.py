"""The ticket rules, against a naive model of them (DESIGN's inequality written out) under random
schedules.
"""

import json
from collections import Counter
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.comm.channel import dp_rank_of
from llamarl.tickets.governors import GOVERNORS, Constants
from llamarl.tickets.ledger import TicketLedger
from llamarl.tickets.pool import in_time
from llamarl.tickets.prompts import PromptStream


def holds(deadlines: list[int], step: int, B: int) -> bool:
    """R(d) <= (d - step + 1) B for every d >= step, and R(step - 1) = 0: by counting."""
    if any(d < step for d in deadlines):
        return False
    for d in range(step, max(deadlines, default=step) + 1):
        if sum(x <= d for x in deadlines) > (d - step + 1) * B:
            return False
    return True


class NaiveRankTickets:
    """One data-parallel rank, by the letter of the rules: recomputed from scratch at every
    question.
    """

    def __init__(self, B, max_lag, overcommit):
        self.B = B
        self.max_lag = max_lag
        self.overcommit = overcommit
        self.step = 0
        self.deadline, self.finished = {}, set()

    def may_start(self, version):
        d = version + self.max_lag
        return len(self.deadline) < self.B + self.overcommit and holds(
            [*self.deadline.values(), d], self.step, self.B
        )

    def batch(self):
        first = sorted(self.finished, key=lambda t: (self.deadline[t], t))[: self.B]
        rest = [d for t, d in self.deadline.items() if t not in first]
        return first if len(first) == self.B and holds(rest, self.step + 1, self.B) else None


@given(st.lists(st.integers(0, 12), max_size=12), st.integers(0, 6), st.integers(1, 4))
def test_in_time_is_the_inequality(deadlines, step, B):
    assert in_time(Counter(deadlines), step, B) == holds(deadlines, step, B)


@settings(max_examples=150)
@given(
    B=st.integers(1, 4),
    max_lag=st.integers(0, 5),
    overcommit=st.integers(0, 12),
    dp_ranks=st.integers(1, 3),
    rolls=st.lists(st.integers(0, 10**6), min_size=20, max_size=150),
)
def test_random_schedules_obey_the_rules_never_exceed_max_lag_and_never_deadlock(
    B, max_lag, overcommit, dp_ranks, rolls
):
    overcommit = overcommit if max_lag else 0
    ledger = TicketLedger(
        groups_per_step=B * dp_ranks, max_lag=max_lag, overcommit=overcommit, num_pools=dp_ranks
    )
    share = [overcommit // dp_ranks + (i < overcommit % dp_ranks) for i in range(dp_ranks)]
    naive = [NaiveRankTickets(B, max_lag, share[i]) for i in range(dp_ranks)]
    version = 0
    working = []
    consumed = []
    started_at = {}
    for roll in rolls:
        action = roll % 4
        if action == 0:  # some generator, perhaps with older weights, asks
            held = max(0, version - (roll // 4) % 2)
            granted = ledger.start(1, held)
            able = [i for i in range(dp_ranks) if naive[i].may_start(held)]
            assert bool(granted) == bool(able)
            for t in granted:
                assert t.deadline == held + max_lag
                naive[t.index % dp_ranks].deadline[t.index] = t.deadline
                started_at[t.index] = held
                working.append(t.index)
        elif action == 1 and working:  # completions finish in any order
            ticket = working.pop(roll // 4 % len(working))
            ledger.finish([ticket])
            naive[ticket % dp_ranks].finished.add(ticket)
        elif action == 2:
            batches = [dp_rank.batch() for dp_rank in naive]
            taken = ledger.take(naive[0].step)
            assert (taken is None) == any(b is None for b in batches)
            if taken is not None:
                assert sorted(taken) == sorted(chain.from_iterable(batches))
                for dp_rank, batch in zip(naive, batches):
                    for t in batch:
                        assert dp_rank.step - started_at[t] <= max_lag
                        dp_rank.finished.discard(t), dp_rank.deadline.pop(t)
                    dp_rank.step += 1
                consumed += taken
        else:  # the generators receive the newest weights
            version = naive[0].step
        for dp_rank in naive:
            assert holds(list(dp_rank.deadline.values()), dp_rank.step, B)
    # From here, finishing all work and starting with fresh weights must always lead to a next step.
    target = naive[0].step + max_lag + 2
    for _ in range(4 * (B * dp_ranks + overcommit) * (target + 1)):
        ledger.finish(working)
        working = [t.index for t in ledger.start(100, ledger.step)]
        if (taken := ledger.take(ledger.step)) is not None:
            consumed += taken
        if ledger.step >= target:
            break
    assert ledger.step >= target
    assert len(consumed) == len(set(consumed))


@settings(max_examples=100)
@given(
    B=st.integers(1, 4),
    max_lag=st.integers(0, 3),
    overcommit=st.sampled_from([0, 3, 12, "auto"]),
    dp_ranks=st.integers(1, 3),
    generators=st.integers(1, 3),
    max_steps=st.lists(st.integers(1, 8), min_size=1, max_size=3).map(sorted),
    rolls=st.lists(st.integers(0, 10**6), max_size=60),
)
def test_no_ticket_starts_that_no_step_can_use_and_a_longer_run_goes_on_densely(
    B, max_lag, overcommit, dp_ranks, generators, max_steps, rolls
):
    """Runs of so many steps, each going on from the last checkpoint of the one before."""
    state = None
    consumed = []
    started = []
    for last in max_steps:
        ledger = TicketLedger(
            groups_per_step=B * dp_ranks,
            max_lag=max_lag,
            overcommit=overcommit if max_lag else 0,
            num_pools=dp_ranks,
            num_generators=generators,
            max_steps=last,
        )
        if state is not None:
            ledger.load_state_dict(json.loads(json.dumps(state)))
        working = []

        def ask(generator, version):
            granted = [t.index for t in ledger.start(5, version, generator)]
            started.extend(granted)
            working.extend(granted)
            # What the steps that are left train on.
            assert len(started) - len(consumed) <= (last - ledger.step) * B * dp_ranks

        def take():
            consumed.extend(ledger.take(ledger.step) or [])

        for roll in rolls:
            if roll % 3 == 0:
                ask(roll // 3 % generators, max(0, ledger.step - roll // 9 % 2))
            elif roll % 3 == 1 and working:
                ledger.finish([working.pop(roll // 3 % len(working))])
            elif ledger.step < last:
                take()
        while ledger.step < last:
            before = (ledger.step, len(started), len(working))
            for generator in range(generators):
                ask(generator, ledger.step)
            ledger.finish(working)
            working.clear()
            take()
            assert (ledger.step, len(started), len(working)) != before, "a standstill"
        assert not working and not ledger.in_work() and ledger.start(9, last) == []
        assert sorted(started) == sorted(consumed) == list(range(B * dp_ranks * last))
        state = ledger.state_dict()


def naive_overdue(dp_ranks: list[NaiveRankTickets]) -> list[int]:
    """Unfinished tickets at their last step, in data-parallel ranks with B others finished, if
    every other data-parallel rank could take.
    """
    due = []
    for one in dp_ranks:
        now = {t for t, d in one.deadline.items() if d == one.step}
        has_enough = len(one.finished) >= one.B
        due.append(now.difference(one.finished) if has_enough else set())
    if any(not mine and dp_rank.batch() is None for mine, dp_rank in zip(due, dp_ranks)):
        return []
    return sorted(chain.from_iterable(due))


@settings(max_examples=150)
@given(
    kind=st.sampled_from(sorted(GOVERNORS)),
    truncate=st.booleans(),
    B=st.integers(1, 4),
    max_lag=st.integers(1, 5),
    dp_ranks=st.integers(1, 3),
    window=st.integers(1, 3),
    rolls=st.lists(st.integers(0, 10**6), min_size=20, max_size=200),
)
def test_the_inequality_and_max_lag_hold_under_every_governor_with_and_without_truncation(
    kind, truncate, B, max_lag, dp_ranks, window, rolls
):
    constants = Constants(window=window, increase=2)
    ledger = TicketLedger(
        groups_per_step=B * dp_ranks,
        max_lag=max_lag,
        overcommit=kind,
        num_pools=dp_ranks,
        constants=constants,
    )
    naive = [NaiveRankTickets(B, max_lag, 0) for _ in range(dp_ranks)]
    version, working = 0, []

    def finish(ticket):
        working.remove(ticket)
        ledger.finish([ticket])
        naive[ticket % dp_ranks].finished.add(ticket)

    def take() -> bool:
        overdue = ledger.overdue()
        assert sorted(overdue) == naive_overdue(naive)
        for ticket in overdue if truncate else ():
            finish(ticket)
        assert not (truncate and naive_overdue(naive)), "still waiting for what is due"
        waited = len(working) % 2 == 0
        batches, taken = [dp_rank.batch() for dp_rank in naive], ledger.take(naive[0].step, waited)
        assert (taken is None) == any(batch is None for batch in batches)
        for ticket in taken or ():
            dp_rank = naive[ticket % dp_ranks]
            assert dp_rank.step <= dp_rank.deadline[ticket], "trained on when it was too old"
            dp_rank.finished.discard(ticket), dp_rank.deadline.pop(ticket)
        for dp_rank in naive if taken else ():
            dp_rank.step += 1
        return taken is not None

    for roll in rolls:
        action, more = roll % 4, roll // 4
        if action == 0:
            held = max(0, version - more % 2)
            for t in ledger.start(1 + more % 3, held):
                naive[t.index % dp_ranks].deadline[t.index] = held + max_lag
                working.append(t.index)
        elif action == 1 and working:
            finish(working[more % len(working)])
        elif action == 2 and take():
            ledger.trained(more % 5)
        elif action == 3:
            version = naive[0].step
        assert 0 <= ledger.overcommit <= max_lag * B * dp_ranks
        assert all(holds(list(dp_rank.deadline.values()), dp_rank.step, B) for dp_rank in naive)
    # Whatever the governor has come to, steps go on.
    target = naive[0].step + 3
    for _ in range(3 * (max_lag + 2) * B * dp_ranks):
        for t in ledger.start(100, naive[0].step):
            naive[t.index % dp_ranks].deadline[t.index] = t.deadline
            working.append(t.index)
        for ticket in list(working):
            finish(ticket)
        take()
    assert naive[0].step >= target


def test_a_straggler_is_overdue_at_its_last_step_once_others_make_up_the_batch():
    ledger = TicketLedger(groups_per_step=2, max_lag=1, overcommit=2)
    ledger.start(4, 0)  # deadline 1
    ledger.finish([1, 2])
    assert ledger.overdue() == [], "step 0 is not their last"
    assert ledger.take(0) == [1, 2]
    ledger.start(10, 1)  # 4 and 5
    ledger.finish([3, 4])
    assert ledger.take(1) is None and ledger.overdue() == [0]
    ledger.finish([0])
    assert ledger.overdue() == [] and ledger.take(1) == [0, 3]


def test_a_trainer_that_waits_for_data_ends_no_straggler():
    ledger = TicketLedger(groups_per_step=2, max_lag=1, overcommit=2)
    ledger.start(4, 0)
    ledger.finish([1, 2])
    ledger.take(0)
    ledger.start(10, 1)
    ledger.finish([4])
    assert (
        ledger.take(1) is None and ledger.overdue() == []
    )  # 0 and 3 are due; with 4 alone there is no batch


def test_a_lane_that_waits_for_data_keeps_the_others_from_ending_stragglers():
    ledger = TicketLedger(groups_per_step=2, max_lag=1, overcommit=4, num_pools=2)
    ledger.start(4, 0)  # two a data-parallel rank, deadline 1
    ledger.finish([0, 1])
    assert ledger.take(0) == [0, 1]
    ledger.start(10, 1)
    ledger.finish([4])
    assert ledger.overdue() == [], (
        "data-parallel rank 0 could do without ticket 2, but data-parallel rank 1 has nothing"
    )
    ledger.finish([5])
    assert ledger.overdue() == [2, 3]


def test_synchronous_starts_one_batch_a_version_and_nothing_ahead():
    ledger = TicketLedger(groups_per_step=3, max_lag=0, overcommit=0)
    assert [t.index for t in ledger.start(10, 0)] == [0, 1, 2]
    assert ledger.start(10, 0) == []
    ledger.finish([2, 0])
    assert ledger.take(0) is None
    ledger.finish([1])
    assert ledger.take(0) == [0, 1, 2]
    assert ledger.start(10, 0) == []  # version 0 is too old for step 1
    assert [t.index for t in ledger.start(10, 1)] == [3, 4, 5]


def test_synchronous_tickets_are_dealt_to_generators_whoever_asks_first():
    def deal(order):
        ledger = TicketLedger(groups_per_step=4, max_lag=0, overcommit=0, num_generators=2)
        found = {}
        for g in order:
            found[g] = [t.index for t in ledger.start(10, 0, g)]
        return found

    assert deal([0, 1]) == deal([1, 0]) == {0: [0, 2], 1: [1, 3]}


def test_a_straggler_holds_up_only_the_step_of_its_own_deadline():
    ledger = TicketLedger(groups_per_step=1, max_lag=2, overcommit=2)
    assert [t.index for t in ledger.start(10, 0)] == [0, 1, 2]
    ledger.finish([1])
    assert ledger.take(0) == [1]
    ledger.finish([2])
    assert ledger.take(1) == [2]
    ledger.start(10, 2)
    ledger.finish([3])
    assert ledger.take(2) is None  # ticket 0 was started at version 0: step 2 is its last
    ledger.finish([0])
    assert ledger.take(2) == [0]


def test_untaken_groups_are_taken_again():
    ledger = TicketLedger(groups_per_step=2, max_lag=1, overcommit=1)
    ledger.start(2, 0)
    ledger.finish([0, 1])
    assert ledger.take(0) == [0, 1]
    ledger.untake(0)
    assert ledger.take(0) == [0, 1]


@settings(max_examples=60)
@given(
    steps=st.integers(0, 4),
    dp_ranks=st.sampled_from([1, 2, 4]),
    new_dp_ranks=st.sampled_from([1, 2, 4]),
    in_work=st.integers(0, 8),
    done=st.integers(0, 8),
)
def test_a_resumed_ledger_consumes_every_ticket_once_on_any_number_of_lanes(
    steps, dp_ranks, new_dp_ranks, in_work, done
):
    def make(n):
        return TicketLedger(groups_per_step=4, max_lag=2, overcommit=8, num_pools=n)

    ledger, consumed = make(dp_ranks), []
    for _ in range(steps):
        ledger.finish([t.index for t in ledger.start(4, ledger.step)])
        consumed += ledger.take(ledger.step) or []
    started = [t.index for t in ledger.start(in_work, ledger.step)]
    ledger.finish(started[:done])
    resumed = make(new_dp_ranks)
    resumed.load_state_dict(ledger.state_dict())
    assert resumed.reconcile(started[:done]) == set(started[:done])
    for _ in range(6):
        resumed.finish([t.index for t in resumed.start(100, resumed.step)])
        while (taken := resumed.take(resumed.step)) is not None:
            consumed += taken
    assert len(consumed) == len(set(consumed))
    assert set(range(max(consumed, default=-1) - 12)) <= set(consumed)


@settings(max_examples=60)
@given(
    steps=st.integers(0, 4),
    dp_ranks=st.sampled_from([1, 2, 4]),
    new_dp_ranks=st.sampled_from([1, 2, 4]),
    behind=st.integers(0, 2),
    in_work=st.integers(0, 12),
    done=st.integers(0, 4),
    saved=st.sets(st.integers(0, 30)),
)
def test_tickets_whose_completions_were_saved_stay_started_and_all_are_consumed_once(
    steps, dp_ranks, new_dp_ranks, behind, in_work, done, saved
):
    def make(n):
        return TicketLedger(
            groups_per_step=4, max_lag=2, overcommit=8, num_pools=n, resume_in_work=True
        )

    ledger, consumed = make(dp_ranks), []
    for _ in range(steps):
        ledger.finish([t.index for t in ledger.start(4, ledger.step)])
        consumed += ledger.take(ledger.step) or []
    started = [
        *ledger.start(in_work // 2, max(0, ledger.step - behind)),
        *ledger.start(in_work - in_work // 2, ledger.step),
    ]
    finished = [t.index for t in started[:done]]
    ledger.finish(finished)
    resumed = make(new_dp_ranks)
    resumed.load_state_dict(ledger.state_dict(), saved)
    kept = resumed.in_work()
    assert kept <= saved & {t.index for t in started[done:]}
    if new_dp_ranks == dp_ranks:
        assert kept == saved & {t.index for t in started[done:]}, (
            "what obeyed the rules does so still"
        )
    deadlines = {t.index: t.deadline for t in started}
    assert resumed.reconcile(finished) == set(finished)
    for _ in range(8):
        unfinished = [t.index for t in resumed.start(100, resumed.step)]
        assert not kept & set(unfinished), "a ticket that goes on is not started again"
        resumed.finish(unfinished + sorted(kept))
        step = resumed.step
        going_on = kept
        kept = set()
        while (taken := resumed.take(resumed.step)) is not None:
            assert all(deadlines[t] >= step for t in going_on & set(taken)), "trained on in time"
            step, consumed = resumed.step, consumed + taken
    assert len(consumed) == len(set(consumed))
    assert set(range(max(consumed, default=-1) - 16)) <= set(consumed)


def test_without_the_wish_saved_completions_start_again():
    ledger = TicketLedger(groups_per_step=2, max_lag=1, overcommit=2)
    ledger.start(4, 0)
    resumed = TicketLedger(groups_per_step=2, max_lag=1, overcommit=2)
    resumed.load_state_dict(ledger.state_dict(), {0, 1, 2, 3})
    assert resumed.in_work() == set() and [t.index for t in resumed.start(10, 0)] == [0, 1, 2, 3]


def test_a_saved_ticket_that_could_not_be_trained_on_in_time_starts_again():
    def make(dp_ranks):
        return TicketLedger(
            groups_per_step=2, max_lag=0, overcommit=0, num_pools=dp_ranks, resume_in_work=True
        )

    ledger = make(1)
    ledger.start(2, 0)
    state = ledger.state_dict()
    state["in_work"] = [[0, 0], [1, -1]]  # 1 was due a step ago
    resumed = make(1)
    resumed.load_state_dict(state, {0, 1})
    assert resumed.in_work() == {0} and [t.index for t in resumed.start(10, 0)] == [1]
    crowded = make(2)
    crowded.load_state_dict(state | {"in_work": [[0, 0], [2, 0]], "again": [0, 1, 2]}, {0, 2})
    assert crowded.in_work() == {0}, (
        "a data-parallel rank that trains on one group a step has no room for two of one deadline"
    )


def test_tickets_of_a_lost_generator_start_again_before_new_ones_with_new_deadlines():
    ledger = TicketLedger(groups_per_step=2, max_lag=1, overcommit=2)
    assert [t.index for t in ledger.start(4, 0)] == [0, 1, 2, 3]
    ledger.finish([0, 1])
    assert sorted(ledger.take(0)) == [0, 1]
    ledger.finish([2])
    ledger.start_again([3])
    assert ledger.in_work() == set()
    assert [(t.index, t.deadline) for t in ledger.start(10, 1)] == [(3, 2), (4, 2), (5, 2)]
    ledger.finish([3])
    assert sorted(ledger.take(1)) == [2, 3]
    for ticket in (2, 3, 9):  # trained on, or never started
        with pytest.raises(ValueError, match=f"ticket {ticket} is to start again"):
            ledger.start_again([ticket])
    ledger.finish([4])
    with pytest.raises(ValueError, match="ticket 4"):
        ledger.start_again([4])


def test_finished_groups_whose_data_is_lost_start_again():
    ledger = TicketLedger(groups_per_step=2, max_lag=1, overcommit=2)
    ledger.start(4, 0)
    ledger.finish([0, 1, 2])
    state = ledger.state_dict()
    resumed = TicketLedger(groups_per_step=2, max_lag=1, overcommit=2)
    resumed.load_state_dict(state)
    assert resumed.reconcile([1]) == {1}
    assert [t.index for t in resumed.start(10, 0)][:3] == [0, 2, 3]


def test_a_ticket_cannot_finish_twice_or_unstarted():
    ledger = TicketLedger(groups_per_step=1, max_lag=0, overcommit=0)
    with pytest.raises(ValueError, match="not in work"):
        ledger.finish([0])
    ledger.start(1, 0)
    ledger.finish([0])
    with pytest.raises(ValueError, match="not in work"):
        ledger.finish([0])


@pytest.mark.parametrize("kind", sorted(GOVERNORS))
def test_a_resumed_governor_goes_on_as_if_nothing_had_been(kind):
    def make():
        return TicketLedger(
            groups_per_step=8, max_lag=4, overcommit=kind, constants=Constants(window=3, increase=2)
        )

    def go_on(ledger, steps):
        values = []
        for step in steps:
            ledger.finish([t.index for t in ledger.start(8, step)])
            assert ledger.take(step, waited=step % 3 > 0) is not None
            ledger.trained((step * 7 % 5) / 5)
            values.append(ledger.overcommit)
        return values

    whole = make()
    want = go_on(whole, range(20))
    assert len(set(want)) > 1, "it never moved"
    for cut in (1, 4, 11):
        first, second = make(), make()
        go_on(first, range(cut))
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert go_on(second, range(cut, 20)) == want[cut:]


class Numbers:
    num_train = 7

    def train_prompt(self, i):
        return i


@given(st.integers(0, 5), st.integers(0, 4))
def test_a_prompt_stream_is_a_permutation_an_epoch_and_a_pure_function(seed, epoch):
    stream = PromptStream(Numbers(), seed)
    tickets = range(epoch * 7, epoch * 7 + 7)
    assert sorted(stream[t] for t in tickets) == list(range(7))
    assert [stream[t] for t in tickets] == [PromptStream(Numbers(), seed)[t] for t in tickets]


@given(st.integers(1, 8))
def test_every_rank_gets_one_ticket_in_n(n):
    assert sorted(dp_rank_of(t, n) for t in range(n)) == list(range(n))
