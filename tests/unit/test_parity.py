"""Canaries: what travels, which prompts they are, and what does not pass."""

import json
from types import SimpleNamespace

import pytest
import torch

from llamarl.errors import ParityError
from llamarl.models.parity import (
    FIRST_PROMPTS,
    FIRST_TOKENS,
    LATER_SCORED,
    LATER_TOKENS,
    Canary,
    Sequence,
    canary_sequences,
    check_canary,
)

NAN, INF = float("nan"), float("inf")


def canary_of(*logprobs: float) -> Canary:
    return Canary([Sequence(list(range(len(logprobs) + 1)), 1)], list(logprobs), [], [])


def check(canary, got, tolerance=0.01):
    return check_canary(canary, torch.tensor(got), version=7, rank=3, tolerance=tolerance)


def test_a_canary_survives_json():
    canary = Canary(
        [Sequence([1, 5, 9], 1), Sequence([4, 4], 1)],
        [-0.1, -2.5, -1e-9],
        [[3, 1]],
        [[-0.5, -1.25]],
    )
    assert Canary.from_json(json.loads(json.dumps(canary.to_json()))) == canary


def test_the_largest_difference_counts():
    assert check(canary_of(-1.0, -2.0, -3.0), [-1.0, -2.125, -3.0625], tolerance=0.125) == 0.125
    with pytest.raises(ParityError, match=r"rank 3 .* differ by 0.125 .* version 7, more than 0.1"):
        check(canary_of(-1.0, -2.0, -3.0), [-1.0, -2.125, -3.0625], tolerance=0.1)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
def test_what_is_not_a_number_does_not_pass_wherever_it_stands(place, wrong):
    right = [-1.0, -2.0, -3.0]
    broken = [wrong if i == place else x for i, x in enumerate(right)]
    for trainers, generators in ((right, broken), (broken, right), (broken, broken)):
        with pytest.raises(ParityError):
            check(canary_of(*trainers), generators, tolerance=1e6)


def test_another_number_of_tokens_is_a_mistake_not_a_difference():
    with pytest.raises(ValueError):
        check(canary_of(-1.0, -2.0), [-1.0])


def prompts_of(*lengths: int):
    return [SimpleNamespace(prompt_ids=torch.arange(n) + 100 * i) for i, n in enumerate(lengths)]


def test_a_run_starts_with_its_first_prompts_whole():
    sequences = canary_sequences(prompts_of(5, FIRST_TOKENS + 9, 1, 2, 8), first=True)
    assert FIRST_PROMPTS == 4
    assert [s.token_ids for s in sequences] == [
        list(range(5)),
        list(range(100, 100 + FIRST_TOKENS)),
        [300, 301],
    ]
    assert {s.given for s in sequences} == {1}


@pytest.mark.parametrize(
    "length, given",
    [(LATER_TOKENS + 5, LATER_TOKENS - LATER_SCORED), (LATER_SCORED + 2, 2), (3, 1), (2, 1)],
)
def test_later_versions_score_the_end_of_one_prompt(length, given):
    (sequence,) = canary_sequences(prompts_of(length, 50), first=False)
    assert sequence == Sequence(list(range(min(length, LATER_TOKENS))), given)


def test_prompts_too_short_to_score_have_a_substitute():
    assert (
        canary_sequences(prompts_of(1, 1, 1, 1), first=True)
        == canary_sequences(prompts_of(1), first=False)
        == [Sequence([0, 0], 1)]
    )
