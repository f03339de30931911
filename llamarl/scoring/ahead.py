"""Ahead: one model reads completions while these are sampled, on all ranks of its executor (OPPO's
intra-step overlap, Yan et al. 2025, 3.1 and algorithm 1).

    hear(stretch) --> GrowingSequences, one a cache --next_pass--> read --> PieceReader, all ranks

Each data-parallel rank has a cache. The first rank plans for all: it has an object of
GrowingSequences for each cache. All completions of a ticket go to the same cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from llamarl.comm.together import CollectiveCall
from llamarl.inference.cache import whole_blocks
from llamarl.models.build import Decoder
from llamarl.scoring.growing import GrowingSequences, Pass
from llamarl.scoring.pieces import PieceHead, PieceReader, from_message, to_message
from llamarl.scoring.scorer import Site
from llamarl.types import Stretch


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """How completions are read while they are sampled.

    piece_tokens: tokens of a piece, at the start if candidates are tried. cache_tokens: places of
    each model's cache, per data-parallel rank. longest: the most tokens of a prompt with its
    completion. candidates: sizes of pieces to try for the fastest step; none: the size stays.
    a_step: completions that a step trains on.
    """

    piece_tokens: int
    cache_tokens: int
    longest: int
    candidates: tuple[int, ...] = ()
    a_step: int = 1

    @property
    def slots(self) -> int:
        """How many sequences a cache holds."""
        return max(1, self.cache_tokens // whole_blocks(self.longest))


class Ahead:
    """A model's caches over the ranks of a site.

    head: what is wanted of what is read. call: the name under which ranks read together; metrics
    and messages of it begin with `about`. last_is_label: the last token of a sequence is predicted
    and never read.
    """

    def __init__(
        self,
        decoder: Decoder,
        head: PieceHead,
        settings: StreamSettings,
        site: Site,
        *,
        call: str,
        about: str,
        last_is_label: bool = False,
    ):
        self.piece_tokens = settings.piece_tokens
        self.num_read = 0  # tokens, so far
        self._site = site
        self._call = call
        self._about = about
        # A completion longer than the model's context is an error, which is reported with its
        # batch.
        self.longest = min(settings.longest, decoder.config.max_position_embeddings)
        self._reader = PieceReader(
            decoder,
            head,
            slots=settings.slots,
            max_len=settings.longest,
            group=site.group,
            one_by_one=site.reproducible,
        )
        site.together.add(call, CollectiveCall(self._reader.run, to_message, from_message))
        self.caches: list[GrowingSequences] = []
        for _ in range(site.group.data_size):
            growing = GrowingSequences(
                piece_tokens=settings.piece_tokens,
                slots=settings.slots,
                max_len=self.longest,
                last_is_label=last_is_label,
            )
            self.caches.append(growing)
        self._evictions = 0

    def index_of(self, ticket: int) -> int:
        """Return the number of the cache for a ticket's completions. They share their prompt, so
        they share a cache.
        """
        return ticket % len(self.caches)

    def cache_of(self, ticket: int) -> GrowingSequences:
        """Return the plan of that cache."""
        growing = self.caches[self.index_of(ticket)]
        growing.piece_tokens = self.piece_tokens
        return growing

    def hear(self, stretch: Stretch, prompt_ids: Tensor) -> None:
        """Note new tokens of a completion."""
        self.cache_of(stretch.ticket).extend(
            (stretch.ticket, stretch.sample_index),
            prompt_ids,
            stretch.begin,
            stretch.token_ids,
            has_ended=stretch.has_ended,
        )

    def read(self, passes: Sequence[Pass]) -> list[Tensor]:
        """On the first rank: read a pass into each cache, with all ranks. Return the values of each
        piece, in order.
        """
        began = time.monotonic()
        values = self._site.together.call(self._call, passes)
        self.num_read += sum(one.num_tokens for one in passes)
        metrics = self._site.metrics
        if metrics is not None:
            what = "read to the end" if any(one.ends for one in passes) else "read ahead"
            metrics.span(self._site.group.name, what, began, time.monotonic())
        return values

    def note_evictions(self) -> None:
        """Count the sequences that have lost their slots since the last call."""
        total = sum(growing.num_evictions for growing in self.caches)
        if self._site.metrics is not None:
            self._site.metrics.add_sum(f"{self._about}/evictions", total - self._evictions)
        self._evictions = total

    def tensors(self) -> Iterator[Tensor]:
        """Yield this rank's cache."""
        yield from self._reader.cache.layers

    def clear(self) -> None:
        """Forget every sequence."""
        for growing in self.caches:
            growing.clear()
