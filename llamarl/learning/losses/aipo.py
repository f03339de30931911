"""AIPO: the policy gradient with a one-sided, truncated importance weight (LlamaRL)."""

from __future__ import annotations

from torch import Tensor

from llamarl.learning.losses.common import Completions, Metrics, normalized
from llamarl.learning.losses.ratios import importance_weight, policy_gradient


def aipo(
    trainer_logprobs: Tensor,
    generator_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    num_loss_tokens: float,
    completions: Completions | None = None,
    ratio_cap: float | None = 4.0,
    ratio_mask_low: float | None = None,
    ratio_mask_high: float | None = None,
    ratio_level: str = "token",
    normalize: str = "tokens",
) -> tuple[Tensor, Metrics]:
    """-sum_t sg(min(pi/mu, rho)) A_t log pi / num_loss_tokens        (LlamaRL, AIPO)

    pi = trainer_logprobs, mu = generator_logprobs, rho = ratio_cap, A = advantages (reward minus
    its group's mean); tensors [R], nats. sg: no gradient goes through the weight. LlamaRL has rho
    in [2, 10]. Without tokens the loss is 0 and still has its (zero) gradient. ratio_mask_*,
    ratio_level: see ratios.py; normalize: see `normalized`. ValueError for impossible options.

    metrics: ratio/sum, ratio/max (before the cap), ratio/capped (tokens above it), kl/generator.
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
