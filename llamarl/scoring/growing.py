"""Plans which tokens a model reads next of sequences that are still being sampled.

    growing = GrowingSequences(piece_tokens=64, slots=32, max_len=1024)
    growing.extend((7, 0), prompt_ids, 0, token_ids)   # a hint: the first tokens of a completion
    growing.finish((7, 0), prompt_ids, token_ids)      # the whole completion: the truth
    reading = growing.next_pass(most_tokens=8192)      # pieces, to be read at once

A sequence is a prompt and one of its completions. It is read in pieces of exactly piece_tokens,
which lie at multiples of that from its start; the last piece is the rest. A piece is read ahead
once a token behind it is known, so the last piece is never read before the sequence is whole. So
equal sequences are read in equal pieces, whenever their tokens came, and also if what was read has
been dropped in the meantime.

Hints may come twice, late, with gaps or never. Their tokens count until the sequence is whole, and
tokens that no hint brought are read then.

This class computes nothing: llamarl.scoring.ahead reads what it plans, into one cache. If several
ranks have a cache, each cache has an object of this class, and all objects are on the first rank.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

Key = tuple[int, int]  # ticket and sample_index

# Remember this many finished sequences, so that a late stretch does not restart one.
_REMEMBERED = 4096
# Unfinished sequences that are remembered, for each slot. Those without a slot wait for one.
_KNOWN_A_SLOT = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens that are read of one sequence at a time."""

    key: Key
    slot: int
    begin: int  # how many tokens of the sequence the slot holds before it
    token_ids: Tensor  # [n] int64, n >= 1
    next_id: int  # the token behind it; -1 if the sequence ends here
    is_last: bool  # whether it is the sequence's last piece
    prompt_size: int  # tokens of the sequence's prompt


@dataclass(frozen=True, slots=True)
class Pass:
    """The pieces that are read at once, in order. Copies come first."""

    copies: tuple[tuple[int, int, int], ...] = ()  # (from slot, to slot, tokens)
    pieces: tuple[Piece, ...] = ()

    @property
    def num_tokens(self) -> int:
        """The tokens of all pieces."""
        return sum(piece.token_ids.numel() for piece in self.pieces)

    @property
    def ends(self) -> bool:
        """Whether it reads a sequence to its end."""
        return any(piece.is_last for piece in self.pieces)


@dataclass(slots=True, eq=False)
class _Sequence:
    """The known tokens of a sequence, and how far they were read."""

    key: Key
    chunk: int
    prompt_size: int
    tokens: Tensor  # [P + L] int64, as far as known
    touched: int  # when it last grew
    read: int = 0  # tokens whose K/V its slot holds; a multiple of the chunk
    slot: int | None = None
    has_ended: bool = False  # no more hints come
    is_whole: bool = False


@dataclass(slots=True)
class _Plan:
    """A pass that is being planned."""

    room: int  # tokens
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    reading: set[int] = field(default_factory=set)  # tickets whose prompts this pass reads
    # For each sequence of this pass, how many tokens its slot held before.
    held: dict[Key, int] = field(default_factory=dict)


