"""Shared by the losses: marks, masks, ratios and KL of a token, and denominators.

A loss is a pure function

    loss(inputs: LossInputs, *, **options) -> (loss, metrics)

The loss is this microbatch's share of the batch's (see inputs.py). A masked label adds nothing and
gets a gradient of exactly zero, whatever its values are. Keyword-only parameters are the options
that a config sets.

metrics: 0-dim float tensors without gradient, on the device. A name that ends in "/max" is a
maximum. One that ends in "/completions" is a sum over completions: the trainer divides it by their
number and drops the ending. All others are sums over trained tokens, which the trainer divides by
the number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from llamarl.learning.losses.inputs import Completions, LossInputs
from llamarl.learning.segments import wide_dtype
from llamarl.words.choices import LEVELS, NORMALIZE

Metrics = dict[str, Tensor]
LossAndMetrics = tuple[Tensor, Metrics]
Bound = float | None  # None: no bound
Loss = Callable[..., LossAndMetrics]
Marked = TypeVar("Marked", bound=Callable)

# exp() stops growing at e^20 = 4.9e8. Such a ratio is a broken run either way; the sums stay finite
# and say so.
MAX_LOG_RATIO = 20.0
# How `normalized` treats the terms around a loss that sums a completion's tokens. No option has it.
SUMS = "sums"
# A square goes on along its tangent past this, for the same reason.
MAX_SQUARED = 1e8


# --- What a loss declares of itself, as decorators ---
#
# The config's check reads the marks of the package's losses from their source, without torch, and
# those of a user's own once it has imported it (llamarl/config/sections/loss.py).


def _marked(fn: Marked, mark: str) -> Marked:
    """Return the loss with a mark that `has_mark` finds."""
    setattr(fn, mark, True)
    return fn


def whole_groups(fn: Marked) -> Marked:
    """Mark a loss that couples the completions of a group, so that all of them must be in one
    microbatch.
    """
    return _marked(fn, "whole_groups")


def group_means(fn: Marked) -> Marked:
    """Mark a loss that couples the completions of a group by `Completions.group_mean` alone, of
    values without gradient, and uses neither advantages nor numbers of groups and their tokens.
    Ranks may then share a group: the mean is collective, and taken as often for each microbatch.
    """
    return _marked(fn, "group_means")


def uses_all_completions(fn: Marked) -> Marked:
    """Mark a loss that has a gradient where the advantage is 0, so that such completions are not
    left out.
    """
    return _marked(fn, "uses_all_completions")


def uses_entropy(fn: Marked) -> Marked:
    """Mark a loss that has a gradient in `inputs.entropy`, which is made without one otherwise."""
    return _marked(fn, "uses_entropy")


def needs_reference(fn: Marked) -> Marked:
    """Mark a loss that compares with a reference: a config that has none is refused."""
    return _marked(fn, "needs_reference")


def holds_to_generator(fn: Marked) -> Marked:
    """Mark a loss that takes generator_logprobs for an earlier version of the policy itself, near
    which it holds the policy: a generator that samples at temperatures of its own is refused.
    """
    return _marked(fn, "holds_to_generator")


def token_advantages(fn: Marked) -> Marked:
    """Mark a loss that uses an advantage of each token's own, as trainer.advantages=gae and turns
    make them.
    """
    return _marked(fn, "token_advantages")


def sums_completions(fn: Marked) -> Marked:
    """Mark a loss that is a mean over completions (or groups) of sums over a completion's tokens. A
    KL term around it is then of the same kind, so that its coefficient is the beta of the papers.
    """
    return _marked(fn, "sums_completions")


def has_mark(fn: Loss | None, mark: str) -> bool:
    """Whether fn has the mark of this name, also through functools.partial and functools.wraps.

    The terms around a loss add marks of their own (regularisers.py).
    """
    while fn is not None:
        if getattr(fn, mark, False):
            return True
        fn = getattr(fn, "func", None) or getattr(fn, "__wrapped__", None)
    return False


def reference_of(inputs: LossInputs, name: str) -> Tensor:
    """Return ref_logprobs. ValueError where no reference runs, for the loss called `name`."""
    if inputs.ref_logprobs is None:
        raise ValueError(f"{name} needs ref_logprobs: switch the reference on (reference=frozen)")
    return inputs.ref_logprobs


# --- Tokens ---


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return values where mask, else 0; in float32 at least.

    It is not a product with the mask: 0 * inf is NaN, in the gradient too.
    """
    return torch.where(mask, values, 0).to(wide_dtype(values))


