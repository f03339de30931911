"""Win rates: compare completions with references to the same prompts, by the scores of a gold
scorer.

    wins_N = wins(gold_N, against_N, same_N)            1 better, 0.5 as good, 0 worse
    win_rate(wins_N)                                    share of wins, with its interval
    length_controlled(wins_N, longer_N)                 the share if all pairs were equally long

Shapes: N prompts, each with a completion and a reference. NaN means that one of them has no score;
such pairs are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Z = 1.959963984540054  # of a two-sided interval of 95 %
# Standard deviations of the normal priors of the regression, in logits. If length separates wins
# from losses, the likelihood alone has no maximum. The slope's is that of Gelman et al. (2008), for
# lengths that are about 1 apart; the intercept's prior is nearly flat.
SLOPE_DEVIATION = 2.5
INTERCEPT_DEVIATION = 10.0
NUM_RESAMPLES = 1000
_ITERATIONS = 200
_LARGEST_STEP = 1.0  # in logits: farther away the quadratic approximation is poor
_SMALL_STEP = 1e-10


@dataclass(frozen=True, slots=True)
class WinRate:
    """A share of wins and its interval of 95 %."""

    share: float
    low: float
    high: float


def wins(gold_N: np.ndarray, against_N: np.ndarray, same_N: np.ndarray) -> np.ndarray:
    """Return [N]: 1 where gold is greater than against, 0.5 where they are equal or the texts are
    the same, 0 otherwise; NaN where one of them has no score.
    """
    wins_N = (gold_N > against_N) + 0.5 * (gold_N == against_N)
    wins_N[same_N] = 0.5  # two scores of one text may differ by rounding
    wins_N[np.isnan(gold_N) | np.isnan(against_N)] = np.nan
    return wins_N


def win_rate(wins_N: np.ndarray) -> WinRate | None:
    """Return the mean, and Wilson's interval (1927, eq. 1); None if nothing was compared.

    With p the mean over n prompts and z = 1.96:

        (p + z^2/2n ± z sqrt(p (1 - p)/n + z^2/4n^2)) / (1 + z^2/n)

    The interval also holds with few prompts and near 0 and 1, where a bootstrap's has no width
    (Brown, Cai and DasGupta 2001). Ties make wins vary less than p (1 - p), so with ties it is
    rather too wide.
    """
    known = wins_N[~np.isnan(wins_N)]
    n = known.size
    if not n:
        return None
    p = float(known.mean())
    centre = p + Z**2 / (2 * n)
    half = Z * (p * (1 - p) / n + Z**2 / (4 * n**2)) ** 0.5
    scale = 1 + Z**2 / n
    low = max(0.0, (centre - half) / scale)
    high = min(1.0, (centre + half) / scale)
    return WinRate(share=p, low=low, high=high)


def length_controlled(wins_N: np.ndarray, longer_N: np.ndarray) -> float | None:
    """Return the win rate that a logistic regression predicts for pairs of equal length
    (AlpacaEval 2; Dubois et al. 2024, section 3).

        P(win) = sigmoid(intercept + slope tanh(longer / deviation of longer)),   sigmoid(intercept)

    longer_N: the tokens that each completion has more than its reference. We leave out AlpacaEval's
    third term, the difficulty of each instruction, which needs completions of many models. Both
    weights have a normal prior instead of a penalty by cross-validation. None if length and quality
    cannot be told apart: without a pair, or if all completions are longer, or all shorter.
    """
    known = ~np.isnan(wins_N)
    length_N = scaled_lengths(longer_N[known])
    if length_N is None:
        return None
    ((intercept, _),) = fit(wins_N[known][None], length_N[None])
    return float(sigmoid(intercept))


def length_controlled_interval(
    wins_N: np.ndarray, longer_N: np.ndarray, *, seed: int
) -> WinRate | None:
    """Return the rate of length_controlled with an interval of 95 %: percentiles over resampled
    prompts (Efron 1979).
    """
    share = length_controlled(wins_N, longer_N)
    if share is None:
        return None
    known = ~np.isnan(wins_N)
    wins_M = wins_N[known]
    length_M = scaled_lengths(longer_N[known])  # on the scale of all prompts, not of a sample
    assert length_M is not None, "so there would be no share"
    size = (NUM_RESAMPLES, wins_M.size)
    drawn = np.random.default_rng(seed).integers(wins_M.size, size=size)
    weights = fit(wins_M[drawn], length_M[drawn])
    low, high = np.percentile(sigmoid(weights[:, 0]), [2.5, 97.5])
    return WinRate(share=share, low=float(low), high=float(high))


def scaled_lengths(longer_N: np.ndarray) -> np.ndarray | None:
    """Return tanh(longer / its standard deviation) [N]; None if equal lengths would lie outside of
    the measured range.
    """
    if not longer_N.size or longer_N.min() > 0 or longer_N.max() < 0:
        return None
    deviation = longer_N.std()
    if not deviation:
        return None
    return np.tanh(longer_N / deviation)


def fit(wins_RN: np.ndarray, length_RN: np.ndarray) -> np.ndarray:
    """Return [R, 2], intercept and slope of each of R regressions: the maximum of the likelihood
    times the priors, by Newton's method.
    """
    precision = np.diag([INTERCEPT_DEVIATION**-2, SLOPE_DEVIATION**-2])
    features_RN2 = np.stack([np.ones_like(length_RN), length_RN], axis=-1)
    weights_R2 = np.zeros((len(wins_RN), 2))
    for _ in range(_ITERATIONS):
        predicted_RN = sigmoid(np.einsum("rnk,rk->rn", features_RN2, weights_R2))
        residual_RN = wins_RN - predicted_RN
        gradient_R2 = np.einsum("rnk,rn->rk", features_RN2, residual_RN) - weights_R2 @ precision
        curved_RN2 = features_RN2 * (predicted_RN * (1 - predicted_RN))[..., None]
        curvature_R22 = np.einsum("rnk,rnj->rkj", curved_RN2, features_RN2) + precision
        step_R2 = np.linalg.solve(curvature_R22, gradient_R2[..., None])[..., 0]
        length_R1 = np.linalg.norm(step_R2, axis=1, keepdims=True)
        weights_R2 += step_R2 * np.minimum(1, _LARGEST_STEP / np.maximum(length_R1, _SMALL_STEP))
        if length_R1.max() < _SMALL_STEP:
            break
    return weights_R2


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x))."""
    # tanh does not overflow for large |x|, as exp would.
    return 0.5 * (1 + np.tanh(x / 2))