class GrowingSequences:
    """The sequences of one cache, which has `slots` rows of at most max_len tokens.

    piece_tokens: tokens of a piece; a change applies to sequences that begin later. last_is_label:
    the last token of a sequence is predicted and never read, as logprobs need it.

    When all slots are taken, a whole sequence takes the slot of the unfinished one of which the
    least was read; that one is read again later. Unfinished sequences take no slots from others:
    they wait.
    """

    def __init__(self, *, piece_tokens: int, slots: int, max_len: int, last_is_label: bool = False):
        if piece_tokens < 1 or slots < 1 or max_len < 1:
            raise ValueError(
                f"piece_tokens={piece_tokens}, slots={slots}, max_len={max_len}: need at least 1"
            )
        self.piece_tokens = piece_tokens
        self.max_len = max_len
        self.num_evictions = 0
        self._label = int(last_is_label)  # tokens at the end that are not read
        self._sequences: dict[Key, _Sequence] = {}  # in the order of their beginnings
        self._done: dict[Key, None] = {}  # the newest last
        self._free = list(reversed(range(slots)))
        self._most_known = slots * _KNOWN_A_SLOT
        self._clock = itertools.count()

    @property
    def pending(self) -> int:
        """How many whole sequences are not yet read to their ends."""
        return sum(sequence.is_whole for sequence in self._sequences.values())

    @property
    def num_known(self) -> int:
        """How many sequences it knows, whole or not."""
        return len(self._sequences)

    def known(self, key: Key) -> Tensor | None:
        """Return the known tokens [n] of a completion; None if it was not begun, or is done or
        forgotten.
        """
        sequence = self._sequences.get(key)
        return None if sequence is None else sequence.tokens[sequence.prompt_size :]

    def num_read(self, key: Key) -> int:
        """Return how many tokens of an unfinished completion were read, or predicted if the last
        one is a label.
        """
        sequence = self._sequences.get(key)
        if sequence is None:
            return 0
        return max(0, sequence.read + self._label - sequence.prompt_size)

    # --- Taking in tokens ---

    def extend(
        self,
        key: Key,
        prompt_ids: Tensor,
        begin: int,
        token_ids: Tensor,
        *,
        has_ended: bool = False,
    ) -> None:
        """Take a hint: tokens [n] of a completion after its first `begin`. has_ended: they are its
        last.

        A hint that cannot be used, such as one behind a gap, is ignored, because `finish` brings
        its tokens again.
        """
        sequence = self._sequences.get(key)
        if sequence is None:
            # Once it has ended, the completion itself is on its way, or has come already.
            if begin or has_ended or key in self._done:
                return
            self._make_room()
            sequence = self._begin(key, prompt_ids)
        if sequence.is_whole:
            return
        place = sequence.prompt_size + begin
        known = sequence.tokens.numel()
        end = min(place + token_ids.numel(), self.max_len)
        if place > known:
            return
        new = token_ids[: max(0, end - place)]
        same = _common(sequence.tokens[place:], new)
        if place + same < min(known, end):
            self._cut(sequence, place + same)  # it is being sampled again, with other tokens
        if end > sequence.tokens.numel():
            sequence.tokens = torch.cat([sequence.tokens[: place + same], new[same:]])
        sequence.has_ended |= has_ended
        sequence.touched = next(self._clock)

    def finish(self, key: Key, prompt_ids: Tensor, token_ids: Tensor) -> int:
        """Take the whole completion, [P] and [L]. A later pass has its last piece. Return how many
        of its L tokens were read already, or predicted if the last one is a label.

        ValueError for a sequence that is longer than max_len, has nothing to read, or was whole
        already.
        """
        whole = torch.cat([prompt_ids, token_ids])
        inputs = whole.numel() - self._label
        if inputs < 1 or whole.numel() > self.max_len:
            raise ValueError(
                f"ticket {key[0]}, sample {key[1]}: a sequence of {whole.numel()} tokens; "
                f"need {1 + self._label} to {self.max_len}"
            )
        sequence = self._sequences.get(key) or self._begin(key, prompt_ids)
        if sequence.is_whole:
            raise ValueError(f"ticket {key[0]}, sample {key[1]} came twice")
        self._cut(sequence, _common(sequence.tokens, whole))
        sequence.tokens = whole
        sequence.prompt_size = prompt_ids.numel()
        sequence.is_whole = True
        sequence.read = min(sequence.read, _pieces_within(inputs - 1, sequence.chunk))
        return self.num_read(key)

    def forget(self, key: Key) -> None:
        """Forget a sequence, because nothing of it is wanted."""
        if key in self._sequences:
            self._drop_slot(self._sequences.pop(key))
        self._done[key] = None
        if len(self._done) > _REMEMBERED:
            del self._done[next(iter(self._done))]

    def clear(self) -> None:
        """Forget all."""
        for key in list(self._sequences):
            self.forget(key)

    # --- Planning a pass ---

    def next_pass(self, most_tokens: int) -> Pass:
        """Plan what is read next, at most so many tokens (or one piece). Whole sequences come
        first; the others are read only if there is none. Empty if there is nothing to read.

        The plan counts as read. A sequence is forgotten with its last piece.
        """
        plan = _Plan(room=most_tokens)
        for sequence in self._in_order():
            if plan.room <= 0:
                break
            if not self._size_behind(sequence, sequence.read) or not self._has_slot(sequence):
                continue
            if sequence.read or self._share(sequence, plan):
                self._read(sequence, plan)
        # Only now, because no slot may change hands within a pass.
        for piece in plan.pieces:
            if piece.is_last:
                self.forget(piece.key)
        return Pass(tuple(plan.copies), tuple(plan.pieces))

    def _in_order(self) -> list[_Sequence]:
        """Return the whole sequences; if there is none, the others, and those whose completions
        must come soon first.
        """
        known = list(self._sequences.values())
        whole = [sequence for sequence in known if sequence.is_whole]
        return whole or sorted(known, key=lambda sequence: not sequence.has_ended)

    def _size_behind(self, sequence: _Sequence, read: int) -> int:
        """Return the tokens of the piece that may be read behind so many; 0 if there is none."""
        left = sequence.tokens.numel() - self._label - read
        if sequence.is_whole:
            return min(left, sequence.chunk)
        return sequence.chunk if left > sequence.chunk else 0

    def _has_slot(self, sequence: _Sequence) -> bool:
        """Whether it has a slot. If it has none, try to give it one."""
        if sequence.slot is None and not self._free and sequence.is_whole:
            self._evict()
        if sequence.slot is None and self._free:
            sequence.slot = self._free.pop()
        return sequence.slot is not None

    def _evict(self) -> None:
        """Take the slot of the unfinished sequence of which the least was read."""
        held = [s for s in self._sequences.values() if s.slot is not None and not s.is_whole]
        if held:
            self._drop_slot(min(held, key=lambda sequence: sequence.read))
            self.num_evictions += 1

    def _share(self, sequence: _Sequence, plan: _Plan) -> bool:
        """Plan to copy the pieces within the prompt from another sample of the ticket. False if
        another sample reads them in this pass.
        """
        ticket, _ = sequence.key
        shared = self._shared_size(sequence)
        if not shared:
            return True
        if ticket in plan.reading:
            return False
        for other in self._sequences.values():
            is_alike = other.key[0] == ticket and other.chunk == sequence.chunk
            if not is_alike or not other.read:
                continue
            if plan.held.get(other.key, other.read) >= shared:
                if not self._size_behind(sequence, shared):
                    return False  # a copy is of no use if no piece follows it
                assert other.slot is not None and sequence.slot is not None, "both are read"
                plan.copies.append((other.slot, sequence.slot, shared))
                sequence.read = shared
                return True
            if not sequence.is_whole:
                return False
        return True

    def _shared_size(self, sequence: _Sequence) -> int:
        """Return the tokens of the pieces that all samples of its ticket share, but never all its
        tokens.
        """
        size = sequence.prompt_size - self._label
        if sequence.is_whole:
            size = min(size, sequence.tokens.numel() - self._label - 1)
        return _pieces_within(size, sequence.chunk)

    def _read(self, sequence: _Sequence, plan: _Plan) -> None:
        """Plan as many pieces of a sequence as may be read and fit into the pass."""
        if sequence.read < self._shared_size(sequence):
            plan.reading.add(sequence.key[0])
        plan.held[sequence.key] = sequence.read
        while size := self._size_behind(sequence, sequence.read):
            if plan.pieces and size > plan.room:
                plan.room = 0
                return
            end = sequence.read + size
            is_behind = end < sequence.tokens.numel()
            assert sequence.slot is not None, "what is read has a slot"
            is_last = sequence.is_whole and end == sequence.tokens.numel() - self._label
            piece = Piece(
                key=sequence.key,
                slot=sequence.slot,
                begin=sequence.read,
                token_ids=sequence.tokens[sequence.read : end],
                next_id=int(sequence.tokens[end]) if is_behind else -1,
                is_last=is_last,
                prompt_size=sequence.prompt_size,
            )
            plan.pieces.append(piece)
            plan.room -= size
            sequence.read = end

    # --- Remembering sequences ---

    def _begin(self, key: Key, prompt_ids: Tensor) -> _Sequence:
        sequence = _Sequence(
            key=key,
            chunk=self.piece_tokens,
            prompt_size=prompt_ids.numel(),
            tokens=prompt_ids[: self.max_len],
            touched=next(self._clock),
        )
        self._sequences[key] = sequence
        return sequence

    def _make_room(self) -> None:
        """Forget the unfinished sequence that has not grown for longest, if there are many, because
        its completion may never come.
        """
        unfinished = [s for s in self._sequences.values() if not s.is_whole]
        if len(unfinished) >= self._most_known:
            stalest = min(unfinished, key=lambda sequence: sequence.touched)
            self._drop_slot(self._sequences.pop(stalest.key))

    def _cut(self, sequence: _Sequence, size: int) -> None:
        """Cut a sequence to its first `size` tokens."""
        sequence.tokens = sequence.tokens[:size]
        held = _pieces_within(size - self._label, sequence.chunk)
        sequence.read = min(sequence.read, held)

    def _drop_slot(self, sequence: _Sequence) -> None:
        """Free the slot of a sequence, if it has one."""
        if sequence.slot is not None:
            self._free.append(sequence.slot)
        sequence.slot = None
        sequence.read = 0


def _pieces_within(size: int, chunk: int) -> int:
    """Return the tokens of the whole pieces within the first `size`."""
    return max(0, size) // chunk * chunk


def _common(a: Tensor, b: Tensor) -> int:
    """Return how many tokens two sequences, [n] and [m], have in common from their start."""
    shorter = min(a.numel(), b.numel())
    unequal = (a[:shorter] != b[:shorter]).nonzero()
    return int(unequal[0]) if unequal.numel() else shorter
