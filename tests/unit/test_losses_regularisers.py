"""KL to the reference and entropy bonus around a loss: by hand, against exact KLs, and what they
ask of the learner.
"""

import functools
import math
from itertools import chain, product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from llamarl.learning.losses.common import (
    MAX_LOG_RATIO,
    half_square,
    has_mark,
    k3,
    uses_entropy,
)
from llamarl.learning.losses.inputs import Completions
from llamarl.learning.losses.regularisers import ESTIMATORS, kl_to_reference, regularised
from tests.loss_problems import PUBLISHED, inputs_of, problem

HALF = math.log(0.5)


def f64(*values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


# pi 1/2, ref 1/4: x = log(ref/pi) = -log 2
@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", math.log(2), math.log(2)),
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        ("k3", 0.5 - 1 + math.log(2), 1 - 0.5),
    ],
)
def test_kl_term_by_hand(estimator, value, slope):
    pi = f64(HALF, grad=True)
    fn = regularised(PUBLISHED["aipo"], kl_coef=0.1, kl_estimator=estimator)
    inputs = inputs_of(
        pi, f64(HALF), f64(2 * HALF), f64(0.0), torch.tensor([True]), num_loss_tokens=2
    )
    loss, metrics = fn(inputs)
    loss.backward()
    assert loss.item() == pytest.approx(0.1 / 2 * value, abs=1e-15)
    assert pi.grad.item() == pytest.approx(0.1 / 2 * slope, abs=1e-15)
    assert (
        metrics["kl/ref"].item() == pytest.approx(math.log(2) - 0.5, abs=1e-14)
        and not metrics["kl/ref"].requires_grad
    )


def test_estimators_and_the_gradients_of_k1_and_k2_are_the_exact_kls_in_the_mean():
    # All tokens of a vocabulary, weighted by pi: the sample mean without sampling.
    random = torch.Generator().manual_seed(0)
    theta, ref = torch.randn(2, 8, generator=random, dtype=torch.float64)
    theta.requires_grad_()
    ref = ref.log_softmax(0)
    exact = (theta.softmax(0) * (theta.log_softmax(0) - ref)).sum()
    (slope,) = torch.autograd.grad(exact, theta)
    p = theta.detach().softmax(0)
    for estimator in ESTIMATORS:
        mean = (p * kl_to_reference(ref - theta.log_softmax(0), estimator)).sum()
        (got,) = torch.autograd.grad(mean, theta)
        # k2's value is biased, k3's gradient is another divergence's
        assert (mean.item() == pytest.approx(exact.item(), abs=1e-12)) is (estimator != "k2")
        assert torch.allclose(got, slope, atol=1e-12) is (estimator != "k3")


def test_entropy_bonus_by_hand():
    pi, entropy = f64(HALF, HALF, grad=True), f64(2.0, 5.0, grad=True)
    fn = regularised(PUBLISHED["aipo"], entropy_coef=0.3)
    mask = torch.tensor([True, False])
    inputs = inputs_of(
        pi, pi.detach(), None, f64(0.0, 0.0), mask, num_loss_tokens=4, entropy=entropy
    )
    loss, metrics = fn(inputs)
    loss.backward()
    assert loss.item() == pytest.approx(-0.3 * 2 / 4) and entropy.grad.tolist() == pytest.approx(
        [-0.3 / 4, 0.0]
    )
    assert "kl/ref" not in metrics


def test_without_coefficients_the_loss_is_untouched_and_the_reference_is_measured():
    p = problem()
    plain, around = p.call(PUBLISHED["aipo"]), p.call(regularised(PUBLISHED["aipo"]))
    assert plain[0].item() == around[0].item() and around[1].keys() - plain[1].keys() == {"kl/ref"}
    want = sum(math.expm1(x) - x for x in (p.ref - p.pi.detach())[p.mask].tolist())
    assert around[1]["kl/ref"].item() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("normalize", ["tokens", "completions", "groups"])
