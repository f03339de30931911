"""Each loss by hand on two groups, its gradient against the paper's formula in float64, the terms
around it, and losses and gradients against TRL 1.16's (tests/golden/make_trl_losses.py).

The formulas are loops over completions with coefficients c_t such that the gradient of the loss in
log pi_t is -c_t.
"""

import functools
import json
import math
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.learning.advantages import gae, group_mean_std, leave_one_out
from llamarl.learning.losses.common import (
    MAX_LOG_RATIO,
    half_square,
    has_mark,
    k3,
    uses_entropy,
)
from llamarl.learning.losses.inputs import Completions
from llamarl.learning.losses.regularisers import ESTIMATORS, kl_to_reference, regularised
from llamarl.learning.values import value_loss
from tests.loss_problems import PUBLISHED, Problem, inputs_of, problem

EXACT = dict(atol=1e-14, rtol=1e-12)
LOG2 = math.log(2)
HALF = math.log(0.5)


def f64(*values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


# Two groups of two completions, pi = 1/2 at each label. Group 0: y0 of two labels with ratios 2 and
# 1/2, y1 of one with ratio 1. Group 1: y2 of one label with ratio 4, y3 of two with ratio 1.
# Against the reference pi is 2 x 2, 1; 1, and 2 x 1/2.
RATIOS = [2.0, 0.5, 1.0, 4.0, 1.0, 1.0]
REF_RATIOS = [2.0, 2.0, 1.0, 1.0, 2.0, 0.5]
INDEX = [0, 0, 1, 2, 3, 3]
GROUPS = [0, 0, 1, 1]
REWARDS = [1.0, 0.0, 3.0, 1.0]
ADVANTAGES = [0.5, -0.5, 1.0, -1.0]  # the group's means are 0.5 and 2


def by_hand() -> Problem:
    pi = torch.full((6,), -LOG2, dtype=torch.float64)
    index = torch.tensor(INDEX)
    completions = Completions(
        index=index,
        groups=torch.tensor(GROUPS),
        rewards=f64(*REWARDS),
        group_tokens=torch.full((4,), 3.0),
        num_completions=4,
        num_groups=2,
        num_trained_groups=2,
    )
    mu, ref = (pi - f64(*ratios).log() for ratios in (RATIOS, REF_RATIOS))
    mask = torch.ones(6, dtype=torch.bool)
    return Problem(pi.requires_grad_(), mu, ref, f64(*ADVANTAGES)[index], mask, completions, 6.0)


OF_COMPLETIONS = {"ratio_cap": 1.5, "normalize": "completions"}
BAND = {"ratio_mask_low": 0.9, "ratio_mask_high": 3.0}
HAND = [
    # weights min(r, cap) times advantage, one a label, times log pi = -log 2: -sum w A log pi / 6
    ("aipo", {"ratio_cap": 1.5}, LOG2 * (1.5 * 0.5 + 0.5 * 0.5 - 0.5 + 1.5 - 2) / 6),
    ("dr_grpo", {}, LOG2 * (2 * 0.5 + 0.5 * 0.5 - 0.5 + 4 - 2) / 6),
    ("dr_grpo", {"max_tokens": 10}, LOG2 * (1 + 0.25 - 0.5 + 4 - 2) / 40),
    ("cispo", OF_COMPLETIONS, LOG2 * ((0.75 + 0.25) / 2 - 0.5 + 1.5 - 1) / 4),
    ("reinforce", {}, LOG2 * (0.5 + 0.5 - 0.5 + 1 - 1 - 1) / 6),
    ("icepop", BAND, LOG2 * (1 - 0.5 + 0 - 2) / 6),  # 1/2 and 4 are masked
    # min(r A, clip(r, 0.8, 1.2) A): 0.6 and 0.25 in y0; -0.5; 1.2; -1 and -1
    ("ppo", {}, -(0.6 + 0.25 - 0.5 + 1.2 - 2) / 6),
    ("grpo", {}, -((0.6 + 0.25) / 2 - 0.5 + 1.2 - 1) / 4),
    ("dapo", {}, -(0.64 + 0.25 - 0.5 + 1.28 - 2) / 6),
    ("bnpo", {}, -(0.6 + 0.25 - 0.5 + 1.2 - 2) / 6),
    # the roots of the products: 1, 1, 4, 1, clipped to 1.0004 in y2
    ("gspo", {}, -(0.5 - 0.5 + 1.0004 - 1) / 4),
    ("rloo", {}, LOG2 * (2 * 0.5 - 0.5 + 1 - 2) / 4),
    # log(pi/mu): 2 * 1/2 -> log 1 = 0, 0, log 4, 0
    ("copg", {}, -(2 * LOG2 * 1.0) / 4),
    # r = 1, 1, 4, 1, clipped to 1.2 in y2
    ("proximal_rloo", {}, -(0.5 - 0.5 + 1.2 - 1) / 4),
    # log(pi/ref) = 2 log 2, 0; 0, 0. Best y0 against y1, y2 against y3.
    ("online_dpo", {"beta": 0.5}, (math.log(1 + math.exp(-LOG2)) + LOG2) / 2),
    ("best_of_n", {}, (2 * LOG2 + LOG2) / 2),
    ("best_of_n", {"length_normalize": True}, (LOG2 + LOG2) / 2),
    # r/beta - log(pi/ref) with beta 1/2: 2 - 2 log 2, 0; 6, 2. log Z = 1 - log 2 and 4, so
    # residuals log 2 - 1, 1 - log 2; -2, 2
    ("tb", {"beta": 0.5}, 0.25 * (2 * (1 - LOG2) ** 2 + 8) / 4),
    # A - beta (log L - mean): 0.5 - log2/2, -0.5 + log2/2; 1, -1; weights 2 and 0.5, 1; 4, 1 and 1
    ("tba", {"beta": 0.5}, LOG2 * ((2.5 - 1) * (0.5 - LOG2 / 2) + 4 - 2) / 6),
    # log(ref/pi) is -log 2 twice, 0 and 0, -log 2, log 2; weights 2, 0.5, 1, 4, 1 and 1
    ("distill", {}, LOG2 * (-2.5 * LOG2) / 6),
    # weights 1.5, 0.5, 1, 1.5, 1 and 1, and twice the advantages beside the teacher's
    (
        "distill",
        {"reward_weight": 2.0, "ratio_cap": 1.5},
        LOG2 * (2 * (1 - LOG2) - 1 + 3 - (2 + LOG2) - (2 - LOG2)) / 6,
    ),
    # A - tau log(pi/mu)(y): 0.5, -0.5; 1 - 2 log2 / 2, -1
    ("kimi_k2", {"tau": 0.5}, LOG2 * (2.5 * 0.5 - 0.5 + 4 * (1 - LOG2) - 2) / 6),
]


@pytest.mark.parametrize(
    ("name", "options", "want"), HAND, ids=[f"{name}{n}" for n, (name, *_) in enumerate(HAND)]
)
def test_a_loss_by_hand(name, options, want):
    assert by_hand().call(PUBLISHED[name], **options)[0].item() == pytest.approx(want, abs=1e-14)


def test_every_loss_is_done_by_hand():
    assert {name for name, *_ in HAND} == PUBLISHED.keys()


def test_metrics_of_completions_by_hand():
    def of(name, **options):
        return {k: v.item() for k, v in by_hand().call(PUBLISHED[name], **options)[1].items()}

    def some(name, *keys, **options):
        found = of(name, **options)
        return [found[key] for key in keys]

    kl = (1 - LOG2) + (LOG2 - 0.5) + (3 - 2 * LOG2)
    assert of("rloo") == pytest.approx({"ratio/sum": 9.5, "ratio/max": 4.0, "kl/generator": kl})
    # the squares of tb's residuals are (1 - log 2)^2 twice and 4 twice; log Z twice 1 - log 2 and 4
    keys = [f"tb/{name}/completions" for name in ("square", "log_z", "log_ratio")]
    want = [2 * (1 - LOG2) ** 2 + 8, 2 * (1 - LOG2) + 8, 2 * LOG2]
    assert some("tb", *keys, beta=0.5) == pytest.approx(want)
    for name, key in (("tba", "tba/log_ratio"), ("kimi_k2", "kimi/log_ratio")):
        assert some(name, f"{key}/completions") == pytest.approx([2 * LOG2])
    # margins beta 2 log 2 and 0, counted at both completions of their groups
    keys = [f"dpo/{name}/completions" for name in ("margin", "accuracy", "tied")]
    assert some("online_dpo", *keys, beta=0.5) == pytest.approx([2 * LOG2, 2, 0])
    assert some("ppo", "clip/high", "clip/low", "ratio/capped") == [2, 0, 0]
    # y2 alone is clipped, once a label
    found = some("proximal_rloo", "clip/high", "ratio/sum", "ratio/max")
    assert found == pytest.approx([1, 2 + 1 + 4 + 2, 4])


@pytest.mark.parametrize("name", ["online_dpo", "best_of_n"])
def test_a_group_without_preference_adds_nothing(name):
    p = by_hand()
    tied = replace(p, completions=replace(p.completions, rewards=f64(1.0, 1.0, 3.0, 1.0)))
    gradient, (loss, metrics) = tied.gradient(PUBLISHED[name]), tied.call(PUBLISHED[name])
    assert (gradient[:3] == 0).all() and (gradient[3] != 0).all()
    assert loss.item() == pytest.approx(LOG2 / 2)
    (key,) = (k for k in metrics if "tied" in k)
    assert metrics[key] == 2  # completions


def test_a_group_with_one_trained_completion_couples_with_nothing():
    p = by_hand()
    alone = replace(p, mask=torch.tensor([True, True, False, True, True, True]))
    for name in ("tb", "online_dpo", "best_of_n"):
        assert (alone.gradient(PUBLISHED[name])[:3] == 0).all()
        assert (p.gradient(PUBLISHED[name])[:2] != 0).all()


# --- distillation, over all completions of two tokens ---


VOCAB = 3


def next_tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of a random policy: [V] of the first token, and [V, V] of the second by the
    first.
    """
    draw = torch.Generator().manual_seed(seed)
    shapes = ((VOCAB,), (VOCAB, VOCAB))
    first, second = (torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes)
    return first, second


def mean_gradients(sampler, advantage):
    """The mean over what the sampler samples of the gradients in the policy's logits, of a loss of
    (log pi, log mu, log ref) of two tokens.
    """
    policy = [logits.requires_grad_() for logits in next_tokens(0)]
    tables = (policy, sampler, next_tokens(2))
    logs = []
    for first, second in tables:
        logs.append((first.log_softmax(-1), second.log_softmax(-1)))
    mean = 0.0
    for a, b in torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB)).tolist():
        both = []
        for first, second in logs:
            both.append(torch.stack([first[a], second[a, b]]))
        pi, mu, ref = both
        mean = mean + mu.sum().exp().detach() * advantage(pi, mu.detach(), ref)
    return policy, logs, torch.autograd.grad(mean, policy, retain_graph=True)


def kl_of_tokens(logs, prefixes, p: int, q: int) -> torch.Tensor:
    """sum_t KL(p(.|s_t) || q(.|s_t)) in the mean over these prefixes [V]; p, q: places in logs."""
    first, second = ((logs[p][i].exp() * (logs[p][i] - logs[q][i])).sum(-1) for i in (0, 1))
    return first + (prefixes * second).sum()


@pytest.mark.parametrize("sampler", [0, 1], ids=["on-policy", "off-policy"])
def test_the_mean_gradient_of_distill_is_that_of_the_reverse_kl_of_each_token(sampler):
    """Whoever samples, if its weights are not capped; prefixes are the sampler's and held fixed."""

    def loss_of(pi, mu, ref):
        both = torch.ones(2, dtype=torch.bool)
        inputs = inputs_of(pi, mu, ref, torch.ones(2), both, num_loss_tokens=1)
        loss, metrics = PUBLISHED["distill"](inputs, ratio_cap=None)
        assert metrics["loss/teacher_kl"].item() == pytest.approx((mu - ref).sum().item())
        return loss

    policy, logs, got = mean_gradients(next_tokens(sampler), loss_of)
    prefixes = logs[1][0].exp().detach()
    wanted = torch.autograd.grad(kl_of_tokens(logs, prefixes, 0, 2), policy)
    for mine, theirs in zip(got, wanted, strict=True):
        assert theirs.abs().max() > 0.01
        torch.testing.assert_close(mine, theirs, atol=1e-14, rtol=1e-12)


def test_with_the_samplers_logprobs_it_would_leave_the_sampler_off_policy():
    """What the docstring of distill says of Tinker's advantage."""

    def loss_of(pi, mu, ref):
        both = torch.ones(2, dtype=torch.bool)
        inputs = inputs_of(pi, mu, None, ref - mu, both, num_loss_tokens=1)
        return PUBLISHED["aipo"](inputs, ratio_cap=None)[0]

    policy, logs, got = mean_gradients(next_tokens(1), loss_of)
    prefixes = logs[1][0].exp().detach()
    drives = kl_of_tokens(logs, prefixes, 0, 2) - kl_of_tokens(logs, prefixes, 0, 1)
    for mine, theirs in zip(got, torch.autograd.grad(drives, policy), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-14, rtol=1e-12)


# --- gradients of the papers ---


def sums(p: Problem, values_T: torch.Tensor) -> dict[int, float]:
    """The sum of values over the labels of each trained completion."""
    trained = chain.from_iterable(p.members())
    return {j: values_T[p.labels(j)].sum().item() for j in trained}


def advantages_of(p: Problem) -> dict[int, float]:
    """The advantage of each trained completion, which all of its labels have."""
    trained = chain.from_iterable(p.members())
    return {j: float(p.advantages[p.labels(j)[0]]) for j in trained}


def less_their_mean(p: Problem, values: dict[int, float]) -> dict[int, float]:
    """Values of completions less the mean over the trained ones of their group."""
    found = {}
    for members in p.members():
        mean = sum(values[j] for j in members) / max(1, len(members))
        found |= {j: values[j] - mean for j in members}
    return found


def assert_gradient(p: Problem, name: str, of: dict[int, float], weights_T=1.0, **options) -> None:
    """That the gradient of the loss is minus `of` its completion times the weight of the label, and
    0 elsewhere.
    """
    want = torch.zeros_like(p.pi)
    for j, c in of.items():
        want[p.labels(j)] = -c
    torch.testing.assert_close(p.gradient(PUBLISHED[name], **options), want * weights_T, **EXACT)


def token_weights(p: Problem) -> torch.Tensor:
    """[T]: min(pi/mu, 8)"""
    weights = (p.pi.detach() - p.mu).exp().clamp(max=8.0)
    assert weights.max() == 8.0 > weights.min()
    return weights


@pytest.mark.parametrize(
    "name, options",
    [("cispo", {}), ("dr_grpo", {}), ("kimi_k2", {"tau": 0.3}), ("tba", {"beta": 0.3})],
)
def test_gradients_of_tba_eq_13_to_16(name, options):
    p = problem(spread=7)
    ratios = dict.fromkeys(advantages_of(p), 0.0)
    if name == "kimi_k2":
        ratios = sums(p, p.pi.detach() - p.mu)
    elif name == "tba":
        ratios = less_their_mean(p, sums(p, p.pi.detach() - p.ref))
    c = {j: (a - 0.3 * ratios[j]) / p.num_loss_tokens for j, a in advantages_of(p).items()}
    assert_gradient(p, name, c, token_weights(p), **options)


@pytest.mark.parametrize("gamma, t", [(1.0, 1.0), (1.2, 2.0)])
def test_gradient_and_value_of_tb_are_those_of_its_target(gamma, t):
    """log R = (log ref / gamma + r / beta) / T (Lee et al. 2024); 1 and 1: TBA eq. 5 and 7."""
    p, beta = problem(), 0.25
    rewards, n = p.completions.rewards.tolist(), p.completions.num_completions
    log_ref = sums(p, p.ref)
    distance = {}  # log pi - log R of each
    for j, log_pi in sums(p, p.pi).items():
        distance[j] = log_pi - (log_ref[j] / gamma + rewards[j] / beta) / t
    residuals = less_their_mean(p, distance)
    squares = sum(one**2 for one in residuals.values())
    options = {"beta": beta, "log_reward_temperature": t, "reference_temperature": gamma}
    assert_gradient(p, "tb", {j: -beta * one / n for j, one in residuals.items()}, **options)
    loss, metrics = p.call(PUBLISHED["tb"], **options)
    assert loss.item() == pytest.approx(beta / 2 * squares / n, rel=1e-12)
    assert metrics["tb/square/completions"].item() == pytest.approx(squares, rel=1e-12)


def test_gradient_of_rloo_is_the_leave_one_out_policy_gradient_and_copgs_is_the_same():
    p = problem()
    on_policy = replace(p, mu=p.pi.detach())
    c = {j: a / p.completions.num_completions for j, a in advantages_of(p).items()}
    for q in (p, on_policy):
        assert_gradient(q, "rloo", c)
        assert_gradient(q, "copg", c)
    assert on_policy.call(PUBLISHED["copg"])[0].item() == 0.0


def test_gradient_of_proximal_rloo_carries_the_ratio_inside_the_clip():
    p = problem(spread=0.6)
    a, c = advantages_of(p), {}
    for j, log_r in sums(p, p.pi.detach() - p.mu).items():
        r = math.exp(log_r)
        is_clipped = (r > 1.2 and a[j] > 0) or (r < 0.8 and a[j] < 0)
        c[j] = 0.0 if is_clipped else r * a[j] / p.completions.num_completions
    assert 0 < list(c.values()).count(0.0) < len(c)
    assert_gradient(p, "proximal_rloo", c)


def test_gradient_of_online_dpo_is_dpos():
    """beta sigma(-margin) (grad log pi(y+) - grad log pi(y-)), a mean over groups: DPO, eq. 7."""
    p, beta = problem(), 0.7
    log_ratios, rewards = sums(p, p.pi.detach() - p.ref), p.completions.rewards.tolist()
    c = {}
    for members in p.members():
        if len(members) < 2:
            continue
        best, worst = (f(members, key=lambda j: rewards[j]) for f in (max, min))
        margin = beta * (log_ratios[best] - log_ratios[worst])
        c[best] = beta / (1 + math.exp(margin)) / p.completions.num_groups
        c[worst] = -c[best]
    assert_gradient(p, "online_dpo", c, beta=beta)


def test_on_policy_the_token_losses_are_the_policy_gradient():
    p = problem()
    p = replace(p, mu=p.pi.detach())
    want = torch.where(p.mask, -p.advantages / p.num_loss_tokens, 0)
    for name in ("aipo", "reinforce", "dr_grpo", "cispo", "icepop", "ppo"):
        torch.testing.assert_close(p.gradient(PUBLISHED[name]), want, **EXACT)
    torch.testing.assert_close(p.gradient(PUBLISHED["grpo"], normalize="tokens"), want, **EXACT)


def test_the_clip_cuts_the_gradient_on_its_side_alone():
    p, a = problem(spread=3, seed=1), problem(spread=3, seed=1).advantages
    r = (p.pi.detach() - p.mu).exp()
    cut = ((r > 1.2) & (a > 0)) | ((r < 0.8) & (a < 0))
    assert (cut & p.mask).any() and (p.mask & ~cut & ((r > 1.2) | (r < 0.8))).any()
    want = torch.where(p.mask & ~cut, -r * a / p.num_loss_tokens, 0)
    torch.testing.assert_close(p.gradient(PUBLISHED["ppo"]), want, **EXACT)
    capped = torch.where((r > 1.5) & (a < 0), 0, want)  # TRL's delta
    torch.testing.assert_close(p.gradient(PUBLISHED["ppo"], ratio_cap=1.5), capped, **EXACT)


def test_a_cap_of_the_ratio_is_verls_dual_clip():
    """For A < 0 at least clip_ratio_c A, for A > 0 PPO's (verl, clip_ratio_c)."""
    p = problem(spread=3, seed=1)
    a, c = p.advantages, 1.5
    r = (p.pi - p.mu).exp()
    of_ppo = torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
    objective = torch.where(a < 0, torch.maximum(of_ppo, c * a), of_ppo)
    assert (p.mask & (a < 0) & (r > c)).any()
    want = -objective[p.mask].sum() / p.num_loss_tokens
    (slope,) = torch.autograd.grad(want, p.pi)
    loss, _ = p.call(PUBLISHED["ppo"], ratio_cap=c)
    torch.testing.assert_close(loss, want, **EXACT)
    torch.testing.assert_close(p.gradient(PUBLISHED["ppo"], ratio_cap=c), slope, **EXACT)


def test_past_the_largest_ratio_a_bad_token_is_still_pushed_down():
    one = torch.ones(1)
    pi = torch.tensor([0.0], requires_grad=True)
    inputs = inputs_of(pi, -100 * one, None, -one, one.bool(), num_loss_tokens=1)
    loss, _ = PUBLISHED["ppo"](inputs)
    loss.backward()
    assert [pi.grad.item(), loss.item()] == pytest.approx([math.exp(20)] * 2)


# --- the value head ---


@pytest.mark.parametrize(
    "values, returns, loss, slopes, error, clipped",
    [
        # V_old 1, eps 0.4: clip(V) 1.4, 0.6, 1. max(4, 1.96), max(0.25, 0.16), 0
        ([2.0, 0.5, 1.0], [0.0, 1.0, 1.0], 4.25 / 2 / 3, [2 / 3, -0.5 / 3, 0], 2.5, 0),
        # A step towards the return: the clipped 1.4 is farther, (3 - 1.4)^2, and has no gradient
        ([2.0], [3.0], 1.6**2 / 2, [0], 1.0, 1),
    ],
)
def test_value_loss_by_hand(values, returns, loss, slopes, error, clipped):
    values = torch.tensor(values, requires_grad=True)
    given = (torch.ones(len(values)), torch.tensor(returns))
    found, metrics = value_loss(values, *given, value_clip=0.4, num_loss_tokens=len(values))
    found.backward()
    assert found.item() == pytest.approx(loss) and values.grad.tolist() == pytest.approx(slopes)
    wanted = {"value/sum": values.sum().item(), "value/error": error, "value/clipped": clipped}
    assert {k: v.item() for k, v in metrics.items()} == pytest.approx(wanted)
    free = value_loss(values, *given, value_clip=None, num_loss_tokens=len(values))[0]
    squares = sum((v - r) ** 2 for v, r in zip(values.tolist(), returns))
    assert free.item() == pytest.approx(squares / 2 / len(values))
    with pytest.raises(ValueError, match="value_clip=0"):
        value_loss(values, *given, value_clip=0, num_loss_tokens=1)


# --- KL to the reference and entropy bonus around a loss ---


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
    given = (f64(HALF), f64(2 * HALF), f64(0.0), torch.tensor([True]))
    loss, metrics = fn(inputs_of(pi, *given, num_loss_tokens=2))
    loss.backward()
    assert loss.item() == pytest.approx(0.1 / 2 * value, abs=1e-15)
    assert pi.grad.item() == pytest.approx(0.1 / 2 * slope, abs=1e-15)
    assert metrics["kl/ref"].item() == pytest.approx(math.log(2) - 0.5, abs=1e-14)
    assert not metrics["kl/ref"].requires_grad


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
    given = (pi.detach(), None, f64(0.0, 0.0), torch.tensor([True, False]))
    inputs = inputs_of(pi, *given, num_loss_tokens=4, entropy=entropy)
    loss, metrics = regularised(PUBLISHED["aipo"], entropy_coef=0.3)(inputs)
    loss.backward()
    assert loss.item() == pytest.approx(-0.3 * 2 / 4)
    assert entropy.grad.tolist() == pytest.approx([-0.3 / 4, 0.0])
    assert "kl/ref" not in metrics


def test_without_coefficients_the_loss_is_untouched_and_the_reference_is_measured():
    p = problem()
    plain, around = p.call(PUBLISHED["aipo"]), p.call(regularised(PUBLISHED["aipo"]))
    assert plain[0].item() == around[0].item() and around[1].keys() - plain[1].keys() == {"kl/ref"}
    want = sum(math.expm1(x) - x for x in (p.ref - p.pi.detach())[p.mask].tolist())
    assert around[1]["kl/ref"].item() == pytest.approx(want, rel=1e-12)


SUMMED = ["rloo", "copg", "proximal_rloo", "online_dpo", "best_of_n", "tb"]


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize(
    "name, options, over, weigh",
    [
        ("grpo", {"normalize": "tokens"}, "batch", torch.mean),
        ("grpo", {"normalize": "completions"}, "completions", torch.mean),
        ("grpo", {"normalize": "groups"}, "groups", torch.mean),
        ("best_of_n", {"length_normalize": True}, "completions", torch.mean),
        *((name, {}, "completions", torch.sum) for name in SUMMED),
    ],
)
def test_the_kl_is_weighed_as_the_loss_is(name, options, over, weigh, bound):
    """DeepSeekMath, eq. 3: of completions the KL is inside the mean over a completion's tokens.
    Around a loss that sums completions kl_coef is the papers' beta, and each KL a sum over tokens.
    """
    p = problem(sizes=(3, 2, 4))
    x = p.ref - p.pi.detach()
    kl = x.exp() - 1 - x
    labels = [p.labels(j) for j in range(p.completions.groups.numel())]
    parts = {"batch": [torch.cat(labels)], "completions": labels, "groups": []}
    for members in p.members():
        parts["groups"].append(torch.cat([labels[j] for j in members]))
    shares = [float(weigh(kl[part])) for part in parts[over] if part.numel()]
    want = 0.04 * sum(shares) / len(shares)
    fn = functools.partial(PUBLISHED[name], **options) if bound else PUBLISHED[name]
    given = {} if bound else options
    with_kl = p.call(regularised(fn, kl_coef=0.04), **given)[0].item()
    assert with_kl - p.call(fn, **given)[0].item() == pytest.approx(want, rel=1e-9)


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


@uses_entropy
def my_loss(inputs):
    return -(inputs.trainer_logprobs + inputs.entropy).sum() / inputs.num_loss_tokens, {}


def test_what_a_loss_is_given_goes_through():
    bound = functools.partial(PUBLISHED["tb"], beta=0.5)
    for fn in (my_loss, regularised(my_loss), regularised(PUBLISHED["tb"], entropy_coef=0.1)):
        assert has_mark(fn, "uses_entropy")
    for fn in (PUBLISHED["aipo"], regularised(PUBLISHED["aipo"]), regularised(bound, kl_coef=0.1)):
        assert not has_mark(fn, "uses_entropy")
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
def test_a_policy_far_below_the_reference_is_still_pulled_up(estimator):
    pi = torch.tensor([-1e20], requires_grad=True)
    one = torch.ones(1)
    fn = regularised(PUBLISHED["aipo"], kl_coef=1e-3, kl_estimator=estimator)
    inputs = inputs_of(pi, pi.detach(), 0 * one, 0 * one, one.bool(), num_loss_tokens=1)
    loss, metrics = fn(inputs)
    loss.backward()
    assert loss.isfinite() and all(value.isfinite() for value in metrics.values())
    assert math.isfinite(pi.grad.item()) and pi.grad.item() <= -0.09


@settings(max_examples=25)
@given(x=st.floats(-50, 50))
def test_k3_is_nonnegative_convex_and_smooth_past_its_limit(x):
    points = f64(x - 0.5, x, x + 0.5, grad=True)
    values = k3(points)
    (slope,) = torch.autograd.grad(values.sum(), points)
    assert (values >= 0).all() and (slope.diff() >= 0).all()
    within = min(x, MAX_LOG_RATIO)
    exact = math.expm1(within) * (1 + max(x - MAX_LOG_RATIO, 0)) - within
    assert values[1].item() == pytest.approx(exact, rel=1e-9, abs=1e-15)


def test_float32_k3_keeps_its_digits_near_zero():
    assert k3(torch.tensor([1e-3])).item() == pytest.approx(math.expm1(1e-3) - 1e-3, rel=1e-3)


def test_half_square_is_a_square_until_it_would_overflow():
    x = torch.tensor([-3.0, 1e6, 1e20, -1e30], requires_grad=True)
    values = half_square(x)
    (slope,) = torch.autograd.grad(values.sum(), x)
    assert values.tolist() == pytest.approx([4.5, 5e11, 1e28, 1e38], rel=1e-6)
    assert slope.tolist() == [-3.0, 1e6, 1e8, -1e8]


# --- against TRL and torchtune ---

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "trl_losses.json").read_text())
OURS = {
    "grpo": ("grpo", {}, {}),
    "grpo_clip_higher": ("grpo", {"clip_high": 0.28}, {}),
    "grpo_delta": ("grpo", {"ratio_cap": 1.5}, {}),
    "gspo": ("gspo", {}, {}),
    "gspo_wide": ("gspo", {"clip_low": 0.05, "clip_high": 0.05}, {}),
    "dapo": ("dapo", {}, {}),
    "dapo_kl": ("dapo", {}, {"kl_coef": 0.1}),
    "dapo_entropy": ("dapo", {}, {"entropy_coef": 0.05}),
    "bnpo": ("bnpo", {}, {}),
    "dr_grpo": ("ppo", {"normalize": "tokens"}, {}),  # and another denominator
    "cispo": ("cispo", {"ratio_cap": 1.2}, {}),
    "cispo_kl": ("cispo", {"ratio_cap": 1.2}, {"kl_coef": 0.1}),
    "rloo": ("proximal_rloo", {}, {}),
}


