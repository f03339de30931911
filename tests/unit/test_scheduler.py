"""The scheduler alone, without torch: a machine of random requests runs its plans over slots that
hold names in place of keys and values, and compares each decision with a brute-force one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llamarl.inference.schedule import PrefillChunk, Room, Scheduler, Start

BLOCK = 16
WORTH_FLOPS = 2e8


@dataclass(eq=False)
class Request:
    """A prompt of num_tokens, whose samples end after so many new tokens each."""

    num_tokens: int
    lengths: list[int]
    max_new: int
    num_started: int = 0
    num_cached: int = 0
    end: int = field(init=False)

    def __post_init__(self):
        self.end = len(self.lengths)

    @property
    def max_tokens(self) -> int:
        return self.num_tokens + self.max_new

    def prompt(self, end: int | None = None) -> list[tuple]:
        """Names of the keys and values of its first tokens."""
        return [(self, place) for place in range(self.num_tokens if end is None else end)]


def blocks(length: int) -> int:
    return (length + BLOCK - 1) // BLOCK * BLOCK


@st.composite
def requests(draw, max_len: int) -> Request:
    """Short ones, and as often some of the full length: beside those few rows fit."""
    total = draw(st.sampled_from([max_len, max_len, 4]) | st.integers(2, max_len))
    new = draw(st.integers(1, total - 1))
    lengths = st.lists(st.just(new) | st.integers(1, new), min_size=1, max_size=4)
    return Request(num_tokens=total - new, lengths=draw(lengths), max_new=new)


class Machine(RuleBasedStateMachine):
    """An engine of names: `held` is the cache, `rows` what must run, `line` what must wait."""

    @initialize(
        max_slots=st.sampled_from([4, 6, 2, 1]),
        max_len=st.sampled_from([30, 64, 8]),
        rows_in_budget=st.sampled_from([3, 1.5, 10, 1]),
        chunk=st.sampled_from([10, 3, 100, 1]),
        is_fixed=st.sampled_from([False, False, True]),
        flops=st.sampled_from([1.0, 6e7, 3e8]),
    )
    def begin(self, max_slots, max_len, rows_in_budget, chunk, is_fixed, flops):
        self.max_slots = max_slots
        self.max_len = max_len
        self.chunk = chunk
        self.flops = flops
        self.budget = int(rows_in_budget * blocks(max_len))
        self.room = Room(
            max_slots=max_slots, max_len=max_len, budget=self.budget, is_fixed=is_fixed
        )
        self.waiting = deque()
        self.scheduler = Scheduler(
            self.waiting, self.room, max_slots=max_slots, prefill_chunk=chunk, flops_per_token=flops
        )
        self.held = {}  # slot -> names of its keys and values
        self.rows = []  # [request, index, tokens sampled] of each row
        self.line = deque()  # (request, index)
        self.finished = 0
        self.submitted = 0
        self.wasted = 0.0
        self.has_lent = False

    # --- What happens to it ---

    @rule(data=st.data())
    def submit(self, data):
        for request in data.draw(st.lists(requests(self.max_len), min_size=1, max_size=3)):
            self.waiting.append(request)
            self.line += [(request, index) for index in range(request.end)]
            self.submitted += request.end

    @rule(chunk=st.sampled_from([1, 1, 1, 2, 5, 30]))
    def step(self, chunk):
        self.run(chunks=True)
        for _ in range(1, chunk):
            if not self.rows:
                break
            ended = [row for row in range(len(self.rows)) if not self.is_live(row)]
            self.wasted += len(ended) * self.flops
            is_worth_it = len(ended) == len(self.rows) or self.wasted >= WORTH_FLOPS
            assert self.scheduler.waste(len(ended)) == is_worth_it
            if is_worth_it:
                self.retire(ended)
                self.run(chunks=False)
            else:
                self.decode(len(self.rows))
        self.retire([row for row in range(len(self.rows)) if not self.is_live(row)])

    @precondition(lambda self: self.line or self.rows)
    @rule(data=st.data())
    def abort(self, data):
        known = [request for request, *_ in [*self.line, *self.rows]]
        gone = known[data.draw(st.integers(0, len(known) - 1))]
        self.retire([row for row, (request, *_) in enumerate(self.rows) if request is gone])
        if gone in self.waiting:
            self.waiting.remove(gone)
        left = deque(sample for sample in self.line if sample[0] is not gone)
        self.finished += len(self.line) - len(left)
        self.line = left

    @rule(length=st.integers(1, 8))
    def lend(self, length):
        staged = self.scheduler.staged_chunks()
        slot = self.scheduler.lend_slot(length)
        assert slot >= len(self.rows) and slot not in {chunk.slot for chunk in staged}
        assert slot < self.room.rows and length <= self.room.capacity
        assert not self.room.is_fixed or slot == self.room.rows - 2
        self.held[slot] = []  # whoever scores writes there
        self.has_lent = True

    @rule(is_recomputed=st.booleans())
    def change_weights(self, is_recomputed):
        if is_recomputed:
            self.scheduler.unstage()
            assert not any(request.num_cached for request in self.waiting)
        chunks = self.scheduler.staged_chunks()
        cached = [request for request in self.waiting if request.num_cached]
        assert len(cached) == bool(chunks)
        for chunk in chunks:
            self.held[chunk.slot] = self.held[chunk.slot][: chunk.begin]
            self.extend(chunk)
        if chunks:
            assert self.held[chunks[0].slot] == cached[0].prompt(cached[0].num_cached)

    # --- What the engine does with a plan ---

    def is_live(self, row: int) -> bool:
        request, index, sampled = self.rows[row]
        return sampled < request.lengths[index]

    def run(self, chunks: bool) -> None:
        num_before = len(self.rows)
        head = self.waiting[0] if self.waiting else None
        cached_before = head.num_cached if head else 0
        plan = self.scheduler.schedule(chunks=chunks)
        self.wasted = 0.0
        assert plan.num_decoding == num_before
        assert not plan.chunks or chunks
        for chunk in plan.chunks:
            assert num_before <= chunk.slot < self.room.rows, "no row's slot"
            if self.room.is_fixed:
                # A graph computes more rows than run, and writes to the slots behind these.
                assert chunk.slot == self.room.rows - 1
            self.extend(chunk)
        self.decode(num_before)
        for number, start in enumerate(plan.starts):
            assert start.last_chunk is None or number == 0
            self.begin_rows(start)
        assert self.scheduler.running == [(request, index) for request, index, _ in self.rows]
        self.what_runs_fits()
        if self.line:
            self.check_who_waits(plan, head, cached_before, chunks)

    def check_who_waits(self, plan, head, cached_before, chunks) -> None:
        """Nobody waits who could run."""
        first, _ = self.line[0]
        is_long = first.num_tokens > self.chunk
        if self.fits(first) and (not is_long or chunks):
            assert is_long, "a short prompt that fits waits"
            is_another_staged = any(start.last_chunk for start in plan.starts)
            goes_on = first is head and first.num_cached > cached_before
            assert is_another_staged or goes_on or first.num_cached == self.chunk
            assert self.rows, "alone it would not wait for anybody"

    def fits(self, request: Request) -> bool:
        """Whether one more row fits, all as long as the longest may become."""
        num_rows = len(self.rows) + 1
        tokens = [request.max_tokens, *(row[0].max_tokens for row in self.rows)]
        places = blocks(self.max_len if self.room.is_fixed else max(tokens))
        return num_rows <= self.max_slots and (num_rows == 1 or num_rows * places <= self.budget)

    def extend(self, chunk: PrefillChunk) -> None:
        before = self.held.get(chunk.slot, [])[: chunk.begin]
        assert before == chunk.request.prompt(chunk.begin), "the chunks before it are there"
        assert chunk.begin < chunk.end <= min(chunk.request.num_tokens, chunk.begin + self.chunk)
        self.write(chunk.slot, chunk.request.prompt(chunk.end))

    def begin_rows(self, start: Start) -> None:
        request = start.request
        chunk = start.last_chunk
        if chunk is None:
            assert request.num_tokens <= self.chunk
        else:
            self.extend(chunk)
            assert chunk.end == request.num_tokens
        prompt = request.prompt() if chunk is None else list(self.held[chunk.slot])
        assert prompt == request.prompt(), "each place once, before anything is decoded"
        assert request.num_cached == 0 and len(start.sample_indices) > 0
        for index in start.sample_indices:
            assert self.line.popleft() == (request, index), "in the order of submission"
            self.write(len(self.rows), prompt)
            self.rows.append([request, index, 1])

    def decode(self, num_rows: int) -> None:
        """A token for each of the first rows that has not ended, behind all that its slot holds."""
        for row in range(num_rows):
            if self.is_live(row):
                request, index, sampled = self.rows[row]
                sequence = request.prompt() + [(request, index, i) for i in range(1, sampled)]
                assert self.held[row] == sequence, "its own keys and values, all of them"
                self.write(row, [*sequence, (request, index, sampled)])
                self.rows[row][2] += 1

    def write(self, slot: int, names: list) -> None:
        assert slot < self.room.rows and len(names) <= self.room.capacity
        self.held[slot] = names

    def retire(self, ended: list[int]) -> None:
        if not ended:
            return
        left = [sample for row, sample in enumerate(self.rows) if row not in ended]
        moves = self.scheduler.retire(ended)
        for source, target in moves:
            assert source not in ended and target in ended
            self.held[target] = self.held[source]
            self.rows[target] = self.rows[source]
        self.finished += len(ended)
        del self.rows[len(left) :]
        assert sorted(map(id, self.rows)) == sorted(map(id, left)), "all others, each once"
        assert len(moves) <= len(ended)

    # --- What is always so ---

    @invariant()
    def what_runs_fits(self):
        assert len(self.rows) <= min(self.max_slots, self.room.rows)
        longest = max((request.max_tokens for request, *_ in self.rows), default=0)
        assert longest <= self.room.capacity
        num_rows = len(self.rows)
        assert num_rows <= 1 or num_rows * blocks(longest) <= self.budget
        if not self.has_lent and not self.room.is_fixed:
            # One row more, for a long prompt that is copied to rows behind it.
            assert (self.room.rows - 1) * self.room.capacity <= self.budget
        assert self.finished + len(self.rows) + len(self.line) == self.submitted

    @invariant()
    def as_many_wait_as_must(self):
        waiting = []
        for request in self.waiting:
            waiting += [(request, i) for i in range(request.num_started, request.end)]
        assert waiting == list(self.line)

    def teardown(self):
        """All that was submitted ends, in so many steps at most."""
        if not hasattr(self, "line"):
            return
        works = [request.num_tokens + request.max_new for request, *_ in [*self.line, *self.rows]]
        for _ in range(sum(works)):
            if self.line or self.rows:
                self.step(chunk=1)
        assert self.finished == self.submitted and not self.rows and not self.waiting


Machine.TestCase.settings = settings(max_examples=80, stateful_step_count=25)
TestAnyRequestsInAnyOrder = Machine.TestCase


# --- By hand ---


def small(num_tokens: int, n: int, max_new: int = 4) -> Request:
    return Request(num_tokens=num_tokens, lengths=[max_new] * n, max_new=max_new)


def scheduler_of(*submitted: Request, **options) -> Scheduler:
    settings_of = {"max_slots": 4, "prefill_chunk": 10, "flops_per_token": 1e8} | options
    room = Room(max_slots=settings_of["max_slots"], max_len=64, budget=256)
    return Scheduler(deque(submitted), room, **settings_of)


def test_a_group_that_starts_together_is_one_start_and_its_prompt_one_prefill():
    first, second = small(5, 3), small(7, 2)
    plan = scheduler_of(first, second).schedule()
    assert plan.starts == [Start(first, range(3)), Start(second, range(1))]
    assert (plan.chunks, plan.num_decoding) == ([], 0)


def test_a_long_prompt_beside_a_row_comes_a_piece_a_step_and_then_its_last_chunk():
    short, long = small(5, 1), small(23, 2)
    scheduler = scheduler_of(short, long)
    plan = scheduler.schedule()
    # The short one starts, and the first chunk is computed beside it, in the slot behind it.
    assert (plan.starts, plan.chunks) == ([Start(short, range(1))], [PrefillChunk(long, 1, 0, 10)])
    assert scheduler.schedule(chunks=False).chunks == []
    plan = scheduler.schedule()
    assert (plan.starts, plan.chunks) == ([], [PrefillChunk(long, 1, 10, 20)])
    plan = scheduler.schedule()
    assert plan.starts == [Start(long, range(2), last_chunk=PrefillChunk(long, 1, 20, 23))]
    assert plan.num_decoding == 1


def test_a_long_prompt_alone_comes_at_once():
    long = small(23, 1)
    plan = scheduler_of(long).schedule()
    assert plan.chunks == [PrefillChunk(long, 0, 0, 10), PrefillChunk(long, 0, 10, 20)]
    assert plan.starts == [Start(long, range(1), last_chunk=PrefillChunk(long, 0, 20, 23))]


def test_a_room_grows_as_its_examples_say():
    room = Room(max_slots=8, max_len=1024, budget=4096)
    assert room.rows_of(100) == 4096 // 112 == 36
    sizes = []
    for rows, length in ((3, 100), (4, 300), (4, 310), (2, 5), (8, 500)):
        room.reserve(rows, length)
        sizes.append((room.rows, room.capacity))
    # 304 places are doubled for 310; 8 rows of 608 exceed 4096, so that they get 512 places each.
    assert sizes == [(3, 112), (4, 304), (4, 608), (4, 608), (8, 512)]
    narrow = Room(max_slots=2, max_len=90, budget=400)
    narrow.reserve(2, 60)
    narrow.reserve(2, 70)
    assert (narrow.rows, narrow.capacity) == (2, 96), "doubled up to max_len alone"
    with pytest.raises(IndexError, match="9 rows of 1025 tokens"):
        room.reserve(9, 1025)


@given(
    st.integers(1, 9),
    st.integers(1, 90),
    st.integers(0, 400),
    st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1)), max_size=8),
)
def test_a_room_has_what_was_reserved_last_and_no_more_than_it_may(slots, max_len, more, asked):
    room = Room(max_slots=slots, max_len=max_len, budget=blocks(max_len) + more)
    for rows, part in asked:
        length = 1 + int(part * (max_len - 1))
        rows = min(rows, room.rows_of(length))
        room.reserve(rows, length)
        assert room.rows >= rows and room.capacity >= length
        assert room.capacity % BLOCK == 0 and room.capacity <= room.max_len
        assert room.rows * room.capacity <= room.budget


def test_a_fixed_room_has_two_rows_more_from_the_start():
    room = Room(max_slots=8, max_len=60, budget=200, is_fixed=True)
    assert (room.rows, room.capacity) == (200 // 64 + 2, 64)
    room.reserve(5, 64)
    with pytest.raises(IndexError, match="6 rows of 10 tokens in a cache of 5 rows of at most 64"):
        room.reserve(6, 10)
