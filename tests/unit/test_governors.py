"""The rules that choose overcommit, by hand arithmetic from where they are published."""

import math
from dataclasses import replace

import pytest

from llamarl.config.command_line import compose_config
from llamarl.tickets.governors import (
    DEFAULTS,
    GOVERNORS,
    AutoGovernor,
    OppoGovernor,
    WindowGovernor,
)


def values_after(governor, rewards):
    out = []
    for reward in rewards:
        governor.trained(reward)
        out.append(governor.value)
    return out


def assert_values(governor, steps):
    """steps: (reward, the value after it)."""
    rewards, values = zip(*steps)
    assert values_after(governor, rewards) == list(values)


def test_auto_grows_while_the_trainer_waits_and_shrinks_while_groups_queue():
    governor = AutoGovernor(groups_per_step=16, max_lag=4)
    assert governor.value == 8
    governor.taken(waited=True, num_finished=7)
    assert governor.value == 10  # an eighth of 16
    governor.taken(waited=False, num_finished=7)
    assert governor.value == 10
    governor.taken(waited=True, num_finished=8)  # half a batch queues
    assert governor.value == 8
    for _ in range(100):
        governor.taken(waited=True, num_finished=0)
    assert governor.value == 64
    for _ in range(100):
        governor.taken(waited=False, num_finished=16)
    assert governor.value == 0


def test_the_numbers_of_a_ledger_that_is_given_none_are_those_of_a_configuration():
    assert compose_config([]).governor == DEFAULTS


def test_oppo_is_equation_4():
    given = {"start": 4, "least": 1, "most": 9, "window": 2, "increase": 3, "decrease": 2}
    governor = OppoGovernor(8, 4, replace(DEFAULTS, **given))
    # s_t = ((R_{t-1} - R_{t-2}) + (R_t - R_{t-1})) / 2
    steps = [
        (0.1, 4),  # no two differences yet
        (0.5, 4),
        (0.3, 7),  # (0.4 - 0.2) / 2 = 0.1
        (0.5, 5),  # (-0.2 + 0.2) / 2 = 0: not above
        (0.4, 8),  # (0.2 - 0.1) / 2 = 0.05
        (0.9, 9),  # (-0.1 + 0.5) / 2 = 0.2; 11 is above most
        (0.3, 7),  # (0.5 - 0.6) / 2 = -0.05
        (0.2, 5),
        (0.1, 3),
        (0.0, 1),
        (0.0, 1),  # least
    ]
    assert_values(governor, steps)
    converging = OppoGovernor(8, 4, replace(DEFAULTS, start=5, window=3))
    assert values_after(converging, [0.7] * 12) == [5, 5, 5, 4, 3, 2, 1, 0, 0, 0, 0, 0]


def test_window_is_algorithm_1():
    governor = WindowGovernor(8, 4, replace(DEFAULTS, start=9, least=2, most=10, window=2))
    steps = [
        (1.0, 9),
        (1.0, 9),
        (2.0, 9),
        (2.0, 7),  # d = 2 - 1: 9 - max(1, floor(9 / 4))
        (2.0, 7),  # 2, 2, 2: fewer than 2W since the two that were kept
        (2.0, 7),  # d = 0
        (1.0, 7),
        (0.0, 8),  # d = 0.5 - 2: 7 + max(1, floor(7 / 4))
        (0.0, 8),
        (0.0, 10),  # d = 0 - 0.5: 8 + 2
        (-1.0, 10),
        (-1.0, 10),  # 12 is above most
    ]
    assert_values(governor, steps)
    # It moves by one where a quarter is less, and stops at the least.
    small = WindowGovernor(8, 4, replace(DEFAULTS, start=3, least=1, window=1))
    assert values_after(small, [0, 1, 2, 3, 4]) == [3, 2, 1, 1, 1]


@pytest.mark.parametrize("kind", sorted(GOVERNORS))
def test_every_rule_stays_within_its_bounds_and_learns_nothing_of_a_step_without_a_reward(kind):
    make = GOVERNORS[kind]
    synchronous = make(8, 0, DEFAULTS)
    wide = make(8, 2, replace(DEFAULTS, most=10**6, window=1, increase=100))
    for i in range(60):
        for governor in (synchronous, wide):
            governor.taken(waited=True, num_finished=0)
            governor.trained(-i if kind == "window" else i)
    assert synchronous.value == 0 and wide.value == 16  # two batches
    resumed = make(8, 4, replace(DEFAULTS, most=6))
    resumed.resume(30, [0.5])
    assert resumed.value == 6, "of a checkpoint of wider bounds"
    governor = make(8, 4, replace(DEFAULTS, window=1))
    governor.trained(1.0)
    before = governor.value, list(governor.rewards)
    governor.trained(math.nan)
    assert (governor.value, governor.rewards) == before
