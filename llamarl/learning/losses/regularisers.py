"""KL to the reference and entropy bonus, around any loss."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from llamarl.learning.losses.common import (
    NORMALIZE,
    Metrics,
    half_square,
    k3,
    log_ratio,
    masked,
    normalized,
    takes,
)

ESTIMATORS = ("k1", "k2", "k3")


def regularised(
    loss_fn: Callable[..., tuple[Tensor, Metrics]],
    *,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
) -> Callable[..., tuple[Tensor, Metrics]]:
    """loss + mean_t [ kl_coef KL_t(pi, ref) - entropy_coef H_t ]

    A loss with the arguments of `loss_fn` and one more, entropy [R] nats: the learner passes it,
    with gradient when `needs_entropy_gradient` says so. H = entropy, KL_t = `kl_to_reference`. The
    mean is the loss's own: by its option `normalize` (see `normalized`; of completions:
    DeepSeekMath eq. 3), over all trained tokens alike where it has none. metrics: those of the
    loss, and with a reference kl/ref (k3 whatever the estimator, always over all tokens).

    ValueError for coefficients below 0 or an unknown estimator, here; in a call, for kl_coef > 0
    without ref_logprobs, or entropy_coef > 0 without an entropy that has a gradient.
    """
    if not kl_coef >= 0 or not entropy_coef >= 0:
        raise ValueError(
            f"need kl_coef >= 0 and entropy_coef >= 0, got {kl_coef} and {entropy_coef}"
        )
    if kl_estimator not in ESTIMATORS:
        raise ValueError(f"kl_estimator={kl_estimator}: need {' or '.join(ESTIMATORS)}")
    inner_takes_entropy = takes(loss_fn, "entropy")
    normalize = _normalization(loss_fn)

    @functools.wraps(loss_fn)
    def with_regularisers(
        trainer_logprobs,
        generator_logprobs,
        ref_logprobs,
        advantages,
        loss_mask,
        *,
        num_loss_tokens,
        entropy=None,
        **given,
    ) -> tuple[Tensor, Metrics]:
        if inner_takes_entropy:
            given["entropy"] = entropy
        over = {
            "normalize": given.get("normalize", normalize),
            "num_loss_tokens": num_loss_tokens,
            "completions": given.get("completions"),
        }
        tensors = (trainer_logprobs, generator_logprobs, ref_logprobs, advantages, loss_mask)
        loss, metrics = loss_fn(*tensors, num_loss_tokens=num_loss_tokens, **given)
        if kl_coef > 0 and ref_logprobs is None:
            raise ValueError(
                f"kl_coef={kl_coef} needs ref_logprobs: switch the reference on, or set kl_coef to 0"
            )
        if ref_logprobs is not None:
            x = log_ratio(ref_logprobs, trainer_logprobs, loss_mask)
            metrics = {**metrics, "kl/ref": k3(x.detach()).sum()}
            if kl_coef > 0:
                kl = kl_to_reference(x, kl_estimator)
                loss = loss + kl_coef * normalized(kl, loss_mask, **over)
        if entropy_coef > 0:
            _check_entropy(entropy, trainer_logprobs)
            loss = loss - entropy_coef * normalized(masked(entropy, loss_mask), loss_mask, **over)
        return loss, metrics

    with_regularisers.__signature__ = _with_entropy(inspect.signature(loss_fn))
    with_regularisers.entropy_gradient = entropy_coef > 0 or inner_takes_entropy
    if kl_coef > 0 or entropy_coef > 0:
        with_regularisers.uses_all_completions = True
    return with_regularisers


def kl_to_reference(x: Tensor, estimator: str) -> Tensor:
    """Estimates of KL(pi || ref) from one sample of pi, with x = log(ref/pi) [R]        (Schulman, "Approximating KL divergence")

    estimator  value              gradient in log pi
    k1         -x                 -x: k2's, straight through. Its own is 1, whose mean over samples is 0: no pull at all
    k2         x^2 / 2            -x: the gradient of KL(pi || ref) on-policy
    k3         exp(x) - 1 - x     1 - exp(x): GRPO's; of KL(pi || ref) to first order in x
    No importance weight is applied: off-policy all three are estimates under the generator's
    policy.
    """
    if estimator == "k3":
        return k3(x)
    k2 = half_square(x)
    return k2 if estimator == "k2" else k2 - k2.detach() - x.detach()


def _normalization(loss_fn: Callable) -> str:
    """The loss's own option `normalize`; "tokens" where it has none, or means another thing by it."""
    option = inspect.signature(loss_fn).parameters.get("normalize")
    known = option is not None and option.default in NORMALIZE and takes(loss_fn, "completions")
    return option.default if known else "tokens"


def _check_entropy(entropy: Tensor | None, trainer_logprobs: Tensor) -> None:
    learning = torch.is_grad_enabled() and trainer_logprobs.requires_grad
    if entropy is None or (learning and not entropy.requires_grad):
        raise ValueError(
            "entropy_coef > 0 needs an entropy with gradient: make_head(..., entropy_grad=True)"
        )


def _with_entropy(signature: inspect.Signature) -> inspect.Signature:
    """The signature with a keyword-only `entropy`, before any **options."""
    if "entropy" in signature.parameters:
        return signature
    parameters = list(signature.parameters.values())
    at = len(parameters) - (
        bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    )
    parameters.insert(
        at, inspect.Parameter("entropy", inspect.Parameter.KEYWORD_ONLY, default=None)
    )
    return signature.replace(parameters=parameters)
