"""Proximal RLOO: the clipped importance ratio of whole completions."""

from __future__ import annotations

from llamarl.learning.losses.clipped import clipped
from llamarl.learning.losses.common import (
    LossAndMetrics,
    holds_to_generator,
    sums_completions,
    token_advantages,
)
from llamarl.learning.losses.inputs import LossInputs
from llamarl.learning.losses.ratios import Bound


@sums_completions
@token_advantages
@holds_to_generator
def proximal_rloo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_cap: Bound = None,
    ratio_mask_low: Bound = None,
    ratio_mask_high: Bound = None,
    ratio_level: str = "sequence",
) -> LossAndMetrics:
    """-(1/N) sum_j min( r_j A_j, clip(r_j, 1 - clip_low, 1 + clip_high) A_j )

    (Async RLHF, app. B, eq. 1.) r_j = pi(y_j)/mu(y_j), pi = trainer_logprobs, mu =
    generator_logprobs (pi_old), nats, summed over a completion; A_j = advantages, of
    trainer.advantages=leave_one_out; N = num_completions. It is `clipped` with the mean over a
    completion's labels of what is the same for all of them. That mean is no option: terms that
    `regularised` adds around this loss are sums over a completion's tokens. The paper has clip_low
    = clip_high = eps and prints none; 0.2 is TRL's for its RLOO, which is this loss. Knobs and
    metrics: those of `clipped`. ValueError for impossible options.
    """
    return clipped(
        inputs,
        clip_low=clip_low,
        clip_high=clip_high,
        ratio_cap=ratio_cap,
        ratio_mask_low=ratio_mask_low,
        ratio_mask_high=ratio_mask_high,
        ratio_level=ratio_level,
        normalize="completions",
    )
