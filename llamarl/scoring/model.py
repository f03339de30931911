"""ModelScorer: a model that scores, over the ranks of its executor. It reads completions whole, or
while they are sampled.

    submit --> release(a batch) --> rounds of whole completions -----+
    hear(stretch) --> read ahead --submit--> its last piece is read --+--> (score - shift) * scale

A model computes a prompt once for all its completions, so it waits for their batch. With a stream
it reads training completions while they are sampled. The score is always that of the whole
completion, because a stretch only brings tokens earlier. Held-out completions are scored whole,
when their batch comes.
"""

from __future__ import annotations

import os.path
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llamarl.comm.together import CollectiveCall
from llamarl.executor import State
from llamarl.models.fsdp import local
from llamarl.scoring.ahead import Ahead, ChunkSearch, ScoreHead, StreamSettings
from llamarl.scoring.growing import Key
from llamarl.scoring.scorer import Item, Outcomes, Queue, Scorer, Site
from llamarl.scoring.sharded import (
    ScoreRequest,
    ShardedScorer,
    Transcript,
    from_message,
    to_message,
)
from llamarl.types import Outcome, Stretch

if TYPE_CHECKING:
    from llamarl.scoring.kinds.model import ModelKindSettings

Scores = list[tuple[int, float]]  # scores, each with its item's key


class ModelScorer(Scorer):
    """Scores items by a model.

    name: of the part of the reward that it is. stream: how it reads completions while they are
    sampled; None: it does not. transcript: how it reads texts, if its tokenizer is not the
    policy's; None: it reads the policy's tokens. Its metrics, for completions that are trained on:
    reward/NAME/seconds and tokens, what it took; reward/tail_s, from a completion to its score;
    with a stream reward/prefilled_early, the share of a completion's tokens that were read before
    it came, reward/piece_tokens and reward/evictions.

    For the search of piece_tokens, steps are timed here: a step ends whenever as many completions
    are scored as a step trains on.
    """

    computes = True

    def __init__(
        self,
        name: str,
        settings: ModelKindSettings,
        site: Site,
        stream: StreamSettings | None = None,
        transcript: Transcript | None = None,
    ):
        self.name = name
        self._settings = settings
        self._site = site
        self._stream = stream
        self._transcript = transcript
        self._items: dict[int, Item] = {}  # items without a score yet, by key
        self._came: dict[int, float] = {}  # when each came
        self._errors: Outcomes = []

    def load(self) -> None:
        """Load the model, and lay out its cache."""
        model = ShardedScorer(self._settings, self._site.group)
        self.model = model
        self._run = f"score/{self.name}"
        self._site.together.add(self._run, CollectiveCall(model.scores, to_message, from_message))
        self._rounds = Rounds(
            transcript=self._transcript,
            context=model.decoder.config.max_position_embeddings,
            tokens_a_round=model.tokens_a_round,
            reproducible=self._site.reproducible,
        )
        self._growing: Growing | None = None
        if self._stream is not None:
            ahead = Ahead(
                model.decoder,
                ScoreHead(model.label),
                self._stream,
                self._site,
                call=f"read/{self.name}",
                about="reward",
            )
            self._growing = Growing(ahead, self._stream, self._settings.microbatch_tokens)

    @property
    def pending(self) -> int:
        """The number of items that are being scored."""
        num_growing = 0 if self._growing is None else self._growing.pending
        return self._rounds.pending + num_growing

    def submit(self, key: int, item: Item) -> None:
        """Take one item. With a stream a training completion is read to its end; any other item
        waits for its batch.
        """
        self._items[key] = item
        self._came[key] = time.monotonic()
        if self._growing is None or not self._growing.is_streamed(item):
            return
        early = self._growing.finish(key, item)
        size = item.sampled_ids.numel()
        metrics = self._site.metrics
        if metrics is not None:
            if size:
                metrics.add_mean("reward/prefilled_early", early / size)
            metrics.add_mean("reward/piece_tokens", self._growing.ahead.piece_tokens)

    def hear(self, stretch: Stretch, prompt_ids: Tensor) -> None:
        """Note new tokens of a completion, if they are read ahead."""
        if self._growing is not None:
            self._growing.ahead.hear(stretch, prompt_ids)

    def forget(self, ticket: int, sample_index: int) -> None:
        """Drop what was read ahead of a completion."""
        if self._growing is not None:
            self._growing.ahead.cache_of(ticket).forget((ticket, sample_index))

    def release(self, keys: Sequence[int]) -> None:
        """Queue a batch, except items that were read as they grew, which may have their scores
        already.
        """
        batch = {key: self._items[key] for key in keys if key in self._items}
        if self._growing is not None:
            streamed = self._growing.is_streamed
            batch = {key: item for key, item in batch.items() if not streamed(item)}
        self._errors += self._rounds.put(batch)

    def poll(self) -> Outcomes:
        """Score a round, or read a pass."""
        began = time.monotonic()
        outcomes = self._errors
        self._errors = []
        scores, num_tokens = self._work()
        self.has_read_ahead = num_tokens > 0 and not scores
        metrics = self._site.metrics
        if num_tokens and metrics is not None:
            metrics.add_sum(f"reward/{self.name}/seconds", time.monotonic() - began)
            metrics.add_sum(f"reward/{self.name}/tokens", num_tokens)
        for key, value in scores:
            if metrics is not None and not self._items[key].is_held_out:
                metrics.add_mean("reward/tail_s", time.monotonic() - self._came[key])
            rescaled = (value - self._settings.shift) * self._settings.scale
            outcomes.append((key, Outcome.score(rescaled)))
        for key, _ in outcomes:
            del self._items[key]
            del self._came[key]
        if self._growing is not None:
            self._growing.time_step()
        return outcomes

    def close(self) -> None:
        """Drop what is pending."""
        self._items.clear()
        self._came.clear()
        if hasattr(self, "model"):
            self._rounds.clear()
            if self._growing is not None:
                self._growing.clear()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the model's weights and its cache."""
        for parameter in self.model.decoder.parameters():
            yield local(parameter)
        if self._growing is not None:
            yield from self._growing.ahead.tensors()

    def state_dict(self) -> State:
        """Return how far the search of piece_tokens has come."""
        return {} if self._growing is None else self._growing.state_dict()

    def load_state_dict(self, state: Mapping) -> None:
        """Go on with the search."""
        if self._growing is not None:
            self._growing.load_state_dict(state)

    def _work(self) -> tuple[Scores, int]:
        """Score a round, or read a pass. Return the scores, and how many tokens were read. Streamed
        completions that have come take turns with rounds; without any, a round is scored; without a
        round, what may be read ahead.
        """
        growing = self._growing
        has_round = self._rounds.pending > 0
        if growing is None:
            return self._score_round() if has_round else ([], 0)
        if has_round and (growing.round_is_due or not growing.pending):
            growing.round_is_due = False
            return self._score_round()
        growing.round_is_due = True
        return growing.read_pass()

    def _score_round(self) -> tuple[Scores, int]:
        keys, asked = self._rounds.take()
        scores_N = self._site.together.call(self._run, asked)
        return list(zip(keys, scores_N.tolist())), sum(one.num_tokens for one in asked)