def packed():
    """(TRL's padded tensors, which labels are no padding, ours end to end)."""
    padded = {name: f64(*value) for name, value in GOLDEN["tensors"].items()}
    lengths = torch.tensor(GOLDEN["lengths"])
    real = torch.arange(5) < lengths[:, None]
    index = torch.arange(6).repeat_interleave(lengths)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    completions = Completions(
        index=index,
        groups=groups,
        rewards=padded["rewards"],
        group_tokens=torch.zeros(2).index_add(0, groups, lengths.float())[groups],
        num_completions=6.0,
        num_groups=2.0,
        num_trained_groups=2.0,
    )
    ours = {}
    for name, value in padded.items():
        ours[name] = value[real] if value.dim() == 2 else value[index]
    return padded, real, ours, completions


@pytest.mark.parametrize("case", OURS)
def test_loss_and_gradient_equal_trls(case):
    (name, options, around), golden = OURS[case], GOLDEN["losses"][case]
    _, real, t, completions = packed()
    pi, entropy = t["trainer_logprobs"].requires_grad_(), t["entropy"].requires_grad_()
    advantages = t["leave_one_out"] if case == "rloo" else t["advantages"]
    fn, size = regularised(PUBLISHED[name], **around), pi.numel()
    # TRL's dr_grpo is the clipped surrogate over completions times their room
    tokens = 6.0 * 5 if case == "dr_grpo" else float(size)
    given = (t["generator_logprobs"], t["ref_logprobs"], advantages)
    of_all = {"num_loss_tokens": tokens, "entropy": entropy, "completions": completions}
    inputs = inputs_of(pi, *given, torch.ones(size, dtype=torch.bool), **of_all)
    loss, _ = fn(inputs, **options)
    loss.backward()
    assert loss.item() == pytest.approx(golden["loss"], rel=1e-12)
    want = torch.tensor(golden["gradient"], dtype=torch.float64)
    torch.testing.assert_close(pi.grad, want[real], **EXACT)
    assert (want != 0).any() and (want[~real] == 0).all()
    if "entropy_gradient" in golden:
        wanted = torch.tensor(golden["entropy_gradient"], dtype=torch.float64)[real]
        torch.testing.assert_close(entropy.grad, wanted, **EXACT)


