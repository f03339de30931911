"""KL to the reference and entropy bonus, around any loss."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping

import torch
from torch import Tensor

from llamarl.learning.losses.common import (
    NORMALIZE,
    SUMS,
    Loss,
    LossAndMetrics,
    half_square,
    has_mark,
    k3,
    log_ratio,
    masked,
    normalized,
    uses_all_completions,
    uses_entropy,
)
from llamarl.learning.losses.inputs import LossInputs
from llamarl.words.choices import ESTIMATORS


def regularised(
    loss_fn: Loss, *, kl_coef: float = 0.0, kl_estimator: str = "k3", entropy_coef: float = 0.0
) -> Loss:
    """loss + mean_t [ kl_coef KL_t(pi, ref) - entropy_coef H_t ]

    H = inputs.entropy, KL_t = `kl_to_reference`. The mean is of the loss's own kind:

    - by its option `normalize` where it has one (see `normalized`; of completions: DeepSeekMath
      eq. 3);
    - a sum over each completion's tokens and a mean over completions around a loss that is so
      itself (`sums_completions`): kl_coef is then the beta of RLOO's and PPO's papers; a mean over
      its tokens with `length_normalize`;
    - over all trained tokens alike otherwise.

    The sum's mean is KL(pi || ref) of whole completions in value. Its gradient is not, because each
    token's term leaves out what the token does to those after it; a KL in the reward has that one.

    metrics: those of the loss, and with a reference kl/ref (k3 whatever the estimator, always over
    all tokens).

    ValueError for coefficients below 0 or an unknown estimator, here; in a call, for kl_coef > 0
    without ref_logprobs, or entropy_coef > 0 without an entropy that has a gradient.
    """
    if not kl_coef >= 0 or not entropy_coef >= 0:
        raise ValueError(
            f"need kl_coef >= 0 and entropy_coef >= 0, got {kl_coef} and {entropy_coef}"
        )
    if kl_estimator not in ESTIMATORS:
        raise ValueError(f"kl_estimator={kl_estimator}: need {' or '.join(ESTIMATORS)}")
    defaults = {}
    for name, parameter in inspect.signature(loss_fn).parameters.items():
        defaults[name] = parameter.default
    sums = has_mark(loss_fn, "sums_completions")

    def normalize_of(options: Mapping[str, object]) -> str:
        chosen = {**defaults, **options}
        if sums:
            return "completions" if chosen.get("length_normalize") is True else SUMS
        # A loss may mean another thing by this name.
        own = chosen.get("normalize")
        if "normalize" in options or own in NORMALIZE:
            return str(own)
        return "tokens"

    @functools.wraps(loss_fn)
    def with_regularisers(inputs: LossInputs, **options: object) -> LossAndMetrics:
        loss, metrics = loss_fn(inputs, **options)
        normalize = normalize_of(options)
        if kl_coef > 0 and inputs.ref_logprobs is None:
            raise ValueError(
                f"kl_coef={kl_coef} needs ref_logprobs: "
                "switch the reference on, or set kl_coef to 0"
            )
        if inputs.ref_logprobs is not None:
            x = -log_ratio(inputs, inputs.ref_logprobs)
            metrics = {**metrics, "kl/ref": k3(x.detach()).sum()}
            if kl_coef > 0:
                kl = kl_to_reference(x, kl_estimator)
                loss = loss + kl_coef * normalized(kl, inputs, normalize)
        if entropy_coef > 0:
            learning = torch.is_grad_enabled() and inputs.trainer_logprobs.requires_grad
            if learning and not inputs.entropy.requires_grad:
                raise ValueError(
                    "entropy_coef > 0 needs an entropy with gradient: "
                    "make_head(..., entropy_grad=True)"
                )
            entropy = masked(inputs.entropy, inputs.loss_mask)
            loss = loss - entropy_coef * normalized(entropy, inputs, normalize)
        return loss, metrics

    if entropy_coef > 0:
        uses_entropy(with_regularisers)
    if kl_coef > 0 or entropy_coef > 0:
        uses_all_completions(with_regularisers)
    return with_regularisers


def kl_to_reference(x: Tensor, estimator: str) -> Tensor:
    """Estimate KL(pi || ref) [T] from one sample of pi, with x = log(ref/pi) [T]

    (Schulman, "Approximating KL divergence".)

    estimator  value              gradient in log pi
    k1         -x                 -x: k2's, straight through. Its own is 1, whose mean over samples
                                  is 0: no pull at all
    k2         x^2 / 2            -x: the gradient of KL(pi || ref) on-policy
    k3         exp(x) - 1 - x     1 - exp(x): GRPO's; of KL(pi || ref) to first order in x

    No importance weight is applied: off-policy all three are estimates under the generator's
    policy.
    """
    if estimator == "k3":
        return k3(x)
    k2 = half_square(x)
    if estimator == "k2":
        return k2
    return k2 - k2.detach() - x.detach()
