"""StreamingReference: a FrozenReference that reads completions while these are sampled, so that
their logprobs are there when they end.

    stretches --> StreamedLogprobs --a pass--> PieceReader, on all ranks --logprobs--> kept
    groups    --> what is kept, and what is left is read --> on to the trainer

A stretch only says earlier what may be read: what a group gets is of its own tokens. The first rank
plans for all: it has an object of StreamedLogprobs for the cache of each data-parallel rank, and a
ticket's completions all meet the same one.

    loop step    consumes              waits for              unblocked by
    first rank   stretches             -                      the generator
                 a few groups          groups                 the reward
                 a pass of both        the others' share      the others
    another      the first's commands  -                      the first rank

Completions are read in pieces of chunk_tokens, so that a group's logprobs have the same bits
whatever was heard of it before, and are those of a FrozenReference within rounding.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from executors.generator import REFERENCE_STRETCHES
from executors.reference import FrozenReference, newest_version
from executors.streaming import MOST_STRETCHES, StreamSettings
from llamarl.inference.growing import GrowingSequences, Key, Pass, Piece
from llamarl.inference.pieces import LogprobHead, PieceReader, from_words, to_words
from llamarl.learning.asking import broadcast
from llamarl.tickets.prompts import PromptStream
from llamarl.types import Group, Stretch

# Completions that were read to their ends and whose groups have not come, for each slot of a cache:
# of more, the oldest are forgotten and read anew.
_KEPT_A_SLOT = 16


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A group that was taken and not sent."""

    group: Group
    keys: tuple[Key, ...]  # of its completions that have tokens
    came: float  # seconds


@dataclass(kw_only=True, eq=False, repr=False)
class StreamingReference(FrozenReference):
    """A FrozenReference with a cache on each rank.

    consumes  "reference_stretches" too: what completions have grown by
    prompts   prompts[ticket] is the ticket's prompt
    """

    prompts: PromptStream
    stream: StreamSettings

    def __post_init__(self):
        self._streams: list[StreamedLogprobs] = []  # on the first rank: of each data-parallel rank
        self._waiting: deque[_Waiting] = deque()
        self._evictions = 0

    def setup(self) -> None:
        """Load the model, and lay out its cache."""
        super().setup()
        self._commands["read"] = self._read_told
        self._reader = PieceReader(
            self.decoder,
            LogprobHead(self.temperature),
            slots=self.stream.slots,
            max_len=self.stream.longest,
            group=self.group,
            one_by_one=self.reproducible,
        )
        if self.follows:
            return
        self._streams += [StreamedLogprobs(self.stream) for _ in range(self.group.data_size)]

    def _lead(self) -> bool:
        """Take stretches and groups, read a pass, and send the groups that are complete. True if
        there was anything to read or to send.
        """
        for stretch in self.inputs[REFERENCE_STRETCHES].take(MOST_STRETCHES):
            prompt_ids = self.prompts[stretch.ticket].prompt_ids
            self._stream_of(stretch.ticket).extend(stretch, prompt_ids)
        self._take_groups()
        has_read = self._read_next()
        has_sent = self._send()
        return has_read or has_sent

    def _take_groups(self) -> None:
        """Have the completions of some groups read to their ends."""
        room = self.groups_per_batch * self.group.data_size - len(self._waiting)
        if room <= 0 or not self._sink.has_room():
            return
        for group in self._source.take(room):
            self.note_version(newest_version(group))
            stream = self._stream_of(group.ticket)
            keys = []
            early = 0
            for index, token_ids in enumerate(group.token_ids.split(group.lengths.tolist())):
                if not token_ids.numel():
                    continue
                key = (group.ticket, index)
                early += stream.want(key, group.prompt_ids, token_ids)
                keys.append(key)
            if keys:
                share = early / group.token_ids.numel()
                self.metrics.add_mean("reference/prefilled_early", share)
            self._waiting.append(_Waiting(group, tuple(keys), time.monotonic()))

    def _read_next(self) -> bool:
        """With all ranks: read a pass, of whole completions or else of what may be read ahead."""
        passes = [stream.next_pass(self.microbatch_tokens) for stream in self._streams]
        if not any(one.pieces for one in passes):
            return False
        values = iter(self._read(passes))
        for stream, one in zip(self._streams, passes):
            for piece in one.pieces:
                stream.note(piece, next(values))
        evictions = sum(stream.num_evictions for stream in self._streams)
        self.metrics.add_sum("reference/evictions", evictions - self._evictions)
        self._evictions = evictions
        return True

    def _read(self, passes: Sequence[Pass]) -> list[Tensor]:
        began = time.monotonic()
        words = to_words(passes)
        self._lockstep.tell("read", size=words.numel(), step=self.step_at)
        self.claim_device()
        broadcast(words, self.group)
        values = self._reader.run(passes)
        what = "read to the end" if any(one.ends for one in passes) else "read ahead"
        self.metrics.span(self.name, what, began, time.monotonic())
        return values

    def _read_told(self, size: int, step: int) -> None:
        """Take part in `_read`."""
        self.note_version(step)
        self.claim_device()
        words = torch.empty(size, dtype=torch.int64)
        broadcast(words, self.group)
        self._reader.run(from_words(words))

    def _send(self) -> bool:
        """Send the groups that are complete, in the order in which they came, while there is room.
        True if any was.
        """
        has_sent = False
        while self._waiting and self._sink.has_room():
            first = self._waiting[0]
            stream = self._stream_of(first.group.ticket)
            if not all(stream.has(key) for key in first.keys):
                break
            self._waiting.popleft()
            logprobs = torch.cat([torch.zeros(0), *map(stream.take, first.keys)])
            self.check_finite(first.group, logprobs)
            scored = replace(first.group, ref_logprobs=logprobs, ref_version=self.version)
            self._sink.put(scored)
            self.metrics.add_mean("reference/tail_s", time.monotonic() - first.came)
            has_sent = True
        return has_sent

    def offloadable(self) -> list[Tensor]:
        """The tensors that may leave the device while others use it."""
        return [*super().offloadable(), *self._reader.cache.layers]

    def _stream_of(self, ticket: int) -> StreamedLogprobs:
        """A ticket's completions share their prompt, and so a cache."""
        return self._streams[ticket % len(self._streams)]


