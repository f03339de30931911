"""What losses share: mask, denominators, completions, ratio and KL of a token; what a loss declares
of itself.

A loss is a pure function

    loss(trainer_logprobs, generator_logprobs, ref_logprobs, advantages, loss_mask, *,
    num_loss_tokens, **options)
        -> (loss, metrics)

All tensors are [R], nats, one element a label: the completion tokens of one microbatch, packed end
to end; ref_logprobs is None without a reference. The loss is this microbatch's share: shares of all
microbatches and ranks add up to the loss of the whole batch, because `num_loss_tokens` counts the
whole batch (a per-rank mean would up-weight short ranks). A masked token adds nothing and gets a
gradient of exactly zero, whatever its values are.

What a loss is given besides, if it declares a keyword-only parameter of that name (not an option,
never set in a config): completions, a `Completions`; entropy [R], nats, with gradient.

metrics: 0-dim float tensors without gradient, on the device. A name that ends in "/max" is a
maximum. One that ends in "/completions" is a sum over completions: the trainer divides it by their
number and drops the ending. All others are sums over trained tokens, which the trainer divides by
the number of tokens.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from llamarl.learning.segments import mean_by, sum_by

Metrics = dict[str, Tensor]
Fn = TypeVar("Fn", bound=Callable)

# exp() stops growing at e^20 = 4.9e8. Such a ratio is a broken run either way; the sums stay finite
# and say so.
MAX_LOG_RATIO = 20.0
# A square goes on along its tangent past this, for the same reason.
MAX_SQUARED = 1e8

# What is handed to a loss that declares it; everything else keyword-only is an option.
GIVEN = ("num_loss_tokens", "completions", "entropy")

# What a mean over the batch weighs alike; see `normalized`.
NORMALIZE = ("tokens", "completions", "groups")


@dataclass(frozen=True, slots=True)
class Completions:
    """Which label is whose in a microbatch of R labels, N completions, and how many there are in
    the whole batch.
    """

    index: Tensor  # [R] int64: which of the N completions a label belongs to, ascending
    groups: Tensor  # [N] int64: which of the microbatch's groups a completion belongs to, from 0
    rewards: Tensor  # [N] float32, shaped; finite
    group_tokens: (
        Tensor  # [N] float32: trained tokens of its whole group, in whichever microbatches
    )
    num_completions: float  # trained completions of the whole batch, over all ranks
    num_groups: (
        float  # groups of the whole batch with at least two trained completions, over all ranks
    )
    num_trained_groups: float  # those with at least one

    def to(self, device: torch.device | str) -> Completions:
        """The same with every tensor on `device`."""
        names = ("index", "groups", "rewards", "group_tokens")
        tensors = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return replace(self, **tensors)

    def lengths(self, loss_mask: Tensor) -> Tensor:
        """[N] float32: trained labels of each completion."""
        return sum_by(loss_mask.float(), self.index, self.groups.numel())

    def sums(self, values: Tensor) -> Tensor:
        """[N]: the sum of a completion's values [R]."""
        return sum_by(values, self.index, self.groups.numel())

    def group_mean(self, values: Tensor, valid: Tensor) -> Tensor:
        """[N]: for each completion the mean of the valid [N] of its group's values [N], 0 of none."""
        return mean_by(values, self.groups, self.groups.numel(), valid)[self.groups]


# --- What a loss declares of itself ---


def whole_groups(fn: Fn) -> Fn:
    """Decorator: the loss couples the completions of a group, so all of them must be in one
    microbatch.
    """
    fn.whole_groups = True
    return fn


def uses_all_completions(fn: Fn) -> Fn:
    """Decorator: the loss has a gradient where the advantage is 0, so such completions must not be
    left out.
    """
    fn.uses_all_completions = True
    return fn


def needs_whole_groups(fn: Callable) -> bool:
    return _declares(fn, "whole_groups")


def needs_all_completions(fn: Callable, options: Mapping[str, object] = {}) -> bool:
    """Whether completions of advantage 0 add to the loss, by itself or by a KL or entropy term
    among the options.
    """
    return _declares(fn, "uses_all_completions") or any(
        bool(options.get(name)) for name in ("kl_coef", "entropy_coef")
    )


def takes(fn: Callable, name: str) -> bool:
    """Whether a loss declares the parameter `name`, such as "completions"."""
    return name in inspect.signature(fn).parameters


