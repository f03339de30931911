"""Theorem 7.5 of LlamaRL and the closed form of its split, over drawn jobs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.planner.predict import Side, best_split, compared, t_async, t_best, t_sync

# Ratios of up to 1e4: 1 - theta then loses four digits of sixteen.
positive = st.floats(0.1, 10.0)
shares = st.floats(0.01, 0.99)


@st.composite
def etas(draw):
    """A time a completion that does not rise with b: fixed / b + floor (1 + 1/b^power)."""
    fixed = draw(st.floats(0.0, 10.0))
    floor = draw(st.floats(0.01, 10.0))
    power = draw(st.floats(0.0, 3.0))
    return lambda b: fixed / b + floor * (1 + b**-power)


@st.composite
def sides(draw, gpus):
    return Side(
        gpus=gpus,
        eta=draw(etas()),
        weights=draw(st.floats(0.1, 100.0)),
        sample=draw(st.floats(0.1, 10.0)),
    )


def test_worked_by_hand():
    """2,048 completions on 256 GPUs, 8 a replica, 0.5 and 1.5 s a completion."""
    assert t_sync(2048, 256, 8, 0.5, 1.5) == 2048 * 8 / 256 * 2.0 == 128.0
    # Its own m: 4 GPUs of the generator hold a replica that is as fast.
    assert best_split((8, 0.5), (4, 1.5)) == 4 / 10
    assert t_best(2048, 256, (8, 0.5), (4, 1.5)) == 2048 / 256 * 10 == 80.0
    assert t_async(2048, 256, 0.5, (8, 0.5), (4, 1.5)) == max(64.0, 96.0)


@settings(deadline=None)
@given(positive, positive, positive, positive)
def test_with_equal_m_and_b_overlap_alone_gains_nothing(m, eta_t, eta_g, batch):
    synchronous = t_sync(batch, 64.0, m, eta_t, eta_g)
    asynchronous = t_best(batch, 64.0, (m, eta_t), (m, eta_g))
    assert asynchronous == pytest.approx(synchronous, rel=1e-12)


@settings(deadline=None)
@given(positive, positive, positive, positive, st.lists(shares, min_size=1, max_size=50))
def test_the_closed_form_is_the_least_of_all_splits(m_t, eta_t, m_g, eta_g, others):
    trainer = (m_t, eta_t)
    generator = (m_g, eta_g)
    best = t_best(100.0, 64.0, trainer, generator)
    theta = best_split(trainer, generator)
    assert t_async(100.0, 64.0, theta, trainer, generator) == pytest.approx(best, rel=1e-9)
    for other in others:
        assert t_async(100.0, 64.0, other, trainer, generator) >= best * (1 - 1e-9)


@settings(deadline=None)
@given(st.data(), st.floats(1.0, 64.0), shares, st.floats(1.01, 100.0))
def test_theorem_7_5(data, m, share, room):
    """Whatever a synchronous job does with its memory, an asynchronous one is no slower."""
    trainer = data.draw(sides(m))
    generator = data.draw(sides(m))
    # Room for all weights and for a completion of each side at least, however it is shared.
    least = trainer.weights + generator.weights
    least += max(trainer.sample / share, generator.sample / (1 - share))
    found = compared(100.0, 64.0, room * least / m, trainer, generator, share)
    assert found.asynchronous <= found.synchronous * (1 + 1e-9)
    assert 0 < found.theta < 1


def test_the_gain_is_that_of_a_larger_b():
    """eta = 1/b, weights of 4 on both sides, 12 in all: half of the 4 left is b = 2 for each, and
    alone each has b = 8. m = 1: T_sync = B0/G0 (1/2 + 1/2), T* = B0/G0 (1/8 + 1/8).
    """
    side = Side(gpus=1, eta=lambda b: 1 / b, weights=4.0)
    found = compared(10.0, 10.0, 12.0, side, side, 0.5)
    assert (found.synchronous, found.asynchronous, found.theta) == (1.0, 0.25, 0.5)


def test_without_the_assumption_the_theorem_need_not_hold():
    """With an eta that rises with b, all of the memory makes it slower."""
    side = Side(gpus=1, eta=lambda b: b, weights=1.0)
    found = compared(10.0, 10.0, 4.0, side, side, 0.5)
    assert found.asynchronous > found.synchronous


def test_what_is_not_of_the_theorem_is_refused():
    one = Side(gpus=1, eta=lambda b: 1.0, weights=4.0)
    with pytest.raises(ValueError, match="one m"):
        compared(1.0, 1.0, 12.0, one, Side(gpus=2, eta=one.eta), 0.5)
    with pytest.raises(ValueError, match="leave nothing"):
        compared(1.0, 1.0, 8.0, one, one, 0.5)
