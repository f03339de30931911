"""A model that scores, over the ranks of an executor: sharded, split, or a copy on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llamarl.executor import ExecutorGroup
from llamarl.learning.asking import Asked, join_shares, own_share
from llamarl.models.fsdp import reshard
from llamarl.models.scorer import load_scorer
from llamarl.models.tp import TensorParallel
from llamarl.scoring.packed import filler, pack_scored, score
from llamarl.scoring.transcript import Transcript


@dataclass(frozen=True, slots=True)
class ScorerSettings:
    """Settings of a model that scores.

    dtype: a name in torch. label: the number of the score to use. microbatch_tokens: packed tokens
    a forward, per rank. A score becomes (score - shift) * scale. transcript: how it reads texts, if
    its tokenizer is not the policy's; None: it reads the policy's tokens.
    """

    path: str
    dtype: str
    label: int = 0
    microbatch_tokens: int = 8192
    scale: float = 1.0
    shift: float = 0.0
    transcript: Transcript | None = None


class ShardedScorer:
    """A model over the ranks of an executor. Every call is collective over them."""

    def __init__(self, settings: ScorerSettings, group: ExecutorGroup):
        self.settings = settings
        self._group = group
        self.decoder = load_scorer(
            settings.path,
            device=group.device,
            dtype=getattr(torch, settings.dtype),
            mesh=group.data_mesh() if group.size > 1 else None,
            tensor_parallel=TensorParallel.of(group),
        )

    @property
    def tokens_a_round(self) -> int:
        """Packed tokens that fill one microbatch on each rank."""
        return self.settings.microbatch_tokens * self._group.data_size

    def scores(self, asked: Sequence[Asked]) -> Tensor:
        """Return the scores [N] of all given completions, in order, on the CPU; the same on all
        ranks. Each rank computes its share.
        """
        batches = pack_scored(asked, budget_tokens=self.settings.microbatch_tokens)
        scores_N = torch.zeros(sum(len(one.completions) for one in asked))
        for batch in own_share(batches, filler(), self._group):
            scores_NC = score(self.decoder, batch, self._group.device)
            scores_N[batch.places] = scores_NC[:, self.settings.label]
        reshard(self.decoder)
        join_shares(scores_N, self._group)
        return scores_N
