"""Losses of the best completion of a group: supervised fine-tuning on it (best_of_n), or its
preference over the worst (online_dpo).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.learning.losses.common import (
    LossAndMetrics,
    log_ratio,
    masked,
    needs_reference,
    reference_of,
    sums_completions,
    token_metrics,
    uses_all_completions,
    whole_groups,
)
from llamarl.learning.losses.inputs import LossInputs


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


@sums_completions
@whole_groups
@uses_all_completions
@needs_reference
def online_dpo(inputs: LossInputs, *, beta: float = 0.1) -> LossAndMetrics:
    """-(1/M) sum_groups log sigma( beta [ log(pi/ref)(y+) - log(pi/ref)(y-) ] )        (DPO, eq. 7)

    Online: Async RLHF, 2.1 and 4.2. pi = trainer_logprobs, ref = ref_logprobs, nats, summed over a
    completion; y+, y- = the completions of a group with the highest and the lowest reward, of
    equals the first (`best_and_worst`); M = num_groups. A group whose rewards are all equal prefers
    nothing and adds nothing. beta: 0.1 in Async RLHF A.1, 0.03 in table 7, 0.05 in table 10.
    `advantages` is not used. ValueError without ref_logprobs, or for beta <= 0.

    metrics: dpo/accuracy/completions (pi already prefers y+ more than ref does),
    dpo/margin/completions (what sigma is given), dpo/tied/completions (no preference): a group's
    value counted once for each of its completions; ratio/sum, ratio/max, kl/generator of tokens.
    """
    ref_logprobs = reference_of(inputs, "online_dpo")
    if not beta > 0:
        raise ValueError(f"beta={beta}: need more than 0")
    completions = inputs.completions
    trained = completions.lengths(inputs.loss_mask) > 0
    best, worst, differ = best_and_worst(completions.rewards, completions.groups, trained)
    implicit_reward = beta * completions.sums(log_ratio(inputs, ref_logprobs))  # [N]
    # [N], one a group, in the first places.
    margin = torch.where(differ, implicit_reward[best] - implicit_reward[worst], 0)
    likelihood = torch.where(differ, F.logsigmoid(margin), 0)

    def over_completions(of_group: Tensor) -> Tensor:
        of_completion = torch.where(trained, of_group[completions.groups], 0)
        return of_completion.sum().to(margin.dtype)

    metrics = {
        "dpo/accuracy/completions": over_completions(margin > 0),
        "dpo/margin/completions": over_completions(margin.detach()),
        "dpo/tied/completions": over_completions(~differ),
    }
    loss = -likelihood.sum() / max(completions.num_groups, 1)
    return loss, metrics | token_metrics(inputs)


def best_and_worst(
    rewards: Tensor, groups: Tensor, trained: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(best, worst, differ): for group g, at place g of [N], the completions of highest and lowest
    reward        (Async RLHF, 4.2)

    rewards [N], groups [N] int64 below N, trained [N] bool: those that may be chosen. Of equal
    rewards the first completion is taken. differ [N] bool: the two have different rewards; best and
    worst mean something only there (elsewhere they are valid places all the same, so that they can
    index).
    """
    best, highest = _first_of_the_highest(rewards, groups, trained)
    worst, lowest_below_0 = _first_of_the_highest(-rewards, groups, trained)
    return best, worst, highest > -lowest_below_0


def _first_of_the_highest(rewards: Tensor, groups: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return (first, highest) [N] each: for group g, at place g, its first valid completion of the
    highest reward, and that reward. A group without a valid completion has some place, and -inf.
    """
    size = rewards.numel()
    nothing = torch.full_like(rewards, -torch.inf)
    known = torch.where(valid, rewards, nothing)
    highest = nothing.scatter_reduce(0, groups, known, "amax")
    place = torch.arange(size, device=rewards.device)
    is_highest = valid & (known == highest[groups])
    candidates = torch.where(is_highest, place, size)
    none = torch.full_like(place, size)
    first = none.scatter_reduce(0, groups, candidates, "amin")
    return first.clamp(max=size - 1), highest