@dataclass(kw_only=True)
class Rounds:
    """Batches that wait for a model. It scores a round of them at a time.

    transcript: as ModelScorer's. context: the most tokens that the model reads. tokens_a_round:
    tokens that fill a microbatch on each rank. reproducible: batches are not computed together.
    """

    transcript: Transcript | None
    context: int
    tokens_a_round: int
    reproducible: bool

    def __post_init__(self):
        self.pending = 0  # items
        self._num_batches = 0
        # (number of its batch, keys, sequences), each of one prompt
        self._waiting: Queue[tuple[int, list[int], ScoreRequest]] = Queue()

    def put(self, batch: Mapping[int, Item]) -> Outcomes:
        """Queue the items of a batch by their prompts. Return the errors of those that are too
        long, are empty or cannot be read.
        """
        errors: Outcomes = []
        by_prompt: dict[tuple[int, ...], dict[int, Item]] = {}
        for key, item in batch.items():
            prompt = tuple(item.prompt.prompt_ids.tolist())
            by_prompt.setdefault(prompt, {})[key] = item
        for items in by_prompt.values():
            tokens = {}
            for key, item in items.items():
                try:
                    ids = self._tokens_of(item)
                except ValueError as error:
                    errors.append((key, Outcome.error(str(error))))
                    continue
                size = ids.numel()
                if 0 < size <= self.context:
                    tokens[key] = ids
                    continue
                what = f"{size} tokens, and the scorer reads 1 to {self.context}"
                errors.append((key, Outcome.error(what)))
            if tokens:
                asked = asked_of(list(tokens.values()))
                is_held_out = next(iter(items.values())).is_held_out
                unit = (self._num_batches, list(tokens), asked)
                self._waiting.put(unit, is_held_out=is_held_out)
                self.pending += len(tokens)
        self._num_batches += 1
        return errors

    def take(self) -> tuple[list[int], list[ScoreRequest]]:
        """Return the keys and the sequences that are scored next: as many as fill a microbatch on
        each rank. If it must be reproducible, they are all of one batch.
        """
        first, _, _ = self._waiting.first
        keys: list[int] = []
        asked: list[ScoreRequest] = []
        room = self.tokens_a_round
        while self._waiting:
            number, own, one = self._waiting.first
            is_over = asked and one.num_tokens > room
            if is_over or (self.reproducible and number != first):
                break
            self._waiting.take()
            keys += own
            asked.append(one)
            room -= one.num_tokens
        self.pending -= len(keys)
        return keys, asked

    def clear(self) -> None:
        """Drop everything."""
        self._waiting.clear()
        self.pending = 0

    def _tokens_of(self, item: Item) -> Tensor:
        """Return all tokens [P + L] of an item, as the model reads it. ValueError."""
        if self.transcript is None:
            return torch.cat([item.prompt.prompt_ids, item.sampled_ids])
        ids = self.transcript.ids(item.prompt.asked, item.text, has_ended=item.has_ended)
        return torch.tensor(ids, dtype=torch.int64)


