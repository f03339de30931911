"""REINFORCE: the policy gradient without any importance weight."""

from __future__ import annotations

from llamarl.learning.losses.common import LossAndMetrics, normalized, pulled, token_advantages
from llamarl.learning.losses.inputs import LossInputs
from llamarl.learning.losses.ratios import token_metrics


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