def log_ratio(inputs: LossInputs, old_logprobs: Tensor) -> Tensor:
    """Return [T]: log(pi / old) where trained, else 0; in float32 at least. pi =
    trainer_logprobs.
    """
    mask = inputs.loss_mask
    return masked(inputs.trainer_logprobs, mask) - masked(old_logprobs, mask)


def pulled(inputs: LossInputs, of_label: Tensor) -> Tensor:
    """Return [T]: the advantage, without gradient, times a value of each label [T], 0 where
    masked.
    """
    mask = inputs.loss_mask
    return masked(inputs.advantages, mask).detach() * masked(of_label, mask)


def ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), at most e^20."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - 1 - x >= 0 with x = log(q/p): in the mean over samples of p, KL(p || q)

    (Schulman, "Approximating KL divergence", k3.) Past x = 20 it goes on along the tangent, so that
    it neither overflows nor loses its pull.
    """
    x = log_ratio.clamp(max=MAX_LOG_RATIO)
    # Its slope at 0 is 0, where the clamp's is still 1.
    beyond = torch.relu(log_ratio - MAX_LOG_RATIO)
    return x.expm1() - x + math.expm1(MAX_LOG_RATIO) * beyond


def half_square(x: Tensor) -> Tensor:
    """x^2 / 2; past 1e8 along the tangent, so that it neither overflows nor loses its pull."""
    inside = x.clamp(-MAX_SQUARED, MAX_SQUARED)
    beyond = torch.relu(x.abs() - MAX_SQUARED)
    return inside.square() / 2 + MAX_SQUARED * beyond


def maximum(values: Tensor) -> Tensor:
    """Return the largest of the values, or 0 where there is none."""
    return values.amax() if values.numel() else values.new_zeros(())


# --- Importance ratios pi/mu, with the knobs that all losses share: level, mask and cap ---
#
#     ratio_level       of "token": pi(y_t)/mu(y_t). "sequence": pi(y)/mu(y), their product over the
#                       completion, for each of its tokens. "sequence_mean": its |y|-th root
#                       (GSPO, eq. 7; TRL importance_sampling_level "sequence")
#     ratio_mask_low,   labels whose ratio is below or above get weight 0; None: no bound (IcePop)
#     ratio_mask_high
#     ratio_cap         min(ratio, ratio_cap); None or inf: no cap
#
# pi = trainer_logprobs, mu = generator_logprobs; tensors [T], nats. The mask looks at the ratio
# before the cap.


def at_level(token_log_ratio: Tensor, inputs: LossInputs, level: str) -> Tensor:
    """Return [T]: the log ratio that each label is weighted by, from its own [T] (0 where masked).

    ValueError for an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"ratio_level={level}: need {' or '.join(LEVELS)}")
    if level == "token":
        return token_log_ratio
    completions = inputs.completions
    total = completions.sums(token_log_ratio)
    if level == "sequence_mean":
        total = total / completions.lengths(inputs.loss_mask).clamp(min=1)
    return total[completions.index]


def kept_labels(
    raw: Tensor, loss_mask: Tensor, ratio_mask_low: Bound, ratio_mask_high: Bound
) -> tuple[Tensor, Metrics]:
    """Return [T] bool: the trained labels whose ratio [T] is inside the mask's bounds; and metrics.

    NaN is inside: what is broken must reach the check of the loss. metrics: ratio/masked (labels
    outside), nothing where there is no mask.
    """
    outside = (raw < (ratio_mask_low or 0.0)) | (raw > bound(ratio_mask_high))
    kept = loss_mask & ~outside
    if ratio_mask_low is None and ratio_mask_high is None:
        return kept, {}
    return kept, {"ratio/masked": (loss_mask & outside).sum().float()}


