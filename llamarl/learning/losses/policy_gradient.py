"""The policy gradient with an importance weight that is truncated, masked or both; and with an
advantage that is regularised (tba, kimi_k2) or a teacher's (distill).

Published as AIPO, CISPO, Dr. GRPO and IcePop: conf/loss has the values of each.
"""

from __future__ import annotations

from dataclasses import replace

from llamarl.learning.losses.common import (
    Bound,
    LossAndMetrics,
    at_level,
    bound,
    check_ratio,
    holds_to_generator,
    kept_labels,
    log_ratio,
    masked,
    needs_reference,
    normalized,
    off_policy_metrics,
    per_completion,
    ratio,
    reference_of,
    token_advantages,
    uses_all_completions,
    whole_groups,
)
from llamarl.learning.losses.inputs import LossInputs


@token_advantages
def policy_gradient(
    inputs: LossInputs,
    *,
    ratio_cap: Bound = 4.0,
    ratio_mask_low: Bound = None,
    ratio_mask_high: Bound = None,
    ratio_level: str = "token",
    normalize: str = "tokens",
    max_tokens: int | None = None,
) -> LossAndMetrics:
    """-sum_t sg( M(min(pi/mu, rho)) A_t ) log pi / Z

    pi = trainer_logprobs, mu = generator_logprobs, A = advantages; tensors [T], nats. sg: no
    gradient goes through the weight. rho = ratio_cap. M(w) = w where ratio_mask_low <= pi/mu <=
    ratio_mask_high, else 0, whatever the sign of A. ratio_level: see common.py.

    Z is the denominator of `normalized`, by default num_loss_tokens. With max_tokens it is
    num_completions max_tokens, a constant that does not depend on lengths (Dr. GRPO; TRL
    "dr_grpo", max_completion_length). Without tokens the loss is 0 and still has its (zero)
    gradient.

    name     source                           rho         A: trainer.advantages
    AIPO     LlamaRL                          4 (2 - 10)  group_mean: r - mean r of the group
    CISPO    MiniMax-M1; TBA app. D, eq. 13   8           group_mean_std: (r - mean r) / std r
    Dr. GRPO TBA app. D, eq. 14               8           group_mean
    IcePop   Ring-1T; TBA app. D              none        group_mean; low = 0.5, high = 5

    The bounds of 8 are of TBA's table 4. TBA's equations leave Z out; PRIME-RL's is
    num_loss_tokens. IcePop's own ratio is between the engines at equal weights and multiplies
    PPO's; here, as in TBA, the one ratio has staleness in it too. The defaults are AIPO's.

    metrics: ratio/sum, ratio/max (before the cap), ratio/capped (labels above it), ratio/masked
    (labels outside the mask, where there is one), kl/generator. ValueError for impossible options.
    """
    check_ratio(ratio_cap, ratio_mask_low, ratio_mask_high)
    mask = inputs.loss_mask
    cap = bound(ratio_cap)
    token = log_ratio(inputs, inputs.generator_logprobs).detach()
    raw = masked(ratio(at_level(token, inputs, ratio_level)), mask)
    kept, of_mask = kept_labels(raw, mask, ratio_mask_low, ratio_mask_high)
    weight = masked(raw.clamp(max=cap), kept)

    metrics = off_policy_metrics(token, raw)
    metrics["ratio/capped"] = (raw > cap).sum().float()
    metrics |= of_mask

    pull = (weight * masked(inputs.advantages, mask)).detach()
    objective = pull * masked(inputs.trainer_logprobs, mask)
    if max_tokens is None:
        return -normalized(objective, inputs, normalize), metrics
    if not max_tokens >= 1:
        raise ValueError(f"max_tokens={max_tokens}: need at least 1")
    if normalize != "tokens":
        raise ValueError(
            f"max_tokens={max_tokens} takes the place of normalize={normalize}: leave one out"
        )
    return -per_completion(objective.sum() / max_tokens, inputs.completions), metrics


@whole_groups
@uses_all_completions
@needs_reference
def tba(
    inputs: LossInputs,
    *,
    beta: float = 0.005,
    ratio_cap: Bound = 8.0,
    ratio_mask_low: Bound = None,
    ratio_mask_high: Bound = None,
    ratio_level: str = "token",
    normalize: str = "tokens",
) -> LossAndMetrics:
    """-sum_t sg( min(pi/mu, 8) (A_j - beta (log L_j - mean log L)) ) log pi / num_loss_tokens

    (TBA, app. D, eq. 16.) The policy gradient with another advantage: log L_j = log(pi/ref)(y_j),
    summed over the completion, its mean over the group; pi = trainer_logprobs, mu =
    generator_logprobs, ref = ref_logprobs, 8 = ratio_cap (table 4), A_j = r_j - mean r =
    advantages, of trainer.advantages=group_mean; tensors [T], nats. beta = 0.005 (table 4); with 0
    it is Dr. GRPO. TBA makes pi the reference every 50 steps (table 4), outside of this function.
    Eq. 16 leaves the normalization out; PRIME-RL's is a mean over the batch's tokens. Knobs: see
    common.py and `normalized`. ValueError without ref_logprobs, for beta < 0, or impossible
    options.

    metrics: tba/log_ratio/completions (log L), and those of `policy_gradient`.
    """
    ref_logprobs = reference_of(inputs, "tba")
    if not beta >= 0:
        raise ValueError(f"beta={beta}: need at least 0")
    completions = inputs.completions
    trained = completions.lengths(inputs.loss_mask) > 0
    log_l = completions.sums(log_ratio(inputs, ref_logprobs).detach())
    centred = log_l - completions.group_mean(log_l, trained)
    regularised = inputs.advantages - beta * centred[completions.index]
    loss, metrics = policy_gradient(
        replace(inputs, advantages=regularised),
        ratio_cap=ratio_cap,
        ratio_mask_low=ratio_mask_low,
        ratio_mask_high=ratio_mask_high,
        ratio_level=ratio_level,
        normalize=normalize,
    )
    return loss, metrics | {"tba/log_ratio/completions": log_l.sum()}


