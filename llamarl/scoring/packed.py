"""Sequences that a model scores at their last tokens: packed without padding, each prompt once for
all its completions.

    batches = pack_scored([ScoreRequest(prompt_ids, completions), ...], budget_tokens=8192)
    scores_NC = score(decoder, batches[0], device)

Shapes: T tokens and S segments of a microbatch, N completions, C labels, P tokens of a prompt, L of
a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.learning.packing import collate
from llamarl.models.attention import PackedAttention
from llamarl.models.protocol import LanguageModel
from llamarl.models.scorer import scores_at


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A request: the completions of one prompt that are to be scored. ValueError for a sequence
    without any token.
    """

    prompt_ids: Tensor  # [P] int64; [0] where the completions have no token in common
    completions: tuple[Tensor, ...]  # [L] int64 each

    def __post_init__(self):
        if not self.prompt_ids.numel() and not all(c.numel() for c in self.completions):
            raise ValueError("a sequence without tokens has no last one to be scored at")

    @property
    def num_tokens(self) -> int:
        """The tokens of the prompt and of all completions."""
        return self.prompt_ids.numel() + sum(c.numel() for c in self.completions)


def to_message(asked: Sequence[ScoreRequest]) -> Tensor:
    """Encode requests as one message of whole numbers [n] int64, for other ranks: for each prompt
    its length, how many completions it has and their lengths, then the tokens of all.
    """
    sizes = []
    tokens = []
    for one in asked:
        lengths = [completion.numel() for completion in one.completions]
        sizes += [one.prompt_ids.numel(), len(lengths), *lengths]
        tokens += [one.prompt_ids, *one.completions]
    head = torch.tensor([len(asked), *sizes], dtype=torch.int64)
    return torch.cat([head, *tokens])


def from_message(words: Tensor) -> list[ScoreRequest]:
    """Decode a message of `to_message`."""
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
        asked.append(ScoreRequest(prompt_ids, tuple(completions)))
        tokens = tokens[sum(own) :]
    return asked


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """A microbatch: segments end to end, as in PackedBatch, but with every completion's last token.

    A prompt with a single completion is one segment together with it.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, from 0 at the start of each prompt
    cu_seqlens: Tensor  # [S+1] int64
    parents: Tensor  # [S] int64, a completion's prompt; -1 for a segment that continues none
    rows: Tensor  # [N] int64 into T: the last token of each completion
    places: Tensor  # [N] int64: places of the completions among all that were asked, end to end


def pack_scored(asked: Sequence[ScoreRequest], *, budget_tokens: int) -> list[ScoreBatch]:
    """Collate what is asked into microbatches of at most budget_tokens, on the CPU. Equal inputs
    give equal outputs.

    If a prompt's completions do not fit one microbatch, each microbatch with some of them computes
    the prompt once. A sequence over the budget gets a microbatch of its own. ValueError for a
    budget without room.
    """
    parts: list[_Part] = []
    first = 0
    for one in asked:
        parts += _cut(one, first, budget_tokens)
        first += len(one.completions)
    bins = collate([part.asked.num_tokens for part in parts], budget_tokens)
    batches = []
    for places in bins:
        batches.append(_build([parts[i] for i in places]))
    return batches


def filler() -> ScoreBatch:
    """Return a microbatch that scores nothing, for a rank with fewer than its FSDP peers."""
    zero = torch.zeros(1, dtype=torch.int64)
    none = torch.zeros(0, dtype=torch.int64)
    return ScoreBatch(
        input_ids=zero,
        positions=zero,
        cu_seqlens=torch.tensor([0, 1]),
        parents=zero - 1,
        rows=none,
        places=none,
    )


@torch.no_grad()
def score(decoder: LanguageModel, batch: ScoreBatch, device: torch.device) -> Tensor:
    """Return the scores [N, C] of a microbatch, float32, on the CPU. Collective over a sharded
    decoder's ranks.
    """
    attention = PackedAttention(batch.cu_seqlens.to(device), batch.parents.to(device))
    head = scores_at(batch.rows.to(device))
    scores_NC = decoder(batch.input_ids.to(device), batch.positions.to(device), attention, head)
    return scores_NC.float().cpu()


@dataclass(frozen=True, slots=True)
class _Part:
    """Completions of one prompt that go into a microbatch together."""

    asked: ScoreRequest
    places: list[int]


def _cut(asked: ScoreRequest, first: int, budget: int) -> list[_Part]:
    """Cut the completions of a prompt into parts of at most the budget, as far as possible."""
    sizes = [completion.numel() for completion in asked.completions]
    cuts = [[i] for i in range(len(sizes))]
    room = budget - asked.prompt_ids.numel()
    if room > 0 and asked.prompt_ids.numel():
        cuts = [sorted(cut) for cut in collate(sizes, room)]
    parts = []
    for cut in cuts:
        own = ScoreRequest(asked.prompt_ids, tuple(asked.completions[i] for i in cut))
        parts.append(_Part(own, [first + i for i in cut]))
    return parts


def _build(parts: list[_Part]) -> ScoreBatch:
    segments: list[Tensor] = []  # token ids of each
    positions = []
    parents = []
    rows = []
    places = []
    tokens = 0
    for part in parts:
        prompt_ids = part.asked.prompt_ids
        completions = part.asked.completions
        start = prompt_ids.numel()
        parent = -1
        if len(completions) == 1:
            start = 0
            completions = (torch.cat([prompt_ids, completions[0]]),)
        elif start:
            parent = len(segments)
            segments.append(prompt_ids)
            positions.append(torch.arange(start))
            parents.append(-1)
            tokens += start
        end_of_prompt = tokens - 1
        for completion in completions:
            size = completion.numel()
            if not size:
                rows.append(end_of_prompt)
                continue
            segments.append(completion)
            positions.append(torch.arange(start, start + size))
            parents.append(parent)
            tokens += size
            rows.append(tokens - 1)
        places += part.places
    lengths = torch.tensor([ids.numel() for ids in segments])
    return ScoreBatch(
        input_ids=torch.cat(segments),
        positions=torch.cat(positions),
        cu_seqlens=F.pad(lengths.cumsum(0), (1, 0)),
        parents=torch.tensor(parents),
        rows=torch.tensor(rows),
        places=torch.tensor(places),
    )
