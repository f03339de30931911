"""IcePop: tokens on which trainer and generator disagree too much are masked (Ring-1T; TBA app. D)."""

from __future__ import annotations

from torch import Tensor

from llamarl.learning.losses.common import Completions, Metrics, normalized
from llamarl.learning.losses.ratios import importance_weight, policy_gradient


def icepop(
    trainer_logprobs: Tensor,
    generator_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    num_loss_tokens: float,
    completions: Completions | None = None,
    ratio_cap: float | None = None,
    ratio_mask_low: float | None = 0.5,
    ratio_mask_high: float | None = 5.0,
    ratio_level: str = "token",
    normalize: str = "tokens",
) -> tuple[Tensor, Metrics]:
    """-sum_t sg(M(pi/mu) A_t) log pi / num_loss_tokens,  M(k) = k if low <= k <= high, else 0        (IcePop; TBA, app. D)

    pi = trainer_logprobs, mu = generator_logprobs, low = ratio_mask_low and high = ratio_mask_high
    (alpha and beta of IcePop, 0.5 and 5), A = advantages; tensors [R], nats. Both bounds act
    whatever the sign of A. IcePop's own ratio is between the engines at equal weights and
    multiplies PPO's; here, as in TBA, the one ratio has staleness in it too. ratio_cap,
    ratio_level: see ratios.py; normalize: see `normalized`. ValueError for impossible options.

    metrics: ratio/sum, ratio/max, ratio/masked (tokens outside), ratio/capped, kl/generator.
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
