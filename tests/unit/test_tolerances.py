"""What tests compare with: roundings pass, and what is more than a rounding does not."""

import pytest
import torch

from tests.tolerances import (
    assert_same_count,
    assert_same_greedy,
    assert_same_ranking,
    first_difference,
    margins_of,
    rounding,
)


@pytest.mark.parametrize("terms", [16, 192, 2048])
def test_float32_sums_in_another_order_are_within_and_bfloat16_products_are_not(terms):
    random = torch.Generator().manual_seed(terms)
    a, b = torch.randn(64, terms, generator=random), torch.randn(terms, 64, generator=random)
    size = terms**0.5  # how the results deviate
    order = torch.randperm(terms, generator=random)
    exact = a.double() @ b.double()
    other = sum(a[:, i, None] * b[i] for i in order.tolist())
    allowed = rounding(terms=terms, size=size)
    assert (other - exact).abs().max() < allowed
    assert (a.bfloat16().double() @ b.bfloat16().double() - exact).abs().max() > 10 * allowed


def test_greedy_completions_are_compared_up_to_the_first_near_tie():
    margins = margins_of(torch.tensor([[0.0, 1.0], [1.0, 1.0 + 1e-6], [3.0, 0.0]]))
    ours, theirs = torch.tensor([1, 0, 0]), torch.tensor([1, 1, 0])
    assert assert_same_greedy(ours, theirs, margins, 1e-5) == 1
    assert assert_same_greedy(theirs, theirs, margins, 1e-5) == 3
    with pytest.raises(AssertionError, match="place 1: .* likelier by"):
        assert_same_greedy(ours, theirs, margins, 1e-8)


def test_a_completion_that_ends_elsewhere_is_another_one():
    margins = torch.ones(3)
    with pytest.raises(AssertionError, match="place 2"):
        assert_same_greedy(torch.tensor([1, 2]), torch.tensor([1, 2, 3]), margins, 1e-5)
    with pytest.raises(AssertionError, match="goes on after"):
        assert_same_greedy(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3]), margins, 1e-5)
    assert first_difference(torch.tensor([1, 2]), torch.tensor([1, 2, 3])) == 2


def test_a_ranking_is_right_in_either_order_of_a_near_tie():
    values = torch.tensor([0.5, 2.0, 2.0 + 1e-6, -1.0])
    assert_same_ranking([2, 1, 0], values, 1e-5)
    assert_same_ranking([1, 2, 0], values, 1e-5)
    for wrong in ([0, 1, 2], [1, 2, 3]):
        with pytest.raises(AssertionError):
            assert_same_ranking(wrong, values, 1e-5)
    with pytest.raises(AssertionError, match="repeats"):
        assert_same_ranking([1, 1, 0], values, 1e-5)


def test_a_count_lies_between_those_of_a_moved_threshold():
    values = torch.tensor([0.1, 0.2 + 1e-7, 0.3])
    counts = {"stricter": int((values > 0.2 + 1e-6).sum()), "looser": int((values > 0.2).sum())}
    for either in (1, 2):
        assert_same_count(either, **counts, what="past 0.2")
    for wrong in (0, 3):
        with pytest.raises(AssertionError, match=f"past 0.2: {wrong}, not 1 to 2"):
            assert_same_count(wrong, **counts, what="past 0.2")
