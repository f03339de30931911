"""The input of a loss: one microbatch of trained tokens, and how much there is in the whole batch.

    loss of a batch = sum over its microbatches of  (1/num_loss_tokens) sum_t f(trainer_logprobs_t)

A denominator counts the whole batch, over all ranks, so that the shares of all microbatches and
ranks add up to the loss of the batch. A mean over what one rank holds would up-weight short ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llamarl.learning.segments import sum_by


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """Index of a microbatch: the completion of each label, and the group of each completion.

    Two groups, of two completions and of one, with 3, 1 and 2 labels:

        index 0 0 0 1 2 2        groups 0 0 1        group_tokens 4 4 2
    """

    index: Tensor  # [T] int64: which of the N completions a label belongs to, ascending
    groups: Tensor  # [N] int64: which of the microbatch's groups a completion belongs to, from 0
    rewards: Tensor  # [N] float32, shaped; finite
    # [N] float32: the trained tokens of its whole group, in whichever microbatches they are
    group_tokens: Tensor

    # Counts of the whole batch, over all ranks:
    num_completions: float  # completions with a trained token
    num_groups: float  # groups with at least two trained completions
    num_trained_groups: float  # groups with at least one

    # Where each rank has an equal share of the same groups: the elementwise sum over the ranks,
    # collective and without gradient; group_tokens, num_groups and num_trained_groups are then of
    # shares. None: every group is here whole.
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None

    def lengths(self, loss_mask: Tensor) -> Tensor:
        """Return [N] float32: how many trained labels each completion has."""
        return self.sums(loss_mask.float())

    def sums(self, values: Tensor) -> Tensor:
        """Return [N]: the sum of each completion's values [T]."""
        return sum_by(values, self.index, self.groups.numel())

    def group_mean(self, values: Tensor, valid: Tensor) -> Tensor:
        """Return [N]: for each completion the mean of its group's valid values [N], 0 without any.
        Values that are not valid may be anything. The mean is of the whole group also where ranks
        share it: ValueError then for values with a gradient.
        """
        size = self.groups.numel()
        sums = sum_by(torch.where(valid, values, 0), self.groups, size)
        counts = sum_by(valid.to(values.dtype), self.groups, size)
        if self.sum_over_ranks is not None:
            sums, counts = self.sum_over_ranks(torch.stack([sums, counts]))
        return (sums / counts.clamp(min=1))[self.groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One microbatch: T labels (completion tokens, packed end to end) of N completions.

    `logprobs` are of the sampled token, in nats, after the temperature.
    """

    trainer_logprobs: Tensor  # [T], with gradient: log pi, the policy that is trained
    generator_logprobs: Tensor  # [T]: log mu, the policies that sampled each token
    ref_logprobs: Tensor | None  # [T]: log ref; None where no reference runs
    entropy: Tensor  # [T] nats, of pi; with gradient for a loss that declares `uses_entropy`
    # [T]: the same for all labels of a completion, or with gae one a token, with turns one a turn
    advantages: Tensor
    loss_mask: Tensor  # [T] bool: a label where it is False adds nothing, whatever it holds
    completions: Completions
    num_loss_tokens: float  # trained tokens of the whole batch, over all ranks
