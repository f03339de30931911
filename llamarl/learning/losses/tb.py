"""Trajectory balance with the VarGrad estimate of the partition function (TBA)."""

from __future__ import annotations

from llamarl.learning.losses.common import (
    LossAndMetrics,
    group_means,
    half_square,
    log_ratio,
    masked,
    needs_reference,
    per_completion,
    reference_of,
    sums_completions,
    token_metrics,
    uses_all_completions,
    whole_groups,
)
from llamarl.learning.losses.inputs import LossInputs


@sums_completions
@whole_groups
@group_means
@uses_all_completions
@needs_reference
def tb(
    inputs: LossInputs,
    *,
    beta: float = 0.012,
    log_reward_temperature: float = 1.0,
    reference_temperature: float = 1.0,
) -> LossAndMetrics:
    """(beta/2) (1/N) sum_j ( sg log Z(x) + log(pi/ref)(y_j) - r_j/beta )^2        (TBA, eq. 5)

    log Z(x) = mean over the group of r/beta - log(pi/ref)(y)        (TBA, eq. 4; no gradient)
    pi = trainer_logprobs, ref = ref_logprobs, nats, summed over a completion; r =
    completions.rewards; N = num_completions. The factor beta/2 is that of TBA's eq. 12, with which
    the gradient is eq. 7's: -(1/N) sum_j A_j grad log pi(y_j) with A_j = (r_j - mean r) - beta
    (log(pi/ref)(y_j) - its mean); without it gradients grow as 1/beta. Valid for data of any
    policy: neither the generator's logprobs nor `advantages` are used. beta: 0.012 falling to 0.004
    in table 2, 1 to 0.05 in table 3. ValueError without ref_logprobs, or for beta <= 0.

    The target, log R(y) = log ref(y) + r/beta, is that of Lee et al. 2024, with which TBA attacks
    (B.3):

        log R(y) = ( log ref(y) / gamma + r/beta ) / T

    gamma = reference_temperature (above 1 the reference, a language model, says less) and T =
    log_reward_temperature (above 1 the target is flatter). With both at 1 it is eq. 5.
    ValueError for either <= 0.

    metrics: tb/square/completions (the mean of it is eq. 5), tb/log_z/completions,
    tb/log_ratio/completions (log(pi/ref)(y): an estimate of the KL on-policy); ratio/sum,
    ratio/max, kl/generator of tokens.
    """
    ref_logprobs = reference_of(inputs, "tb")
    if not beta > 0:
        raise ValueError(f"beta={beta}: need more than 0")
    temperatures = {
        "log_reward_temperature": log_reward_temperature,
        "reference_temperature": reference_temperature,
    }
    for name, value in temperatures.items():
        if not value > 0:
            raise ValueError(f"{name}={value}: need more than 0")
    completions = inputs.completions
    rewards = completions.rewards
    trained = completions.lengths(inputs.loss_mask) > 0
    log_pi_ref = completions.sums(log_ratio(inputs, ref_logprobs))
    log_ref = completions.sums(masked(ref_logprobs, inputs.loss_mask))
    left_of_ref = 1 - 1 / (reference_temperature * log_reward_temperature)  # 0 for eq. 5
    log_pi_tempered_ref = log_pi_ref + left_of_ref * log_ref
    of_reward = rewards / (beta * log_reward_temperature)
    log_z = completions.group_mean(of_reward - log_pi_tempered_ref.detach(), trained)
    residual = (log_z + log_pi_tempered_ref - of_reward) * trained
    metrics = {
        "tb/square/completions": 2 * half_square(residual.detach()).sum(),
        "tb/log_z/completions": (log_z * trained).sum(),
        "tb/log_ratio/completions": log_pi_ref.detach().sum(),
    }
    loss = per_completion(beta * half_square(residual).sum(), completions)
    return loss, metrics | token_metrics(inputs)
