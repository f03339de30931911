"""PPO: the clipped surrogate with an advantage a token, and the clipped loss of the value head."""

from __future__ import annotations

import torch
from torch import Tensor

from llamarl.learning.losses.common import (
    Completions,
    Metrics,
    half_square,
    masked,
    normalized,
    per_token,
)
from llamarl.learning.losses.ratios import clipped_surrogate


def ppo(
    trainer_logprobs: Tensor,
    generator_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    num_loss_tokens: float,
    completions: Completions | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_cap: float | None = None,
    ratio_mask_low: float | None = None,
    ratio_mask_high: float | None = None,
    ratio_level: str = "token",
    normalize: str = "tokens",
) -> tuple[Tensor, Metrics]:
    """-sum_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) / num_loss_tokens        (OPPO, eq. 2; PPO, eq. 7)

    r_t = pi/mu, pi = trainer_logprobs, mu = generator_logprobs (they sampled, so they are pi_old);
    A_t = advantages, one a token with trainer.advantages=gae (OPPO, eq. 1); tensors [R], nats. eps
    = 0.2 of PPO; Magistral raises clip_high to 0.26-0.28. ratio_cap bounds what the clip leaves
    open at A < 0. Other knobs: see ratios.py and `normalized`. ValueError for impossible options.

    metrics: ratio/sum, ratio/max, clip/low, clip/high (labels that the clip cuts), ratio/capped,
    kl/generator.
    """
    objective, metrics = clipped_surrogate(
        trainer_logprobs,
        generator_logprobs,
        advantages,
        loss_mask,
        clip_low=clip_low,
        clip_high=clip_high,
        ratio_cap=ratio_cap,
        ratio_mask_low=ratio_mask_low,
        ratio_mask_high=ratio_mask_high,
        ratio_level=ratio_level,
        completions=completions,
    )
    objective = normalized(
        objective,
        loss_mask,
        normalize=normalize,
        num_loss_tokens=num_loss_tokens,
        completions=completions,
    )
    return -objective, metrics


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    *,
    value_clip: float | None,
    num_loss_tokens: float,
) -> tuple[Tensor, Metrics]:
    """sum_t max[ (V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2 ] / 2 / num_loss_tokens        (PPO's value loss; TRL)

    V = values, with gradient; V_old = old_values, before the batch's first update; R = returns
    (`gae`); eps = value_clip, None: no clip. Tensors [R], in units of the reward. A masked label
    adds nothing. ValueError for value_clip <= 0.

    metrics: value/sum, value/error (sum of |V - R|), value/clipped (labels whose gradient the clip cuts).
    """
    if value_clip is not None and not value_clip > 0:
        raise ValueError(f"value_clip={value_clip}: need more than 0, or null for no clip")
    v, old, target = (masked(x, loss_mask) for x in (values, old_values.detach(), returns.detach()))
    loss = half_square(v - target)
    clipped = loss
    if value_clip is not None:
        clipped = half_square(old + (v - old).clamp(-value_clip, value_clip) - target)
    total = torch.maximum(loss, clipped).sum()
    metrics = {
        "value/sum": v.detach().sum(),
        "value/error": (v - target).detach().abs().sum(),
        "value/clipped": (clipped > loss).sum().to(v.dtype),
    }
    return per_token(total, num_loss_tokens), metrics
