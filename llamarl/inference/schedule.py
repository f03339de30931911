"""Which samples run, which wait and what room they get, decided before anything is computed.

    waiting = deque()
    room = Room(max_slots=8, max_len=1024, budget=4096)
    scheduler = Scheduler(waiting, room, max_slots=8, prefill_chunk=512, flops_per_token=1e9)

    waiting.append(request)              # a prompt of 20 tokens, 3 samples
    turn = scheduler.schedule()          # Turn(starts=[Start(request, range(0, 3))]): rows 0, 1, 2
    ...                                  # the engine prefills it, then samples a token a row
    moves = scheduler.retire([0])        # row 0 has ended: [RowMove(source=2, target=0)]

Samples start in the order in which they were submitted. One starts when as many rows as then run,
each as long as the longest may become, fit into the room's budget and into the slots; until then it
waits, and all behind it. Rows are dense: those that run are 0..n-1, and row i has slot i of the
cache.

A prompt of more than prefill_chunk tokens is prefilled in chunks, one a step, so that the rows that
run go on meanwhile. Its chunks lie in a staging slot until the last one; then they are copied to
the rows of its samples. There is one staging slot: a second long prompt waits for it.

This file computes nothing and imports no torch: requests are counts of tokens and samples here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

# Places are read in whole blocks: the CPU's softmax and products are slow on a ragged tail.
_BLOCK = 16


class Room:
    """The size of a cache of at most max_slots rows of at most max_len tokens, `budget` places in
    all.

    By default it grows with what is asked of it. is_fixed: it has its full size from the start, and
    two rows more: the last two are for `score` and for the prompt that is prefilled in chunks.
    """

    def __init__(self, *, max_slots: int, max_len: int, budget: int, is_fixed: bool = False):
        self.max_len = whole_blocks(max_len)
        self.budget = budget
        self.is_fixed = is_fixed
        self.rows = 0
        self.capacity = _BLOCK  # places of a row
        if is_fixed:
            affordable = self.rows_of(max_len)
            self.rows = min(max_slots, affordable) + 2
            self.capacity = self.max_len

    def rows_of(self, length: int) -> int:
        """Return how many rows of `length` tokens the budget holds: one in any case."""
        places = self.max_len if self.is_fixed else whole_blocks(length)
        return max(1, self.budget // places)

    def reserve(self, rows: int, length: int) -> None:
        """Grow, where that is needed, so that the first `rows` rows have `length` places each.

        IndexError for a length beyond max_len, and for more than a fixed size has.
        """
        if rows <= self.rows and length <= self.capacity:
            return
        if self.is_fixed or length > self.max_len:
            held = f"{self.rows} rows of at most {self.max_len}"
            raise IndexError(f"{rows} rows of {length} tokens in a cache of {held}")
        needed = whole_blocks(length)
        if length > self.capacity:
            # Doubling, so that a row that grows token by token is seldom copied.
            doubled = max(needed, 2 * self.capacity)
            self.capacity = min(doubled, self.max_len)
        if rows * self.capacity > self.budget:
            self.capacity = needed
        # Rows behind the reserved ones stay where the budget allows: longer rows may mean fewer.
        affordable = self.budget // self.capacity
        keepable = min(self.rows, affordable)
        self.rows = max(rows, keepable)


def whole_blocks(length: int) -> int:
    """Return the places that a row of so many tokens takes."""
    blocks = -(-length // _BLOCK)
    return blocks * _BLOCK


# Rows that have ended are taken out in the middle of a step once so many operations were done for
# them in vain: about what that costs.
_WORTH_FLOPS = 2e8


class Schedulable(Protocol):
    """What the scheduler knows of a request: how many tokens and samples it has. It writes
    num_started and num_cached alone.
    """

    end: int  # samples num_started..end-1 wait
    num_started: int
    num_cached: int  # tokens of a long prompt that wait in the staging slot

    @property
    def num_tokens(self) -> int:
        """How many tokens are prefilled before its samples start."""

    @property
    def max_tokens(self) -> int:
        """The most tokens that one of its rows may come to."""


R = TypeVar("R", bound=Schedulable)


class Sample(NamedTuple, Generic[R]):
    """One sample of a request."""

    request: R
    sample_index: int


@dataclass(frozen=True, slots=True)
class PrefillChunk(Generic[R]):
    """Tokens begin..end-1 of a long prompt, prefilled into a slot that holds those before them."""

    request: R
    slot: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Start(Generic[R]):
    """Samples of one request that become rows together, so that their prompt is prefilled once."""

    request: R
    sample_indices: range
    # The last chunk of a prompt in chunks; the whole prompt lies in the staging slot behind it.
    last_chunk: PrefillChunk[R] | None = None


@dataclass(frozen=True, slots=True)
class Turn(Generic[R]):
    """What is computed next, in this order: the chunks, then a token for each row.

    num_decoding: rows 0..num_decoding-1 ran before. starts: their samples are the rows behind, in
    this order. Only the first of them can have a last chunk.
    """

    chunks: list[PrefillChunk[R]]
    num_decoding: int
    starts: list[Start[R]]


class RowMove(NamedTuple):
    """A row that is copied into the place of one that has ended."""

    source: int
    target: int


class Scheduler(Generic[R]):
    """Gives slots and room to waiting samples, and takes them back.

    waiting: requests in the order in which they came; whoever submits or aborts one changes it.
    room: of the cache. The cache follows it before anything of a turn is computed.
    flops_per_token: operations for one token of a row, to weigh what ended rows cost.
    """

    def __init__(
        self,
        waiting: deque[R],
        room: Room,
        *,
        max_slots: int,
        prefill_chunk: int,
        flops_per_token: float,
    ):
        self.running: list[Sample[R]] = []  # row -> its sample
        self.prefill_chunk = prefill_chunk
        self._waiting = waiting
        self._room = room
        self._max_slots = max_slots
        self._flops_per_token = flops_per_token
        self._wasted_flops = 0.0  # since samples were last given rows
        self._staging_slot = 0  # where the prompt of `_staged` is

    def schedule(self, *, chunks: bool = True) -> Turn[R]:
        """Give rows to waiting samples, in order, and reserve the room for all that run then.

        chunks: also go on with a prompt that is prefilled in chunks.
        """
        self._wasted_flops = 0.0
        num_decoding = len(self.running)
        longest = max((sample.request.max_tokens for sample in self.running), default=0)
        ahead: list[PrefillChunk[R]] = []
        starts: list[Start[R]] = []
        last_chunk = None
        while self._waiting:
            request = self._waiting[0]
            longest = max(longest, request.max_tokens)
            most = min(self._max_slots, self._room.rows_of(longest))
            num_free = most - len(self.running)
            if num_free < 1:
                break
            is_long = request.num_tokens > self.prefill_chunk
            if is_long and (last_chunk is not None or not chunks):
                break  # the staging slot is another's until this turn has run
            if is_long:
                ahead = self._next_chunks(request)
                if ahead and self.running:
                    break  # the rows that run go on before its next chunk
                last_chunk = self._chunk(request, request.num_cached)
            start = Start(
                request=request,
                sample_indices=self._give_rows(request, num_free),
                last_chunk=last_chunk if is_long else None,
            )
            starts.append(start)
        num_slots = self._num_held
        if last_chunk is not None:
            # Its prompt is in the staging slot until it is copied to the new rows.
            num_slots = max(num_slots, last_chunk.slot + 1)
        self._reserve(num_slots)
        if last_chunk is not None:
            last_chunk.request.num_cached = 0
        return Turn(chunks=ahead, num_decoding=num_decoding, starts=starts)

    def waste(self, num_ended: int) -> bool:
        """Count a turn that is computed for so many rows that have ended. Return whether to take
        them out before it.
        """
        self._wasted_flops += num_ended * self._flops_per_token
        return num_ended == len(self.running) or self._wasted_flops >= _WORTH_FLOPS

    def retire(self, ended: Sequence[int]) -> list[RowMove]:
        """Take out these rows, in ascending order. Return how the last rows move into the holes, so
        that rows stay dense.
        """
        num_rows = len(self.running)
        num_left = num_rows - len(ended)
        holes = [row for row in ended if row < num_left]
        movers = sorted(set(range(num_left, num_rows)) - set(ended))
        moves = [RowMove(source, target) for source, target in zip(movers, holes)]
        for move in moves:
            self.running[move.target] = self.running[move.source]
        del self.running[num_left:]
        return moves

    def staged_chunks(self) -> list[PrefillChunk[R]]:
        """Return the chunks that are in the staging slot, for new weights to compute again."""
        staged = self._staged
        if staged is None:
            return []
        begins = range(0, staged.num_cached, self.prefill_chunk)
        return [self._chunk(staged, begin) for begin in begins]

    def unstage(self) -> None:
        """Drop the chunks that are in the staging slot: their prompt begins again."""
        staged = self._staged
        if staged is not None:
            staged.num_cached = 0

    def lend_slot(self, length: int) -> int:
        """Reserve and return a slot of `length` places that nobody has. It is free again with the
        next call.
        """
        slot = self._room.rows - 2 if self._room.is_fixed else self._num_held
        self._reserve(slot + 1, length)
        return slot

    @property
    def _staged(self) -> R | None:
        """The request whose prompt is staged. It stays the first that waits: those behind it start
        after it.
        """
        if self._waiting and self._waiting[0].num_cached:
            return self._waiting[0]
        return None

    @property
    def _num_held(self) -> int:
        """Slots, from the first on, that rows and the staged prompt have."""
        num_staging = 0 if self._staged is None else self._staging_slot + 1
        return max(len(self.running), num_staging)

    def _chunk(self, request: R, begin: int) -> PrefillChunk[R]:
        """Return the chunk of a long prompt that begins there."""
        end = min(begin + self.prefill_chunk, request.num_tokens)
        return PrefillChunk(request=request, slot=self._staging_slot, begin=begin, end=end)

    def _next_chunks(self, request: R) -> list[PrefillChunk[R]]:
        """Stage the next chunk of a long prompt, but not its last: that comes with its samples. If
        no row runs that would have to wait, stage all but the last.
        """
        chunks: list[PrefillChunk[R]] = []
        while request.num_tokens - request.num_cached > self.prefill_chunk:
            if not request.num_cached:
                is_fixed = self._room.is_fixed
                self._staging_slot = self._room.rows - 1 if is_fixed else len(self.running)
                self._reserve(self._staging_slot + 1, request.max_tokens)
            chunks.append(self._chunk(request, request.num_cached))
            request.num_cached += self.prefill_chunk
            if self.running:
                break
        return chunks

    def _give_rows(self, request: R, num_free: int) -> range:
        """Make rows of the first request's next samples, as many as are free. Return which those
        are.
        """
        begin = request.num_started
        request.num_started = min(request.end, begin + num_free)
        sample_indices = range(begin, request.num_started)
        self.running += [Sample(request, index) for index in sample_indices]
        if request.num_started == request.end:
            self._waiting.popleft()
        return sample_indices

    def _reserve(self, num_slots: int, length: int = 0) -> None:
        """Reserve so many slots, each for the longest of `length` and of what rows and the staged
        prompt may come to. These lose nothing.
        """
        lengths = [sample.request.max_tokens for sample in self.running]
        if self._staged is not None:
            lengths.append(self._staged.max_tokens)
        self._room.reserve(num_slots, max([length, *lengths]))
