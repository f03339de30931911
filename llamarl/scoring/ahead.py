"""A model reads completions while these are sampled, on all ranks of its executor (OPPO's
intra-step overlap, Yan et al. 2025, 3.1 and algorithm 1).

    hear(stretch) --> GrowingSequences, one a cache --next_pass--> read --> PieceReader, all ranks

Each data-parallel rank has a cache. The first rank plans for all: it has an object of
GrowingSequences (llamarl.scoring.growing) for each cache. All completions of a ticket go to the
same cache. ChunkSearch finds the size of pieces that makes steps fastest.

On a CPU the native pass reads all pieces of a rank together. It sums a row in one order whatever
lies beside it, so the result depends neither on how a sequence is cut nor on other sequences. On
other devices the module reads them. With one_by_one it reads one piece in a forward, so that a
sequence has the same bits whenever its pieces are read.

LIMITS. The native pass keeps a second copy of the weights, laid out for it. A slot has max_len
places, however short its sequence is. If a model is sharded, each pass gathers every weight, even
for few tokens.

Shapes: T tokens, n tokens of a piece, D model, V rows of the head.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.comm.together import CollectiveCall, join_shares
from llamarl.executor import ExecutorGroup
from llamarl.inference.cache import Pieces, SlotCache, whole_blocks
from llamarl.inference.decode import NativeDecode
from llamarl.learning.logprobs import LateEnds, Narrowing, chunked_logprobs
from llamarl.models.attention import PackedAttention
from llamarl.models.build import Decoder
from llamarl.models.fsdp import reshard
from llamarl.scoring.growing import GrowingSequences, Pass, Piece
from llamarl.scoring.scorer import Site
from llamarl.types import Stretch

_NUMBERS = 8  # numbers that describe a piece, without its tokens


class ScoreHead:
    """A head on the hidden states of a piece: one label's score at the last token of a sequence, in
    float32.
    """

    def __init__(self, label: int):
        self._label = label

    def num_values(self, piece: Piece) -> int:
        """Return 1 for the last piece of a sequence, otherwise 0."""
        return int(piece.is_last)

    def __call__(self, hidden_nD: Tensor, weight_VD: Tensor, piece: Piece) -> Tensor:
        scores_1C = F.linear(hidden_nD[-1:].float(), weight_VD.float())
        return scores_1C[0, self._label : self._label + 1]


@dataclass(frozen=True, slots=True)
class LogprobHead:
    """The logprobs of a completion's tokens in a piece, each predicted by the token before it:
    float32, nats. For sequences whose last token is a label (llamarl.scoring.growing).

    temperature: divides the logits. absent_rows, late_ends: what is out of the distribution.
    logit_cap: the decoder's.
    """

    temperature: float
    absent_rows: Tensor | None = None
    late_ends: LateEnds | None = None
    logit_cap: float | None = None

    def num_values(self, piece: Piece) -> int:
        """Return how many completion tokens the piece predicts."""
        predicted = piece.begin + piece.token_ids.numel() + 1  # tokens, with the prompt's
        return max(0, min(predicted - piece.prompt_size, piece.token_ids.numel()))

    def __call__(self, hidden_nD: Tensor, weight_VD: Tensor, piece: Piece) -> Tensor:
        count = self.num_values(piece)
        labels_n = F.pad(piece.token_ids[1:], (0, 1), value=piece.next_id)
        last = piece.begin + piece.token_ids.numel() - piece.prompt_size  # of its completion
        offsets_n = torch.arange(last + 1 - count, last + 1, device=hidden_nD.device)
        logprobs, _ = chunked_logprobs(
            hidden_nD[-count:],
            weight_VD,
            labels_n[-count:].to(hidden_nD.device),
            temperature=self.temperature,
            narrowing=Narrowing.of(self.absent_rows, self.late_ends, offsets_n),
            logit_cap=self.logit_cap,
        )
        return logprobs


class PieceReader:
    """This rank's cache of `slots` rows, and the passes that fill it.

    head: computes the values of pieces. group: the executor's ranks; each of its data-parallel
    ranks has a cache. one_by_one: without native kernels, read one piece in a forward.
    """

    def __init__(
        self,
        decoder: Decoder,
        head: ScoreHead | LogprobHead,
        *,
        slots: int,
        max_len: int,
        group: ExecutorGroup,
        one_by_one: bool,
    ):
        self._decoder = decoder
        self._head = head
        self._group = group
        self._one_by_one = one_by_one
        self._slots = slots
        self.cache = SlotCache(decoder, slots, max_len, slots * whole_blocks(max_len))
        fits = NativeDecode.fits(decoder, self.cache.device, self.cache.dtype)
        self.native = NativeDecode(decoder, self.cache.dtype) if fits else None

    @torch.no_grad()
    def run(self, passes: Sequence[Pass]) -> list[Tensor]:
        """Collective over all ranks: read a pass on each data-parallel rank. Return the head's
        values [num_values] for each piece of all passes, in order, on the CPU; the same on all
        ranks.
        """
        if self.cache.device.type == "cpu":
            self.cache.reserve(self._slots, self.cache.max_len)
        sizes: list[int] = []
        first = 0
        for number, one in enumerate(passes):
            if number == self._group.data_index:
                first = sum(sizes)
            sizes += [self._head.num_values(piece) for piece in one.pieces]
        own = passes[self._group.data_index]
        for source, target, length in own.copies:
            places = torch.tensor([source, target], device=self.cache.device)
            self.cache.copy(places[:1], places[1:], length)
        found = self._read_all(own, most=max(len(one.pieces) for one in passes))
        values = torch.zeros(sum(sizes))
        if found:
            read = torch.cat(found)
            values[first : first + read.numel()] = read
        if values.numel():
            join_shares(values, self._group)
        return list(values.split(sizes))

    def _read_all(self, own: Pass, most: int) -> list[Tensor]:
        """Read this rank's pieces. most: how many the rank with the most pieces has."""
        if self.native is not None:
            return self._read_natively(self.native, own.pieces) if own.pieces else []
        forwards = [own.pieces] if own.pieces else []
        num_forwards = min(most, 1)
        if self._one_by_one:
            forwards = [(piece,) for piece in own.pieces]
            num_forwards = most
        found = []
        for pieces in forwards:
            found += self._read(pieces)
        for _ in range(num_forwards - len(forwards)):
            self._take_part()
        reshard(self._decoder)
        return found

    def _read_natively(self, native: NativeDecode, pieces: Sequence[Piece]) -> list[Tensor]:
        native.refresh()
        lengths_N = torch.tensor([piece.token_ids.numel() for piece in pieces])
        starts_N = torch.tensor([piece.begin for piece in pieces])
        slots_N = torch.tensor([piece.slot for piece in pieces])
        tokens_T = torch.cat([piece.token_ids for piece in pieces])
        offsets_N = lengths_N.cumsum(0) - lengths_N - starts_N
        positions_T = torch.arange(tokens_T.numel()) - offsets_N.repeat_interleave(lengths_N)
        slots_T = slots_N.repeat_interleave(lengths_N)
        hidden_TD = native.hidden(tokens_T, positions_T, self.cache, slots_T)
        return self._values(pieces, hidden_TD, self._decoder.output_weight)

    def _read(self, pieces: Sequence[Piece]) -> list[Tensor]:
        context = Pieces(
            self.cache,
            torch.tensor([piece.slot for piece in pieces]),
            torch.tensor([piece.begin for piece in pieces]),
            torch.tensor([piece.token_ids.numel() for piece in pieces]),
        )
        tokens_T = torch.cat([piece.token_ids for piece in pieces])

        def head(hidden_TD: Tensor, weight_VD: Tensor) -> list[Tensor]:
            return self._values(pieces, hidden_TD, weight_VD)

        return self._decoder(tokens_T.to(self.cache.device), context.positions_T, context, head)

    def _values(
        self, pieces: Sequence[Piece], hidden_TD: Tensor, weight_VD: Tensor
    ) -> list[Tensor]:
        """Return the head's values for each piece. Each is computed alone, so that it does not
        depend on others.
        """
        found = []
        begin = 0
        for piece in pieces:
            end = begin + piece.token_ids.numel()
            if self._head.num_values(piece):
                values = self._head(hidden_TD[begin:end], weight_VD, piece)
                found.append(values.float().cpu())
            begin = end
        return found

    def _take_part(self) -> None:
        """Run an empty forward, because a sharded model needs all ranks while others have more
        pieces.
        """
        zero = torch.zeros(1, dtype=torch.int64, device=self.cache.device)
        attention = PackedAttention(torch.tensor([0, 1], device=self.cache.device))
        self._decoder(zero, zero, attention, lambda hidden_TD, _: hidden_TD)


