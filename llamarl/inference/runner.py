"""The decoder over the cache: prompts whole or in pieces, a token for each running row, rows again
under new weights.

A job is (request, first sample, end): the prompt is computed once, and its K/V go to a slot for
each of these samples. Shapes: T tokens, N prompts, R rows, V vocabulary, D model.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.inference.cache import Decode, Extend, Prefill, SlotCache
from llamarl.inference.decode import NativeDecode
from llamarl.inference.rows import Request
from llamarl.models.build import Decoder
from llamarl.native.choice import fastest

Job = tuple[Request, int, int]

_TRIAL_ROWS = 32  # of the decode step by which the ways are compared
_PREFILL_TOKENS = 4096  # of one prefill, padding included
_NONE = torch.empty(0, dtype=torch.int64)


class ModelRunner:
    """Runs what the engine asks for: natively where that can be, else by the module.

    There are up to three ways: the native pass with products by tile instructions, or by vectors,
    and the module. reproducible: the first of those that this machine has; else the one that a
    decode step of `rows` rows shows to be clearly faster, measured before the first pass and kept
    for later runs on the machine (llamarl.native.choice).
    """

    def __init__(self, decoder: Decoder, cache: SlotCache, *, rows: int, reproducible: bool):
        self._decoder, self._cache = decoder, cache
        fits = NativeDecode.fits(decoder, cache.device, cache.dtype)
        self.native = NativeDecode(decoder, cache.dtype) if fits else None
        self._rows = min(rows, _TRIAL_ROWS)
        self._undecided = fits and not reproducible

    def weights_changed(self) -> None:
        """They are other ones, which `refresh` cannot always tell by itself."""
        if self.native:
            self.native.stale = True

    def refresh(self) -> None:
        """Before a pass or several: see whether the weights are others."""
        if self._undecided:
            self._undecided = False
            self.take(self._fastest_way())
        if self.native:
            self.native.refresh()

    @property
    def way(self) -> str:
        """How passes are computed now."""
        if self.native is None:
            return "module"
        return "tiles" if self.native.use_tiles else "vectors"

    def take(self, way: str) -> None:
        """Compute by this way from now on: "tiles", "vectors" or "module", of those that there are."""
        if way == "module":
            self.native = None
        elif self.native is not None:
            self.native.use_tiles = way == "tiles"

    def _fastest_way(self) -> str:
        """By the time of a decode step in the first slots. Nothing may be running: their first
        place is written to.
        """
        native, rows = self.native, self._rows
        self._cache.reserve(rows, 1)
        tokens_N, positions_N = (
            torch.zeros(rows, dtype=torch.int64),
            torch.zeros(rows, dtype=torch.int64),
        )
        native.refresh()

        def step(way: str) -> None:
            self.native = native
            self.take(way)
            self.decode(0, tokens_N, positions_N, 1)

        names = ["tiles", "vectors", "module"] if native.has_tiles else ["vectors", "module"]
        config, threads = self._decoder.config, torch.get_num_threads()
        key = f"{native.version} {config} {self._cache.dtype} {rows} rows {threads} threads"
        way = fastest("decoding", {name: partial(step, name) for name in names}, key=key)
        self.native = native
        return way

    def decode(
        self, first_slot: int, tokens_N: Tensor, positions_N: Tensor, longest: int
    ) -> Tensor:
        """One token a row, in slots first_slot onwards, at positions_N < longest. Logits [N, V] of
        the next.
        """
        if self.native:
            slots_N = torch.arange(first_slot, first_slot + tokens_N.numel())
            return self.native(tokens_N, positions_N, self._cache, slots_N, longest)
        return self._decoder(
            tokens_N, positions_N, Decode(self._cache, positions_N, longest, first_slot)
        )

    def prefill(
        self,
        first_slot: int,
        jobs: list[Job],
        tokens_M: Tensor = _NONE,
        positions_M: Tensor = _NONE,
    ) -> Tensor:
        """Run each prompt once and keep its K/V in a slot for each sample, from first_slot on. Next
        logits [M + R, V].

        tokens_M, positions_M: of running rows in the slots before first_slot, which decode in the
        same pass. Natively alone: the weights are read once for both then, so that new rows hardly
        hold up the others.
        """
        prompts, copies = [r.ids for r, _, _ in jobs], [end - begin for _, begin, end in jobs]
        return self._prefill(first_slot, prompts, copies, tokens_M, positions_M)

    def _prefill(
        self,
        first_slot: int,
        prompts: list[Tensor],
        copies: list[int],
        tokens_M: Tensor = _NONE,
        positions_M: Tensor = _NONE,
    ) -> Tensor:
        """`prefill` of token ids on the CPU: prompt i goes to the next copies[i] slots."""
        ones, cache = [1] * tokens_M.numel(), self._cache
        lengths_N, copies_N = (
            torch.tensor([*ones, *(p.numel() for p in prompts)]),
            torch.tensor([*ones, *copies]),
        )
        ends_N, slots_N = (
            lengths_N.cumsum(0),
            first_slot - len(ones) + copies_N.cumsum(0) - copies_N,
        )
        offsets_N = ends_N - lengths_N - F.pad(positions_M, (0, len(prompts)))
        offsets_T, slots_T = torch.stack([offsets_N, slots_N]).repeat_interleave(lengths_N, dim=1)
        tokens_T = torch.cat([tokens_M, *prompts])
        positions_T = torch.arange(tokens_T.numel()) - offsets_T
        if self.native:
            logits_NV = self.native(
                tokens_T, positions_T, cache, slots_T, int(positions_T.max()) + 1, ends_N - 1
            )
        else:
            tokens_T, positions_T, slots_T, ends_N = (
                x.to(cache.device) for x in (tokens_T, positions_T, slots_T, ends_N)
            )
            context = Prefill(cache, F.pad(ends_N, (1, 0)), slots_T, positions_T)
            logits_NV = self._project_last(tokens_T, positions_T, context, ends_N - 1)
        input_R = torch.arange(len(lengths_N)).repeat_interleave(copies_N)
        if len(input_R) == len(lengths_N):
            return logits_NV
        source, target = slots_N[input_R], torch.arange(len(input_R)) + (first_slot - len(ones))
        copied = source != target
        cache.copy(
            source[copied].to(cache.device), target[copied].to(cache.device), int(lengths_N.max())
        )
        return logits_NV[input_R.to(cache.device)]

    def extend(self, slot: int, start: int, ids: Tensor) -> Tensor:
        """Keep the K/V of the next tokens of one slot, whose places before `start` are kept. Logits
        [1, V] of the last.
        """
        count, cache = ids.numel(), self._cache
        if self.native:
            positions, slots = torch.arange(start, start + count), torch.full((count,), slot)
            return self.native(
                ids.contiguous(), positions, cache, slots, start + count, torch.tensor([count - 1])
            )
        context = Extend(cache, slot, start, count)
        return self._project_last(ids.to(cache.device), context.positions, context, slice(-1, None))

    def recompute(self, sequences: list[Tensor]) -> None:
        """The K/V of rows 0.. anew: row i has read sequences[i]."""
        first = 0
        for batch in batches([s.numel() for s in sequences]):
            self._prefill(first, sequences[first : first + batch], [1] * batch)
            first += batch

    def _project_last(
        self, tokens_T: Tensor, positions_T: Tensor, context: Prefill | Extend, last: Tensor | slice
    ) -> Tensor:
        project = self._decoder.project
        return self._decoder(
            tokens_T, positions_T, context, lambda h_TD, w_VD: project(h_TD[last], w_VD)
        )


def batches(lengths: list[int]) -> Iterator[int]:
    """How many prompts to take next, so that they have _PREFILL_TOKENS tokens at most, padded to
    the longest (or one longer).
    """
    size, longest = 0, 0
    for length in lengths:
        longest = max(longest, length)
        if size and longest * (size + 1) > _PREFILL_TOKENS:
            yield size
            size, longest = 0, length
        size += 1
    if size:
        yield size