def test_every_golden_is_compared():
    assert OURS.keys() == GOLDEN["losses"].keys() and GOLDEN["made"]["trl"].startswith("1.16")


def test_advantages_equal_trls():
    padded, *_ = packed()
    rewards = padded["rewards"].view(2, 3)
    every = torch.ones(2, 3, dtype=torch.bool)
    scaled = group_mean_std(rewards, every).flatten()
    left_out = leave_one_out(rewards, every).flatten()
    torch.testing.assert_close(scaled, padded["advantages"], **EXACT)
    torch.testing.assert_close(left_out, padded["leave_one_out"], **EXACT)


def test_ppo_value_loss_and_gae_equal_torchtunes():
    from torchtune import rlhf
    from torchtune.rlhf.loss import PPOLoss

    random = torch.Generator().manual_seed(3)
    pi, old, values, old_values, rewards = (
        torch.randn(5, 4, 7, generator=random, dtype=torch.float64) * 0.4
    )
    length = torch.full((4,), 7)
    # torchtune whitens its advantages; ours are whitened before they are compared.
    got, returns = gae(rewards.flatten(), old_values.flatten(), length, gamma=0.9, lam=0.8)
    want, want_returns = rlhf.estimate_advantages(old_values, rewards, 0.9, 0.8)
    whitened = rlhf.whiten(got.view(4, 7))
    torch.testing.assert_close(whitened, want, **EXACT)
    torch.testing.assert_close(returns.view(4, 7), want_returns, **EXACT)
    _, policy, value, *_ = PPOLoss(epsilon=0.2, value_coeff=1.0, value_clip_range=0.3)(
        old, pi, want, old_values, values, want_returns
    )
    every = torch.ones(28, dtype=torch.bool)
    inputs = inputs_of(pi.flatten(), old.flatten(), None, want.flatten(), every, num_loss_tokens=28)
    ours = PUBLISHED["ppo"](inputs)[0]
    flat = (x.flatten() for x in (values, old_values, want_returns))
    ours_value, _ = value_loss(*flat, value_clip=0.3, num_loss_tokens=28)
    torch.testing.assert_close((ours, ours_value), (policy, value), **EXACT)
