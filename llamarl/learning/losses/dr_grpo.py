"""Dr. GRPO with a truncated importance weight (TBA eq. 14)."""

from __future__ import annotations

from torch import Tensor

from llamarl.learning.losses.common import Completions, Metrics, per_completion, per_token
from llamarl.learning.losses.ratios import importance_weight, policy_gradient


def dr_grpo(
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
    max_tokens: int | None = None,
) -> tuple[Tensor, Metrics]:
    """-sum_t sg(min(pi/mu, 8) (r - mean r)) log pi / Z        (TBA, app. D, eq. 14; bounds 0/8 of table 4)

    pi = trainer_logprobs, mu = generator_logprobs, 8 = ratio_cap, r - mean r = advantages, which
    are not divided by a standard deviation; tensors [R], nats. Eq. 14 leaves Z out. max_tokens
    None: Z = num_loss_tokens, PRIME-RL's. A number: Z =
    num_completions max_tokens, a constant that does not depend on lengths        (Dr. GRPO; TRL "dr_grpo", max_completion_length)
    ratio_mask_*, ratio_level: see ratios.py. ValueError for impossible options, or max_tokens
    without completions.

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
    if max_tokens is None:
        return -per_token(objective.sum(), num_loss_tokens), metrics
    if not max_tokens >= 1 or completions is None:
        raise ValueError(
            f"max_tokens={max_tokens}: need at least 1, and the completions of the labels"
        )
    return -per_completion(objective.sum() / max_tokens, completions), metrics
