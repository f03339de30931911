"""Curves through measured times: they never fall, and say how far they are from what was measured.

    curve = Curve.fitted([1, 2, 4], [3.0, 4.0, 8.0])
    curve.at(3)          # 6.0
    curve.error.worst    # 0.0: it goes through every point

A larger piece of work takes no less time than a smaller one, so a point that lies below an earlier
one is noise: isotonic regression (pool adjacent violators) gives both their mean. Between two knots
a curve is a line. Before the first it is level, because a piece smaller than all that were measured
may cost as much. Behind the last it rises by the last knot's time a unit, because what was not
measured is not assumed to become cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

_ROUNDS = 50  # of a fit that alternates between a curve and a slope
_SETTLED = 1e-12  # relative change of a slope that ends the rounds

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FitError:
    """How far a fit is from what it was made of, as shares of the measured values.

    typical: root mean square. worst: the largest. points: how many values there were.
    """

    typical: float = 0.0
    worst: float = 0.0
    points: int = 0

    @classmethod
    def between(cls, measured: ArrayLike, fitted: ArrayLike) -> FitError:
        """Return the error of fitted values, in the order of the measured ones, all above 0."""
        seconds = np.asarray(measured, float)
        shares = np.abs(np.asarray(fitted, float) - seconds) / seconds
        typical = float(np.sqrt(np.mean(shares**2)))
        return cls(typical=typical, worst=float(shares.max()), points=len(seconds))

    def __str__(self) -> str:
        return f"{self.typical:.1%} typical, {self.worst:.1%} at worst, of {self.points} points"


@dataclass(frozen=True, slots=True)
class Curve:
    """A function that never falls, by its knots.

    xs: sizes, rising and above 0. ys: seconds at them, not falling and not below 0.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    error: FitError = field(default=FitError(), compare=False)

    def __post_init__(self):
        if not self.xs or len(self.xs) != len(self.ys):
            raise ValueError(
                f"{len(self.xs)} sizes and {len(self.ys)} times: need as many, and one at least"
            )
        if not all(map(math.isfinite, (*self.xs, *self.ys))):
            raise ValueError("a size or a time is not finite")
        if self.xs[0] <= 0 or any(b <= a for a, b in zip(self.xs, self.xs[1:])):
            raise ValueError(f"sizes {list(self.xs)}: need rising ones above 0")
        if self.ys[0] < 0 or any(b < a for a, b in zip(self.ys, self.ys[1:])):
            raise ValueError(f"times {list(self.ys)}: need some that never fall, of at least 0")

    @classmethod
    def fitted(cls, sizes: Sequence[float], seconds: Sequence[float]) -> Curve:
        """Return the curve nearest to these points, in squares, among those that never fall.

        Several times of a size count as their mean, with their number as its weight. ValueError for
        no points, a size that is not above 0, or a time that is not.
        """
        if not sizes or len(sizes) != len(seconds):
            raise ValueError(f"{len(sizes)} sizes and {len(seconds)} times: need as many, not none")
        if min(sizes) <= 0 or min(seconds) <= 0:
            raise ValueError("sizes and times must be above 0")
        xs, places = np.unique(np.asarray(sizes, float), return_inverse=True)
        counts = np.bincount(places)
        means = np.bincount(places, weights=np.asarray(seconds, float)) / counts
        ys = rising(means, counts)
        curve = cls(tuple(xs.tolist()), tuple(ys.tolist()))
        fitted = [curve.at(size) for size in sizes]
        return cls(curve.xs, curve.ys, FitError.between(seconds, fitted))

    def at(self, x: float) -> float:
        """Return the seconds of a piece of size x; 0 for an empty one."""
        if x <= 0:
            return 0.0
        last = self.xs[-1]
        if x > last:
            return self.ys[-1] * x / last
        return float(np.interp(x, self.xs, self.ys))

    def per_unit(self) -> list[tuple[float, float]]:
        """Return (size, seconds a unit) at every knot: eta of LlamaRL's figure 5."""
        return [(x, y / x) for x, y in zip(self.xs, self.ys)]

    @property
    def unit_time_falls(self) -> bool:
        """Whether a unit takes no longer in a larger piece: the assumption of theorem 7.5."""
        units = [y for _, y in self.per_unit()]
        return all(b <= a * (1 + 1e-9) for a, b in zip(units, units[1:]))


