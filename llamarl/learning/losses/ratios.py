"""Importance ratios pi/mu, with the knobs that all losses share: level, mask and cap; and the two
objectives made of them.

    ratio_level       of "token": pi(y_t)/mu(y_t). "sequence": pi(y)/mu(y), their product over the completion, for each of its
                      tokens. "sequence_mean": its |y|-th root        (GSPO, eq. 7; TRL importance_sampling_level "sequence")
    ratio_mask_low,   labels whose ratio is below or above get weight 0; None: no bound        (IcePop)
    ratio_mask_high
    ratio_cap         min(ratio, ratio_cap); None or inf: no cap

pi = trainer_logprobs, mu = generator_logprobs; tensors [R], nats. The mask looks at the ratio
before the cap.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llamarl.learning.losses.common import (
    Completions,
    Metrics,
    k3,
    log_ratio,
    masked,
    maximum,
    ratio,
)

LEVELS = ("token", "sequence", "sequence_mean")


def importance_weight(
    trainer_logprobs: Tensor,
    generator_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    ratio_cap: float | None,
    ratio_mask_low: float | None,
    ratio_mask_high: float | None,
    ratio_level: str,
    completions: Completions | None,
) -> tuple[Tensor, Metrics]:
    """(sg(min(ratio, cap)) where inside the mask, else 0; metrics).

    No gradient goes through the weight [R]. metrics: those of `off_policy_metrics`; ratio/capped
    (labels above the cap); with a mask ratio/masked. ValueError for impossible knobs, or a sequence
    level without completions.
    """
    check_ratio(ratio_cap, ratio_mask_low, ratio_mask_high)
    token = log_ratio(trainer_logprobs.detach(), generator_logprobs, loss_mask)
    raw = masked(ratio(_at_level(token, loss_mask, ratio_level, completions)), loss_mask)
    kept = loss_mask & ~_outside(raw, ratio_mask_low, ratio_mask_high)
    weight = masked(raw.clamp(max=_cap(ratio_cap)), kept)
    metrics = off_policy_metrics(token, raw)
    metrics["ratio/capped"] = (raw > _cap(ratio_cap)).sum().to(raw.dtype)
    if ratio_mask_low is not None or ratio_mask_high is not None:
        metrics["ratio/masked"] = (loss_mask & ~kept).sum().to(raw.dtype)
    return weight, metrics


def policy_gradient(
    weight: Tensor, advantages: Tensor, trainer_logprobs: Tensor, loss_mask: Tensor
) -> Tensor:
    """[R]: sg(weight A) log pi, 0 where masked: its gradient is weight A grad log pi."""
    return (weight * masked(advantages, loss_mask)).detach() * masked(trainer_logprobs, loss_mask)


def clipped_surrogate(
    trainer_logprobs: Tensor,
    generator_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    ratio_cap: float | None,
    ratio_mask_low: float | None,
    ratio_mask_high: float | None,
    ratio_level: str,
    completions: Completions | None,
) -> tuple[Tensor, Metrics]:
    """([R]: min(min(r, ratio_cap) A, clip(r, 1 - clip_low, 1 + clip_high) A), 0 where masked; metrics)        (PPO, eq. 7)

    The gradient goes through r. ratio_cap bounds the pull on tokens of A < 0, which the clip leaves
    open (TRL's delta). metrics: those of `off_policy_metrics`; clip/low, clip/high: labels whose
    gradient the clip cuts; ratio/capped (A < 0 and above the cap); with a mask ratio/masked.
    ValueError for impossible knobs, or a sequence level without completions.
    """
    check_ratio(ratio_cap, ratio_mask_low, ratio_mask_high, clip_low, clip_high)
    token = log_ratio(trainer_logprobs, generator_logprobs, loss_mask)
    x = _at_level(token, loss_mask, ratio_level, completions)
    # Past e^20 the value stands still and the gradient does not: a token of A < 0 is still pushed
    # down.
    r = ratio(x.detach()) * (1 + x - x.detach())
    a = masked(advantages, loss_mask)
    raw, cap = masked(r.detach(), loss_mask), _cap(ratio_cap)
    kept = loss_mask & ~_outside(raw, ratio_mask_low, ratio_mask_high)
    objective = masked(
        torch.minimum(r.clamp(max=cap) * a, r.clamp(1 - clip_low, 1 + clip_high) * a), kept
    )
    metrics = off_policy_metrics(token.detach(), raw)
    metrics["clip/low"] = (kept & (raw < 1 - clip_low) & (a < 0)).sum().to(raw.dtype)
    metrics["clip/high"] = (kept & (raw > 1 + clip_high) & (a > 0)).sum().to(raw.dtype)
    metrics["ratio/capped"] = (kept & (raw > cap) & (a < 0)).sum().to(raw.dtype)
    if ratio_mask_low is not None or ratio_mask_high is not None:
        metrics["ratio/masked"] = (loss_mask & ~kept).sum().to(raw.dtype)
    return objective, metrics


def off_policy_metrics(token_log_ratio: Tensor, raw: Tensor) -> Metrics:
    """ratio/sum, ratio/max: of the raw ratio [R]. kl/generator: k3 estimate of KL(mu || pi), how
    far off-policy the batch is.
    """
    return {
        "ratio/sum": raw.sum(),
        "ratio/max": maximum(raw),
        "kl/generator": k3(token_log_ratio).sum(),
    }


def token_metrics(
    trainer_logprobs: Tensor, generator_logprobs: Tensor, loss_mask: Tensor
) -> Metrics:
    """`off_policy_metrics` of each token's own ratio, for losses that do not use it."""
    token = log_ratio(trainer_logprobs.detach(), generator_logprobs, loss_mask)
    return off_policy_metrics(token, masked(ratio(token), loss_mask))


def check_ratio(
    cap: float | None,
    low: float | None,
    high: float | None,
    clip_low: float | None = None,
    clip_high: float | None = None,
) -> None:
    """ValueError, with the remedy, for knobs that contradict themselves."""
    if cap is not None and not cap > 0:
        raise ValueError(f"ratio_cap={cap}: need more than 0, or null for no cap")
    if (
        not (low is None or low >= 0)
        or not (high is None or high > 0)
        or (low or 0) >= (math.inf if high is None else high)
    ):
        raise ValueError(
            f"ratio_mask_low={low}, ratio_mask_high={high}: need 0 <= low < high, null for no bound"
        )
    if clip_low is None or clip_high is None:
        return
    if not 0 <= clip_low <= 1 or not clip_high >= 0:
        raise ValueError(
            f"clip_low={clip_low}, clip_high={clip_high}: need 0 <= clip_low <= 1 and clip_high >= 0"
        )
    if cap is not None and not cap > 1 + clip_high:
        raise ValueError(
            f"ratio_cap={cap} leaves nothing to clip at 1 + clip_high = {1 + clip_high}: raise it, or null"
        )


def _at_level(
    token: Tensor, loss_mask: Tensor, level: str, completions: Completions | None
) -> Tensor:
    """[R]: the log ratio that each label is weighted by, from its own [R] (0 where masked)."""
    if level not in LEVELS:
        raise ValueError(f"ratio_level={level}: need {' or '.join(LEVELS)}")
    if level == "token":
        return token
    if completions is None:
        raise ValueError(f"ratio_level={level} needs the completions of the labels")
    total = completions.sums(token)
    if level == "sequence_mean":
        total = total / completions.lengths(loss_mask).clamp(min=1)
    return total[completions.index]


def _outside(raw: Tensor, low: float | None, high: float | None) -> Tensor:
    """Where a ratio is masked. NaN is not: what is broken must reach the check of the loss."""
    return (raw < (0.0 if low is None else low)) | (raw > (math.inf if high is None else high))


def _cap(ratio_cap: float | None) -> float:
    return math.inf if ratio_cap is None else ratio_cap