def needs_entropy_gradient(fn: Callable) -> bool:
    """Whether the entropy that the loss is given must carry a gradient."""
    return getattr(fn, "entropy_gradient", takes(fn, "entropy"))


def _declares(fn: Callable, mark: str) -> bool:
    """Looks through functools.partial and functools.wraps."""
    while fn is not None:
        if getattr(fn, mark, False):
            return True
        fn = getattr(fn, "func", None) or getattr(fn, "__wrapped__", None)
    return False


# --- Tokens ---


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """values where mask, else 0; float32 at least. Not a product: 0 * inf is NaN, in the gradient
    too.
    """
    return torch.where(mask, values, 0).to(torch.promote_types(values.dtype, torch.float32))


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log(pi / mu) where mask, else 0. Subtracted in float32 at least."""
    return masked(logprobs, mask) - masked(old_logprobs, mask)


def ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), at most e^20."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - 1 - x >= 0 with x = log(q/p): KL(p || q) in the mean over samples of p        (Schulman, "k3")

    Past x = 20 it goes on along the tangent, so that it neither overflows nor loses its pull.
    """
    x = log_ratio.clamp(max=MAX_LOG_RATIO)
    beyond = torch.relu(
        log_ratio - MAX_LOG_RATIO
    )  # its slope at 0 is 0, where the clamp's is still 1
    return x.expm1() - x + math.expm1(MAX_LOG_RATIO) * beyond


def half_square(x: Tensor) -> Tensor:
    """x^2 / 2; past 1e8 along the tangent, so that it neither overflows nor loses its pull."""
    inside = x.clamp(-MAX_SQUARED, MAX_SQUARED)
    beyond = torch.relu(x.abs() - MAX_SQUARED)
    return inside.square() / 2 + MAX_SQUARED * beyond


def maximum(values: Tensor) -> Tensor:
    """The largest, or 0 of none."""
    return values.amax() if values.numel() else values.new_zeros(())


# --- Denominators ---


def per_token(total: Tensor, num_loss_tokens: float) -> Tensor:
    """total / num_loss_tokens, the trained tokens of the whole batch over all ranks; a batch
    without any has loss 0.
    """
    if num_loss_tokens < 0:
        raise ValueError(
            f"num_loss_tokens={num_loss_tokens}: count the trained tokens of the whole batch"
        )
    return total / max(num_loss_tokens, 1)


def per_completion(total: Tensor, completions: Completions) -> Tensor:
    """total / the trained completions of the whole batch over all ranks."""
    return total / max(completions.num_completions, 1)


def per_group(total: Tensor, completions: Completions) -> Tensor:
    """total / the groups of the whole batch with at least two trained completions, over all ranks."""
    return total / max(completions.num_groups, 1)


def per_trained_group(total: Tensor, completions: Completions) -> Tensor:
    """total / the groups of the whole batch with a trained completion, over all ranks."""
    return total / max(completions.num_trained_groups, 1)


def normalized(
    objective: Tensor,
    loss_mask: Tensor,
    *,
    normalize: str,
    num_loss_tokens: float,
    completions: Completions | None,
) -> Tensor:
    """The microbatch's share of the batch's mean of an objective [R] that is 0 where masked.

    normalize="tokens":       sum_t o_t / num_loss_tokens: every token weighs the same        (TRL "dapo"; PRIME-RL)
    normalize="completions":  sum_j (1/|y_j|) sum_t o_jt / num_completions: every completion does        (GRPO; TRL "grpo")
    normalize="groups":       sum_g (1/sum_j |y_gj|) sum_j sum_t o_gjt / num_trained_groups: every group does    (Magistral 2.1)
    ValueError for another name, or for completions or groups without completions.
    """
    if normalize == "tokens":
        return per_token(objective.sum(), num_loss_tokens)
    if normalize not in NORMALIZE:
        raise ValueError(f"normalize={normalize}: need {' or '.join(NORMALIZE)}")
    if completions is None:
        raise ValueError(f"normalize={normalize} needs the completions of the labels")
    if normalize == "groups":
        tokens = completions.group_tokens.clamp(min=1)
        return per_trained_group((objective / tokens[completions.index]).sum(), completions)
    lengths = completions.lengths(loss_mask).clamp(min=1)
    return per_completion((objective / lengths[completions.index]).sum(), completions)
