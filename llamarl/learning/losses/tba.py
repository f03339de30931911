"""TBA: trajectory balance as a policy gradient with a truncated importance weight (TBA eq. 16)."""

from __future__ import annotations

from dataclasses import replace

from llamarl.learning.losses.common import (
    LossAndMetrics,
    log_ratio,
    needs_reference,
    reference_of,
    uses_all_completions,
    whole_groups,
)
from llamarl.learning.losses.inputs import LossInputs
from llamarl.learning.losses.policy_gradient import policy_gradient
from llamarl.learning.losses.ratios import Bound


@whole_groups
@uses_all_completions
@needs_reference
def tba(
    inputs: LossInputs,
    *,
    beta: float = 0.005,
    ratio_cap: Bound = 8.0,
    ratio_mask_low: Bound = None,
    ratio_mask_high: Bound = None,
    ratio_level: str = "token",
    normalize: str = "tokens",
) -> LossAndMetrics:
    """-sum_t sg( min(pi/mu, 8) (A_j - beta (log L_j - mean log L)) ) log pi / num_loss_tokens

    (TBA, app. D, eq. 16.) The policy gradient with another advantage: log L_j = log(pi/ref)(y_j),
    summed over the completion, its mean over the group; pi = trainer_logprobs, mu =
    generator_logprobs, ref = ref_logprobs, 8 = ratio_cap (table 4), A_j = r_j - mean r =
    advantages, of trainer.advantages=group_mean; tensors [T], nats. beta = 0.005 (table 4); with 0
    it is Dr. GRPO. TBA makes pi the reference every 50 steps (table 4), outside of this function.
    Eq. 16 leaves the normalization out; PRIME-RL's is a mean over the batch's tokens. Knobs: see
    ratios.py and `normalized`. ValueError without ref_logprobs, for beta < 0, or impossible
    options.

    metrics: tba/log_ratio/completions (log L), and those of `policy_gradient`.
    """
    ref_logprobs = reference_of(inputs, "tba")
    if not beta >= 0:
        raise ValueError(f"beta={beta}: need at least 0")
    completions = inputs.completions
    trained = completions.lengths(inputs.loss_mask) > 0
    log_l = completions.sums(log_ratio(inputs, ref_logprobs).detach())
    centred = log_l - completions.group_mean(log_l, trained)
    regularised = inputs.advantages - beta * centred[completions.index]
    loss, metrics = policy_gradient(
        replace(inputs, advantages=regularised),
        ratio_cap=ratio_cap,
        ratio_mask_low=ratio_mask_low,
        ratio_mask_high=ratio_mask_high,
        ratio_level=ratio_level,
        normalize=normalize,
    )
    return loss, metrics | {"tba/log_ratio/completions": log_l.sum()}