class StreamedLogprobs:
    """The completions of one cache: what is read of each, and the logprobs that came of it.

    A completion is read to its end once a stretch says that it has ended, or its group has come.
    """

    def __init__(self, settings: StreamSettings):
        self._growing = GrowingSequences(
            chunk_tokens=settings.chunk_tokens,
            slots=settings.slots,
            max_len=settings.longest,
            last_is_label=True,
        )
        self._most_kept = settings.slots * _KEPT_A_SLOT
        # Of what is being read the logprobs of each piece, by where in the sequence it begins.
        self._parts: dict[Key, dict[int, Tensor]] = {}
        self._whole: dict[Key, Tensor] = {}  # tokens [L] of what is being read to its end
        self._wanted: set[Key] = set()  # by groups that have come
        # Tokens and logprobs, [L] each, of what was read to its end: the newest last.
        self._read: dict[Key, tuple[Tensor, Tensor]] = {}

    @property
    def num_evictions(self) -> int:
        return self._growing.num_evictions

    @property
    def num_held(self) -> int:
        """Completions of which it holds anything."""
        return len(self._parts.keys() | self._whole.keys() | self._read.keys())

    def extend(self, stretch: Stretch, prompt_ids: Tensor) -> None:
        """Take note of what a completion has grown by, and whether it has ended."""
        key = (stretch.ticket, stretch.sample_index)
        if key in self._whole or key in self._read:
            return
        begin = stretch.begin
        new = stretch.token_ids
        self._growing.extend(key, prompt_ids, begin, new, has_ended=stretch.has_ended)
        token_ids = self._growing.known(key)
        size = 0 if token_ids is None else token_ids.numel()
        if stretch.has_ended and 0 < size == begin + new.numel():
            self._finish(key, prompt_ids, token_ids)
        if len(self._parts) > self._growing.num_known:
            # Of sequences that it has not heard of for long, and so has forgotten.
            self._parts = {
                key: parts
                for key, parts in self._parts.items()
                if self._growing.known(key) is not None
            }

    def want(self, key: Key, prompt_ids: Tensor, token_ids: Tensor) -> int:
        """Have the completion [L] of a group read to its end, if it is not, until `take`. Returns
        of how many of its L >= 1 tokens the logprobs are there already.
        """
        self._wanted.add(key)
        if key in self._read:
            of_these, _ = self._read[key]
            if torch.equal(of_these, token_ids):
                return token_ids.numel()
            del self._read[key]  # it was sampled anew, and otherwise
        if key in self._whole and not torch.equal(self._whole[key], token_ids):
            self._growing.forget(key)
            del self._whole[key]
        if key not in self._whole:
            self._finish(key, prompt_ids, token_ids)
        return self._growing.num_read(key)

    def next_pass(self, most_tokens: int) -> Pass:
        """What is read next, to be told with `note`."""
        return self._growing.next_pass(most_tokens)

    def note(self, piece: Piece, logprobs: Tensor) -> None:
        """Keep what a piece gave."""
        parts = self._parts.setdefault(piece.key, {})
        parts[piece.begin] = logprobs
        if not piece.is_last:
            return
        del self._parts[piece.key]
        # What lies behind is of tokens that were then sampled anew.
        begins = sorted(begin for begin in parts if begin <= piece.begin)
        token_ids = self._whole.pop(piece.key)
        found = torch.cat([parts[begin] for begin in begins])
        assert found.numel() == token_ids.numel(), (piece.key, begins)
        self._read[piece.key] = (token_ids, found)
        self._forget_oldest()

    def has(self, key: Key) -> bool:
        """Whether a wanted completion was read to its end."""
        return key in self._read

    def take(self, key: Key) -> Tensor:
        """The logprobs [L] of a wanted completion that was, float32, nats; it is forgotten."""
        self._wanted.remove(key)
        _, logprobs = self._read.pop(key)
        return logprobs

    def _finish(self, key: Key, prompt_ids: Tensor, token_ids: Tensor) -> None:
        self._growing.finish(key, prompt_ids, token_ids)
        self._whole[key] = token_ids

    def _forget_oldest(self) -> None:
        """Their groups may never come."""
        spare = [key for key in self._read if key not in self._wanted]
        for key in spare[: max(0, len(spare) - self._most_kept)]:
            del self._read[key]
