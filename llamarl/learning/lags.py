"""How old the tokens are that a step trains on."""

from __future__ import annotations

from torch import Tensor

BUCKETS = (
    (0, 0),
    (1, 1),
    (2, 3),
    (4, 7),
    (8, 15),
    (16, 31),
    (32, 63),
    (64, None),
)  # steps, both ends included


def bucket_name(first: int, last: int | None) -> str:
    if last is None:
        return f"lag/tokens/{first}+"
    return f"lag/tokens/{first}" if first == last else f"lag/tokens/{first}-{last}"


def lag_histogram(lags: Tensor) -> dict[str, Tensor]:
    """Tokens by lag, as sums: lags [R] int64 steps. Divided by the number of tokens they are
    shares, which add up to 1.
    """
    return {
        bucket_name(first, last): ((lags >= first) & (lags <= (lags if last is None else last)))
        .sum()
        .float()
        for first, last in BUCKETS
    }
