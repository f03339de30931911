"""Groups of equal outcomes that are given back: the rules hold, and each ticket ends once."""

import json
import math
import random
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.comm.control import Control
from llamarl.learning.buffer import GroupBuffer
from llamarl.learning.targets import verdict_of
from llamarl.tickets.ledger import TicketLedger
from llamarl.tickets.pool import in_time
from llamarl.tickets.service import TicketService
from llamarl.types import Group, Verdict

TEACHES = Verdict(num_scored=4, total=1.0, teaches=True, solved=1.0)
EQUAL = Verdict(num_scored=4, total=0.0, teaches=False, solved=0.0)


def ledger(**changes):
    settings = {"groups_per_step": 4, "max_lag": 1, "overcommit": 2, "max_refill": 2}
    return TicketLedger(**{**settings, **changes})


def verdicts_of(tickets, equal):
    return {ticket: EQUAL if ticket in equal else TEACHES for ticket in tickets}


def indices(tickets):
    return [ticket.index for ticket in tickets]


def test_an_equal_group_is_given_back_and_another_ticket_starts_in_its_place():
    ours = ledger()
    assert indices(ours.start(10, 0)) == [0, 1, 2, 3, 4, 5]
    assert ours.start(1, 0) == []
    assert ours.finish([0, 1], verdicts_of([0, 1], equal={1})) == [1]
    assert indices(ours.start(10, 0)) == [6]
    ours.finish([2, 3], verdicts_of([2, 3], equal=set()))
    assert ours.take(0) is None, "three that teach are no batch"
    ours.finish([6], {6: TEACHES})
    assert ours.take(0) == [0, 2, 3, 6]
    made_of = ours.newest_yield
    assert (made_of.given_back, made_of.kept_equal, made_of.teaching) == (1, 0, 4)
    assert made_of.teaching_fraction == 4 / 5
    assert made_of.mean_outcome == 4 / 20


def test_a_ticket_that_was_given_back_can_neither_finish_again_nor_start_again():
    ours = ledger()
    ours.start(6, 0)
    ours.finish([3], {3: EQUAL})
    with pytest.raises(ValueError, match="ticket 3 finished, but it is not in work"):
        ours.finish([3], {3: EQUAL})
    with pytest.raises(ValueError, match="ticket 3 is to start again"):
        ours.start_again([3])


def test_without_refills_and_without_a_verdict_every_group_is_kept():
    plain = ledger(max_refill=0)
    plain.start(6, 0)
    assert plain.finish([0, 1, 2, 3], verdicts_of(range(4), equal={0, 1, 2, 3})) == []
    assert plain.take(0) == [0, 1, 2, 3]
    assert plain.newest_yield.kept_equal == 4
    unknown = ledger()
    unknown.start(6, 0)
    assert unknown.finish([0, 1, 2, 3]) == []


def test_beyond_the_bound_a_batch_is_completed_with_what_there_is():
    ours = ledger(max_refill=1)
    num_given_back = 0
    while (taken := ours.take(0)) is None:
        started = indices(ours.start(10, 0))
        num_given_back += len(ours.finish(started, verdicts_of(started, equal=set(started))))
    assert num_given_back == 4
    assert len(taken) == 4
    made_of = ours.newest_yield
    assert (made_of.given_back, made_of.kept_equal, made_of.teaching) == (4, 4, 0)
    # The next step has a bound of its own, also for what was kept and not taken.
    assert [ticket for ticket, _ in ours.state_dict()["finished"]] == [8, 9]
    assert indices(ours.start(10, 1)) == [10, 11, 12, 13]
    assert ours.finish([10], {10: TEACHES}) == [8, 9]


