"""A trial of threads keeps what was measured to be faster, and nothing else."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llamarl.native.threads import GAIN, REST, ROUNDS, STEPS, Crew, ThreadTrial, trial_of

ONE = Crew(1)
HELPED = Crew(1, has_helper=True)
TWO = Crew(2)
BOTH = (ONE, TWO)
TRIAL = (
    STEPS + 2 * ROUNDS * STEPS
)  # steps until the first decision, where both are tried to the end
SHORT = STEPS - 1  # steps with a crew that was slower in the two that are counted


def crews_of(trial: ThreadTrial, seconds: dict[Crew, float], steps: int) -> list[Crew]:
    """Return the crews of so many steps, each of which takes what its crew takes."""
    used = []
    for _ in range(steps):
        used.append(trial.crew)
        trial.step_took(seconds[trial.crew])
    return used


def test_more_threads_stay_where_they_are_faster():
    trial = ThreadTrial(BOTH)
    used = crews_of(trial, {ONE: 3.1, TWO: 2.5}, TRIAL)
    assert used == [ONE] * STEPS + ([ONE] * STEPS + [TWO] * STEPS) * ROUNDS
    assert crews_of(trial, {ONE: 3.1, TWO: 2.5}, REST) == [TWO] * REST
    # What was faster is tried again.
    again = crews_of(trial, {ONE: 3.1, TWO: 4.0}, STEPS + SHORT + 1)
    assert again == [ONE] * STEPS + [TWO] * SHORT + [ONE]


@pytest.mark.parametrize("share", [1.0, 1 - GAIN / 2, 1.2])
def test_a_gain_that_is_too_small_changes_nothing_and_is_looked_for_more_and_more_seldom(share):
    trial = ThreadTrial((Crew(2), Crew(8)))
    seconds = {Crew(2): 1.0, Crew(8): share}
    crews_of(trial, seconds, STEPS)
    for times in (1, 2, 4):
        assert crews_of(trial, seconds, STEPS + SHORT) == [Crew(2)] * STEPS + [Crew(8)] * SHORT
        assert crews_of(trial, seconds, times * REST) == [Crew(2)] * times * REST


def test_of_several_the_fastest_stays_and_one_that_is_slower_costs_few_steps():
    trial = ThreadTrial((HELPED, ONE, TWO))
    seconds = {HELPED: 1.0, ONE: 1.1, TWO: 0.8}
    first = [HELPED] * STEPS + [ONE] * SHORT + [TWO] * STEPS
    second = [HELPED] * STEPS + [TWO] * STEPS
    assert crews_of(trial, seconds, STEPS + len(first + second)) == [
        *([HELPED] * STEPS),
        *first,
        *second,
    ]
    assert trial.crew == TWO
    crews_of(trial, seconds, REST)
    seconds = {HELPED: 1.0, ONE: 0.7, TWO: 0.8}
    crews_of(trial, seconds, 3 * STEPS * ROUNDS)
    assert trial.crew == ONE


def test_one_round_that_saw_no_gain_decides():
    trial = ThreadTrial(BOTH)
    crews_of(trial, {ONE: 1.0, TWO: 0.5}, STEPS + 2 * STEPS)
    crews_of(trial, {ONE: 1.0, TWO: 1.1}, STEPS + SHORT)
    assert crews_of(trial, {ONE: 1.0, TWO: 0.5}, REST) == [ONE] * REST


def test_one_slow_step_of_a_round_does_not_decide():
    trial = ThreadTrial(BOTH)
    for step in range(TRIAL):
        is_slow = trial.crew == TWO and step % STEPS == 2
        trial.step_took(9.0 if is_slow else {ONE: 1.0, TWO: 0.8}[trial.crew])
    assert trial.crew == TWO


@given(threads=st.integers(1, 64), steps=st.integers(0, 300))
def test_where_there_is_one_crew_nothing_is_tried(threads, steps):
    crew = Crew(threads)
    trial = ThreadTrial((crew,))
    assert set(crews_of(trial, {crew: 1.0}, steps)) <= {crew}


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="threads=0"):
        Crew(0)
    with pytest.raises(ValueError, match="no crews"):
        ThreadTrial(())


@pytest.mark.parametrize(
    ("threads", "cores", "is_fixed", "may_have_helper", "crews"),
    [
        (1, 2, False, True, (HELPED, ONE, TWO)),
        (1, 2, False, False, (ONE, TWO)),
        (1, 2, True, True, (HELPED,)),
        (1, 1, False, True, (ONE,)),
        (2, 4, False, True, (TWO, Crew(4))),
        (2, 4, True, True, (TWO,)),
    ],
)
def test_what_a_rank_tries(monkeypatch, threads, cores, is_fixed, may_have_helper, crews):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert trial_of(is_fixed=is_fixed, may_have_helper=may_have_helper).crews == crews
