"""StreamingReward: a ModelReward whose models read completions while these are sampled
(OPPO's intra-step overlap, Yan et al. 2025, 3.1 and algorithm 1).

    stretches   --> GrowingSequences --a pass--> PieceReader, on all ranks: keys and values are kept
    completions --> GrowingSequences --its last piece--> PieceReader --score--> weighted sum

The score belongs to the completion, and is that of the whole: a stretch only says earlier what may
be read. Held-out completions are scored whole, as their batch comes. The first rank plans for all:
it has an object of GrowingSequences for the cache of each data-parallel rank, and a ticket's
completions all meet the same one.

    loop step    consumes              waits for               unblocked by
    first rank   stretches             -                       the generator
                 and as ModelReward
    another      the first's commands  -                       the first rank
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from executors.assembly import Answer
from executors.generator import STRETCHES
from executors.model_reward import ModelReward
from executors.scoring import Item
from executors.weighted import ModelQueue, Run
from llamarl.executor import Meter, State
from llamarl.inference.cache import whole_blocks
from llamarl.inference.growing import GrowingSequences, Key, Pass
from llamarl.inference.pieces import PieceReader, ScoreHead, from_words, to_words
from llamarl.learning.chunk_search import ChunkSearch
from llamarl.learning.sharded_scorer import ShardedScorer
from llamarl.types import Completion, Prompt, Stretch

# Stretches that are taken at a time: more wait in their channel.
MOST_STRETCHES = 4096

Read = Callable[[Sequence[Pass]], list[Tensor]]  # on all ranks -> the values of each piece


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """How completions are read while they are sampled.

    chunk_tokens: of a piece, or of the first ones. cache_tokens: places of each model's cache, per
    data-parallel rank. longest: tokens of a prompt and its completion at most. candidates: sizes of
    pieces among which the one with the fastest steps is looked for; none: it stays. a_step:
    completions that a step trains on.
    """

    chunk_tokens: int
    cache_tokens: int
    longest: int
    candidates: tuple[int, ...] = ()
    a_step: int = 1

    @property
    def slots(self) -> int:
        """How many sequences a cache holds."""
        return max(1, self.cache_tokens // whole_blocks(self.longest))


@dataclass(kw_only=True, eq=False, repr=False)
class StreamingReward(ModelReward):
    """A ModelReward with a cache for each of its models on each rank.

    consumes  "stretches" too: what completions have grown by

    A step is as many scored completions as a step trains on: steps are timed here, for the search
    of chunk_tokens, by how fast they follow each other.
    """

    stream: StreamSettings

    def setup(self) -> None:
        """Load the models, and lay out their caches."""
        self._readers: list[PieceReader] = []
        self._streams: list[StreamQueue] = []
        self._search = ChunkSearch(self.stream.candidates) if self.stream.candidates else None
        self._step_ends = self.stream.a_step  # at so many scored completions
        self._step_began: float | None = None  # the first is not timed: it began with the run
        super().setup()

    def load_models(self) -> list[ShardedScorer]:
        """The models, each with what reads for it."""
        models = super().load_models()
        for model in models:
            reader = PieceReader(
                model.decoder,
                ScoreHead(model.settings.label),
                slots=self.stream.slots,
                max_len=self.stream.longest,
                group=self.group,
                one_by_one=self.reproducible,
            )
            self._readers.append(reader)
        return models

    def make_queue(self, number: int) -> ModelQueue:
        """What waits for the model of this number, and what it reads ahead."""
        queue = StreamQueue(
            self._models[number],
            partial(self._run, number),
            partial(self._read, number),
            reproducible=self.reproducible,
            stream=self.stream,
            num_caches=self.group.data_size,
            metrics=self.metrics,
        )
        self._streams.append(queue)
        return queue

    def step(self) -> bool:
        """Take stretches, then what ModelReward does: with a part of what may be read ahead, where
        no completion waits. True if there was any.
        """
        if self.follows:
            return super().step()
        for stretch in self.inputs[STRETCHES].take(MOST_STRETCHES):
            prompt_ids = self.prompts[stretch.ticket].prompt_ids
            for queue in self._streams:
                queue.extend(stretch, prompt_ids)
        before = self._num_read()
        has_worked = super().step()
        self._time_step()
        return has_worked or self._num_read() > before

    def _submit(self, completion: Answer, prompt: Prompt) -> int | None:
        """Hand a completion on; one that is not to be scored is not read any further."""
        if isinstance(completion, Completion) and completion.finish_reason == "aborted":
            for queue in self._streams:
                queue.forget(completion.ticket, completion.sample_index)
        return super()._submit(completion, prompt)

    def offloadable(self) -> list[Tensor]:
        """The tensors that may leave the device while others use it."""
        tensors = super().offloadable()
        for reader in self._readers:
            tensors += reader.cache.layers
        return tensors

    def take_part(self, do: str, number: int, words: Tensor) -> None:
        """On another rank than the first: this rank's share of what a model is asked."""
        if do == "read":
            self._readers[number].run(from_words(words))
            return
        super().take_part(do, number, words)

    def _read(self, number: int, passes: Sequence[Pass]) -> list[Tensor]:
        """Have a model read a pass on each data-parallel rank, with all ranks."""
        began = time.monotonic()
        self.ask("read", number, to_words(passes))
        values = self._readers[number].run(passes)
        what = "read to the end" if any(one.ends for one in passes) else "read ahead"
        self.metrics.span(self.name, what, began, time.monotonic())
        return values

    def _time_step(self) -> None:
        """At the end of a step, take the size of pieces that the search says."""
        beyond = self._streams[0].num_scored - self._step_ends
        if self._search is None or beyond < 0:
            return
        now = time.monotonic()
        num_steps = 1 + beyond // self.stream.a_step
        if self._step_began is not None:
            self._search.step((now - self._step_began) / num_steps)
        self._step_began = now
        self._step_ends += num_steps * self.stream.a_step
        self._take_chunk_tokens()

    def _take_chunk_tokens(self) -> None:
        for queue in self._streams:
            queue.chunk_tokens = self._search.chunk_tokens

    def state_dict(self) -> State:
        """How far the search has come too; the first rank's."""
        state = super().state_dict()
        if self._search is not None and not self.follows:
            state["chunk_search"] = self._search.state_dict()
        return state

    def load_state_dict(self, parts: Iterable[Mapping]) -> None:
        """Go on with the search too."""
        parts = list(parts)
        super().load_state_dict(parts)
        for part in parts:
            state = part.get("chunk_search")
            if state is not None and self._search is not None and not self.follows:
                self._search.load_state_dict(state)
                self._take_chunk_tokens()

    def _num_read(self) -> int:
        return sum(queue.num_read for queue in self._streams)