def test_a_step_that_is_given_up_has_given_back_what_it_had():
    ours = ledger(max_refill=1)
    ours.start(6, 0)
    ours.finish([0, 1, 2], verdicts_of(range(3), equal={0, 1, 2}))
    ours.start(3, 0)
    ours.finish([3, 4, 5, 6], verdicts_of([3, 4, 5, 6], equal={6}))
    ours.finish([7], {7: EQUAL})
    assert ours.take(0) == [3, 4, 5, 7]
    ours.untake(0)
    before = ours.state_dict()
    assert len(before["given_back"][0]) == 4
    assert ours.take(0) == [3, 4, 5, 7]
    assert (ours.newest_yield.given_back, ours.newest_yield.kept_equal) == (4, 1)


def test_groups_that_were_given_back_are_counted_once_after_a_resume_with_more_trainer_ranks():
    ours = ledger()
    ours.start(6, 0)
    assert ours.finish([0, 1, 2], verdicts_of([0, 1, 2], equal={0, 1, 2})) == [0, 1, 2]
    again = ledger(num_pools=2)
    again.load_state_dict(json.loads(json.dumps(ours.state_dict())))
    assert [len(of_pool) for of_pool in again.state_dict()["given_back"]] == [2, 1]


def test_in_a_synchronous_run_nothing_is_given_back_before_its_batch_is_finished():
    ours = ledger(max_lag=0, overcommit=0)
    ours.start(10, 0)
    assert ours.finish([1], {1: EQUAL}) == []
    assert ours.finish([3, 0], verdicts_of([3, 0], equal={3})) == []
    assert ours.start(10, 0) == []
    assert ours.finish([2], {2: TEACHES}) == [1, 3]
    assert indices(ours.start(10, 0)) == [4, 5]


