"""Group advantages: hand arithmetic, then the properties that any rewards must keep."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from llamarl.learning.advantages import ADVANTAGES, group_mean, group_mean_std

NAN = float("nan")
EXACT = 1e-6  # float32 outputs of float64 arithmetic

reward = st.one_of(st.just(NAN), st.floats(-100, 100, width=32))
rewards_BG = npst.arrays("float32", npst.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=reward).map(torch.from_numpy)
both = pytest.mark.parametrize("advantage", ADVANTAGES.values(), ids=ADVANTAGES)


def test_group_mean_by_hand():
    assert group_mean(torch.tensor([1.0, 0.0, 0.0, 1.0])).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_group_mean_std_by_hand():
    # mean 2, deviations -1 0 1, variance (1 + 0 + 1) / (3 - 1) = 1
    torch.testing.assert_close(group_mean_std(torch.tensor([1.0, 2.0, 3.0])), torch.tensor([-1.0, 0.0, 1.0]), atol=2e-6, rtol=0)


def test_nan_gets_zero_and_is_outside_the_mean():
    assert group_mean(torch.tensor([1.0, NAN, 0.0])).tolist() == [0.5, 0.0, -0.5]


@both
@pytest.mark.parametrize("rewards", [[NAN, NAN], [NAN, 3.0], [7.0], [0.1, 0.1, 0.1], [1e-30] * 7, []])
def test_a_group_without_contrast_is_exactly_zero(advantage, rewards):
    got = advantage(torch.tensor(rewards))
    assert got.tolist() == [0.0] * len(rewards)


@both
@given(rewards=rewards_BG)
def test_many_groups_at_once_equal_one_by_one(advantage, rewards):
    assert torch.equal(advantage(rewards), torch.stack([advantage(row) for row in rewards]))


@both
@given(rewards=rewards_BG)
def test_advantages_are_finite_sum_to_zero_and_ignore_nan(advantage, rewards):
    got = advantage(rewards)
    assert got.isfinite().all() and got.shape == rewards.shape and got.dtype == torch.float32
    assert (got[rewards.isnan()] == 0).all()
    assert got.double().sum(-1).abs().max() <= 1e-4
    row = rewards[0]
    torch.testing.assert_close(got[0][~row.isnan()], advantage(row[~row.isnan()]), atol=EXACT, rtol=EXACT)


@both
@given(rewards=rewards_BG)
def test_a_better_reward_never_has_a_smaller_advantage(advantage, rewards):
    for row, got in zip(rewards, advantage(rewards)):
        valid = ~row.isnan()
        order = row[valid].argsort()
        assert (got[valid][order].diff() >= 0).all()


@given(rewards=st.lists(st.integers(-8, 8), min_size=2, max_size=8), shift=st.integers(-99, 99), scale=st.sampled_from([0.5, 4]))
def test_shift_never_matters_and_scale_not_after_normalising(rewards, shift, scale):
    r = torch.tensor(rewards, dtype=torch.float32)
    torch.testing.assert_close(group_mean(r + shift), group_mean(r), atol=1e-5, rtol=0)
    torch.testing.assert_close(group_mean(r * scale), group_mean(r) * scale, atol=1e-5, rtol=0)
    torch.testing.assert_close(group_mean_std(r * scale + shift), group_mean_std(r), atol=1e-5, rtol=0)


def test_normalised_advantages_have_unit_variance():
    got = group_mean_std(torch.randn(3, 16, dtype=torch.float64) * 40)
    torch.testing.assert_close(got.std(-1), torch.ones(3, dtype=torch.float64), atol=1e-6, rtol=0)
