"""CoPG as an off-policy RLOO: the log-ratio to the generator in place of the log-probability."""

from __future__ import annotations

from llamarl.learning.losses.common import (
    LossAndMetrics,
    log_ratio,
    per_completion,
    pulled,
    sums_completions,
)
from llamarl.learning.losses.inputs import LossInputs
from llamarl.learning.losses.ratios import token_metrics


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
