"""Tensor parallelism: the collectives that make the ranks of a group compute one decoder, each with
its share of every layer.

    block input    copied(x)           identity forward, sum over the ranks backward
    block output   summed(x)           sum over the ranks forward, identity backward
    head           gathered(logits)    concatenation forward, the rank's own part backward

Who holds what is in llamarl.models.sharding. The collectives are written out, not left to DTensor:
decoding is many small operations, whose dispatch would cost more than they do, and heads may be
split unevenly. Every rank of the group must make the same calls in the same order; the residual
stream and the logits then have the same bits on all of them.

Shapes: T tokens, D model, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from llamarl.executor import ExecutorGroup
from llamarl.models.config import ModelConfig
from llamarl.models.sharding import heads_of, span


@dataclass(frozen=True)
class TensorParallel:
    """This process's place among the ranks that share a decoder. split_vocabulary=False: each holds
    embedding and head whole.
    """

    rank: int
    size: int
    group: dist.ProcessGroup
    split_vocabulary: bool = True

    @classmethod
    def of(cls, group: ExecutorGroup, *, split_vocabulary: bool = True) -> TensorParallel | None:
        """Return this process's place in an executor's group; None if its ranks share no layers."""
        if group.tensor_parallel == 1:
            return None
        peers = group.tensor_group
        assert peers is not None, "ranks that share layers have a group"
        return cls(group.tensor_index, group.tensor_parallel, peers, split_vocabulary)


def place_of(tp: TensorParallel | None) -> tuple[int, int]:
    """Return (rank, size) of a place; (0, 1) if layers are not shared."""
    return (tp.rank, tp.size) if tp else (0, 1)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Collective: return the sum of the ranks' x, in a tensor of its own."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def copied(x: Tensor, tp: TensorParallel | None) -> Tensor:
    """Return x, which every rank holds. Collective over the ranks in backward, which sums the
    gradients that they give it.
    """
    if tp is None:
        return x
    view = x.view_as(x)
    if view.requires_grad:
        view.register_hook(lambda grad: _sum(grad, tp.group))
    return view


def summed(x: Tensor, tp: TensorParallel | None) -> Tensor:
    """Collective over the ranks: return the sum of their x, with the same bits on each. Without
    gradients x itself is overwritten.
    """
    if tp is None:
        return x
    if torch.is_grad_enabled():
        return _Summed.apply(x, tp.group)
    x = x.contiguous()
    dist.all_reduce(x, group=tp.group)
    return x


def gathered(x: Tensor, total: int, tp: TensorParallel) -> Tensor:
    """Collective over the ranks: return [..., total], joined from each rank's span of the last dim,
    with the same bits on each.
    """
    counts = [span(total, rank, tp.size)[1] for rank in range(tp.size)]
    if x.shape[-1] != counts[tp.rank]:
        raise ValueError(
            f"a head that returned {tuple(x.shape)} instead of logits [..., {counts[tp.rank]}] "
            "under a split vocabulary; build the decoder with split_vocabulary=False "
            "for one that needs the whole weight"
        )
    # Padded to the widest part: backends gather equal shapes.
    missing = max(counts) - counts[tp.rank]
    padded = F.pad(x.detach(), (0, missing)).contiguous()
    every = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(every, padded, group=tp.group)
    parts = []
    for part, count in zip(every, counts):
        parts.append(part[..., :count])
    parts[tp.rank] = x  # whose gradient is its own part of the whole's
    return torch.cat(parts, dim=-1)


class KeyValueSharing:
    """The K/V heads of a rank that other ranks hold too, because query heads of several ranks read
    them.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel):
        every = [heads_of(config, rank, tp.size) for rank in range(tp.size)]
        self.tp = tp
        self._first = every[tp.rank].first_kv * config.head_dim
        self._total = config.num_key_value_heads * config.head_dim
        # Every rank comes to the same result here.
        num_held = sum(heads.num_kv for heads in every)
        self.any = num_held > config.num_key_value_heads

    def __call__(self, projection: nn.Linear, x_TD: Tensor) -> Tensor:
        """Return projection(x). Collective over all ranks in backward, which sums the weights'
        gradients over the ranks that hold the same rows.
        """
        if not self.any or not torch.is_grad_enabled():
            return projection(x_TD)
        if hasattr(projection, "lora_b"):  # which alone is trained
            return projection(x_TD, self._shared)
        weight = self._shared(projection.weight)
        bias = None
        if projection.bias is not None:
            bias = self._shared(projection.bias)
        return F.linear(x_TD, weight, bias)

    def _shared(self, parameter: Tensor) -> Tensor:
        """Return the parameter so that its gradients are summed over the ranks that hold the same
        rows.
        """

        def sum_of_rows(grad: Tensor) -> Tensor:
            every = grad.new_zeros(self._total, *grad.shape[1:])
            own = slice(self._first, self._first + len(grad))
            every[own] = grad
            return _sum(every, self.tp.group)[own].clone()

        view = parameter.view_as(parameter)
        if view.requires_grad:
            view.register_hook(sum_of_rows)
        return view


class SplitEmbedding(nn.Embedding):
    """Embeds with this rank's span of the vocabulary. Tokens of other spans give zeros here; the
    sum over the ranks has all tokens.
    """

    def __init__(self, vocab_size: int, dim: int, tp: TensorParallel):
        self.first, count = span(vocab_size, tp.rank, tp.size)
        super().__init__(count, dim)
        self.tp = tp

    def forward(self, tokens_T: Tensor) -> Tensor:
        local_T = tokens_T - self.first
        own_T = (local_T >= 0) & (local_T < self.num_embeddings)
        embedded_TD = super().forward(local_T.where(own_T, 0))
        return summed(embedded_TD * own_T[..., None], self.tp)
