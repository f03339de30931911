"""A model that scores, over the ranks of an executor: sharded, split, or a copy on each.

first rank: asked --to_words--> broadcast --> scores --+
the others:                     broadcast --from_words--> scores
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.executor import ExecutorGroup
from llamarl.learning.scoring import Asked, filler, pack_scored, score
from llamarl.models.fsdp import reshard
from llamarl.models.scorer import load_scorer
from llamarl.models.tp import TensorParallel
from llamarl.tasks.transcript import Transcript


@dataclass(frozen=True, slots=True)
class ScorerSettings:
    """A model that scores.

    dtype: a name in torch. label: which of its scores. microbatch_tokens: packed tokens a forward,
    per rank. A score becomes (score - shift) * scale. transcript: how it reads texts, where it has
    another tokenizer than the policy; None: it reads the policy's tokens.
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
        """The scores [N] of all completions that are asked of, in order, on the CPU; each rank
        computes its share. The same on all of them.
        """
        batches = pack_scored(asked, budget_tokens=self.settings.microbatch_tokens)
        data_size = self._group.data_size
        num_rounds = math.ceil(len(batches) / data_size)
        own = batches[self._group.data_index :: data_size]
        scores_N = torch.zeros(sum(len(one.completions) for one in asked))
        for batch in own + [filler()] * (num_rounds - len(own)):
            scores_NC = score(self.decoder, batch, self._group.device)
            scores_N[batch.places] = scores_NC[:, self.settings.label]
        reshard(self.decoder)
        if self._group.size > 1:
            if self._group.tensor_index:
                scores_N.zero_()  # the first of those that share a copy speaks for them
            dist.all_reduce(scores_N, group=self._group.process_group)
        return scores_N


def to_words(asked: Sequence[Asked]) -> Tensor:
    """What is asked as whole numbers [n] int64, for other ranks: for each prompt its length, how
    many completions it has and their lengths, then the tokens of all.
    """
    sizes = []
    tokens = []
    for one in asked:
        lengths = [completion.numel() for completion in one.completions]
        sizes += [one.prompt_ids.numel(), len(lengths), *lengths]
        tokens += [one.prompt_ids, *one.completions]
    head = torch.tensor([len(asked), *sizes], dtype=torch.int64)
    return torch.cat([head, *tokens])


def from_words(words: Tensor) -> list[Asked]:
    """The inverse of to_words."""
    number, *rest = words.tolist()
    place = 0
    lengths = []  # of each prompt: its own, then those of its completions
    for _ in range(number):
        end = place + 2 + rest[place + 1]
        lengths.append([rest[place], *rest[place + 2 : end]])
        place = end
    tokens = words[1 + place :]
    asked = []
    for own in lengths:
        prompt_ids, *completions = tokens[: sum(own)].split(own)
        asked.append(Asked(prompt_ids, tuple(completions)))
        tokens = tokens[sum(own) :]
    return asked


def broadcast(words: Tensor, group: ExecutorGroup) -> None:
    """Collective over the executor's ranks: the first one's words, in host memory, to all."""
    if group.size > 1:
        dist.broadcast(words, group.ranks[0], group=group.process_group)
