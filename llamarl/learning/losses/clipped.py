"""The clipped surrogate of PPO, by token and of whole completions.

Published as PPO, GRPO, GSPO, DAPO, BNPO and Proximal RLOO: conf/loss has the values of each.
"""

from __future__ import annotations

import torch

from llamarl.learning.losses.common import (
    Bound,
    LossAndMetrics,
    at_level,
    bound,
    check_ratio,
    holds_to_generator,
    kept_labels,
    log_ratio,
    masked,
    normalized,
    off_policy_metrics,
    ratio,
    sums_completions,
    token_advantages,
)
from llamarl.learning.losses.inputs import LossInputs


@token_advantages
@holds_to_generator
def clipped(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_cap: Bound = None,
    ratio_mask_low: Bound = None,
    ratio_mask_high: Bound = None,
    ratio_level: str = "token",
    normalize: str = "tokens",
) -> LossAndMetrics:
    """-mean_t min( min(r_t, ratio_cap) A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t )

    (PPO, eq. 7.) r = pi/mu, pi = trainer_logprobs, mu = generator_logprobs (they sampled, so they
    are pi_old); A = advantages; tensors [T], nats. The gradient goes through r. ratio_cap bounds
    the pull on labels of A < 0, which the clip leaves open (TRL's delta). The mean is that of
    `normalized`.

    name           source                           ratio_level    mean of      A
    PPO            OPPO, eq. 2                      token          tokens       gae, or group_mean
    GRPO           DeepSeekMath, eq. 3; TRL "grpo"  token          completions  group_mean_std
    GSPO           GSPO, eq. 5 and 7                sequence_mean  completions  group_mean_std
    DAPO           DAPO, eq. 8; TRL "dapo"          token          tokens       group_mean_std
    BNPO           TRL "bnpo"                       token          tokens       group_mean_std
    Magistral      Magistral, 2.1                   token          groups       group_mean, whitened

    PPO's eps is 0.2; Magistral raises clip_high to 0.26 - 0.28, DAPO to 0.28; GSPO's are 3e-4
    and 4e-4. DeepSeekMath's KL term is loss.kl_coef (k3), inside the same mean. Other knobs: see
    common.py. The defaults are PPO's.

    metrics: ratio/sum, ratio/max, clip/low, clip/high (labels whose gradient the clip cuts),
    ratio/capped (labels of A < 0 above the cap), ratio/masked (labels outside the mask, where there
    is one): a sequence's ratio is counted at each of its labels. kl/generator of tokens. ValueError
    for impossible options.
    """
    check_ratio(ratio_cap, ratio_mask_low, ratio_mask_high)
    _check_clip(clip_low, clip_high, ratio_cap)
    mask = inputs.loss_mask
    cap = bound(ratio_cap)
    token = log_ratio(inputs, inputs.generator_logprobs)
    x = at_level(token, inputs, ratio_level)
    # Past e^20 the value stands still and the gradient does not: a label of A < 0 is still pushed
    # down.
    r = ratio(x.detach()) * (1 + x - x.detach())
    a = masked(inputs.advantages, mask)
    raw = masked(r.detach(), mask)
    kept, of_mask = kept_labels(raw, mask, ratio_mask_low, ratio_mask_high)
    unclipped = r.clamp(max=cap) * a
    clipped_at = r.clamp(1 - clip_low, 1 + clip_high) * a
    objective = masked(torch.minimum(unclipped, clipped_at), kept)

    metrics = off_policy_metrics(token.detach(), raw)
    is_low = raw < 1 - clip_low
    is_high = raw > 1 + clip_high
    metrics["clip/low"] = (kept & is_low & (a < 0)).sum().float()
    metrics["clip/high"] = (kept & is_high & (a > 0)).sum().float()
    metrics["ratio/capped"] = (kept & (raw > cap) & (a < 0)).sum().float()
    metrics |= of_mask
    return -normalized(objective, inputs, normalize), metrics


def _check_clip(clip_low: float, clip_high: float, ratio_cap: Bound) -> None:
    """Raise ValueError, with the remedy, for a clip that cannot be."""
    if not 0 <= clip_low <= 1 or not clip_high >= 0:
        raise ValueError(
            f"clip_low={clip_low}, clip_high={clip_high}: "
            "need 0 <= clip_low <= 1 and clip_high >= 0"
        )
    highest = 1 + clip_high
    if not bound(ratio_cap) > highest:
        raise ValueError(
            f"ratio_cap={ratio_cap} leaves nothing to clip at 1 + clip_high = {highest}: "
            "raise it, or null"
        )


@sums_completions
@token_advantages
@holds_to_generator
def proximal_rloo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_cap: Bound = None,
    ratio_mask_low: Bound = None,
    ratio_mask_high: Bound = None,
    ratio_level: str = "sequence",
) -> LossAndMetrics:
    """-(1/N) sum_j min( r_j A_j, clip(r_j, 1 - clip_low, 1 + clip_high) A_j )

    (Async RLHF, app. B, eq. 1.) r_j = pi(y_j)/mu(y_j), pi = trainer_logprobs, mu =
    generator_logprobs (pi_old), nats, summed over a completion; A_j = advantages, of
    trainer.advantages=leave_one_out; N = num_completions. It is `clipped` with the mean over a
    completion's labels of what is the same for all of them. That mean is no option: terms that
    `regularised` adds around this loss are sums over a completion's tokens. The paper has clip_low
    = clip_high = eps and prints none; 0.2 is TRL's for its RLOO, which is this loss. Knobs and
    metrics: those of `clipped`. ValueError for impossible options.
    """
    return clipped(
        inputs,
        clip_low=clip_low,
        clip_high=clip_high,
        ratio_cap=ratio_cap,
        ratio_mask_low=ratio_mask_low,
        ratio_mask_high=ratio_mask_high,
        ratio_level=ratio_level,
        normalize="completions",
    )