@pytest.mark.parametrize("bound", [True, False])
def test_the_kl_is_weighed_as_the_loss_is(normalize, bound):
    """DeepSeekMath, eq. 3: of completions the KL is inside the mean over a completion's tokens."""
    p = problem(sizes=(3, 2, 4))
    x = p.ref - p.pi.detach()
    kl = (x.exp() - 1 - x).tolist()
    labels = [p.labels(j).tolist() for j in range(p.completions.groups.numel())]
    if normalize == "tokens":
        parts = [list(chain.from_iterable(labels))]
    elif normalize == "completions":
        parts = labels
    else:
        parts = []
        for members in p.members():
            parts.append(list(chain.from_iterable(labels[j] for j in members)))
    means = []
    for part in parts:
        if part:
            means.append(sum(kl[i] for i in part) / len(part))
    want = 0.04 * sum(means) / len(means)
    options = {"normalize": normalize}
    fn = functools.partial(PUBLISHED["grpo"], **options) if bound else PUBLISHED["grpo"]
    given = {} if bound else options
    with_kl = p.call(regularised(fn, kl_coef=0.04), **given)[0].item()
    assert with_kl - p.call(fn, **given)[0].item() == pytest.approx(want, rel=1e-10)


SUMMED = ["rloo", "copg", "proximal_rloo", "online_dpo", "best_of_n", "tb"]


@pytest.mark.parametrize("name", SUMMED)
def test_around_a_loss_that_sums_completions_kl_coef_is_the_papers_beta(name):
    """The mean over completions of the sum over each one's tokens."""
    p = problem(sizes=(3, 2, 4))
    x = p.ref - p.pi.detach()
    kl = (x.exp() - 1 - x).tolist()
    sums = []
    for j in range(p.completions.groups.numel()):
        own = p.labels(j).tolist()
        if own:
            sums.append(sum(kl[i] for i in own))
    want = 0.04 * sum(sums) / len(sums)
    fn = PUBLISHED[name]
    around = p.call(regularised(fn, kl_coef=0.04))[0].item()
    assert around - p.call(fn)[0].item() == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("reinforce", {}),
        ("aipo", {}),
        ("grpo", {}),
        ("grpo", {"normalize": "groups"}),
        ("grpo", {"normalize": "tokens"}),
    ],
)
def test_one_kl_coef_pulls_alike_around_losses_of_every_mean(name, options):
    """On-policy completions of L labels: 1/L of RLOO's gradient, and not at L times the beta."""
    length, size = 12, 6
    random = torch.Generator().manual_seed(0)
    index = torch.arange(size).repeat_interleave(length)
    mu, away = torch.randn(2, size * length, generator=random, dtype=torch.float64)
    pi = mu.clone().requires_grad_()
    inputs = inputs_of(
        pi,
        mu,
        mu + 0.3 * away,
        torch.randn(size, generator=random, dtype=torch.float64)[index],
        torch.ones(size * length, dtype=torch.bool),
        num_loss_tokens=size * length,
        completions=Completions(
            index=index,
            groups=torch.arange(2).repeat_interleave(3),
            rewards=torch.zeros(size),
            group_tokens=torch.full((size,), 3.0 * length),
            num_completions=size,
            num_groups=2,
            num_trained_groups=2,
        ),
    )

    def gradient(loss, beta, **options):
        fn = regularised(PUBLISHED[loss], kl_coef=beta, kl_estimator="k2")
        return torch.autograd.grad(fn(inputs, **options)[0], pi)[0]

    rloo = gradient("rloo", 0.05)
    torch.testing.assert_close(gradient(name, 0.05, **options) * length, rloo)
    scaled = gradient(name, 0.05 * length, **options)
    assert torch.cosine_similarity(scaled, rloo, dim=0) < 0.995


def test_max_tokens_divides_the_loss_and_not_its_kl():
    p = problem(sizes=(3, 2, 4))
    around = regularised(PUBLISHED["aipo"], kl_coef=0.05)
    kls = []
    for options in ({}, {"max_tokens": 7}):
        loss = p.call(PUBLISHED["aipo"], **options)[0].item()
        kls.append(p.call(around, **options)[0].item() - loss)
    assert kls[0] == pytest.approx(kls[1])
    sums = p.call(PUBLISHED["aipo"])[0].item() * p.num_loss_tokens
    assert loss == pytest.approx(sums / (7 * p.completions.num_completions))