def synchronous_run(seed, *, B, dp_ranks, generators, equal, max_refill, num_steps, kill_at=None):
    """Return (tickets of each step, tickets that started together, in order): ranks ask and work
    ends in an order that the seed draws; at the event `kill_at` the ledger is resumed.
    """
    rng = random.Random(seed)

    def make():
        return ledger(
            groups_per_step=B * dp_ranks,
            max_lag=0,
            overcommit=0,
            num_pools=dp_ranks,
            num_generators=generators,
            max_refill=max_refill,
        )

    ours = make()
    steps = []
    waves = []
    working = []
    wave = []
    for event in range(100_000):
        if event == kill_at:
            state = json.loads(json.dumps(ours.state_dict()))
            finished = {ticket for ticket, _ in state["finished"]}
            ours = make()
            ours.load_state_dict(state)
            assert ours.reconcile(sorted(finished)) == finished
            working = []
        asked = list(range(generators))
        rng.shuffle(asked)
        for generator in asked[: rng.randint(0, generators)]:
            granted = indices(ours.start(rng.randint(1, 3), ours.step, generator))
            assert all(ticket // dp_ranks % generators == generator for ticket in granted)
            working += granted
            wave += granted
        rng.shuffle(working)
        ending = [working.pop() for _ in range(min(len(working), rng.randint(0, 2)))]
        if ours.finish(ending, verdicts_of(ending, equal)):
            assert not working, "a part of a batch was still sampled"
            waves.append(sorted(wave))
            wave = []
        if (taken := ours.take(ours.step)) is not None:
            assert not working
            waves.append(sorted(wave))
            wave = []
            steps.append(sorted(taken))
            if len(steps) == num_steps:
                return steps, waves
    raise AssertionError("it got stuck")


@settings(max_examples=60)
@given(
    B=st.integers(1, 4),
    dp_ranks=st.integers(1, 3),
    generators=st.integers(1, 3),
    equal=st.sets(st.integers(0, 60)),
    max_refill=st.integers(1, 3),
    seeds=st.tuples(st.integers(0, 99), st.integers(100, 199)),
)
def test_a_synchronous_batch_is_the_first_that_teach_and_no_timing_changes_what_is_sampled_together(
    B, dp_ranks, generators, equal, max_refill, seeds
):
    sizes = dict(B=B, dp_ranks=dp_ranks, generators=generators, num_steps=3)
    runs = [synchronous_run(seed, **sizes, equal=equal, max_refill=max_refill) for seed in seeds]
    assert runs[0] == runs[1]
    # With room for all, a rank's batches are its first tickets that teach, B at a time.
    steps, _ = synchronous_run(seeds[0], **sizes, equal=equal, max_refill=100)
    for rank in range(dp_ranks):
        teaching = [t for t in range(rank, 1000, dp_ranks) if t not in equal]
        own = [t for t in chain.from_iterable(steps) if t % dp_ranks == rank]
        assert own == teaching[: 3 * B]


@settings(max_examples=60)
@given(
    dp_ranks=st.integers(1, 2),
    generators=st.integers(1, 3),
    equal=st.sets(st.integers(0, 40)),
    max_refill=st.integers(1, 2),
    kill_at=st.integers(0, 40),
)
def test_a_synchronous_run_that_is_resumed_anywhere_has_the_same_batches(
    dp_ranks, generators, equal, max_refill, kill_at
):
    run = dict(B=2, dp_ranks=dp_ranks, generators=generators, equal=equal, max_refill=max_refill)
    through, _ = synchronous_run(5, **run, num_steps=4)
    resumed, _ = synchronous_run(5, **run, num_steps=4, kill_at=kill_at)
    assert resumed == through


@settings(max_examples=150)
@given(
    B=st.integers(1, 4),
    max_lag=st.integers(0, 4),
    overcommit=st.integers(0, 8),
    dp_ranks=st.integers(1, 3),
    max_refill=st.integers(1, 3),
    equal_percent=st.sampled_from([0, 30, 80, 100]),
    rolls=st.lists(st.integers(0, 10**6), min_size=20, max_size=150),
)
def test_random_schedules_keep_the_bound_end_each_ticket_once_and_come_to_every_step(
    B, max_lag, overcommit, dp_ranks, max_refill, equal_percent, rolls
):
    settings = dict(
        groups_per_step=B * dp_ranks,
        max_lag=max_lag,
        overcommit=overcommit if max_lag else 0,
        num_pools=dp_ranks,
        resume_in_work=max_lag > 0,
        max_refill=max_refill,
    )
    ours = ledger(**settings)
    version = 0
    working = []
    started_at = {}
    ended = []
    given_back = [0] * dp_ranks  # since the last take
    equal = {t for t in range(5000) if random.Random(t).randrange(100) < equal_percent}

    def finish(tickets):
        for ticket in ours.finish(tickets, verdicts_of(tickets, equal)):
            assert ticket in equal
            given_back[ticket % dp_ranks] += 1
            ended.append(ticket)

    def take():
        taken = ours.take(ours.step)
        if taken is None:
            return
        for ticket in taken:
            assert ours.step - 1 - started_at[ticket] <= max_lag
            is_used_up = given_back[ticket % dp_ranks] == max_refill * B
            assert ticket not in equal or is_used_up or was_used_up[ticket % dp_ranks]
        made_of = ours.newest_yield
        assert made_of.given_back == sum(given_back)
        assert made_of.kept_equal == len(equal.intersection(taken))
        ended.extend(taken)
        for rank in range(dp_ranks):
            # What was kept because of the bound may wait for a later step.
            was_used_up[rank] |= given_back[rank] == max_refill * B
            given_back[rank] = 0

    was_used_up = [False] * dp_ranks
    for roll in rolls:
        action = roll % 5
        if action == 0:
            held = max(0, version - (roll // 5) % 2)
            for ticket in ours.start(1 + roll // 10 % 3, held):
                started_at[ticket.index] = held
                working.append(ticket.index)
        elif action == 1 and working:
            finish([working.pop(roll // 5 % len(working))])
        elif action == 2:
            take()
        elif action == 3:
            version = ours.step
        elif roll % 7 == 0:  # killed and resumed; what was sampled of the others is kept
            state = json.loads(json.dumps(ours.state_dict()))
            ours = ledger(**settings)
            assert ours.load_state_dict(state, frozenset(working)) == []
            if not max_lag:
                working = []
            assert ours.in_work() == set(working)
        for pool in ours._pools:
            due = {d: list(pool.deadlines.values()).count(d) for d in pool.deadlines.values()}
            assert in_time(due, ours.step, B)
            assert len(pool.given_back) <= max_refill * B
    target = ours.step + max_lag + 2
    for _ in range(1000):
        finish(working)
        fresh = ours.start(100, ours.step)
        working = indices(fresh)
        started_at |= dict.fromkeys(working, ours.step)
        take()
        if ours.step >= target:
            break
    assert ours.step >= target
    assert len(ended) == len(set(ended)), "a ticket was given back or trained on twice"


def alone(**changes):
    control = Control(None, rank=0, world_size=1, leader=0, names=["everything"])
    return TicketService(ledger(**changes), control, trainer_ranks=(0,), timeout_s=10.0)


@pytest.mark.parametrize("max_lag", [0, 1])
def test_trainers_are_told_what_is_given_back_and_generators_that_there_is_room(max_lag):
    desk = alone(max_lag=max_lag, overcommit=2 * max_lag)
    started = indices(desk.ask(0, 100, 0))
    assert desk.ask(0, 100, 0) == []
    desk.finish(started, verdicts_of(started, equal={started[1]}))
    assert desk.given_back() == [started[1]]
    assert desk.given_back() == []
    assert indices(desk.ask(0, 100, 0)) == [len(started)]
    row = desk.yield_row()
    assert row == {}, "no step was taken"
    desk.finish([len(started)], {len(started): TEACHES})
    assert desk.take(0) is not None
    row = desk.yield_row()
    assert row["tickets/given_back"] == 1
    assert row["groups/kept_equal"] == 0


def group(rewards, achieved=None, reasons=None, ticket=0):
    size = len(rewards)
    return Group(
        ticket=ticket,
        prompt_ids=torch.tensor([1]),
        lengths=torch.ones(size, dtype=torch.int64),
        token_ids=torch.ones(size, dtype=torch.int64),
        generator_logprobs=torch.zeros(size),
        policy_versions=torch.zeros(size, dtype=torch.int64),
        ref_logprobs=torch.empty(0),
        rewards=torch.tensor(rewards),
        finish_reasons=reasons or ("stop",) * size,
        outcomes=tuple("error" if math.isnan(r) else "score" for r in rewards),
        **({} if achieved is None else {"achieved": torch.tensor(achieved)}),
    )


def test_outcomes_and_not_shaped_scores_say_whether_a_group_teaches():
    nan = float("nan")
    assert verdict_of(group([1.0, 0.0])) == Verdict(2, 1.0, teaches=True, solved=1.0)
    # All failed, and only a penalty on length makes the scores differ.
    shaped = group([-0.1, -0.3], achieved=[0.0, 0.0])
    assert verdict_of(shaped) == Verdict(2, 0.0, teaches=False, solved=0.0)
    # A completion that is not trained on, or was aborted, makes no difference.
    assert not verdict_of(group([1.0, nan])).teaches
    assert not verdict_of(group([1.0, 0.0], reasons=("stop", "aborted"))).teaches
    assert not verdict_of(group([nan, nan])).teaches


def test_each_outcome_beyond_0_and_1_counts_as_solved_or_failed_and_the_total_is_what_it_is():
    said = verdict_of(group([-1.0, 1.0, 10.0, 0.25]))
    assert said == Verdict(num_scored=4, total=10.25, teaches=True, solved=2.25)
    with pytest.raises(ValueError, match="3.0 of 2 completions solved"):
        Verdict(num_scored=2, total=3.0, teaches=True, solved=3.0)


def test_a_group_needs_an_outcome_for_each_reward():
    with pytest.raises(ValueError, match="2 rewards but 1 outcomes"):
        group([1.0, 0.0], achieved=[1.0])


def test_a_buffer_forgets_what_is_given_back():
    buffer = GroupBuffer(1)
    buffer.put([group([1.0, 0.0], ticket=3), group([1.0, 1.0], ticket=4)])
    buffer.drop([4])
    assert buffer.tickets() == [3]
