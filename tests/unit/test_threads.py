"""A trial of threads keeps what was measured to be faster, and nothing else."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llamarl.machine.threads import GAIN, REST, ROUNDS, STEPS, ThreadTrial, trial_of_threads

ONE = 1
TWO = 2
FOUR = 4
BOTH = (ONE, TWO)
TRIAL = (
    STEPS + 2 * ROUNDS * STEPS
)  # steps until the first decision, where both are tried to the end
SHORT = STEPS - 1  # steps with a number that was slower in the two that are counted


def threads_of(trial: ThreadTrial, seconds: dict[int, float], steps: int) -> list[int]:
    """Return the threads of so many steps, each of which takes what they take."""
    used = []
    for _ in range(steps):
        used.append(trial.threads)
        trial.step_took(seconds[trial.threads])
    return used


def test_more_threads_stay_where_they_are_faster():
    trial = ThreadTrial(BOTH)
    used = threads_of(trial, {ONE: 3.1, TWO: 2.5}, TRIAL)
    assert used == [ONE] * STEPS + ([ONE] * STEPS + [TWO] * STEPS) * ROUNDS
    assert threads_of(trial, {ONE: 3.1, TWO: 2.5}, REST) == [TWO] * REST
    # What was faster is tried again.
    again = threads_of(trial, {ONE: 3.1, TWO: 4.0}, STEPS + SHORT + 1)
    assert again == [ONE] * STEPS + [TWO] * SHORT + [ONE]


@pytest.mark.parametrize("share", [1.0, 1 - GAIN / 2, 1.2])
def test_a_gain_that_is_too_small_changes_nothing_and_is_looked_for_more_and_more_seldom(share):
    trial = ThreadTrial((2, 8))
    seconds = {2: 1.0, 8: share}
    threads_of(trial, seconds, STEPS)
    for times in (1, 2, 4):
        assert threads_of(trial, seconds, STEPS + SHORT) == [2] * STEPS + [8] * SHORT
        assert threads_of(trial, seconds, times * REST) == [2] * times * REST


def test_of_several_the_fastest_stays_and_one_that_is_slower_costs_few_steps():
    trial = ThreadTrial((ONE, TWO, FOUR))
    seconds = {ONE: 1.0, TWO: 1.1, FOUR: 0.8}
    first = [ONE] * STEPS + [TWO] * SHORT + [FOUR] * STEPS
    second = [ONE] * STEPS + [FOUR] * STEPS
    assert threads_of(trial, seconds, STEPS + len(first + second)) == [
        *([ONE] * STEPS),
        *first,
        *second,
    ]
    assert trial.threads == FOUR
    threads_of(trial, seconds, REST)
    seconds = {ONE: 1.0, TWO: 0.7, FOUR: 0.8}
    threads_of(trial, seconds, 3 * STEPS * ROUNDS)
    assert trial.threads == TWO


def test_one_round_that_saw_no_gain_decides():
    trial = ThreadTrial(BOTH)
    threads_of(trial, {ONE: 1.0, TWO: 0.5}, STEPS + 2 * STEPS)
    threads_of(trial, {ONE: 1.0, TWO: 1.1}, STEPS + SHORT)
    assert threads_of(trial, {ONE: 1.0, TWO: 0.5}, REST) == [ONE] * REST


def test_one_slow_step_of_a_round_does_not_decide():
    trial = ThreadTrial(BOTH)
    for step in range(TRIAL):
        is_slow = trial.threads == TWO and step % STEPS == 2
        trial.step_took(9.0 if is_slow else {ONE: 1.0, TWO: 0.8}[trial.threads])
    assert trial.threads == TWO


@given(threads=st.integers(1, 64), steps=st.integers(0, 300))
def test_a_single_number_is_kept(threads, steps):
    trial = ThreadTrial((threads,))
    assert set(threads_of(trial, {threads: 1.0}, steps)) <= {threads}


@pytest.mark.parametrize("numbers", [(), (0,), (2, 0)])
def test_what_cannot_be_is_refused(numbers):
    with pytest.raises(ValueError, match="at least one, each at least 1"):
        ThreadTrial(numbers)


@pytest.mark.parametrize(
    ("threads", "cores", "numbers"), [(1, 2, (1, 2)), (1, 1, (1,)), (2, 4, (2, 4)), (4, 2, (4,))]
)
def test_what_a_rank_tries(monkeypatch, threads, cores, numbers):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert trial_of_threads().numbers == numbers
