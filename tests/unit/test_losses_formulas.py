"""Each loss by hand on two groups, and its gradient against the paper's formula, computed by itself
in float64.

The formulas are loops over completions with coefficients c_t such that the gradient of the loss in
log pi_t is -c_t.
"""

import math
from dataclasses import replace

import pytest
import torch

from llamarl.learning.losses import LOSSES
from llamarl.learning.losses.inputs import Completions
from llamarl.learning.values import value_loss
from tests.loss_problems import PUBLISHED, Problem, inputs_of, problem

EXACT = dict(atol=1e-13, rtol=1e-11)
LOG2 = math.log(2)

# Two groups of two completions, pi = 1/2 at each label. Group 0: y0 of two labels with ratios 2 and
# 1/2, y1 of one with ratio 1. Group 1: y2 of one label with ratio 4, y3 of two with ratio 1.
# Against the reference pi is 2 x 2, 1; 1, and 2 x 1/2.
RATIOS = [2.0, 0.5, 1.0, 4.0, 1.0, 1.0]
REF_RATIOS = [2.0, 2.0, 1.0, 1.0, 2.0, 0.5]
INDEX = [0, 0, 1, 2, 3, 3]
GROUPS = [0, 0, 1, 1]
REWARDS = [1.0, 0.0, 3.0, 1.0]
ADVANTAGES = [0.5, -0.5, 1.0, -1.0]  # the group's means are 0.5 and 2


def by_hand(advantages=ADVANTAGES) -> Problem:
    f64 = torch.float64
    pi = torch.full((6,), -LOG2, dtype=f64)
    index = torch.tensor(INDEX)
    completions = Completions(
        index=index,
        groups=torch.tensor(GROUPS),
        rewards=torch.tensor(REWARDS, dtype=f64),
        group_tokens=torch.full((4,), 3.0),
        num_completions=4,
        num_groups=2,
        num_trained_groups=2,
    )
    mu, ref = (pi - torch.tensor(ratios, dtype=f64).log() for ratios in (RATIOS, REF_RATIOS))
    return Problem(
        pi.requires_grad_(),
        mu,
        ref,
        torch.tensor(advantages, dtype=f64)[index],
        torch.ones(6, dtype=torch.bool),
        completions,
        6.0,
    )