def rising(values: ArrayLike, weights: ArrayLike) -> Numbers:
    """Return the values that never fall and are nearest to these, in weighted squares.

    values, weights: [N], weights above 0. Neighbours that fall are pooled to their mean until none
    do (pool adjacent violators).
    """
    means: list[float] = []
    sums: list[float] = []
    sizes: list[int] = []
    for value, weight in zip(np.asarray(values, float), np.asarray(weights, float)):
        means.append(float(value))
        sums.append(float(weight))
        sizes.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            weight_of_both = sums[-2] + sums[-1]
            both = (means[-2] * sums[-2] + means[-1] * sums[-1]) / weight_of_both
            means[-2:] = [both]
            sums[-2:] = [weight_of_both]
            sizes[-2:] = [sizes[-2] + sizes[-1]]
    return np.repeat(means, sizes)


@dataclass(frozen=True, slots=True)
class Cost:
    """curve(x) + slope y + each z: seconds of a piece of three sizes.

    A decode step is of x rows over y tokens of context; a microbatch is of x tokens with y pairs of
    a query and a key, in z completions.
    """

    curve: Curve
    slope: float = 0.0  # seconds a unit of y
    error: FitError = field(default=FitError(), compare=False)
    each: float = 0.0  # seconds a unit of z

    def __post_init__(self):
        for name in ("slope", "each"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} {value}: need a finite number of at least 0")

    @classmethod
    def fitted(
        cls,
        xs: Sequence[float],
        ys: Sequence[float],
        seconds: Sequence[float],
        zs: Sequence[float] | None = None,
    ) -> Cost:
        """Fit a curve and the slopes by turns, from those that points of one x show.

        Each turn lowers the sum of squares. zs: None: no third size. ValueError as of Curve.fitted.
        """
        given = np.asarray(seconds, float)
        others = [np.asarray(ys, float)]
        if zs is not None:
            others.append(np.asarray(zs, float))
        slopes = _first_slopes(np.asarray(xs, float), others, given)
        curve = _beside(xs, given, _explained(slopes, others))
        for _ in range(_ROUNDS):
            before = list(slopes)
            at_curve = np.array([curve.at(x) for x in xs])
            for i, size in enumerate(others):
                slopes[i] = 0.0
                rest = given - at_curve - _explained(slopes, others)
                squares = float(size @ size)
                slopes[i] = max(0.0, float(size @ rest) / squares) if squares else 0.0
            if all(abs(a - b) <= _SETTLED * max(a, b) for a, b in zip(slopes, before)):
                break
            curve = _beside(xs, given, _explained(slopes, others))
        each = slopes[1] if zs is not None else 0.0
        cost = cls(curve, slopes[0], each=each)
        thirds = [0.0] * len(xs) if zs is None else zs
        fitted = [cost.at(x, y, z) for x, y, z in zip(xs, ys, thirds)]
        return replace(cost, error=FitError.between(seconds, fitted))

    def at(self, x: float, y: float, z: float = 0.0) -> float:
        """Return the seconds of a piece of sizes x, y and z."""
        return self.curve.at(x) + self.slope * y + self.each * z


def _explained(slopes: Sequence[float], sizes: Sequence[Numbers]) -> Numbers:
    """Return the seconds that slopes make of sizes, for each point."""
    total = np.zeros_like(sizes[0])
    for slope, size in zip(slopes, sizes):
        total = total + slope * size
    return total


def _first_slopes(xs: Numbers, sizes: Sequence[Numbers], seconds: Numbers) -> list[float]:
    """Return the slopes within points of equal x, of each size in its turn over what those before
    it leave: those of all these by least squares.
    """
    spreads = [np.zeros_like(seconds) for _ in sizes]
    rest = np.zeros_like(seconds)
    for x in np.unique(xs):
        own = xs == x
        rest[own] = seconds[own] - seconds[own].mean()
        for spread, size in zip(spreads, sizes):
            spread[own] = size[own] - size[own].mean()
    if len(sizes) == 1:
        below = float(spreads[0] @ spreads[0])
        return [max(0.0, float(spreads[0] @ rest) / below) if below > 0 else 0.0]
    found, *_ = np.linalg.lstsq(np.stack(spreads, axis=1), rest, rcond=None)
    return [max(0.0, float(slope)) for slope in found]


def _beside(xs: Sequence[float], seconds: Numbers, explained: Numbers) -> Curve:
    """Return the curve of what a slope leaves to be explained, which is kept above 0."""
    least = 1e-3 * seconds
    return Curve.fitted(list(xs), np.maximum(seconds - explained, least).tolist())