@uses_all_completions
@holds_to_generator
def kimi_k2(
    inputs: LossInputs,
    *,
    tau: float = 0.005,
    ratio_cap: Bound = 8.0,
    ratio_mask_low: Bound = None,
    ratio_mask_high: Bound = None,
    ratio_level: str = "token",
    normalize: str = "tokens",
) -> LossAndMetrics:
    """-sum_t sg( min(pi/mu, 8) (A_j - tau log(pi/mu)(y_j)) ) log pi / num_loss_tokens

    (TBA, app. D, eq. 15; Kimi K2.) The policy gradient with another advantage: log(pi/mu)(y_j)
    summed over the completion; pi = trainer_logprobs, mu = generator_logprobs, 8 = ratio_cap, A_j =
    r_j - mean r = advantages, of trainer.advantages=group_mean; tensors [T], nats. tau = 0.005
    (TBA, fig. 11). Unlike tba it has no reference, and the mean log-ratio is not in the baseline.
    Eq. 15 leaves the normalization out; PRIME-RL's is a mean over the batch's tokens. Knobs: see
    common.py and `normalized`. ValueError for tau < 0 or impossible options.

    metrics: kimi/log_ratio/completions (log(pi/mu)(y)), and those of `policy_gradient`.
    """
    if not tau >= 0:
        raise ValueError(f"tau={tau}: need at least 0")
    completions = inputs.completions
    log_pi_mu = completions.sums(log_ratio(inputs, inputs.generator_logprobs).detach())
    regularised = inputs.advantages - tau * log_pi_mu[completions.index]
    loss, metrics = policy_gradient(
        replace(inputs, advantages=regularised),
        ratio_cap=ratio_cap,
        ratio_mask_low=ratio_mask_low,
        ratio_mask_high=ratio_mask_high,
        ratio_level=ratio_level,
        normalize=normalize,
    )
    return loss, metrics | {"kimi/log_ratio/completions": log_pi_mu.sum()}


@token_advantages
@uses_all_completions
@needs_reference
def distill(
    inputs: LossInputs,
    *,
    reward_weight: float = 0.0,
    ratio_cap: Bound = 4.0,
    ratio_mask_low: Bound = None,
    ratio_mask_high: Bound = None,
    ratio_level: str = "token",
    normalize: str = "tokens",
) -> LossAndMetrics:
    """-sum_t sg( min(pi/mu, rho) (log ref_t - log pi_t + reward_weight A_t) ) log pi / Z

    The policy gradient whose advantage is minus one sample of the reverse KL to a teacher
    ("On-Policy Distillation", Thinking Machines, 2025; discount 0). ref = ref_logprobs, the
    teacher's; pi = trainer_logprobs; mu = generator_logprobs; A = advantages, of the rewards; rho =
    ratio_cap; tensors [T], nats. Z and the knobs: see `policy_gradient`. Without a cap and with
    reward_weight 0 the mean gradient is that of sum_t KL(pi(.|s_t) || ref(.|s_t)), s_t = the
    prefixes that mu sampled, whatever mu is.

    Tinker's advantage has log mu_t in place of log pi_t, which is the same on-policy. Off-policy
    its mean gradient is that of KL(pi || ref) - KL(pi || mu): it drives the policy away from mu.

    metrics: loss/teacher_kl (log mu - log ref, whose mean is the sampler's KL to the teacher), and
    those of `policy_gradient`. ValueError without ref_logprobs, for reward_weight < 0, or
    impossible options.
    """
    ref_logprobs = reference_of(inputs, "distill")
    if not reward_weight >= 0:
        raise ValueError(f"reward_weight={reward_weight}: need at least 0")
    mask = inputs.loss_mask
    of_teacher = -log_ratio(inputs, ref_logprobs).detach()
    of_reward = reward_weight * masked(inputs.advantages, mask)
    loss, metrics = policy_gradient(
        replace(inputs, advantages=of_teacher + of_reward),
        ratio_cap=ratio_cap,
        ratio_mask_low=ratio_mask_low,
        ratio_mask_high=ratio_mask_high,
        ratio_level=ratio_level,
        normalize=normalize,
    )
    kl = masked(inputs.generator_logprobs, mask) - masked(ref_logprobs, mask)
    return loss, metrics | {"loss/teacher_kl": kl.sum()}
