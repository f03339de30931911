"""The fifo buffer holds each group to the bound on its age when a step takes it."""

import pytest
import torch

from llamarl.errors import LagExceeded
from llamarl.learning.buffer import GroupBuffer
from llamarl.types import Completion, Group, Outcome


def group(ticket: int, *completions: list[int]) -> Group:
    """Of completions whose tokens are of these versions."""
    scored = []
    for i, versions in enumerate(completions):
        ids = torch.arange(len(versions))
        fresh = Completion(
            ticket=ticket,
            sample_index=i,
            prompt_ids=torch.arange(3),
            token_ids=ids,
            generator_logprobs=torch.zeros(len(ids)),
            policy_versions=torch.tensor(versions, dtype=torch.int64),
            finish_reason="stop",
        )
        scored.append((fresh, Outcome.score(1.0)))
    return Group.of(scored)


def holding(max_lag, *groups: Group) -> GroupBuffer:
    buffer = GroupBuffer(max_lag)
    buffer.put(list(groups))
    return buffer


def test_a_group_as_old_as_the_bound_allows_is_taken():
    taken = holding(2, group(7, [5, 6, 7], [7]), group(3, [], [6])).take([7, 3], 7)
    assert [g.ticket for g in taken] == [3, 7]


def test_a_group_with_one_token_that_is_too_old_ends_the_run_and_is_named():
    buffer = holding(2, group(3, [8, 8], [8]), group(7, [7, 8], [8, 8], [4, 6]))
    with pytest.raises(LagExceeded) as error:
        buffer.take([3, 7], 8)
    want = (
        "step 8 was to train on ticket 7, whose tokens are of versions 4 to 8: with max_lag=2 "
        "none may be older than version 6."
    )
    assert str(error.value).startswith(want)
    assert "error in llamarl" in str(error.value) and "please report it" in str(error.value)
    assert buffer.tickets() == [3, 7], "nothing was taken"


def test_without_a_bound_any_age_is_taken():
    assert len(holding(None, group(7, [0], [0])).take([7], 1000)) == 1
