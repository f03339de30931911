"""Shaped rewards: hand arithmetic, and a slow float64 loop over tokens."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.comm.together import TrainerRanks
from llamarl.learning.advantages import group_mean
from llamarl.learning.targets import (
    STD_EPS,
    Rewards,
    Shaping,
    Targets,
    make_targets,
    moments,
    shape,
    whiten_advantages,
    whiten_rewards,
)
from tests.updating import NAN, group

FLOAT32 = 1e-6


def one_rank(**values):
    return values


def test_a_kl_needs_a_reference():
    with pytest.raises(ValueError, match="reward_kl_coef=0.1 needs ref_logprobs"):
        shape([group(1, [2], [1.0])], Shaping(reward_kl_coef=0.1))[0]


@pytest.mark.parametrize("lengths", [[2, 1], [3, 0, 4]])
def test_groups_are_shaped_together_as_each_alone(lengths):
    """Of one size, whose advantages are made together too, and of several."""
    others = [
        group(2, [1, 5], [0.3, 0.7], finish_reasons=("stop", "length")),
        group(3, [2, 2], [1.0, NAN]),
    ]
    groups = [group(1, lengths, [0.1, 0.9, 0.4][: len(lengths)]), *others]
    for g in groups:
        g.turn_rewards[-1] = 0.25
    groups = [dataclasses.replace(g, ref_logprobs=g.generator_logprobs - 1.0) for g in groups]
    shaping = Shaping(missing_eos_penalty=-1.0, reward_kl_coef=0.1)
    together = shape(groups, shaping)
    made, _ = targets_of(groups, shaping)
    for g, rewards, targets in zip(groups, together, made, strict=True):
        alone = shape([g], shaping)[0]
        assert rewards.tokens.tolist() == alone.tokens.tolist()
        assert rewards.completions.tolist() == alone.completions.tolist()
        own = Targets.of(g, group_mean(alone.completions, g.trained))
        assert targets.advantages.tolist() == pytest.approx(own.advantages.tolist(), abs=FLOAT32)
    assert shape([], shaping) == []


def targets_of(groups, shaping):
    """Return the targets of one rank's groups, by group_mean."""
    return make_targets(
        groups,
        shaping,
        advantages="group_mean",
        critic=None,
        old_values=None,
        minibatches=[slice(len(groups))],
        ranks=TrainerRanks(None, torch.device("cpu"), None),
    )


@st.composite
def random_group(draw):
    size = draw(st.integers(1, 4))

    def drawn(values, count=size):
        return draw(st.lists(values, min_size=count, max_size=count))

    lengths = drawn(st.integers(0, 4))
    rewards = drawn(st.sampled_from([0.0, 1.0, NAN]))
    reasons = tuple(drawn(st.sampled_from(["stop", "length", "aborted"])))
    g = group(draw(st.integers(0, 9)), lengths, rewards, finish_reasons=reasons)
    mu, ref = (torch.tensor(drawn(st.floats(-5, 0, width=32), sum(lengths))) for _ in range(2))
    return dataclasses.replace(g, generator_logprobs=mu, ref_logprobs=ref)


@settings(max_examples=40)
@given(g=random_group(), penalty=st.sampled_from([None, -1.0]), beta=st.sampled_from([0.0, 0.3]))
def test_rewards_are_those_of_a_loop_over_tokens(g, penalty, beta):
    got, place = shape([g], Shaping(penalty, beta))[0], 0
    for i, length in enumerate(g.lengths.tolist()):
        is_trained = g.trained[i].item()
        score = g.rewards[i].item() if is_trained else 0.0
        if is_trained and penalty is not None and g.finish_reasons[i] != "stop":
            score = penalty
        here = range(place, place + length)
        want = [-beta * (g.generator_logprobs[t] - g.ref_logprobs[t]).item() for t in here]
        if not is_trained:
            want = [0.0] * length
        whole = score + sum(want)
        if length:
            want[-1] += score
        assert got.tokens[place : place + length].tolist() == pytest.approx(want, abs=FLOAT32 * 10)
        assert got.completions[i].item() == pytest.approx(whole, abs=FLOAT32 * 10)
        place += length


