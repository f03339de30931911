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
from llamarl.inference.decode import NativeDecode
from llamarl.inference.rows import Request
from llamarl.models.build import Decoder

Job = tuple[Request, int, int]

_PREFILL_TOKENS = 4096  # of one prefill, padding included


class Prompter:
    """Runs prompts through the decoder: by the native path where there is one, else by the module."""

    def __init__(self, decoder: Decoder, cache: SlotCache, native: NativeDecode | None):
        self._decoder, self._cache, self._native = decoder, cache, native

    def prefill(self, first_slot: int, jobs: list[Job]) -> Tensor:
        """Run each prompt once and keep its K/V in a slot for each sample, from first_slot on. Next logits [R, V]."""
        return self._prefill(first_slot, [r.ids for r, _, _ in jobs], [end - begin for _, begin, end in jobs])

    def _prefill(self, first_slot: int, prompts: list[Tensor], copies: list[int]) -> Tensor:
        """`prefill` of token ids on the CPU: prompt i goes to the next copies[i] slots."""
        lengths_N, copies_N = torch.tensor([p.numel() for p in prompts]), torch.tensor(copies)
        ends_N, slots_N = lengths_N.cumsum(0), first_slot + copies_N.cumsum(0) - copies_N
        starts_T, slots_T = torch.stack([ends_N - lengths_N, slots_N]).repeat_interleave(lengths_N, dim=1)
        prompt_R = torch.arange(len(prompts)).repeat_interleave(copies_N)
        tokens_T = torch.cat(prompts)
        positions_T = torch.arange(tokens_T.numel()) - starts_T
        longest, cache = int(lengths_N.max()), self._cache
        if self._native:
            logits_NV = self._native(tokens_T, positions_T, cache, slots_T, longest, ends_N - 1)
        else:
            tokens_T, positions_T, slots_T, ends_N, prompt_R, slots_N = (
                x.to(cache.device) for x in (tokens_T, positions_T, slots_T, ends_N, prompt_R, slots_N)
            )
            context = Prefill(cache, F.pad(ends_N, (1, 0)), slots_T, positions_T)
            logits_NV = self._project_last(tokens_T, positions_T, context, ends_N - 1)
        if prompt_R.numel() == len(prompts):
            return logits_NV
        slots_R = torch.arange(first_slot, first_slot + prompt_R.numel(), device=cache.device)
        cache.copy(slots_N[prompt_R], slots_R, longest)
        return logits_NV[prompt_R]

    def extend(self, slot: int, start: int, ids: Tensor) -> Tensor:
        """Keep the K/V of the next tokens of one slot, whose places before `start` are kept. Logits [1, V] of the last."""
        count, cache = ids.numel(), self._cache
        if self._native:
            positions, slots = torch.arange(start, start + count), torch.full((count,), slot)
            return self._native(ids.contiguous(), positions, cache, slots, start + count, torch.tensor([count - 1]))
        context = Extend(cache, slot, start, count)
        return self._project_last(ids.to(cache.device), context.positions, context, slice(-1, None))

    def recompute(self, sequences: list[Tensor]) -> None:
        """The K/V of rows 0.. anew: row i has read sequences[i]."""
        first = 0
        for batch in batches([s.numel() for s in sequences]):
            self._prefill(first, sequences[first : first + batch], [1] * batch)
            first += batch

    def _project_last(self, tokens_T: Tensor, positions_T: Tensor, context: Prefill | Extend, last: Tensor | slice) -> Tensor:
        project = self._decoder.project
        return self._decoder(tokens_T, positions_T, context, lambda h_TD, w_VD: project(h_TD[last], w_VD))


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
