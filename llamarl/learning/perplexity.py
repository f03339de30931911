"""How likely a model finds answers that another has sampled: packed without padding.

    batches = pack_answers([Answered(prompt_ids, token_ids), ...], budget_tokens=8192)
    logprobs_N = answer_logprobs(decoder, batches[0], device)

Shapes: T tokens and R labels of a microbatch, N answers, P tokens of a prompt, L of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.learning.logprobs import make_head
from llamarl.learning.packing import collate
from llamarl.models.attention import PackedAttention
from llamarl.models.protocol import LanguageModel


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt and its answer. ValueError if one of them has no token."""

    prompt_ids: Tensor  # [P] int64
    token_ids: Tensor  # [L] int64

    def __post_init__(self):
        if not self.prompt_ids.numel() or not self.token_ids.numel():
            raise ValueError("a prompt or an answer without tokens has no log-probability")

    @property
    def num_fed(self) -> int:
        """What the model reads: all but the last token, which is a label alone."""
        return self.prompt_ids.numel() + self.token_ids.numel() - 1


@dataclass(frozen=True, slots=True)
class AnswerBatch:
    """A microbatch: prompts and their answers end to end, shifted.

    prompt [10, 11] with answer [12, 13], then prompt [20] with answer [21]:
    input_ids  10 11 12 | 20    rows  1 2 3    labels  12 13 21    answers  0 0 1
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, from 0 at the start of each prompt
    cu_seqlens: Tensor  # [N+1] int64
    rows: Tensor  # [R] int64 into T: what predicts each label
    labels: Tensor  # [R] int64
    answers: Tensor  # [R] int64: the answer of each label, of the N that are here
    places: Tensor  # [N] int64: where these are among all that were asked about


def pack_answers(answered: Sequence[Answered], *, budget_tokens: int) -> list[AnswerBatch]:
    """Collate answers into microbatches of at most budget_tokens, on the CPU; one that is longer
    gets a microbatch of its own. Equal input gives equal output. ValueError for a budget without
    room.
    """
    bins = collate([one.num_fed for one in answered], budget_tokens)
    batches = []
    for places in bins:
        batches.append(_build([answered[i] for i in places], places))
    return batches


@torch.no_grad()
def answer_logprobs(decoder: LanguageModel, batch: AnswerBatch, device: torch.device) -> Tensor:
    """[N] float64, nats, on the CPU: the log-probability of each whole answer given its prompt, at
    temperature 1.
    """
    attention = PackedAttention(batch.cu_seqlens.to(device))
    head = make_head(batch.labels.to(device), batch.rows.to(device))
    logprobs_R, _ = decoder(batch.input_ids.to(device), batch.positions.to(device), attention, head)
    sums_N = torch.zeros(batch.places.numel(), dtype=torch.float64)
    return sums_N.index_add_(0, batch.answers, logprobs_R.double().cpu())


def _build(answered: list[Answered], places: list[int]) -> AnswerBatch:
    fed = []
    positions = []
    rows = []
    start = 0
    for one in answered:
        size = one.num_fed
        first = start + one.prompt_ids.numel() - 1
        fed.append(torch.cat([one.prompt_ids, one.token_ids[:-1]]))
        positions.append(torch.arange(size))
        rows.append(torch.arange(first, start + size))
        start += size
    lengths = torch.tensor([one.num_fed for one in answered])
    sizes = torch.tensor([one.token_ids.numel() for one in answered])
    return AnswerBatch(
        input_ids=torch.cat(fed),
        positions=torch.cat(positions),
        cu_seqlens=F.pad(lengths.cumsum(0), (1, 0)),
        rows=torch.cat(rows),
        labels=torch.cat([one.token_ids for one in answered]),
        answers=torch.arange(len(answered)).repeat_interleave(sizes),
        places=torch.tensor(places),
    )
