"""Best-of-N: supervised fine-tuning on the best completion of a group."""

from __future__ import annotations

import torch

from llamarl.learning.advantages import best_and_worst
from llamarl.learning.losses.common import (
    LossAndMetrics,
    masked,
    sums_completions,
    uses_all_completions,
    whole_groups,
)
from llamarl.learning.losses.inputs import LossInputs
from llamarl.learning.losses.ratios import token_metrics


@sums_completions
@whole_groups
@uses_all_completions
def best_of_n(inputs: LossInputs, *, length_normalize: bool = False) -> LossAndMetrics:
    """-(1/M) sum_groups log pi(y+)        (Async RLHF, 3.3, "Best-of-2 SFT")

    pi = trainer_logprobs, nats, summed over a completion, or its mean with length_normalize; y+ =
    the completion of a group with the highest reward, of equals the first (`best_and_worst`); M =
    num_groups. A group whose rewards are all equal has no best and adds nothing. `advantages` is
    not used.

    metrics: best_of_n/tied/completions (in a group without a best); ratio/sum, ratio/max,
    kl/generator of tokens.
    """
    completions = inputs.completions
    lengths = completions.lengths(inputs.loss_mask)
    trained = lengths > 0
    best, _, differ = best_and_worst(completions.rewards, completions.groups, trained)
    logprob = completions.sums(masked(inputs.trainer_logprobs, inputs.loss_mask))
    if length_normalize:
        logprob = logprob / lengths.clamp(min=1)
    of_best = torch.where(differ, logprob[best], 0)
    tied = torch.where(trained, ~differ[completions.groups], 0)
    metrics = {"best_of_n/tied/completions": tied.sum().float()}
    loss = -of_best.sum() / max(completions.num_groups, 1)
    return loss, metrics | token_metrics(inputs)
