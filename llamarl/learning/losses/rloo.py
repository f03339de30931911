"""RLOO: REINFORCE on whole completions with the leave-one-out baseline."""

from __future__ import annotations

from llamarl.learning.losses.common import LossAndMetrics, per_completion, pulled, sums_completions
from llamarl.learning.losses.inputs import LossInputs
from llamarl.learning.losses.ratios import token_metrics


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