def bound(limit: Bound) -> float:
    """Return the limit as a number: infinity for None."""
    return math.inf if limit is None else limit


def off_policy_metrics(token_log_ratio: Tensor, raw: Tensor) -> Metrics:
    """Measure how far off-policy the batch is: ratio/sum and ratio/max of the raw ratio [T],
    kl/generator.

    kl/generator is the k3 estimate of KL(mu || pi).
    """
    return {
        "ratio/sum": raw.sum(),
        "ratio/max": maximum(raw),
        "kl/generator": k3(token_log_ratio).sum(),
    }


def token_metrics(inputs: LossInputs) -> Metrics:
    """Return `off_policy_metrics` of each token's own ratio, for losses that do not use it."""
    token = log_ratio(inputs, inputs.generator_logprobs).detach()
    return off_policy_metrics(token, masked(ratio(token), inputs.loss_mask))


def check_ratio(ratio_cap: Bound, ratio_mask_low: Bound, ratio_mask_high: Bound) -> None:
    """Raise ValueError, with the remedy, for knobs that contradict themselves."""
    if ratio_cap is not None and not ratio_cap > 0:
        raise ValueError(f"ratio_cap={ratio_cap}: need more than 0, or null for no cap")
    if not 0 <= (ratio_mask_low or 0.0) < bound(ratio_mask_high):
        raise ValueError(
            f"ratio_mask_low={ratio_mask_low}, ratio_mask_high={ratio_mask_high}: "
            "need 0 <= low < high, null for no bound"
        )


# --- Denominators ---


def per_token(total: Tensor, num_loss_tokens: float) -> Tensor:
    """Divide a total by num_loss_tokens, the trained tokens of the whole batch over all ranks.

    A batch without any has loss 0. ValueError for a negative count.
    """
    if num_loss_tokens < 0:
        raise ValueError(
            f"num_loss_tokens={num_loss_tokens}: count the trained tokens of the whole batch"
        )
    return total / max(num_loss_tokens, 1)


def per_completion(total: Tensor, completions: Completions) -> Tensor:
    """Divide a total by the trained completions of the whole batch over all ranks."""
    return total / max(completions.num_completions, 1)


def normalized(objective: Tensor, inputs: LossInputs, normalize: str) -> Tensor:
    """Return the microbatch's share of the batch's mean of an objective [T], which is 0 where
    masked.

    "sums"         sum_jt o_jt / num_completions                            (a KL a completion)
    "tokens"       sum_t o_t / num_loss_tokens                                (TRL "dapo"; PRIME-RL)
    "completions"  sum_j (1/|y_j|) sum_t o_jt / num_completions               (GRPO; TRL "grpo")
    "groups"       sum_g (1/sum_j |y_gj|) sum_jt o_gjt / num_trained_groups   (Magistral 2.1)

    Every token, every completion or every group weighs the same; of "sums" a completion weighs as
    much as it has tokens. ValueError for another name.
    """
    completions = inputs.completions
    if normalize == SUMS:
        return per_completion(objective.sum(), completions)
    if normalize == "tokens":
        return per_token(objective.sum(), inputs.num_loss_tokens)
    if normalize == "completions":
        lengths = completions.lengths(inputs.loss_mask).clamp(min=1)
        means = objective / lengths[completions.index]
        return per_completion(means.sum(), completions)
    if normalize == "groups":
        tokens = completions.group_tokens.clamp(min=1)
        means = objective / tokens[completions.index]
        return means.sum() / max(completions.num_trained_groups, 1)
    raise ValueError(f"normalize={normalize}: need {' or '.join(NORMALIZE)}")
