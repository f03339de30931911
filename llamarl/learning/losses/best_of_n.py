"""Best-of-N: supervised fine-tuning on the best completion of a group."""

from __future__ import annotations

import torch
from torch import Tensor

from llamarl.learning.advantages import best_and_worst
from llamarl.learning.losses.common import (
    Completions,
    Metrics,
    masked,
    per_group,
    uses_all_completions,
    whole_groups,
)
from llamarl.learning.losses.ratios import token_metrics


@whole_groups
@uses_all_completions
def best_of_n(
    trainer_logprobs: Tensor,
    generator_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    num_loss_tokens: float,
    completions: Completions,
    length_normalize: bool = False,
) -> tuple[Tensor, Metrics]:
    """-(1/M) sum_groups log pi(y+)        (Async RLHF, 3.3, "Best-of-2 SFT")

    pi = trainer_logprobs, nats, summed over a completion, or its mean with length_normalize; y+ =
    the completion of a group with the highest reward, of equals the first (`best_and_worst`); M =
    num_groups. A group whose rewards are all equal has no best and adds nothing. `advantages` is
    not used.

    metrics: best_of_n/tied/completions (in a group without a best); ratio/sum, ratio/max,
    kl/generator of tokens.
    """
    c = completions
    lengths = c.lengths(loss_mask)
    best, _, differ = best_and_worst(c.rewards, c.groups, lengths > 0)
    logprob = c.sums(masked(trainer_logprobs, loss_mask))
    if length_normalize:
        logprob = logprob / lengths.clamp(min=1)
    loss = -per_group(torch.where(differ, logprob[best], 0).sum(), c)
    tied = torch.where(lengths > 0, ~differ[c.groups], 0).sum().to(logprob.dtype)
    return loss, {"best_of_n/tied/completions": tied} | token_metrics(
        trainer_logprobs, generator_logprobs, loss_mask
    )
