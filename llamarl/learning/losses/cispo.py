"""CISPO: the policy gradient with a truncated importance weight and normalized advantages
(MiniMax-M1; TBA eq. 13).
"""

from __future__ import annotations

from torch import Tensor

from llamarl.learning.losses.common import Completions, Metrics, normalized
from llamarl.learning.losses.ratios import importance_weight, policy_gradient


def cispo(
    trainer_logprobs: Tensor,
    generator_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    num_loss_tokens: float,
    completions: Completions | None = None,
    ratio_cap: float | None = 8.0,
    ratio_mask_low: float | None = None,
    ratio_mask_high: float | None = None,
    ratio_level: str = "token",
    normalize: str = "tokens",
) -> tuple[Tensor, Metrics]:
    """-sum_t sg(min(pi/mu, 8) (r - mean r)/std r) log pi / num_loss_tokens        (TBA, app. D, eq. 13; bounds 0/8 of table 4)

    pi = trainer_logprobs, mu = generator_logprobs, 8 = ratio_cap; (r - mean r)/std r = advantages,
    which trainer.advantages=group_mean_std makes; tensors [R], nats. Eq. 13 leaves the
    normalization out; PRIME-RL's is a mean over the batch's tokens. ratio_mask_*, ratio_level: see
    ratios.py; normalize: see `normalized`. ValueError for impossible options.

    metrics: ratio/sum, ratio/max (before the cap), ratio/capped, kl/generator.
    """
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
    objective = policy_gradient(weight, advantages, trainer_logprobs, loss_mask)
    objective = normalized(
        objective,
        loss_mask,
        normalize=normalize,
        num_loss_tokens=num_loss_tokens,
        completions=completions,
    )
    return -objective, metrics
