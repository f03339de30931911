"""Kimi K2's objective: regularised towards the policy that generated (TBA eq. 15)."""

from __future__ import annotations

from torch import Tensor

from llamarl.learning.losses.common import (
    Completions,
    Metrics,
    log_ratio,
    normalized,
    uses_all_completions,
)
from llamarl.learning.losses.ratios import importance_weight, policy_gradient


@uses_all_completions
def kimi_k2(
    trainer_logprobs: Tensor,
    generator_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    num_loss_tokens: float,
    completions: Completions,
    tau: float = 0.005,
    ratio_cap: float | None = 8.0,
    ratio_mask_low: float | None = None,
    ratio_mask_high: float | None = None,
    ratio_level: str = "token",
    normalize: str = "tokens",
) -> tuple[Tensor, Metrics]:
    """-sum_t sg( min(pi/mu, 8) (A_j - tau log(pi/mu)(y_j)) ) log pi / num_loss_tokens        (TBA, app. D, eq. 15; Kimi K2)

    log(pi/mu)(y_j) summed over the completion; pi = trainer_logprobs, mu = generator_logprobs, 8 =
    ratio_cap, A_j = r_j - mean r
    = advantages, of trainer.advantages=group_mean; tensors [R], nats. tau = 0.005 (TBA, fig. 11). Unlike tba it has no
    reference, and the mean log-ratio is not in the baseline. Eq. 15 leaves the normalization out;
    PRIME-RL's is a mean over the batch's tokens. Knobs: see ratios.py and `normalized`. ValueError
    for tau < 0 or impossible options.

    metrics: kimi/log_ratio/completions (log(pi/mu)(y)); ratio/sum, ratio/max (before the cap),
    ratio/capped, kl/generator.
    """
    if not tau >= 0:
        raise ValueError(f"tau={tau}: need at least 0")
    log_pi_mu = completions.sums(
        log_ratio(trainer_logprobs.detach(), generator_logprobs, loss_mask)
    )
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
    metrics["kimi/log_ratio/completions"] = log_pi_mu.sum()
    objective = policy_gradient(
        weight, advantages - tau * log_pi_mu[completions.index], trainer_logprobs, loss_mask
    )
    objective = normalized(
        objective,
        loss_mask,
        normalize=normalize,
        num_loss_tokens=num_loss_tokens,
        completions=completions,
    )
    return -objective, metrics
