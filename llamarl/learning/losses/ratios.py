"""Importance ratios pi/mu, with the knobs that all losses share: level, mask and cap.

    ratio_level       of "token": pi(y_t)/mu(y_t). "sequence": pi(y)/mu(y), their product over the
                      completion, for each of its tokens. "sequence_mean": its |y|-th root
                      (GSPO, eq. 7; TRL importance_sampling_level "sequence")
    ratio_mask_low,   labels whose ratio is below or above get weight 0; None: no bound (IcePop)
    ratio_mask_high
    ratio_cap         min(ratio, ratio_cap); None or inf: no cap

pi = trainer_logprobs, mu = generator_logprobs; tensors [T], nats. The mask looks at the ratio
before the cap.
"""

from __future__ import annotations

import math

from torch import Tensor

from llamarl.learning.losses.common import Metrics, k3, log_ratio, masked, maximum, ratio
from llamarl.learning.losses.inputs import LossInputs
from llamarl.words.choices import LEVELS

Bound = float | None  # None: no bound


def at_level(token_log_ratio: Tensor, inputs: LossInputs, level: str) -> Tensor:
    """Return [T]: the log ratio that each label is weighted by, from its own [T] (0 where masked).

    ValueError for an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"ratio_level={level}: need {' or '.join(LEVELS)}")
    if level == "token":
        return token_log_ratio
    completions = inputs.completions
    total = completions.sums(token_log_ratio)
    if level == "sequence_mean":
        total = total / completions.lengths(inputs.loss_mask).clamp(min=1)
    return total[completions.index]


def kept_labels(
    raw: Tensor, loss_mask: Tensor, ratio_mask_low: Bound, ratio_mask_high: Bound
) -> tuple[Tensor, Metrics]:
    """Return [T] bool: the trained labels whose ratio [T] is inside the mask's bounds; and metrics.

    NaN is inside: what is broken must reach the check of the loss. metrics: ratio/masked (labels
    outside), nothing where there is no mask.
    """
    outside = (raw < (ratio_mask_low or 0.0)) | (raw > bound(ratio_mask_high))
    kept = loss_mask & ~outside
    if ratio_mask_low is None and ratio_mask_high is None:
        return kept, {}
    return kept, {"ratio/masked": (loss_mask & outside).sum().float()}


def bound(limit: Bound) -> float:
    """Return the limit as a number: infinity for None."""
    return math.inf if limit is None else limit


def off_policy_metrics(token_log_ratio: Tensor, raw: Tensor) -> Metrics:
    """Measure how far off-policy the batch is: ratio/sum and ratio/max of the raw ratio [T],
    kl/generator.

    kl/generator is the k3 estimate of KL(mu || pi).
    """
    return {
        "ratio/sum": raw.sum(),
        "ratio/max": maximum(raw),
        "kl/generator": k3(token_log_ratio).sum(),
    }


def token_metrics(inputs: LossInputs) -> Metrics:
    """Return `off_policy_metrics` of each token's own ratio, for losses that do not use it."""
    token = log_ratio(inputs, inputs.generator_logprobs).detach()
    return off_policy_metrics(token, masked(ratio(token), inputs.loss_mask))


def check_ratio(ratio_cap: Bound, ratio_mask_low: Bound, ratio_mask_high: Bound) -> None:
    """Raise ValueError, with the remedy, for knobs that contradict themselves."""
    if ratio_cap is not None and not ratio_cap > 0:
        raise ValueError(f"ratio_cap={ratio_cap}: need more than 0, or null for no cap")
    if not 0 <= (ratio_mask_low or 0.0) < bound(ratio_mask_high):
        raise ValueError(
            f"ratio_mask_low={ratio_mask_low}, ratio_mask_high={ratio_mask_high}: "
            "need 0 <= low < high, null for no bound"
        )