@pytest.mark.parametrize(
    ("spread", "nats", "cosines"),
    [
        (0.1, 0.027, {"k1": 0.9989, "k2": 0.9989, "k3": 0.9963}),
        (1.5, 1.995, {"k1": 0.9614, "k2": 0.9614, "k3": 0.8201}),
    ],
)
def test_a_kl_in_the_loss_leaves_out_what_a_token_does_to_later_ones(spread, nats, cosines):
    """All completions of 5 tokens of 3, by bigram models: docs/algorithms.md's figures."""
    random = torch.Generator().manual_seed(1)
    for step in (0.1, 0.5, 1.5):
        theta = torch.randn(4, 3, generator=random, dtype=torch.float64)
        away = torch.randn(4, 3, generator=random, dtype=torch.float64)
        if step == spread:
            break
    theta.requires_grad_()
    ref = (theta + spread * away).detach().log_softmax(-1)
    ys = torch.tensor(list(product(range(3), repeat=5)))
    before = F.pad(ys[:, :-1], (1, 0), value=3)  # 3: nothing yet
    pi_YL = theta.log_softmax(-1)[before, ys]
    x_YL = ref[before, ys] - pi_YL
    p_Y = pi_YL.sum(1).exp()
    exact = -(p_Y * x_YL.sum(1)).sum()
    assert exact.item() == pytest.approx(nats, abs=1e-3)
    (whole,) = torch.autograd.grad(exact, theta, retain_graph=True)

    def cosine(of_Y):
        (slope,) = torch.autograd.grad((p_Y.detach() * of_Y).sum(), theta, retain_graph=True)
        return torch.cosine_similarity(slope.flatten(), whole.flatten(), dim=0).item()

    for estimator, expected in cosines.items():
        assert cosine(kl_to_reference(x_YL, estimator).sum(1)) == pytest.approx(expected, abs=1e-3)
    # In the reward, -x of the whole completion: REINFORCE.
    assert cosine(-x_YL.sum(1).detach() * pi_YL.sum(1)) == pytest.approx(1)


def test_best_of_n_by_length_has_a_kl_by_length():
    p = problem(sizes=(3, 2, 4))
    x = p.ref - p.pi.detach()
    kl = (x.exp() - 1 - x).tolist()
    means = []
    for j in range(p.completions.groups.numel()):
        own = p.labels(j).tolist()
        if own:
            means.append(sum(kl[i] for i in own) / len(own))
    want = 0.04 * sum(means) / len(means)
    fn = functools.partial(PUBLISHED["best_of_n"], length_normalize=True)
    given = PUBLISHED["best_of_n"]
    bound = p.call(regularised(fn, kl_coef=0.04))[0].item() - p.call(fn)[0].item()
    asked = p.call(regularised(given, kl_coef=0.04), length_normalize=True)[0].item()
    assert bound == pytest.approx(want, rel=1e-9)
    assert asked - p.call(fn)[0].item() == pytest.approx(want, rel=1e-9)


def test_the_entropy_bonus_is_weighed_as_the_loss_is():
    p = problem(sizes=(3, 2, 4))
    entropy = torch.linspace(1.0, 3.0, p.pi.numel(), dtype=torch.float64, requires_grad=True)
    labels = [p.labels(j) for j in range(p.completions.groups.numel())]
    means = [entropy.detach()[own].mean().item() for own in labels if own.numel()]
    fn = regularised(PUBLISHED["grpo"], entropy_coef=0.3)
    bonus = p.call(fn, entropy=entropy)[0].item() - p.call(PUBLISHED["grpo"])[0].item()
    assert bonus == pytest.approx(-0.3 * sum(means) / len(means), rel=1e-10)


def test_around_proximal_rloo_kl_and_entropy_are_sums_of_completions_by_hand():
    # y0 of two labels, y1 of one; pi is mu, so both ratios are 1. pi is ref too, but at y1's label,
    # where ref is half of pi: KL log 2 - 1/2, its slope 1 - 1/2.
    pi, entropy = f64(HALF, HALF, HALF, grad=True), f64(2.0, 3.0, 4.0, grad=True)
    completions = Completions(
        index=torch.tensor([0, 0, 1]),
        groups=torch.tensor([0, 0]),
        rewards=torch.zeros(2),
        group_tokens=torch.tensor([3.0, 3.0]),
        num_completions=2,
        num_groups=1,
        num_trained_groups=1,
    )
    inputs = inputs_of(
        pi,
        pi.detach(),
        f64(HALF, HALF, 2 * HALF),
        f64(1.0, 1.0, -3.0),
        torch.ones(3, dtype=torch.bool),
        num_loss_tokens=3,
        entropy=entropy,
        completions=completions,
    )
    fn = regularised(PUBLISHED["proximal_rloo"], kl_coef=0.1, entropy_coef=0.2)
    loss, _ = fn(inputs)
    loss.backward()
    own = -(1 - 3) / 2
    kl = (math.log(2) - 0.5) / 2
    assert loss.item() == pytest.approx(own + 0.1 * kl - 0.2 * (2 + 3 + 4) / 2, rel=1e-12)
    assert pi.grad.tolist() == pytest.approx([-1 / 2, -1 / 2, 3 / 2 + 0.1 * 0.5 / 2], rel=1e-12)
    assert entropy.grad.tolist() == pytest.approx([-0.2 / 2] * 3, rel=1e-12)