HAND = [
    # weights min(r, cap) times advantage, one a label, times log pi = -log 2: -sum w A log pi / 6
    ("aipo", {"ratio_cap": 1.5}, LOG2 * (1.5 * 0.5 + 0.5 * 0.5 - 0.5 + 1.5 - 2) / 6),
    ("dr_grpo", {}, LOG2 * (2 * 0.5 + 0.5 * 0.5 - 0.5 + 4 - 2) / 6),
    ("dr_grpo", {"max_tokens": 10}, LOG2 * (1 + 0.25 - 0.5 + 4 - 2) / 40),
    (
        "cispo",
        {"ratio_cap": 1.5, "normalize": "completions"},
        LOG2 * ((0.75 + 0.25) / 2 - 0.5 + 1.5 - 1) / 4,
    ),
    ("reinforce", {}, LOG2 * (0.5 + 0.5 - 0.5 + 1 - 1 - 1) / 6),
    (
        "icepop",
        {"ratio_mask_low": 0.9, "ratio_mask_high": 3.0},
        LOG2 * (1 - 0.5 + 0 - 2) / 6,
    ),  # 1/2 and 4 are masked
    # min(r A, clip(r, 0.8, 1.2) A): 0.6 and 0.25 in y0; -0.5; 1.2; -1 and -1
    ("ppo", {}, -(0.6 + 0.25 - 0.5 + 1.2 - 2) / 6),
    ("grpo", {}, -((0.6 + 0.25) / 2 - 0.5 + 1.2 - 1) / 4),
    ("grpo", {"normalize": "tokens", "clip_high": 0.28}, -(0.64 + 0.25 - 0.5 + 1.28 - 2) / 6),
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

    token = {"ratio/sum": 9.5, "ratio/max": 4.0}
    assert of("rloo") == pytest.approx(
        token | {"kl/generator": (1 - LOG2) + (LOG2 - 0.5) + (3 - 2 * LOG2)}
    )
    # the squares of tb's residuals are (1 - log 2)^2 twice and 4 twice; log Z twice 1 - log 2 and 4
    got = of("tb", beta=0.5)
    assert got["tb/square/completions"] == pytest.approx(2 * (1 - LOG2) ** 2 + 8)
    assert got["tb/log_z/completions"] == pytest.approx(2 * (1 - LOG2) + 8)
    assert (
        got["tb/log_ratio/completions"]
        == pytest.approx(2 * LOG2)
        == pytest.approx(of("tba")["tba/log_ratio/completions"])
    )
    assert of("kimi_k2")["kimi/log_ratio/completions"] == pytest.approx(2 * LOG2)
    # margins beta 2 log 2 and 0, counted at both completions of their groups
    got = of("online_dpo", beta=0.5)
    assert [got[f"dpo/{k}/completions"] for k in ("margin", "accuracy", "tied")] == pytest.approx(
        [2 * LOG2, 2, 0]
    )
    got = of("ppo")
    assert (got["clip/high"], got["clip/low"], got["ratio/capped"]) == (2, 0, 0)
    got = of("proximal_rloo")  # y2 alone, once a label
    assert [got[k] for k in ("clip/high", "ratio/sum", "ratio/max")] == pytest.approx(
        [1, 2 + 1 + 4 + 2, 4]
    )


@pytest.mark.parametrize("name", ["online_dpo", "best_of_n"])
def test_a_group_without_preference_adds_nothing(name):
    p = by_hand()
    tied = replace(
        p,
        completions=replace(
            p.completions, rewards=torch.tensor([1.0, 1.0, 3.0, 1.0], dtype=torch.float64)
        ),
    )
    gradient, (loss, metrics) = tied.gradient(PUBLISHED[name]), tied.call(PUBLISHED[name])
    assert (gradient[:3] == 0).all() and (gradient[3] != 0).all()
    assert loss.item() == pytest.approx({"online_dpo": LOG2 / 2, "best_of_n": LOG2 / 2}[name])
    (key,) = (k for k in metrics if "tied" in k)
    assert metrics[key] == 2  # completions


def test_a_group_with_one_trained_completion_couples_with_nothing():
    p = by_hand()
    alone = replace(p, mask=torch.tensor([True, True, False, True, True, True]))
    for name in ("tb", "online_dpo", "best_of_n"):
        assert (alone.gradient(PUBLISHED[name])[:3] == 0).all() and (
            p.gradient(PUBLISHED[name])[:2] != 0
        ).all()


# --- gradients of the papers ---


def sums(p: Problem, other: torch.Tensor) -> dict[int, float]:
    """log(pi/other)(y) of each trained completion."""
    gaps = (p.pi.detach() - other).tolist()
    found = {}
    for members in p.members():
        for j in members:
            found[j] = sum(gaps[t] for t in p.labels(j))
    return found


def assert_gradient(p: Problem, name: str, coefficients: dict[int, float], **options) -> None:
    """That -coefficients (0 where there is none) is the gradient of the loss."""
    want = torch.zeros_like(p.pi)
    for t, c in coefficients.items():
        want[t] = -c
    torch.testing.assert_close(p.gradient(PUBLISHED[name], **options), want, **EXACT)


def token_weights(p: Problem, cap=8.0) -> list[float]:
    return [min(math.exp(a - b), cap) for a, b in zip(p.pi.tolist(), p.mu.tolist())]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["cispo", "dr_grpo"])
def test_gradients_of_tba_eq_13_and_14(name, seed):
    p = problem(seed=seed, spread=7)
    w, a = token_weights(p), p.advantages.tolist()
    assert max(w) == 8.0 > min(w)
    trained = p.mask.nonzero().flatten().tolist()
    assert_gradient(p, name, {t: w[t] * a[t] / p.num_loss_tokens for t in trained})


