"""Proximal RLOO: the clipped importance ratio of whole completions with the leave-one-out baseline."""

from __future__ import annotations

from torch import Tensor

from llamarl.learning.losses.common import Completions, Metrics, normalized
from llamarl.learning.losses.ratios import clipped_surrogate


def proximal_rloo(
    trainer_logprobs: Tensor,
    generator_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    num_loss_tokens: float,
    completions: Completions,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_cap: float | None = None,
    ratio_mask_low: float | None = None,
    ratio_mask_high: float | None = None,
    ratio_level: str = "sequence",
) -> tuple[Tensor, Metrics]:
    """-(1/N) sum_j min(r_j A_j, clip(r_j, 1 - clip_low, 1 + clip_high) A_j)        (Async RLHF, app. B, eq. 1)

    r_j = pi(y_j)/mu(y_j), pi = trainer_logprobs, mu = generator_logprobs (pi_old), nats, summed
    over a completion; A_j = advantages, of trainer.advantages=leave_one_out; N = num_completions.
    The paper has clip_low = clip_high = eps and does not print it; 0.2 is PPO's, and TRL's for its
    RLOO, which is this loss. Inside the clip the gradient is r_j A_j grad log pi(y_j).
    ratio_level="sequence" is the paper's ratio; the knobs: see ratios.py. ValueError for impossible
    options.

    metrics, each completion's ratio counted at each of its labels: ratio/sum, ratio/max, clip/low,
    clip/high, ratio/capped; kl/generator of tokens.
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
    # The mean over a completion's labels of what is the same for all of them.
    objective = normalized(
        objective,
        loss_mask,
        normalize="completions",
        num_loss_tokens=num_loss_tokens,
        completions=completions,
    )
    return -objective, metrics
