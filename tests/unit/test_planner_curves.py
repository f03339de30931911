"""Curves through measured times."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.planner.curves import Cost, Curve, FitError, rising

times = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=30)


@settings(deadline=None)
@given(times)
def test_a_fit_never_falls_and_loses_no_time(seconds):
    """Pooling keeps the mean of all values, and rising values stay as they are."""
    curve = Curve.fitted(range(1, len(seconds) + 1), seconds)
    assert all(b >= a for a, b in zip(curve.ys, curve.ys[1:]))
    assert sum(curve.ys) == pytest.approx(sum(seconds))
    ordered = sorted(seconds)
    exact = Curve.fitted(range(1, len(seconds) + 1), ordered)
    assert exact.ys == pytest.approx(ordered)
    assert exact.error.worst == pytest.approx(0.0, abs=1e-12)


@settings(deadline=None)
@given(times, times)
def test_no_other_rising_values_are_nearer(values, others):
    number = min(len(values), len(others))
    given_ = np.array(values[:number])
    found = rising(given_, np.ones(number))
    other = np.sort(others[:number])
    assert ((found - given_) ** 2).sum() <= ((other - given_) ** 2).sum() + 1e-9


def test_falling_neighbours_are_pooled_by_hand():
    """4, 2 -> 3, 3; the second weighs three times as much -> 2.5."""
    assert rising([1, 4, 2, 5], [1, 1, 1, 1]).tolist() == [1, 3, 3, 5]
    assert rising([4, 2], [1, 3]).tolist() == [2.5, 2.5]


def test_several_times_of_a_size_count_as_their_mean_and_the_error_says_it():
    curve = Curve.fitted([1, 1, 2], [1.0, 3.0, 4.0])
    assert (curve.xs, curve.ys) == ((1, 2), (2, 4))
    # |2 - 1| / 1, |2 - 3| / 3 and 0.
    assert curve.error.worst == 1.0
    assert curve.error.typical == pytest.approx(((1 + 1 / 9 + 0) / 3) ** 0.5)
    assert str(FitError(0.1, 0.25, 3)) == "10.0% typical, 25.0% at worst, of 3 points"


def test_between_before_and_behind_the_knots():
    curve = Curve((2, 4), (3.0, 5.0))
    assert curve.at(3) == 4.0
    assert curve.at(1) == 3.0  # what is smaller may cost as much
    assert curve.at(8) == 10.0  # behind the last a unit costs what it costs there
    assert curve.at(0) == 0.0
    assert curve.per_unit() == [(2, 1.5), (4, 1.25)]
    assert curve.unit_time_falls
    assert not Curve((1, 2), (1.0, 3.0)).unit_time_falls


@settings(deadline=None)
@given(
    st.lists(st.floats(0.1, 10.0), min_size=3, max_size=3),
    st.floats(0.0, 0.1),
)
def test_a_cost_of_two_sizes_is_found_from_noiseless_times(steps, slope):
    """curve(x) + slope y, with two y at every x: exact."""
    ys = np.cumsum(steps)
    points = []
    for x, fixed in zip((1, 4, 16), ys):
        points += [(x, x * 10, fixed + slope * x * 10), (x, x * 30, fixed + slope * x * 30)]
    cost = Cost.fitted(*map(list, zip(*points)))
    assert cost.slope == pytest.approx(slope, abs=1e-9)
    assert cost.curve.ys == pytest.approx(ys, rel=1e-6)
    assert cost.error.worst < 1e-6
    assert cost.at(4, 40) == pytest.approx(ys[1] + slope * 40, rel=1e-6)


def test_a_cost_of_three_sizes_is_found_from_noiseless_times():
    """2 x + 0.5 y + 3 z, with three y and z at every x: exact."""
    points = []
    for x in (1, 4, 16):
        for y, z in ((10 * x, 1), (10 * x, 5), (40 * x, 1)):
            points.append((x, y, 2.0 * x + 0.5 * y + 3.0 * z, z))
    cost = Cost.fitted(*map(list, zip(*points)))
    assert (cost.slope, cost.each) == (pytest.approx(0.5), pytest.approx(3.0))
    assert cost.curve.ys == pytest.approx((2.0, 8.0, 32.0), rel=1e-6)
    assert cost.at(4, 40, 2) == pytest.approx(8 + 20 + 6)


def test_a_second_size_that_makes_it_faster_is_noise():
    cost = Cost.fitted([1, 1], [1, 2], [2.0, 1.0])
    assert cost.slope == 0.0
    assert cost.curve.ys == (1.5,)


@pytest.mark.parametrize(
    "xs, ys, match",
    [
        ((), (), "one at least"),
        ((1, 2), (1.0,), "as many"),
        ((2, 1), (1.0, 2.0), "rising"),
        ((0, 1), (1.0, 2.0), "above 0"),
        ((1, 2), (2.0, 1.0), "never fall"),
        ((1,), (float("nan"),), "finite"),
    ],
)
def test_what_is_no_curve_is_refused(xs, ys, match):
    with pytest.raises(ValueError, match=match):
        Curve(xs, ys)


def test_times_that_are_not_above_0_are_refused():
    with pytest.raises(ValueError, match="above 0"):
        Curve.fitted([1, 2], [0.0, 1.0])
    with pytest.raises(ValueError, match="not none"):
        Curve.fitted([], [])
    with pytest.raises(ValueError, match="slope"):
        Cost(Curve((1,), (1.0,)), -1.0)
