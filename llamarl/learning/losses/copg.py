"""CoPG as an off-policy RLOO: the log-ratio to the generator in place of the log-probability."""

from __future__ import annotations

from torch import Tensor

from llamarl.learning.losses.common import Completions, Metrics, log_ratio, masked, per_completion
from llamarl.learning.losses.ratios import token_metrics


def copg(
    trainer_logprobs: Tensor,
    generator_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    num_loss_tokens: float,
    completions: Completions,
) -> tuple[Tensor, Metrics]:
    """-(1/N) sum_j A_j log(pi(y_j)/mu(y_j))        (Async RLHF, app. B, L_CoPG)

    pi = trainer_logprobs, mu = generator_logprobs (pi_old), nats, summed over a completion; A_j =
    advantages, of trainer.advantages=leave_one_out; N = num_completions. mu is a constant, so the
    gradient is RLOO's, off-policy too; the value is not: it is 0 on-policy. Kept to compare with:
    Async RLHF finds it fails off-policy (fig. 13), proximal_rloo does not.

    metrics: ratio/sum, ratio/max, kl/generator, of each token's pi/mu.
    """
    total = masked(advantages, loss_mask).detach() * log_ratio(
        trainer_logprobs, generator_logprobs.detach(), loss_mask
    )
    return -per_completion(total.sum(), completions), token_metrics(
        trainer_logprobs, generator_logprobs, loss_mask
    )
