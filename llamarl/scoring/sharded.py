"""Frozen models over the ranks of an executor: sharded, split, or a copy on each. Every rank
computes its share of what is asked, and all get the whole answer.

    ShardedScorer     scores completions at their last tokens
    ShardedReference  gives the logprobs of their tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llamarl.comm.together import join_shares, own_share
from llamarl.executor import ExecutorGroup
from llamarl.learning.logprobs import LateEnds, group_to_score, label_logprobs
from llamarl.learning.packing import filler as empty_microbatch
from llamarl.learning.packing import pack
from llamarl.learning.targets import Targets
from llamarl.models.config import Lora
from llamarl.models.frozen import decoder_over
from llamarl.models.fsdp import reshard
from llamarl.models.scorer import load_scorer
from llamarl.models.tp import TensorParallel
from llamarl.scoring.packed import ScoreRequest, filler, pack_scored, score
from llamarl.scoring.transcript import Transcript
from llamarl.types import Group, PackedBatch


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

    def scores(self, asked: Sequence[ScoreRequest]) -> Tensor:
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


class ShardedReference:
    """A frozen model over the ranks of an executor. Every call is collective over them.

    path: a Hugging Face directory. dtype: of its weights. temperature: that logits are divided by.
    microbatch_tokens: packed tokens a forward, per rank. late_ends: what completions could not have
    when they were sampled, out of this model's distribution too. lora: adapters beside its weights.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: torch.dtype,
        temperature: float,
        microbatch_tokens: int,
        group: ExecutorGroup,
        late_ends: LateEnds | None = None,
        lora: Lora | None = None,
    ):
        self._temperature = temperature
        self._late_ends = late_ends
        self._microbatch_tokens = microbatch_tokens
        self._group = group
        self.decoder = decoder_over(group, path, dtype=dtype, lora=lora)

    @torch.no_grad()
    def logprobs(self, asked: Sequence[ScoreRequest], *, together: bool) -> list[Tensor]:
        """Return for each prompt the logprobs [T] of its completions' tokens, end to end: float32,
        nats, on the CPU; the same on all ranks, of which each computes its share.

        together: a microbatch may hold completions of several prompts. Else the values of one do
        not depend on what is asked beside it.
        """
        groups = [group_to_score(one.prompt_ids, one.completions) for one in asked]
        sizes = [group.token_ids.numel() for group in groups]
        microbatches = self._packed(groups, together)
        nothing = (empty_microbatch(), torch.zeros(0, dtype=torch.int64))
        logprobs_C = torch.zeros(sum(sizes))
        for microbatch, places in own_share(microbatches, nothing, self._group):
            logprobs_C[places] = label_logprobs(
                self.decoder,
                microbatch,
                self._group.device,
                temperature=self._temperature,
                late_ends=self._late_ends,
            )
        reshard(self.decoder)
        join_shares(logprobs_C, self._group)
        return list(logprobs_C.split(sizes))

    def _packed(self, groups: list[Group], together: bool) -> list[tuple[PackedBatch, Tensor]]:
        """Return microbatches, and where their labels are among the tokens of all groups."""
        found = []
        first = 0
        for batch in [groups] if together else [[group] for group in groups]:
            packing = pack(
                batch,
                [Targets.of(group, group.rewards) for group in batch],
                budget_tokens=self._microbatch_tokens,
                drop_zero_advantage=False,
            )
            for microbatch in packing.microbatches:
                found.append((microbatch, microbatch.places + first))
            first += sum(group.token_ids.numel() for group in batch)
        return found


def asked_of(group: Group) -> ScoreRequest:
    """Return the request for all completions of a group, whatever their rewards say."""
    return ScoreRequest(group.prompt_ids, group.token_ids.split(group.lengths.tolist()))
