"""AdamW against its equations in float64, the schedules' shapes, and clipping. On several ranks:
tests/ranks/test_learning.py.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from llamarl.learning.optim import (
    SCHEDULES,
    build_optimizer,
    clip_grad_norm,
    lr_at,
    set_lr,
    settle_moments,
)
from llamarl.models.sharded_state import MOMENTS, moment, moment_scale

ADAM = dict(lr=0.1, betas=(0.9, 0.95), eps=1e-8)


def parameter(*values, grad=None, dtype=torch.float64):
    p = nn.Parameter(torch.tensor(values, dtype=dtype))
    p.grad = None if grad is None else torch.tensor(grad, dtype=dtype)
    return p


def test_adamw_follows_its_equations_and_the_rate_of_the_step():
    p = parameter([2.0])
    optimizer = build_optimizer([p], weight_decay=0.01, **ADAM)
    x = 2.0
    m = 0.0
    v = 0.0
    for step, (gradient, lr) in enumerate([(0.5, 0.1), (-1.0, 0.05), (3.0, 0.2)], start=1):
        p.grad = torch.tensor([[gradient]], dtype=torch.float64)
        set_lr(optimizer, lr)
        optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        x = x * (1 - lr * 0.01) - lr * (m / (1 - 0.9**step)) / (
            math.sqrt(v / (1 - 0.95**step)) + 1e-8
        )
        assert p.item() == pytest.approx(x, abs=1e-14)


def test_vectors_are_not_decayed_and_frozen_parameters_left_alone():
    matrix, vector = parameter([1.0], grad=[[0.0]]), parameter(1.0, grad=[0.0])
    frozen = parameter([1.0]).requires_grad_(False)
    optimizer = build_optimizer([frozen, vector, matrix], weight_decay=0.5, **ADAM)
    optimizer.step()
    assert matrix.item() == pytest.approx(0.95, abs=1e-15)
    assert (vector.item(), frozen.item()) == (1.0, 1.0)
    assert optimizer.defaults["fused"]
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        build_optimizer([frozen], weight_decay=0.0, **ADAM)


@pytest.mark.parametrize(
    ("schedule", "want"),
    [
        ("constant", [1.0] * 10),
        ("linear", [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        ("cosine", [0.5 * (1 + math.cos(math.pi * i / 10)) for i in range(10)]),
        ("wsd", [1.0] * 9 + [0.5]),
    ],
)
def test_schedules_by_hand(schedule, want):
    got = [lr_at(s, lr=3.0, schedule=schedule, max_steps=10) / 3.0 for s in range(10)]
    assert got == pytest.approx(want, abs=1e-12)


def test_warm_up_and_the_steps_of_a_decay_by_hand():
    """wsd as in TBA, table 2: warm-up 50, stable 450, decay 500."""
    warm = {"schedule": "constant", "warmup_steps": 3, "max_steps": 10}
    got = [lr_at(s, lr=1.0, **warm) for s in range(5)]
    assert got == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    tba = {"schedule": "wsd", "warmup_steps": 50, "max_steps": 1000, "decay_steps": 500}
    got = [lr_at(s, lr=1.0, **tba) for s in (24, 50, 499, 500, 750, 999)]
    assert got == pytest.approx([25 / 51, 1.0, 1.0, 1.0, 0.5, 1 / 500])
    with pytest.raises(ValueError, match="warmup_steps=10 must be at least 0 and below max_steps"):
        lr_at(0, lr=1.0, max_steps=10, warmup_steps=10)


@given(schedule=st.sampled_from(sorted(SCHEDULES)), max_steps=st.integers(1, 60), data=st.data())
def test_rates_are_positive_rise_then_fall_and_peak_at_lr(schedule, max_steps, data):
    warmup = data.draw(st.integers(0, max_steps - 1))
    given = {"schedule": schedule, "warmup_steps": warmup, "max_steps": max_steps}
    rates = [lr_at(s, lr=2.0, **given) for s in range(max_steps)]
    assert all(0 < r <= 2.0 for r in rates) and rates[warmup] == 2.0
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    past = lr_at(max_steps + 5, lr=2.0, **given)
    assert past == (2.0 if schedule == "constant" else 0.0)


def test_clipping_by_hand():
    # the norm of (3, 4) with 12 is 13; clipped to 6.5 everything halves
    a = parameter(0.0, 0.0, grad=[3.0, 4.0])
    b = parameter([0.0], grad=[[12.0]])
    norm = clip_grad_norm([a, b, parameter(1.0)], 6.5)
    assert norm.item() == pytest.approx(13.0, abs=1e-12) and norm.shape == ()
    halved = torch.cat([a.grad, b.grad.flatten()]).tolist()
    assert halved == pytest.approx([1.5, 2.0, 6.0], rel=1e-6)
    for bad in (math.nan, math.inf):  # shows in the norm
        assert not clip_grad_norm([parameter(0.0, 0.0, grad=[1.0, bad])], 1.0).isfinite()


@pytest.mark.parametrize("max_norm", [None, 100.0, math.inf])
def test_small_gradients_are_left_bit_for_bit(max_norm):
    a = parameter(0.0, 0.0, grad=[3.0, 4.0])
    assert clip_grad_norm(iter([a]), max_norm).item() == 5.0
    assert a.grad.tolist() == [3.0, 4.0]


def test_the_norm_of_bfloat16_gradients_is_summed_in_float32():
    a = nn.Parameter(torch.zeros(300, dtype=torch.bfloat16))
    a.grad = torch.ones_like(a)
    assert clip_grad_norm([a], None).item() == pytest.approx(math.sqrt(300), rel=1e-6)


# Of a block's largest: three roundings to the codes, 0.0141 apart where they are coarsest.
BLOCK = 3 * 0.0071


def matrix(seed: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)))


def steps(optimizer, p: torch.nn.Parameter, numbers) -> None:
    for i in numbers:
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 + i))
        set_lr(optimizer, 0.01 / (i + 1))
        optimizer.step()


def test_8_bit_moments_follow_those_of_adamw_and_take_a_byte():
    exact, small = matrix(), matrix()
    both = {
        kind: build_optimizer([p], weight_decay=0.1, kind=kind, **ADAM)
        for kind, p in (("adamw", exact), ("adamw8bit", small))
    }
    for optimizer, p in zip(both.values(), (exact, small)):
        steps(optimizer, p, range(3))
    for key in MOMENTS:
        want, got = both["adamw"].state[exact][key], both["adamw8bit"].state[small][key]
        assert got.codes.dtype == torch.uint8 and got.codes.numel() == want.numel()
        error = (moment(got) - want).view(-1, 256).abs().amax(1) / want.view(-1, 256).abs().amax(1)
        assert 0 < error.max() <= BLOCK
    assert ((small - exact).abs() / (exact - matrix()).abs().mean()).mean() < 0.1


def test_8_bit_moments_saved_as_numbers_go_on_with_the_same_bits():
    p = matrix()
    optimizer = build_optimizer([p], weight_decay=0.1, kind="adamw8bit", **ADAM)
    steps(optimizer, p, range(2))
    again = torch.nn.Parameter(p.detach().clone())
    resumed = build_optimizer([again], weight_decay=0.1, kind="adamw8bit", **ADAM)
    state = resumed.state[again]
    for key in MOMENTS:
        kept = optimizer.state[p][key]
        state[key], state[f"{key}_scale"] = moment(kept).clone(), moment_scale(kept).clone()
    state["step"] = torch.tensor(2.0)
    settle_moments(resumed)
    for o, q in ((optimizer, p), (resumed, again)):
        steps(o, q, [2])
    assert torch.equal(p, again) and not torch.equal(p, matrix())
    for key in MOMENTS:
        assert torch.equal(optimizer.state[p][key].codes, resumed.state[again][key].codes)
