"""Rewards that float32 does not tell apart are warned of."""

import logging

import pytest
import torch

from llamarl.scoring.assembly import Groups
from llamarl.types import Completion, Outcome


def said_of(caplog, *rewards_of):
    """The warnings over groups of rewards, which are joined one after another."""
    groups = Groups("mine", group_size=3)
    with caplog.at_level(logging.WARNING):
        for ticket, rewards in enumerate(rewards_of):
            for sample, reward in enumerate(rewards):
                one = torch.zeros(1, dtype=torch.int64)
                completion = Completion(ticket, sample, one, one, torch.zeros(1), one, "stop")
                outcome = Outcome.abstain("no") if reward is None else Outcome.score(reward)
                whole = groups.add(completion, outcome)
            assert whole is not None and whole.ticket == ticket
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    "rewards",
    [
        (2.0**24, None, 2.0**24 + 3),  # 4 apart there
        (1e9 + 0.1, 1e9 + 0.2, 1e9 + 10),
    ],
)
def test_rewards_that_float32_rounds_by_what_they_differ_by_are_warned_of_once(caplog, rewards):
    (said,) = said_of(caplog, (0.0, 1.0, 0.0), rewards, rewards)
    assert "reward mine: the rewards of ticket 1 are from " in said
    assert "Subtract a constant" in said


@pytest.mark.parametrize(
    "rewards",
    [
        (2.0**24, 2.0**24 + 2, 2.0**24 + 4),
        (0.1 + 0.2, 0.3, 0.3),  # rounding alone
        (None, None, None),
    ],
)
def test_rewards_that_float32_tells_apart_are_not(caplog, rewards):
    assert not said_of(caplog, rewards)
