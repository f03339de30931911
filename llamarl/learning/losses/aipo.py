"""AIPO: the policy gradient with a one-sided, truncated importance weight (LlamaRL)."""

from __future__ import annotations

import torch
from torch import Tensor

from llamarl.learning.losses.common import Metrics, k3, log_ratio, masked, maximum, per_token, ratio


def aipo(
    trainer_logprobs: Tensor,
    generator_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    num_loss_tokens: float,
    ratio_cap: float = 4.0,
    kl_coef: float = 0.0,
) -> tuple[Tensor, Metrics]:
    """-sum_t [ sg(min(pi/mu, rho)) A_t log pi - beta k3(pi, ref) ] / num_loss_tokens        (LlamaRL, AIPO; k3 as in GRPO)

    pi = trainer_logprobs, mu = generator_logprobs, rho = ratio_cap, beta = kl_coef, A = advantages; tensors [T], nats.
    sg: no gradient goes through the weight. LlamaRL has beta = 0 and rho in [2, 10]. Without tokens the loss is 0 and still
    has its (zero) gradient. ValueError for rho <= 0, beta < 0, or beta > 0 without ref_logprobs.

    metrics: ratio/sum, ratio/max (before the cap), ratio/capped (tokens above it), kl/generator (k3 estimate of
    KL(mu || pi): how far off-policy the batch is), kl/ref (k3 estimate of KL(pi || ref)) with a reference.
    """
    if not ratio_cap > 0 or not kl_coef >= 0:
        raise ValueError(f"need ratio_cap > 0 and kl_coef >= 0, got {ratio_cap} and {kl_coef}")
    if kl_coef > 0 and ref_logprobs is None:
        raise ValueError(f"kl_coef={kl_coef} needs ref_logprobs: switch the reference on, or set kl_coef to 0")

    off_policy = log_ratio(trainer_logprobs.detach(), generator_logprobs, loss_mask)
    weight = masked(ratio(off_policy), loss_mask)
    objective = weight.clamp(max=ratio_cap) * masked(advantages, loss_mask) * masked(trainer_logprobs, loss_mask)
    loss = -per_token(objective.sum(), num_loss_tokens)
    metrics = {
        "ratio/sum": weight.sum(),
        "ratio/max": maximum(weight),
        "ratio/capped": (weight > ratio_cap).sum().to(weight.dtype),
        "kl/generator": k3(off_policy).sum(),
    }
    if ref_logprobs is not None:
        with torch.set_grad_enabled(kl_coef > 0 and torch.is_grad_enabled()):
            kl_ref = k3(log_ratio(ref_logprobs, trainer_logprobs, loss_mask)).sum()
        loss = loss + kl_coef * per_token(kl_ref, num_loss_tokens) if kl_coef > 0 else loss
        metrics["kl/ref"] = kl_ref.detach()
    return loss, metrics
