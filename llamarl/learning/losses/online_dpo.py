"""Online DPO: the best against the worst completion of a group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.learning.advantages import best_and_worst
from llamarl.learning.losses.common import (
    Completions,
    Metrics,
    log_ratio,
    per_group,
    uses_all_completions,
    whole_groups,
)
from llamarl.learning.losses.ratios import token_metrics


@whole_groups
@uses_all_completions
def online_dpo(
    trainer_logprobs: Tensor,
    generator_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    num_loss_tokens: float,
    completions: Completions,
    beta: float = 0.1,
) -> tuple[Tensor, Metrics]:
    """-(1/M) sum_groups log sigma( beta [ log(pi/ref)(y+) - log(pi/ref)(y-) ] )        (Async RLHF, 2.1 and 4.2; DPO, eq. 7)

    pi = trainer_logprobs, ref = ref_logprobs, nats, summed over a completion; y+, y- = the
    completions of a group with the highest and the lowest reward, of equals the first
    (`best_and_worst`); M = num_groups. A group whose rewards are all equal prefers nothing and adds
    nothing. beta: 0.1 in Async RLHF A.1, 0.03 in table 7, 0.05 in table 10. `advantages` is not
    used. ValueError without ref_logprobs, or for beta <= 0.

    metrics: dpo/accuracy/completions (pi already prefers y+ more than ref does),
    dpo/margin/completions (what sigma is given), dpo/tied/completions (no preference): a group's
    value counted once for each of its completions; ratio/sum, ratio/max, kl/generator of tokens.
    """
    if ref_logprobs is None:
        raise ValueError(
            "online_dpo needs ref_logprobs: switch the reference on (reference=frozen)"
        )
    if not beta > 0:
        raise ValueError(f"beta={beta}: need more than 0")
    c = completions
    trained = c.lengths(loss_mask) > 0
    best, worst, differ = best_and_worst(c.rewards, c.groups, trained)
    implicit = beta * c.sums(
        log_ratio(trainer_logprobs, ref_logprobs, loss_mask)
    )  # DPO's reward, [N]
    margin = torch.where(
        differ, implicit[best] - implicit[worst], 0
    )  # one a group, in the first places of [N]
    loss = -per_group(torch.where(differ, F.logsigmoid(margin), 0).sum(), c)
    each = {"accuracy": margin > 0, "margin": margin.detach(), "tied": ~differ}
    metrics = {
        f"dpo/{k}/completions": torch.where(trained, v[c.groups], 0).sum().to(margin.dtype)
        for k, v in each.items()
    }
    return loss, metrics | token_metrics(trainer_logprobs, generator_logprobs, loss_mask)
