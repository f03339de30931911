"""REINFORCE: the policy gradient without any importance weight, by token (reinforce) or of whole
completions with the leave-one-out baseline (rloo, copg).
"""

from __future__ import annotations

from llamarl.learning.losses.common import (
    LossAndMetrics,
    log_ratio,
    normalized,
    per_completion,
    pulled,
    sums_completions,
    token_advantages,
    token_metrics,
)
from llamarl.learning.losses.inputs import LossInputs


@token_advantages
def reinforce(inputs: LossInputs, *, normalize: str = "tokens") -> LossAndMetrics:
    """-sum_t A_t log pi / num_loss_tokens        (Williams, 1992)

    With the group's mean as baseline it is that of TBA, app. A. pi = trainer_logprobs, A =
    advantages; tensors [T], nats. generator_logprobs count in the metrics alone: off-policy the
    gradient is biased. normalize: see `normalized`.

    metrics: ratio/sum, ratio/max, kl/generator, of each token's pi/mu.
    """
    objective = pulled(inputs, inputs.trainer_logprobs)
    return -normalized(objective, inputs, normalize), token_metrics(inputs)


@sums_completions
def rloo(inputs: LossInputs) -> LossAndMetrics:
    """-(1/N) sum_j A_j log pi(y_j)        (Async RLHF, app. B, L_RLOO; Ahmadian et al., 2024)

    A_j = r_j - mean of the others' r in its group: advantages [T], made by
    trainer.advantages=leave_one_out, the same for all labels of a completion; log pi(y) = its sum
    of trainer_logprobs, nats; N = num_completions. It has no importance weight: loss=proximal_rloo
    has one.

    metrics: ratio/sum, ratio/max, kl/generator, of each token's pi/mu.
    """
    objective = pulled(inputs, inputs.trainer_logprobs)
    return -per_completion(objective.sum(), inputs.completions), token_metrics(inputs)


@sums_completions
def copg(inputs: LossInputs) -> LossAndMetrics:
    """-(1/N) sum_j A_j log(pi(y_j)/mu(y_j))        (Async RLHF, app. B, L_CoPG)

    pi = trainer_logprobs, mu = generator_logprobs (pi_old), nats, summed over a completion; A_j =
    advantages, of trainer.advantages=leave_one_out; N = num_completions. mu is a constant, so the
    gradient is RLOO's, off-policy too; the value is not: it is 0 on-policy. It is kept to compare
    with: Async RLHF finds that it fails off-policy (fig. 13) where Proximal RLOO does not.

    metrics: ratio/sum, ratio/max, kl/generator, of each token's pi/mu.
    """
    objective = pulled(inputs, log_ratio(inputs, inputs.generator_logprobs.detach()))
    return -per_completion(objective.sum(), inputs.completions), token_metrics(inputs)
