"""The policy gradient with an importance weight that is truncated, masked or both.

Published as AIPO, CISPO, Dr. GRPO and IcePop: conf/loss has the values of each.
"""

from __future__ import annotations

from llamarl.learning.losses.common import (
    LossAndMetrics,
    log_ratio,
    masked,
    normalized,
    per_completion,
    ratio,
    token_advantages,
)
from llamarl.learning.losses.inputs import LossInputs
from llamarl.learning.losses.ratios import (
    Bound,
    at_level,
    bound,
    check_ratio,
    kept_labels,
    off_policy_metrics,
)


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
    ratio_mask_high, else 0, whatever the sign of A. ratio_level: see ratios.py.

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