@pytest.mark.parametrize("seed", range(3))
def test_gradient_of_tba_eq_15(seed):
    p, tau = problem(seed=seed, spread=7), 0.3
    w = token_weights(p)
    a = p.advantages.tolist()
    log_lambda = sums(p, p.mu)
    c = {}
    for j, s in log_lambda.items():
        c |= {int(t): w[t] * (a[t] - tau * s) / p.num_loss_tokens for t in p.labels(j)}
    assert_gradient(p, "kimi_k2", c, tau=tau)


@pytest.mark.parametrize("seed", range(3))
def test_gradient_of_tba_eq_16(seed):
    p, beta = problem(seed=seed, spread=7), 0.3
    w = token_weights(p)
    a = p.advantages.tolist()
    log_l = sums(p, p.ref)
    c = {}
    for members in p.members():
        mean = sum(log_l[j] for j in members) / max(1, len(members))
        for j in members:
            for t in p.labels(j):
                c[int(t)] = w[t] * (a[t] - beta * (log_l[j] - mean)) / p.num_loss_tokens
    assert_gradient(p, "tba", c, beta=beta)


def test_tba_without_beta_is_dr_grpo():
    p = problem(spread=7)
    torch.testing.assert_close(
        p.gradient(PUBLISHED["tba"], beta=0.0), p.gradient(PUBLISHED["dr_grpo"]), **EXACT
    )


