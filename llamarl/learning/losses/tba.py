"""TBA: trajectory balance as a policy gradient with a truncated importance weight (TBA eq. 16)."""

from __future__ import annotations

from torch import Tensor

from llamarl.learning.losses.common import (
    Completions,
    Metrics,
    log_ratio,
    normalized,
    uses_all_completions,
    whole_groups,
)
from llamarl.learning.losses.ratios import importance_weight, policy_gradient


@whole_groups
@uses_all_completions
def tba(
    trainer_logprobs: Tensor,
    generator_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    num_loss_tokens: float,
    completions: Completions,
    beta: float = 0.005,
    ratio_cap: float | None = 8.0,
    ratio_mask_low: float | None = None,
    ratio_mask_high: float | None = None,
    ratio_level: str = "token",
    normalize: str = "tokens",
) -> tuple[Tensor, Metrics]:
    """-sum_t sg( min(pi/mu, 8) (A_j - beta (log L_j - mean log L)) ) log pi / num_loss_tokens        (TBA, app. D, eq. 16)

    log L_j = log(pi/ref)(y_j), summed over the completion, its mean over the group; pi =
    trainer_logprobs, mu = generator_logprobs, ref = ref_logprobs, 8 = ratio_cap (table 4), A_j =
    r_j - mean r = advantages, of trainer.advantages=group_mean; tensors [R], nats. beta = 0.005
    (table 4); with 0 it is dr_grpo. TBA makes pi the reference every 50 steps (table 4), outside of
    this function. Eq. 16 leaves the normalization out; PRIME-RL's is a mean over the batch's
    tokens. Knobs: see ratios.py and `normalized`. ValueError without ref_logprobs, for beta < 0, or
    impossible options.

    metrics: tba/log_ratio/completions (log L); ratio/sum, ratio/max (before the cap), ratio/capped,
    kl/generator.
    """
    if ref_logprobs is None:
        raise ValueError("tba needs ref_logprobs: switch the reference on (reference=frozen)")
    if not beta >= 0:
        raise ValueError(f"beta={beta}: need at least 0")
    c = completions
    log_l = c.sums(log_ratio(trainer_logprobs.detach(), ref_logprobs, loss_mask))
    centred = log_l - c.group_mean(log_l, c.lengths(loss_mask) > 0)
    weight, metrics = importance_weight(
        trainer_logprobs,
        generator_logprobs,
        loss_mask,
        ratio_cap=ratio_cap,
        ratio_mask_low=ratio_mask_low,
        ratio_mask_high=ratio_mask_high,
        ratio_level=ratio_level,
        completions=completions,
    )
    metrics["tba/log_ratio/completions"] = log_l.sum()
    objective = policy_gradient(
        weight, advantages - beta * centred[c.index], trainer_logprobs, loss_mask
    )
    objective = normalized(
        objective,
        loss_mask,
        normalize=normalize,
        num_loss_tokens=num_loss_tokens,
        completions=completions,
    )
    return -objective, metrics