def to_message(passes: Sequence[Pass]) -> Tensor:
    """Encode passes as whole numbers [n] int64, for other ranks: for each pass its counts of copies
    and pieces and their descriptions, then all tokens.
    """
    numbers = [len(passes)]
    tokens = []
    for one in passes:
        numbers += [len(one.copies), len(one.pieces)]
        for copy in one.copies:
            numbers += copy
        for piece in one.pieces:
            ids = piece.token_ids
            numbers += [*piece.key, piece.slot, piece.begin, ids.numel(), piece.next_id]
            numbers += [int(piece.is_last), piece.prompt_size]
            tokens.append(ids)
    return torch.cat([torch.tensor(numbers, dtype=torch.int64), *tokens])


def from_message(words: Tensor) -> list[Pass]:
    """Decode what `to_message` encoded."""
    numbers = iter(words.tolist())
    plans = []
    for _ in range(next(numbers)):
        num_copies = next(numbers)
        num_pieces = next(numbers)
        copies = [(next(numbers), next(numbers), next(numbers)) for _ in range(num_copies)]
        sizes = [tuple(islice(numbers, _NUMBERS)) for _ in range(num_pieces)]
        plans.append((copies, sizes))
    left = words[words.numel() - len(list(numbers)) :]
    passes = []
    for copies, sizes in plans:
        pieces = []
        for ticket, index, slot, begin, size, next_id, is_last, prompt_size in sizes:
            piece = Piece(
                key=(ticket, index),
                slot=slot,
                begin=begin,
                token_ids=left[:size],
                next_id=next_id,
                is_last=bool(is_last),
                prompt_size=prompt_size,
            )
            pieces.append(piece)
            left = left[size:]
        passes.append(Pass(tuple(copies), tuple(pieces)))
    return passes