class StreamQueue(ModelQueue):
    """A model's batches that are held out, and the completions that it reads as they grow.

    read: has the model read passes, on all its ranks. num_caches: data-parallel ranks. metrics:
    gets reward/prefilled_early, the share of a completion's tokens that were read before it came;
    reward/chunk_tokens; and reward/evictions.
    """

    def __init__(
        self,
        model: ShardedScorer,
        run: Run,
        read: Read,
        *,
        reproducible: bool,
        stream: StreamSettings,
        num_caches: int,
        metrics: Meter,
    ):
        super().__init__(model, run, reproducible=reproducible)
        self.num_read = 0  # tokens, so far
        self.num_scored = 0  # completions, so far
        self.chunk_tokens = stream.chunk_tokens
        self._read = read
        # What is longer is an error, told with its batch.
        self._longest = min(stream.longest, model.decoder.config.max_position_embeddings)
        self._metrics = metrics
        self._caches: list[GrowingSequences] = []
        for _ in range(num_caches):
            growing = GrowingSequences(
                chunk_tokens=stream.chunk_tokens, slots=stream.slots, max_len=self._longest
            )
            self._caches.append(growing)
        # Of the whole completions that are not read to their ends: their keys.
        self._whole: dict[Key, int] = {}
        self._round_is_due = False
        self._evictions = 0

    def extend(self, stretch: Stretch, prompt_ids: Tensor) -> None:
        """Take note of what a completion has grown by."""
        self._cache_of(stretch.ticket).extend(
            (stretch.ticket, stretch.sample_index),
            prompt_ids,
            stretch.begin,
            stretch.token_ids,
            has_ended=stretch.has_ended,
        )

    def forget(self, ticket: int, sample_index: int) -> None:
        """Of this completion no score is wanted."""
        self._cache_of(ticket).forget((ticket, sample_index))

    def submit(self, key: int, item: Item) -> None:
        """Have a training completion read to its end."""
        if not self._is_streamed(item):
            return
        growing = self._cache_of(item.sample[0])
        early = growing.finish(item.sample, item.prompt.prompt_ids, item.token_ids)
        size = item.token_ids.numel()
        if size:
            self._metrics.add_mean("reward/prefilled_early", early / size)
        self._metrics.add_mean("reward/chunk_tokens", growing.chunk_tokens)
        self._whole[item.sample] = key
        self.pending += 1

    def put(self, batch: dict[int, Item]) -> list:
        """Queue those of a batch that were not read as they grew. The errors of some."""
        left = {key: item for key, item in batch.items() if not self._is_streamed(item)}
        return super().put(left)

    def work(self) -> tuple[list[tuple[int, float]], int]:
        """A pass, or a round of what is scored whole: completions that have come first, in turn
        with rounds; else a round; else what may be read ahead.
        """
        has_round = self.pending > len(self._whole)
        if has_round and (self._round_is_due or not self._whole):
            self._round_is_due = False
            return super().work()
        self._round_is_due = True
        budget = self.model.settings.microbatch_tokens
        passes = [growing.next_pass(budget) for growing in self._caches]
        num_tokens = sum(one.num_tokens for one in passes)
        if not num_tokens:
            return [], 0
        values = iter(self._read(passes))
        self.num_read += num_tokens
        scores = []
        for one in passes:
            for piece in one.pieces:
                value = next(values)
                if piece.is_last:
                    scores.append(self._scored(piece.key, float(value)))
        self._count_evictions()
        return scores, num_tokens

    def clear(self) -> None:
        """Drop everything."""
        super().clear()
        self._whole.clear()
        for growing in self._caches:
            growing.clear()

    def _scored(self, sample: Key, value: float) -> tuple[int, float]:
        key = self._whole.pop(sample)
        self.pending -= 1
        self.num_scored += 1
        return key, value

    def _count_evictions(self) -> None:
        total = sum(growing.num_evictions for growing in self._caches)
        self._metrics.add_sum("reward/evictions", total - self._evictions)
        self._evictions = total

    def _is_streamed(self, item: Item) -> bool:
        """Whether it is read as it grows: of training, and no longer than the cache's rows."""
        size = item.prompt.prompt_ids.numel() + item.token_ids.numel()
        return item.sample is not None and 0 < size <= self._longest

    def _cache_of(self, ticket: int) -> GrowingSequences:
        """A ticket's completions share their prompt, and so a cache."""
        growing = self._caches[ticket % len(self._caches)]
        growing.chunk_tokens = self.chunk_tokens
        return growing
