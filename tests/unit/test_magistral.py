"""Magistral's loss, as its paper has it, against an oracle in float64 that is written from the
equation alone.

    J = E_q 1/(sum_i |o_i|) sum_i sum_t min(r A_i, clip(r, 1 - eps_low, 1 + eps_high) A_i)    (2.1)

    r = pi/mu of a token
    A_i = (B_i - mean B) / std B over a minibatch
    B_i = reward_i - mean of its group

Groups of equal rewards are not in the batch. Where the paper says std, the one over n - 1 is meant
here.
"""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
import torch

from llamarl.learning.losses.regularisers import regularised
from llamarl.learning.targets import Shaping
from tests.loss_problems import PUBLISHED, problem
from tests.updating import (
    NAN,
    VERSION,
    decoder_of,
    go_on,
    group,
    logprobs_alone,
    update_of,
)

LOW, HIGH = 0.2, 0.28
# float32 rounding through a decoder of two layers, as a share of the largest gradient
GRADIENT = 2e-5
WAIT_S = 60.0
LOSS = functools.partial(PUBLISHED["ppo"], clip_low=LOW, clip_high=HIGH, normalize="groups")


def clipped(ratio, advantage):
    return torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)


def mean_over_groups(p, values):
    """1/G sum_g 1/|o of g| sum_t of values, by loops over the trained labels of each group."""
    means = []
    for members in p.members():
        labels = list(chain.from_iterable(p.labels(j) for j in members))
        if labels:
            means.append(sum(values[i] for i in labels) / len(labels))
    return sum(means) / len(means)


@pytest.mark.parametrize("seed", range(2))
def test_every_group_weighs_the_same_and_within_it_every_token(seed):
    p = problem(sizes=(3, 1, 5), seed=seed)
    want = -mean_over_groups(p, clipped((p.pi - p.mu).exp(), p.advantages))
    (gradient,) = torch.autograd.grad(want, p.pi)
    assert p.call(LOSS)[0].item() == pytest.approx(want.item(), rel=1e-12)
    torch.testing.assert_close(p.gradient(LOSS), gradient, rtol=1e-12, atol=1e-15)
    by_token = functools.partial(LOSS, normalize="tokens")
    assert abs(p.call(by_token)[0].item() - want.item()) > 1e-4


def test_a_group_in_two_microbatches_is_still_one_group():
    p = problem(sizes=(3, 2, 4))
    shares = [p.part(own).call(LOSS)[0].item() for own in ([0, 2, 4, 8], [1, 3, 5, 6, 7])]
    assert sum(shares) == pytest.approx(p.call(LOSS)[0].item(), rel=1e-12)


def test_kl_and_entropy_are_means_over_groups_too():
    p = problem(sizes=(3, 2, 4))
    x = p.ref - p.pi.detach()
    added = p.call(regularised(LOSS, kl_coef=0.5))[0].item() - p.call(LOSS)[0].item()
    k3 = float(mean_over_groups(p, x.exp() - 1 - x))
    assert added == pytest.approx(0.5 * k3, rel=1e-10)


def uneven_groups():
    """Lengths 1 to 12; a group of equal rewards, one that has a single reward, a failed
    completion.
    """
    made = [
        group(4, [6, 2, 12], [1.0, 0.5, 0.0]),
        group(1, [3, 4], [1.0, 1.0]),
        group(3, [1, 5, 2, 7], [0.0, 1.0, NAN, 1.0]),
        group(7, [2, 1], [3.0, 0.0]),
        group(2, [9, 9], [0.25, NAN]),
        group(5, [1, 1, 10], [0.0, 0.0, 1.0]),
    ]
    # Near enough to the decoder's that both sides of the clip and its inside are seen.
    decoder = decoder_of().double()
    for g in made:
        logprobs = torch.cat(logprobs_of(decoder, g)).detach()
        noise = torch.linspace(-0.5, 0.5, logprobs.numel(), dtype=torch.float64)
        object.__setattr__(g, "generator_logprobs", (logprobs + noise).float())
    return made


def logprobs_of(decoder, g):
    """[L] float64 of each completion, from its own sequence alone."""
    own = g.token_ids.split(g.lengths.tolist())
    return [logprobs_alone(decoder, g.prompt_ids, tokens) for tokens in own]


def oracle(groups):
    """(J, its gradients) of these groups as one minibatch."""
    decoder = decoder_of().double()
    kept = []
    for g in groups:
        valid = [i for i, r in enumerate(g.rewards.tolist()) if r == r]
        if len({g.rewards[i].item() for i in valid}) > 1:
            kept.append((g, valid))
    raw = [g.rewards[valid].double() - g.rewards[valid].double().mean() for g, valid in kept]
    everything = torch.cat(raw)
    objective = torch.zeros((), dtype=torch.float64)
    for (g, valid), advantages in zip(kept, raw):
        advantages = (advantages - everything.mean()) / everything.std()
        logprobs = logprobs_of(decoder, g)
        mu = g.generator_logprobs.double().split(g.lengths.tolist())
        terms = [clipped((logprobs[i] - mu[i]).exp(), a).sum() for i, a in zip(valid, advantages)]
        objective = objective + sum(terms) / sum(int(g.lengths[i]) for i in valid)
    objective = objective / len(kept)
    parameters = list(decoder.parameters())
    return objective.item(), torch.autograd.grad(objective, parameters)


