"""Prompts into the cache: whole ones together, long ones in pieces, running rows again under new weights.

A job is (request, first sample, end): the prompt is computed once, and its K/V go to a slot for each of these samples.
Shapes: T tokens, N prompts, R rows, V vocabulary, D model.
"""

from __future__ import annotations

from typing import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.inference.cache import Extend, Prefill, SlotCache
from llamarl.inference.rows import Request
from llamarl.models.build import Decoder

Job = tuple[Request, int, int]

_PREFILL_TOKENS = 4096  # of one prefill, padding included


def prefill(decoder: Decoder, cache: SlotCache, first_slot: int, jobs: list[Job]) -> Tensor:
    """Run each prompt once and keep its K/V in a slot for each sample, from first_slot on. Next logits [R, V]."""
    prompts = [request.ids for request, _, _ in jobs]
    return prefill_ids(decoder, cache, first_slot, prompts, [end - begin for _, begin, end in jobs])


def prefill_ids(decoder: Decoder, cache: SlotCache, first_slot: int, prompts: list[Tensor], copies: list[int]) -> Tensor:
    """`prefill` of token ids on the CPU: prompt i goes to the next copies[i] slots."""
    lengths_N, copies_N = torch.tensor([p.numel() for p in prompts]), torch.tensor(copies)
    ends_N, slots_N = lengths_N.cumsum(0), first_slot + copies_N.cumsum(0) - copies_N
    starts_T, slots_T = torch.stack([ends_N - lengths_N, slots_N]).repeat_interleave(lengths_N, dim=1)
    prompt_R = torch.arange(len(prompts)).repeat_interleave(copies_N)
    tokens_T = torch.cat(prompts)
    positions_T = torch.arange(tokens_T.numel()) - starts_T
    tokens_T, positions_T, slots_T, ends_N, prompt_R, slots_N = (
        x.to(cache.device) for x in (tokens_T, positions_T, slots_T, ends_N, prompt_R, slots_N)
    )
    context = Prefill(cache, F.pad(ends_N, (1, 0)), slots_T, positions_T)
    logits_NV = decoder(tokens_T, positions_T, context, lambda h_TD, w_VD: decoder.project(h_TD[ends_N - 1], w_VD))
    if prompt_R.numel() > len(prompts):
        cache.share(slots_N, prompt_R, first_slot, context.longest)
    return logits_NV[prompt_R]


def extend(decoder: Decoder, cache: SlotCache, slot: int, start: int, ids: Tensor) -> Tensor:
    """Keep the K/V of the next tokens of one slot, whose places before `start` are kept already. Logits [1, V] of the last."""
    context = Extend(cache, slot, start, ids.numel())
    return decoder(ids.to(cache.device), context.positions, context, lambda h_TD, w_VD: decoder.project(h_TD[-1:], w_VD))


def recompute(decoder: Decoder, cache: SlotCache, sequences: list[Tensor]) -> None:
    """The K/V of rows 0.. anew: row i has read sequences[i]."""
    first = 0
    for batch in batches([s.numel() for s in sequences]):
        rows = sequences[first : first + batch]
        prefill_ids(decoder, cache, first, rows, [1] * batch)
        first += batch


def batches(lengths: list[int]) -> Iterator[int]:
    """How many prompts to take next, so that they have _PREFILL_TOKENS tokens at most, padded to the longest (or one longer)."""
    size, longest = 0, 0
    for length in lengths:
        longest = max(longest, length)
        if size and longest * (size + 1) > _PREFILL_TOKENS:
            yield size
            size, longest = 0, length
        size += 1
    if size:
        yield size