@uses_entropy
def my_loss(inputs):
    return -(inputs.trainer_logprobs + inputs.entropy).sum() / inputs.num_loss_tokens, {}


def test_what_a_loss_is_given_goes_through():
    assert [
        has_mark(fn, "uses_entropy")
        for fn in (PUBLISHED["aipo"], regularised(PUBLISHED["aipo"]), my_loss)
    ] == [False, False, True]
    assert has_mark(regularised(my_loss), "uses_entropy") and has_mark(
        regularised(PUBLISHED["tb"], entropy_coef=0.1), "uses_entropy"
    )
    around = regularised(functools.partial(PUBLISHED["tb"], beta=0.5), kl_coef=0.1)
    assert not has_mark(around, "uses_entropy")
    entropy = f64(3.0, grad=True)
    one = f64(1.0)
    inputs = inputs_of(one, one, None, one, one.bool(), num_loss_tokens=1, entropy=entropy)
    regularised(my_loss)(inputs)[0].backward()
    assert entropy.grad.item() == -1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_coef": -1.0}, "kl_coef >= 0"),
        ({"entropy_coef": math.nan}, "entropy_coef >= 0"),
        ({"kl_estimator": "k4"}, "need k1 or k2 or k3"),
        ({"kl_coef": 0.1}, "switch the reference on"),
        ({"entropy_coef": 0.1}, "entropy_grad=True"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    one = torch.zeros(1, requires_grad=True)
    with pytest.raises(ValueError, match=message):
        fn = regularised(PUBLISHED["aipo"], **options)
        fn(inputs_of(one, one, None, one, one.bool(), num_loss_tokens=1))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("gap", [100.0, 1e20])
def test_a_policy_far_below_the_reference_is_still_pulled_up(estimator, gap):
    pi = torch.tensor([-gap], requires_grad=True)
    one = torch.ones(1)
    fn = regularised(PUBLISHED["aipo"], kl_coef=1e-3, kl_estimator=estimator)
    inputs = inputs_of(pi, pi.detach(), 0 * one, 0 * one, one.bool(), num_loss_tokens=1)
    loss, metrics = fn(inputs)
    loss.backward()
    assert loss.isfinite() and all(value.isfinite() for value in metrics.values())
    assert math.isfinite(pi.grad.item()) and pi.grad.item() <= -0.09


@given(x=st.floats(-50, 50))
def test_k3_is_nonnegative_convex_and_smooth_past_its_limit(x):
    points = f64(x - 0.5, x, x + 0.5, grad=True)
    values = k3(points)
    (slope,) = torch.autograd.grad(values.sum(), points)
    assert (values >= 0).all() and (slope.diff() >= 0).all()
    exact = math.expm1(min(x, MAX_LOG_RATIO)) * (1 + max(x - MAX_LOG_RATIO, 0)) - min(
        x, MAX_LOG_RATIO
    )
    assert values[1].item() == pytest.approx(exact, rel=1e-9, abs=1e-15)


def test_float32_k3_keeps_its_digits_near_zero():
    assert k3(torch.tensor([1e-3])).item() == pytest.approx(math.expm1(1e-3) - 1e-3, rel=1e-3)


def test_half_square_is_a_square_until_it_would_overflow():
    x = torch.tensor([-3.0, 1e6, 1e20, -1e30], requires_grad=True)
    values = half_square(x)
    (slope,) = torch.autograd.grad(values.sum(), x)
    assert values.tolist() == pytest.approx(
        [4.5, 5e11, 1e28, 1e38], rel=1e-6
    ) and slope.tolist() == [-3.0, 1e6, 1e8, -1e8]