class Growing:
    """The training completions that a model reads as they grow, and the search for the size of
    pieces.

    microbatch_tokens: tokens of a pass, per rank.
    """

    def __init__(self, ahead: Ahead, settings: StreamSettings, microbatch_tokens: int):
        self.ahead = ahead
        self.round_is_due = False
        self._budget = microbatch_tokens
        self._whole: dict[Key, int] = {}  # keys of whole ones that are not read to their ends
        self._search = ChunkSearch(settings.candidates) if settings.candidates else None
        self._a_step = settings.a_step
        self._num_scored = 0  # completions, so far
        self._step_ends = settings.a_step  # the number of scored completions that ends the step
        self._step_began: float | None = None  # the first step is not timed

    @property
    def pending(self) -> int:
        """The number of whole completions that are not read to their ends."""
        return len(self._whole)

    def is_streamed(self, item: Item) -> bool:
        """Whether an item is read as it grows: if it is of training and fits the cache."""
        size = item.prompt.prompt_ids.numel() + item.sampled_ids.numel()
        return item.sample is not None and 0 < size <= self.ahead.longest

    def finish(self, key: int, item: Item) -> int:
        """Take a whole completion, to be read to its end. Return its tokens read already."""
        assert item.sample is not None, "is_streamed says so"
        ticket, _ = item.sample
        self._whole[item.sample] = key
        growing = self.ahead.cache_of(ticket)
        return growing.finish(item.sample, item.prompt.prompt_ids, item.sampled_ids)

    def read_pass(self) -> tuple[Scores, int]:
        """Read a pass. Return the scores of completions that end in it, and its tokens."""
        passes = [growing.next_pass(self._budget) for growing in self.ahead.caches]
        num_tokens = sum(one.num_tokens for one in passes)
        if not num_tokens:
            return [], 0
        values = iter(self.ahead.read(passes))
        scores = []
        for one in passes:
            for piece in one.pieces:
                value = next(values)
                if piece.is_last:
                    self._num_scored += 1
                    scores.append((self._whole.pop(piece.key), float(value)))
        self.ahead.note_evictions()
        return scores, num_tokens

    def time_step(self) -> None:
        """Take the size of pieces from the search, at the end of a step."""
        beyond = self._num_scored - self._step_ends
        if self._search is None or beyond < 0:
            return
        now = time.monotonic()
        num_steps = 1 + beyond // self._a_step
        if self._step_began is not None:
            self._search.step((now - self._step_began) / num_steps)
        self._step_began = now
        self._step_ends += num_steps * self._a_step
        self.ahead.piece_tokens = self._search.piece_tokens

    def state_dict(self) -> State:
        """Return how far the search has come."""
        return {} if self._search is None else {"chunk_search": self._search.state_dict()}

    def load_state_dict(self, state: Mapping) -> None:
        """Go on with the search."""
        searched = state.get("chunk_search")
        if self._search is not None and searched is not None:
            self._search.load_state_dict(searched)
            self.ahead.piece_tokens = self._search.piece_tokens

    def clear(self) -> None:
        """Drop everything."""
        self._whole.clear()
        self.ahead.clear()


def asked_of(sequences: list[Tensor]) -> ScoreRequest:
    """Return sequences as completions of their common beginning."""
    shared = len(os.path.commonprefix([tokens.tolist() for tokens in sequences]))
    return ScoreRequest(sequences[0][:shared], tuple(tokens[shared:] for tokens in sequences))