MAGISTRAL = dict(
    advantages="group_mean",
    shaping=Shaping(whiten="completions"),
    filter_groups=True,
    skip_zero_advantage=True,
    max_grad_norm=None,
)


def assert_gradients(update, want):
    for parameter, gradient in zip(update.decoder.parameters(), want, strict=True):
        atol = GRADIENT * gradient.abs().max().item()
        torch.testing.assert_close(parameter.grad.double(), -gradient, rtol=0, atol=atol)


@pytest.mark.filterwarnings("ignore:sequences longer")
@pytest.mark.parametrize("microbatch_tokens", [12, 1000])
def test_an_update_is_the_papers_whatever_the_microbatches(microbatch_tokens):
    groups = uneven_groups()
    objective, gradients = oracle(groups)
    update = update_of(loss_fn=LOSS, microbatch_tokens=microbatch_tokens, **MAGISTRAL)
    got = update.run(groups, VERSION, go_on)
    assert got["loss/value"] == pytest.approx(-objective, rel=1e-5)
    assert_gradients(update, gradients)
    assert got["groups/filtered"] == 2, "one of equal rewards, one with a single reward"
    assert got["tokens/trained"] == 20 + 13 + 3 + 12
    assert got["reward/mean"] == pytest.approx((1.5 + 2 + 2 + 3 + 0.25 + 1) / 14)


def test_minibatches_have_their_own_mean_and_deviation():
    groups = [g for g in uneven_groups() if g.ticket not in (1, 2)]
    wanted = [oracle(groups[:2])[0], oracle(groups[2:])[0]]
    update = update_of(loss_fn=LOSS, minibatches_per_step=2, **MAGISTRAL, lr=1e-12)
    got = update.run(groups, VERSION, go_on)
    assert got["loss/value"] == pytest.approx(-sum(wanted) / 2, rel=1e-5)


class TwoRanks:
    """Stands for `Ranks` in two threads, each with a share of the groups."""

    size = data_size = 2

    def __init__(self):
        self._barrier = threading.Barrier(2)
        self._given = {}

    def _exchange(self, value):
        self._given[threading.get_ident()] = value
        self._barrier.wait(WAIT_S)
        both = [self._given[thread] for thread in sorted(self._given)]
        self._barrier.wait(WAIT_S)
        return both

    def any(self, wanted):
        return any(self._exchange(wanted))

    def sum(self, **values):
        one, other = self._exchange(values)
        return {name: one[name] + other[name] for name in values}

    def max(self, **values):
        one, other = self._exchange(values)
        return {name: max(one[name], other[name]) for name in values}

    def union(self, names):
        one, other = self._exchange(names)
        return sorted({*one, *other})


def test_two_data_parallel_shares_are_the_whole():
    groups = uneven_groups()
    objective, gradients = oracle(groups)
    ranks = TwoRanks()
    updates = [update_of(loss_fn=LOSS, microbatch_tokens=40, **MAGISTRAL) for _ in range(2)]
    for update in updates:
        update.ranks = ranks

    def run(update, share):
        return update.run(share, VERSION, go_on)

    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(run, updates, [groups[:2], groups[2:]]))
    for row in rows:
        assert row["loss/value"] == pytest.approx(-objective, rel=1e-5)
        assert row["groups/filtered"] == 2
    # FSDP takes the mean over ranks; here it is taken by hand.
    first, second = (list(update.decoder.parameters()) for update in updates)
    for mine, other in zip(first, second):
        mine.grad = (mine.grad + other.grad) / 2
    assert_gradients(updates[0], gradients)


def test_a_batch_without_any_signal_trains_nothing():
    groups = [group(1, [3, 4], [1.0, 1.0]), group(2, [2, 2], [0.0, 0.0])]
    update = update_of(loss_fn=LOSS, **MAGISTRAL)
    got = update.run(groups, VERSION, go_on)
    assert (got["groups/filtered"], got["tokens/trained"], got["grad_norm"]) == (2, 0, 0)
    assert got["reward/mean"] == 0.5


def test_without_the_filter_the_groups_count():
    groups = uneven_groups()
    kept = update_of(loss_fn=LOSS, **MAGISTRAL).run(groups, VERSION, go_on)
    unfiltered = update_of(loss_fn=LOSS, **{**MAGISTRAL, "filter_groups": False})
    counted = unfiltered.run(groups, VERSION, go_on)
    assert "groups/filtered" not in counted
    assert counted["tokens/trained"] == kept["tokens/trained"] + 7 + 9
    assert abs(counted["loss/value"] - kept["loss/value"]) > 1e-3