def test_moments_by_hand():
    got = moments([torch.tensor([1.0]), torch.tensor([2.0, 6.0])], one_rank)
    assert got == pytest.approx((3.0, math.sqrt(14 / 2)))
    assert moments([torch.tensor([5.0])], one_rank) == (5.0, 0.0)
    assert moments([], one_rank) == (0.0, 0.0)


CUT_OFF = {"ref_logprobs": torch.full((3,), -2.5), "finish_reasons": ("stop", "length")}
GROUPS = [
    group(1, [2, 1, 3], [1.0, 0.0, NAN], ref_logprobs=torch.full((6,), -4.0)),
    group(2, [1, 2], [0.5, 2.0], **CUT_OFF),
]


@pytest.mark.parametrize("by_token", [True, False])
def test_whitened_rewards_have_unit_deviation_and_keep_their_mean_in_units_of_it(by_token):
    rewards = [shape([g], Shaping(reward_kl_coef=0.2))[0] for g in GROUPS]
    got = whiten_rewards(GROUPS, rewards, by_token=by_token, total=one_rank)

    def trained(r):  # the last completion of the first group has no reward
        if by_token:
            return torch.cat([r[0].tokens[:3], r[1].tokens])
        return torch.cat([r[0].completions[:2], r[1].completions])

    before, after = trained(rewards), trained(got)
    assert after.std().item() == pytest.approx(1.0, abs=FLOAT32)
    torch.testing.assert_close(after, before / before.std(), atol=FLOAT32, rtol=0)
    # A completion's reward still is the sum of its tokens'.
    own = got[0].tokens[:2].sum().item()
    assert got[0].completions[0].item() == pytest.approx(own, abs=FLOAT32)


def test_whitened_advantages_have_mean_0_and_deviation_1_over_trained_tokens():
    advantages = [torch.arange(6.0), torch.tensor([2.0, -1.0, 4.0])]
    trained = [g.trained_tokens for g in GROUPS]
    got = whiten_advantages(advantages, trained, total=one_rank)
    assert got[0][3:].tolist() == [0.0] * 3
    values = torch.cat([advantages[0][:3], advantages[1]]).double()
    want = (values - values.mean()) / (values.std() + STD_EPS)
    torch.testing.assert_close(torch.cat([got[0][:3], got[1]]).double(), want, atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("value", [0.1, 0.0])
def test_equal_rewards_stay_what_they_are(value, by_token):
    """A deviation of 0 is no unit: over it, rewards of 1 became 1e8."""
    tokens = [torch.full((6,), value), torch.full((3,), value)]
    rewards = [Rewards(torch.full((len(g.rewards),), value), t) for g, t in zip(GROUPS, tokens)]
    got = whiten_rewards(GROUPS, rewards, by_token=by_token, total=one_rank)
    for before, after in zip(rewards, got):
        assert torch.equal(after.completions, before.completions)
        assert torch.equal(after.tokens, before.tokens)


def test_rewards_that_differ_by_rounding_are_equal():
    one_more = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)).item()
    values = [[1.0, one_more, NAN], [1.0, 1.0]]
    rewards = [
        Rewards(torch.tensor(v), torch.zeros(g.token_ids.numel())) for v, g in zip(values, GROUPS)
    ]
    got = whiten_rewards(GROUPS, rewards, by_token=False, total=one_rank)
    assert got[1].completions.tolist() == [1.0, 1.0]


def test_whitened_advantages_of_a_batch_of_equal_values_are_0():
    alike = [torch.full((6,), 2.0), torch.full((3,), 2.0)]
    trained = [g.trained_tokens for g in GROUPS]
    assert all((a == 0).all() for a in whiten_advantages(alike, trained, total=one_rank))
