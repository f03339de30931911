"""What losses share: ratio, KL, mask and denominator, and how their metrics add up.

A loss is a pure function

    loss(trainer_logprobs, generator_logprobs, ref_logprobs, advantages, loss_mask, *, num_loss_tokens, **options)
        -> (loss, metrics)

All tensors are [T], nats; ref_logprobs is None without a reference. The loss is this microbatch's share: shares of all
microbatches and ranks add up to the loss of the whole batch, because `num_loss_tokens` counts the whole batch (a per-rank
mean would up-weight short ranks). A masked token adds nothing and gets a gradient of exactly zero, whatever its values are.

metrics: 0-dim float tensors without gradient, on the device. A name that ends in "/max" is a maximum; all others are sums
over trained tokens, so that microbatches and ranks add up (the trainer divides by the number of tokens).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Metrics = dict[str, Tensor]

# exp() stops growing at e^20 = 4.9e8. Such a ratio is a broken run either way; the sums stay finite and say so.
MAX_LOG_RATIO = 20.0


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """values where mask, else 0; float32 at least. Not a product: 0 * inf is NaN, in the gradient too."""
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
    beyond = torch.relu(log_ratio - MAX_LOG_RATIO)  # its slope at 0 is 0, where the clamp's is still 1
    return x.expm1() - x + math.expm1(MAX_LOG_RATIO) * beyond


def per_token(total: Tensor, num_loss_tokens: float) -> Tensor:
    """total / num_loss_tokens, the trained tokens of the whole batch over all ranks; a batch without any has loss 0."""
    if num_loss_tokens < 0:
        raise ValueError(f"num_loss_tokens={num_loss_tokens}: count the trained tokens of the whole batch")
    return total / max(num_loss_tokens, 1)


def maximum(values: Tensor) -> Tensor:
    """The largest, or 0 of none."""
    return values.amax() if values.numel() else values.new_zeros(())
