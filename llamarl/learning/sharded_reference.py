"""ShardedReference: a language model over the ranks of an executor (sharded, split, or a copy on
each) says how likely given tokens are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llamarl.executor import ExecutorGroup
from llamarl.learning.asking import Asked, join_shares, own_share
from llamarl.learning.logprobs import LateEnds, Narrowing, make_head
from llamarl.learning.packing import filler, pack, to_device
from llamarl.learning.targets import Targets
from llamarl.models.attention import PackedAttention
from llamarl.models.config import Lora
from llamarl.models.frozen import decoder_over
from llamarl.models.fsdp import reshard
from llamarl.models.protocol import LanguageModel
from llamarl.types import Group, PackedBatch


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
    def logprobs(self, asked: Sequence[Asked], *, together: bool) -> list[Tensor]:
        """Return for each prompt the logprobs [T] of its completions' tokens, end to end: float32,
        nats, on the CPU; the same on all ranks, of which each computes its share.

        together: a microbatch may hold completions of several prompts. Else the values of one do
        not depend on what is asked beside it.
        """
        groups = [group_of(one) for one in asked]
        sizes = [group.token_ids.numel() for group in groups]
        microbatches = self._packed(groups, together)
        nothing = (filler(), torch.zeros(0, dtype=torch.int64))
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


@torch.no_grad()
def label_logprobs(
    decoder: LanguageModel,
    microbatch: PackedBatch,
    device: torch.device,
    *,
    temperature: float,
    late_ends: LateEnds | None = None,
) -> Tensor:
    """Return the logprobs [R] of a microbatch's labels, float32, nats, on the CPU."""
    batch = to_device(microbatch, device)
    attention = PackedAttention(batch.cu_seqlens, batch.parents)
    narrowing = Narrowing.of(decoder.absent_rows, late_ends, batch.offsets)
    head = make_head(batch.labels, batch.rows, temperature=temperature, narrowing=narrowing)
    logprobs, _ = decoder(batch.input_ids, batch.positions, attention, head)
    return logprobs.float().cpu()


def asked_of(group: Group) -> Asked:
    """Return the request for all completions of a group, whatever their rewards say."""
    return Asked(group.prompt_ids, group.token_ids.split(group.lengths.tolist()))


def group_of(asked: Asked) -> Group:
    """Return a request as a group in which every completion is trained on, so that packing leaves
    none out.
    """
    lengths = [completion.numel() for completion in asked.completions]
    zeros = torch.zeros(sum(lengths))
    return Group(
        ticket=0,
        prompt_ids=asked.prompt_ids,
        lengths=torch.tensor(lengths),
        token_ids=torch.cat(asked.completions),
        generator_logprobs=zeros,
        policy_versions=zeros.long(),
        ref_logprobs=zeros[:0],
        rewards=torch.ones(len(lengths)),
        finish_reasons=("stop",) * len(lengths),
        outcomes=("score",) * len(lengths),
    )
