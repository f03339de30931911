"""GRPO: the clipped surrogate with advantages normalized in their group."""

from __future__ import annotations

from torch import Tensor

from llamarl.learning.losses.common import Completions, Metrics, normalized
from llamarl.learning.losses.ratios import clipped_surrogate


def grpo(
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
    normalize: str = "completions",
) -> tuple[Tensor, Metrics]:
    """-(1/N) sum_j (1/|y_j|) sum_t min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)        (DeepSeekMath, eq. 3)

    r = pi/mu, pi = trainer_logprobs, mu = generator_logprobs (they sampled, so they are pi_old); A
    = advantages, (reward - mean) / std of the group with trainer.advantages=group_mean_std; N =
    num_completions; tensors [R], nats. normalize="completions" (the paper; TRL loss_type "grpo"):
    the mean of each completion, then over those of the whole batch. normalize="tokens" (TRL
    "dapo"): all tokens of the batch alike; "groups": see `normalized`. ratio_level="sequence_mean"
    is GSPO. ratio_cap is TRL's delta. The paper's KL term is loss.kl_coef (k3), inside the same
    mean. Other knobs: see ratios.py. ValueError for impossible options.

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
