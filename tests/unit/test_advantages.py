"""Group advantages: hand arithmetic, then the properties that any rewards must keep."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from llamarl.learning.advantages import (
    ADVANTAGES,
    GROUP_STD_EPS,
    gae,
    group_mean,
    group_mean_std,
    leave_one_out,
)
from llamarl.learning.losses.best_of_group import best_and_worst

NAN = float("nan")
EXACT = 1e-6  # float32 outputs of float64 arithmetic

reward = st.one_of(st.just(NAN), st.floats(-100, 100, width=32))
rewards_BG = npst.arrays(
    "float32", npst.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=reward
).map(torch.from_numpy)


def of_trained(function):
    """The function of rewards alone, where NaN stands for one that is not trained on."""
    return lambda rewards: function(rewards, ~rewards.isnan())


mean, mean_std, others = map(of_trained, (group_mean, group_mean_std, leave_one_out))
both = pytest.mark.parametrize(
    "advantage", [of_trained(function) for function in ADVANTAGES.values()], ids=list(ADVANTAGES)
)


@pytest.mark.parametrize(
    "advantage, rewards, want",
    [
        (mean, [1.0, 0.0, 0.0, 1.0], [0.5, -0.5, -0.5, 0.5]),
        # An untrained completion gets zero and is outside the mean.
        (mean, [1.0, NAN, 0.0], [0.5, 0.0, -0.5]),
        # Mean 2, deviations -1 0 1, variance (1 + 0 + 1) / (3 - 1) = 1.
        (mean_std, [1.0, 2.0, 3.0], [-1 / (1 + GROUP_STD_EPS), 0.0, 1 / (1 + GROUP_STD_EPS)]),
        # 1 - (0 + 2)/2, 0 - (1 + 2)/2, 2 - (1 + 0)/2; the untrained one is nobody's other.
        (others, [1.0, 0.0, NAN, 2.0], [0.0, -1.5, 0.0, 1.5]),
        (others, [3.0, 1.0], [2.0, -2.0]),
    ],
)
def test_advantages_by_hand(advantage, rewards, want):
    torch.testing.assert_close(
        advantage(torch.tensor(rewards)), torch.tensor(want), atol=EXACT, rtol=0
    )


@both
@pytest.mark.parametrize(
    "rewards", [[NAN, NAN], [NAN, 3.0], [7.0], [0.1, 0.1, 0.1], [1e-30] * 7, []]
)
def test_a_group_without_contrast_is_exactly_zero(advantage, rewards):
    got = advantage(torch.tensor(rewards))
    assert got.tolist() == [0.0] * len(rewards)


@both
@given(rewards=rewards_BG)
def test_many_groups_at_once_equal_one_by_one(advantage, rewards):
    assert torch.equal(advantage(rewards), torch.stack([advantage(row) for row in rewards]))


@both
@given(rewards=rewards_BG)
def test_advantages_are_finite_sum_to_zero_and_ignore_the_untrained(advantage, rewards):
    got = advantage(rewards)
    assert got.isfinite().all() and got.shape == rewards.shape and got.dtype == torch.float32
    assert (got[rewards.isnan()] == 0).all()
    assert got.double().sum(-1).abs().max() <= 1e-4
    row = rewards[0]
    torch.testing.assert_close(
        got[0][~row.isnan()], advantage(row[~row.isnan()]), atol=EXACT, rtol=EXACT
    )


# --- by token ---


@given(
    lengths=st.lists(st.integers(0, 9), max_size=5),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    seed=st.integers(0, 9),
)
def test_gae_equals_a_backward_loop_over_each_completion(lengths, gamma, lam, seed):
    random = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(lengths), dtype=torch.float64, generator=random)
    want = []
    for r, v in zip(rewards.split(lengths), values.split(lengths)):
        later = 0.0
        value = 0.0
        backward = []
        for reward, here in zip(r.flip(0).tolist(), v.flip(0).tolist()):
            later = reward + gamma * value - here + gamma * lam * later
            value = here
            backward.append(later)
        want += backward[::-1]
    got, returns = gae(
        rewards, values, torch.tensor(lengths, dtype=torch.int64), gamma=gamma, lam=lam
    )
    assert got.tolist() == pytest.approx(want, abs=1e-12)
    assert returns.tolist() == pytest.approx(
        [a + v for a, v in zip(want, values.tolist())], abs=1e-12
    )


# --- among the completions of a group ---


@given(
    pairs=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1.0, 2.5]), st.booleans()),
        min_size=4,
        max_size=12,
    )
)
def test_best_and_worst_equal_a_search(pairs):
    groups, rewards, trained = (list(column) for column in zip(*pairs))
    best, worst, differ = best_and_worst(
        torch.tensor(rewards), torch.tensor(groups), torch.tensor(trained)
    )
    for g in range(len(pairs)):
        members = [i for i, (group, _, t) in enumerate(pairs) if group == g and t]
        low, high = (f(members, key=lambda i: rewards[i]) if members else 0 for f in (min, max))
        assert differ[g].item() == (bool(members) and rewards[low] < rewards[high])
        if differ[g]:
            # min and max take the first of equals
            assert (best[g].item(), worst[g].item()) == (high, low)
