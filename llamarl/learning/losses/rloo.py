"""RLOO: REINFORCE on whole completions with the leave-one-out baseline."""

from __future__ import annotations

from torch import Tensor

from llamarl.learning.losses.common import Completions, Metrics, per_completion
from llamarl.learning.losses.ratios import policy_gradient, token_metrics


def rloo(
    trainer_logprobs: Tensor,
    generator_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    num_loss_tokens: float,
    completions: Completions,
) -> tuple[Tensor, Metrics]:
    """-(1/N) sum_j A_j log pi(y_j)        (Async RLHF, app. B, L_RLOO; Ahmadian et al., 2024)

    A_j = r_j - mean of the others' r in its group: advantages [R], made by
    trainer.advantages=leave_one_out, the same for all labels of a completion; log pi(y) = its sum
    of trainer_logprobs, nats; N = num_completions. No importance weight: see proximal_rloo.

    metrics: ratio/sum, ratio/max, kl/generator, of each token's pi/mu.
    """
    objective = policy_gradient(advantages.new_ones(()), advantages, trainer_logprobs, loss_mask)
    return -per_completion(objective.sum(), completions), token_metrics(
        trainer_logprobs, generator_logprobs, loss_mask
    )