EVERY = 50  # steps from one search to the next
TRIAL = 3  # steps that each candidate is tried for; the first is not counted: others share it


class ChunkSearch:
    """Tries candidates for TRIAL steps each, then keeps the one with the fastest step until `every`
    steps have passed since the search began.

    ValueError without candidates, and for too few steps to try them all.
    """

    def __init__(self, candidates: Sequence[int], *, every: int = EVERY):
        self._candidates = sorted(set(candidates))
        if not self._candidates or self._candidates[0] < 1:
            raise ValueError(f"candidates {list(candidates)}: need whole numbers of at least 1")
        if every <= TRIAL * len(self._candidates):
            raise ValueError(
                f"every={every}: {len(self._candidates)} candidates are tried for {TRIAL} steps "
                f"each; need more than {TRIAL * len(self._candidates)}"
            )
        self._every = every
        self._best = self._candidates[0]
        self._num_steps = 0  # since the search began
        self._fastest: list[float] = []  # seconds, for each candidate that was tried

    @property
    def piece_tokens(self) -> int:
        """The size that the next step is to be made with."""
        trial = self._num_steps // TRIAL
        return self._candidates[trial] if trial < len(self._candidates) else self._best

    def step(self, seconds: float) -> None:
        """Note how long a step with the present piece_tokens has taken."""
        trial, number = divmod(self._num_steps, TRIAL)
        if trial < len(self._candidates):
            if number == 1:
                self._fastest.append(seconds)
            elif number > 1:
                self._fastest[trial] = min(self._fastest[trial], seconds)
        self._num_steps += 1
        if self._num_steps == TRIAL * len(self._candidates):
            fastest = min(range(len(self._fastest)), key=self._fastest.__getitem__)
            self._best = self._candidates[fastest]
        if self._num_steps >= self._every:
            self._num_steps = 0
            self._fastest = []

    def state_dict(self) -> dict:
        """Return JSON values for a checkpoint."""
        return {
            "candidates": self._candidates,
            "best": self._best,
            "num_steps": self._num_steps,
            "fastest": self._fastest,
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on from a checkpoint; a search among other candidates begins anew."""
        if list(state["candidates"]) != self._candidates:
            return
        self._best = state["best"]
        self._num_steps = state["num_steps"]
        self._fastest = list(state["fastest"])


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
        head: ScoreHead | LogprobHead,
        settings: StreamSettings,
        site: Site,
        *,
        call: str,
        about: str,
        last_is_label: bool = False,
    ):
        self.piece_tokens = settings.piece_tokens
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
