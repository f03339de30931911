"""Kimi K2's objective: regularised towards the policy that generated (TBA eq. 15)."""

from __future__ import annotations

from dataclasses import replace

from llamarl.learning.losses.common import (
    LossAndMetrics,
    holds_to_generator,
    log_ratio,
    uses_all_completions,
)
from llamarl.learning.losses.inputs import LossInputs
from llamarl.learning.losses.policy_gradient import policy_gradient
from llamarl.learning.losses.ratios import Bound


@uses_all_completions
@holds_to_generator
def kimi_k2(
    inputs: LossInputs,
    *,
    tau: float = 0.005,
    ratio_cap: Bound = 8.0,
    ratio_mask_low: Bound = None,
    ratio_mask_high: Bound = None,
    ratio_level: str = "token",
    normalize: str = "tokens",
) -> LossAndMetrics:
    """-sum_t sg( min(pi/mu, 8) (A_j - tau log(pi/mu)(y_j)) ) log pi / num_loss_tokens

    (TBA, app. D, eq. 15; Kimi K2.) The policy gradient with another advantage: log(pi/mu)(y_j)
    summed over the completion; pi = trainer_logprobs, mu = generator_logprobs, 8 = ratio_cap, A_j =
    r_j - mean r = advantages, of trainer.advantages=group_mean; tensors [T], nats. tau = 0.005
    (TBA, fig. 11). Unlike tba it has no reference, and the mean log-ratio is not in the baseline.
    Eq. 15 leaves the normalization out; PRIME-RL's is a mean over the batch's tokens. Knobs: see
    ratios.py and `normalized`. ValueError for tau < 0 or impossible options.

    metrics: kimi/log_ratio/completions (log(pi/mu)(y)), and those of `policy_gradient`.
    """
    if not tau >= 0:
        raise ValueError(f"tau={tau}: need at least 0")
    completions = inputs.completions
    log_pi_mu = completions.sums(log_ratio(inputs, inputs.generator_logprobs).detach())
    regularised = inputs.advantages - tau * log_pi_mu[completions.index]
    loss, metrics = policy_gradient(
        replace(inputs, advantages=regularised),
        ratio_cap=ratio_cap,
        ratio_mask_low=ratio_mask_low,
        ratio_mask_high=ratio_mask_high,
        ratio_level=ratio_level,
        normalize=normalize,
    )
    return loss, metrics | {"kimi/log_ratio/completions": log_pi_mu.sum()}