@pytest.mark.parametrize("seed", range(3))
def test_gradient_and_value_of_tb_with_temperatures_are_those_of_its_target(seed):
    """log R = (log ref / gamma + r / beta) / T (Lee et al. 2024), by the letter."""
    p = problem(seed=seed)
    beta = 0.25
    gamma = 1.2
    t = 2.0
    rewards, n = p.completions.rewards.tolist(), p.completions.num_completions
    c, squares = {}, 0.0
    for members in p.members():
        distance = {}  # log pi - log R of each
        for j in members:
            log_pi = sum(float(p.pi[label]) for label in p.labels(j))
            log_ref = sum(float(p.ref[label]) for label in p.labels(j))
            distance[j] = log_pi - (log_ref / gamma + rewards[j] / beta) / t
        mean = sum(distance.values()) / max(1, len(members))
        squares += sum((distance[j] - mean) ** 2 for j in members)
        for j in members:
            c |= {int(i): -beta * (distance[j] - mean) / n for i in p.labels(j)}
    options = {"beta": beta, "log_reward_temperature": t, "reference_temperature": gamma}
    assert_gradient(p, "tb", c, **options)
    loss, metrics = p.call(PUBLISHED["tb"], **options)
    assert loss.item() == pytest.approx(beta / 2 * squares / n, rel=1e-12)
    assert metrics["tb/square/completions"].item() == pytest.approx(squares, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_gradient_and_value_of_tb_are_tba_eq_7_and_5(seed):
    p, beta = problem(seed=seed), 0.25
    log_ratios = sums(p, p.ref)
    rewards = p.completions.rewards.tolist()
    n = p.completions.num_completions
    c, squares = {}, 0.0
    for members in p.members():
        shaped = {
            j: rewards[j] - beta * log_ratios[j] for j in members
        }  # [r - beta log pi/ref] of eq. 7
        mean = sum(shaped.values()) / max(1, len(members))
        for j in members:
            c |= {int(t): (shaped[j] - mean) / n for t in p.labels(j)}
        log_z = sum(rewards[j] / beta - log_ratios[j] for j in members) / max(
            1, len(members)
        )  # eq. 4
        squares += sum((log_z + log_ratios[j] - rewards[j] / beta) ** 2 for j in members)
    assert_gradient(p, "tb", c, beta=beta)
    loss, metrics = p.call(PUBLISHED["tb"], beta=beta)
    assert loss.item() == pytest.approx(beta / 2 * squares / n, rel=1e-12)
    assert metrics["tb/square/completions"].item() == pytest.approx(squares, rel=1e-12)


def test_gradient_of_rloo_is_the_leave_one_out_policy_gradient_and_copgs_is_the_same():
    p = problem()
    n, a = p.completions.num_completions, p.advantages.tolist()
    for q in (p, replace(p, mu=p.pi.detach())):  # off-policy and on-policy
        c = {}
        for members in q.members():
            for j in members:
                c |= {int(t): a[t] / n for t in q.labels(j)}
        assert_gradient(q, "rloo", c)
        assert_gradient(q, "copg", c)
    assert replace(p, mu=p.pi.detach()).call(PUBLISHED["copg"])[0].item() == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_gradient_of_proximal_rloo_carries_the_ratio_inside_the_clip(seed):
    p, n = problem(seed=seed, spread=0.6), problem(seed=seed).completions.num_completions
    c, cut = {}, 0
    for j, log_r in sums(p, p.mu).items():
        r, a = math.exp(log_r), p.advantages[p.labels(j)[0]].item()
        clipped = (r > 1.2 and a > 0) or (r < 0.8 and a < 0)
        cut += clipped
        c |= {int(t): 0.0 if clipped else r * a / n for t in p.labels(j)}
    assert 0 < cut < len(sums(p, p.mu))
    assert_gradient(p, "proximal_rloo", c)


def test_on_policy_the_gradients_of_the_rloo_family_are_one():
    p = problem()
    p = replace(p, mu=p.pi.detach())
    want = p.gradient(PUBLISHED["rloo"])
    for name in ("copg", "proximal_rloo"):
        torch.testing.assert_close(p.gradient(PUBLISHED[name]), want, **EXACT)


def test_on_policy_the_token_losses_are_the_policy_gradient():
    p = problem()
    p = replace(p, mu=p.pi.detach())
    want = torch.where(p.mask, -p.advantages / p.num_loss_tokens, 0)
    for name in ("aipo", "reinforce", "dr_grpo", "cispo", "icepop", "ppo"):
        torch.testing.assert_close(p.gradient(PUBLISHED[name]), want, **EXACT)
    torch.testing.assert_close(p.gradient(PUBLISHED["grpo"], normalize="tokens"), want, **EXACT)


def test_gradient_of_online_dpo_is_dpos():
    # beta sigma(-margin) (grad log pi(y+) - grad log pi(y-)), a mean over groups        (DPO, eq.
    # 7)
    p = problem()
    beta = 0.7
    c = {}
    log_ratios, rewards = sums(p, p.ref), p.completions.rewards.tolist()
    for members in p.members():
        if len(members) < 2:
            continue
        best, worst = (f(members, key=lambda j: rewards[j]) for f in (max, min))
        pull = (
            beta
            / (1 + math.exp(beta * (log_ratios[best] - log_ratios[worst])))
            / p.completions.num_groups
        )
        for j, sign in ((best, 1), (worst, -1)):
            c |= {int(t): sign * pull for t in p.labels(j)}
    assert_gradient(p, "online_dpo", c, beta=beta)


def test_the_clip_cuts_the_gradient_on_its_side_alone():
    p, a = problem(spread=3, seed=1), problem(spread=3, seed=1).advantages
    r = (p.pi.detach() - p.mu).exp()
    cut = ((r > 1.2) & (a > 0)) | ((r < 0.8) & (a < 0))
    assert (cut & p.mask).any() and (p.mask & ~cut & ((r > 1.2) | (r < 0.8))).any()
    want = torch.where(p.mask & ~cut, -r * a / p.num_loss_tokens, 0)
    torch.testing.assert_close(p.gradient(PUBLISHED["ppo"]), want, **EXACT)
    capped = torch.where((r > 1.5) & (a < 0), 0, want)  # TRL's delta
    torch.testing.assert_close(p.gradient(PUBLISHED["ppo"], ratio_cap=1.5), capped, **EXACT)


def test_past_the_largest_ratio_a_bad_token_is_still_pushed_down():
    one = torch.ones(1)
    pi = torch.tensor([0.0], requires_grad=True)
    inputs = inputs_of(pi, -100 * one, None, -one, one.bool(), num_loss_tokens=1)
    loss, _ = PUBLISHED["ppo"](inputs)
    loss.backward()
    assert pi.grad.item() == pytest.approx(math.exp(20)) and loss.item() == pytest.approx(
        math.exp(20)
    )


def test_log_z_is_the_mean_over_the_trained_completions_of_a_group():
    # beta 1/2. Group 0: mean of 1/0.5 - 3 and 0/0.5 - 1, its third completion is not trained; group
    # 1: 2/0.5 - 0. The residuals: -1 + 3 - 2, -1 + 1 - 0; 4 + 0 - 4.
    log_pi_ref = torch.tensor([3.0, 1.0, math.nan, 0.0], requires_grad=True)
    completions = Completions(
        index=torch.arange(4),
        groups=torch.tensor([0, 0, 0, 1]),
        rewards=torch.tensor([1.0, 0.0, 8.0, 2.0]),
        group_tokens=torch.tensor([2.0, 2.0, 2.0, 1.0]),
        num_completions=3,
        num_groups=1,
        num_trained_groups=2,
    )
    zeros = torch.zeros(4)
    mask = torch.tensor([True, True, False, True])
    inputs = inputs_of(
        log_pi_ref, zeros, zeros, zeros, mask, num_loss_tokens=3, completions=completions
    )
    loss, metrics = LOSSES["tb"](inputs, beta=0.5)
    loss.backward()
    assert metrics["tb/log_z/completions"].item() == -1.0 - 1.0 + 4.0
    assert loss.item() == 0.0 and log_pi_ref.grad.tolist() == [0.0] * 4


# --- the value head ---


def test_value_loss_by_hand():
    # V 2, 0.5, 1, 9; V_old 1; R 0, 1, 1; eps 0.4: clip(V) 1.4, 0.6, 1. max(4, 1.96), max(0.25,
    # 0.16), 0
    values = torch.tensor([2.0, 0.5, 1.0], requires_grad=True)
    old, returns = torch.ones(3), torch.tensor([0.0, 1.0, 1.0])
    loss, metrics = value_loss(values, old, returns, value_clip=0.4, num_loss_tokens=3)
    loss.backward()
    assert loss.item() == pytest.approx(4.25 / 2 / 3) and values.grad.tolist() == pytest.approx(
        [2 / 3, -0.5 / 3, 0]
    )
    assert {k: v.item() for k, v in metrics.items()} == pytest.approx(
        {"value/sum": 3.5, "value/error": 2.5, "value/clipped": 0}
    )
    free = value_loss(values.detach(), old, returns, value_clip=None, num_loss_tokens=3)[0]
    assert free.item() == pytest.approx(4.25 / 2 / 3)


def test_value_loss_leaves_what_is_inside_the_clip_as_it_is():
    # V_old + (V - V_old) has other last bits than V for one in eight of these, which is no clip.
    random = torch.Generator().manual_seed(0)
    values, old, returns = torch.rand(3, 1000, generator=random) * 0.4 - 0.2
    free, _ = value_loss(values, old, returns, value_clip=None, num_loss_tokens=1)
    loss, metrics = value_loss(values, old, returns, value_clip=0.4, num_loss_tokens=1)
    assert metrics["value/clipped"] == 0
    assert loss == free


def test_value_loss_clips_a_step_towards_the_return():
    # V 2 from V_old 1 towards R 3: the clipped 1.4 is farther, (3 - 1.4)^2, and has no gradient
    value = torch.tensor([2.0], requires_grad=True)
    one = torch.ones(1)
    loss, metrics = value_loss(value, one, 3 * one, value_clip=0.4, num_loss_tokens=1)
    loss.backward()
    assert (
        loss.item() == pytest.approx(1.6**2 / 2)
        and value.grad.item() == 0
        and metrics["value/clipped"] == 1
    )
    with pytest.raises(ValueError, match="value_clip=0"):
        value_loss(value, one, one, value_clip=0, num_loss_tokens=1)
