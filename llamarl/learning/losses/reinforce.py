"""REINFORCE: the policy gradient without any importance weight."""

from __future__ import annotations

from torch import Tensor

from llamarl.learning.losses.common import Completions, Metrics, normalized
from llamarl.learning.losses.ratios import policy_gradient, token_metrics


def reinforce(
    trainer_logprobs: Tensor,
    generator_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    num_loss_tokens: float,
    completions: Completions | None = None,
    normalize: str = "tokens",
) -> tuple[Tensor, Metrics]:
    """-sum_t A_t log pi / num_loss_tokens        (Williams, 1992; with the group's mean as baseline: TBA, app. A)

    pi = trainer_logprobs, A = advantages; tensors [R], nats. generator_logprobs count in the
    metrics alone: off-policy the gradient is biased. normalize: see `normalized`.

    metrics: ratio/sum, ratio/max, kl/generator, of each token's pi/mu.
    """
    objective = policy_gradient(advantages.new_ones(()), advantages, trainer_logprobs, loss_mask)
    metrics = token_metrics(trainer_logprobs, generator_logprobs, loss_mask)
    objective = normalized(
        objective,
        loss_mask,
        normalize=normalize,
        num_loss_tokens=num_loss_tokens,
        completions=completions,
    )
    return -objective, metrics
