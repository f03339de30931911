"""WeightedParts: what several sources and models say of a completion becomes one score.

    submit --> each source ------------------- Outcome --+--> sum of weight * value --> poll
    release --> each model's queue --a round-- Outcome --+

An item that one part calls an error, or abstains from, has no score, whatever the others say of it.
What novelty adds is told apart.
"""

from __future__ import annotations

import math
import os.path
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executors.novelty import Novelty, NoveltySettings
from executors.scoring import Item, Queue, Scoring, SourceScoring
from llamarl.executor import ExecutorGroup, Meter
from llamarl.learning.scoring import Asked
from llamarl.learning.sharded_scorer import ScorerSettings, ShardedScorer
from llamarl.tasks.source import MakeSource, Outcome, Outcomes


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a reward: a source of scores, a model, or novelty."""

    name: str
    what: MakeSource | ScorerSettings | NoveltySettings
    weight: float = 1.0


Run = Callable[[Sequence[Asked]], Tensor]  # what is asked of a model -> scores [N]


class WeightedParts:
    """Scores items by all parts; is a Scoring (executors/scoring.py).

    queues: of those of the parts that are models, in order. metrics: gets of each part
    reward/NAME/mean, and of a model what it took, and reward/tail_s, from a completion to a model's
    score; None: nobody asks. device: where novelty embeds.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        queues: Sequence[ModelQueue],
        metrics: Meter | None,
        device: torch.device,
        on_result: Callable[[], None],
    ):
        self.name = " + ".join(part.name for part in parts)
        self.models = [queue.model for queue in queues]
        self._parts = parts
        self._metrics = metrics
        self._sources: dict[str, Scoring] = {}
        self._queues: dict[str, ModelQueue] = {}
        self.novelties: dict[str, Novelty] = {}  # those of the sources
        for part in parts:
            if isinstance(part.what, ScorerSettings):
                self._queues[part.name] = queues[len(self._queues)]
            elif isinstance(part.what, NoveltySettings):
                self.novelties[part.name] = Novelty(part.name, part.what, device, metrics)
                self._sources[part.name] = self.novelties[part.name]
            else:
                self._sources[part.name] = SourceScoring(part.what(on_result=on_result))
        self._items: dict[int, Item] = {}
        self._came: dict[int, float] = {}  # when each came
        self._said: dict[int, dict[str, Outcome]] = {}  # of each item, by part
        self._done: Outcomes = []

    @property
    def pending(self) -> int:
        """The number of items that a source or a model has to score now."""
        of_sources = [source.pending for source in self._sources.values()]
        of_models = [queue.pending for queue in self._queues.values()]
        return max(of_sources + of_models)

    @property
    def is_computing(self) -> bool:
        """Whether a model has work, so that the next `poll` does some."""
        workers = [*self._queues.values(), *self.novelties.values()]
        return any(worker.pending for worker in workers)

    @property
    def counts(self) -> Counter[str]:
        """What judges among the sources have counted: "pairs" compared, "order_ties", ..."""
        counts: Counter[str] = Counter()
        for source in self._sources.values():
            # A copy, made at one go: a judge's thread may be counting something new.
            if isinstance(source, SourceScoring):
                counts.update(dict(getattr(source.source, "counts", {})))
        return counts

    def start(self) -> None:
        """Start the sources."""
        for source in self._sources.values():
            source.start()

    def submit(self, key: int, item: Item) -> None:
        """Give an item to the sources; most models have it with its batch."""
        self._items[key] = item
        self._came[key] = time.monotonic()
        self._said[key] = {}
        for source in self._sources.values():
            source.submit(key, item)
        for queue in self._queues.values():
            queue.submit(key, item)

    def release(self, keys: Sequence[int]) -> None:
        """Put a batch into the models' queues, and tell the sources."""
        for source in self._sources.values():
            source.release(keys)
        for name, queue in self._queues.items():
            # Those that a model has scored before its batch was whole may be done.
            batch = {key: self._items[key] for key in keys if key in self._items}
            for key, outcome in queue.put(batch):
                self._enter(name, key, outcome)

    def poll(self) -> Outcomes:
        """Let every model score a round, take what the sources have scored, and return the items
        that all parts have spoken of.
        """
        for name, queue in self._queues.items():
            began = time.monotonic()
            scores, num_tokens = queue.work()
            if num_tokens and self._metrics is not None:
                self._metrics.add_sum(f"reward/{name}/seconds", time.monotonic() - began)
                self._metrics.add_sum(f"reward/{name}/tokens", num_tokens)
            for key, value in scores:
                self._note_tail(key)
                self._enter(name, key, queue.outcome_of(value))
        for name, source in self._sources.items():
            for key, outcome in source.poll():
                self._enter(name, key, outcome)
        done = self._done
        self._done = []
        return done

    def wait(self, timeout_s: float) -> bool:
        """Block until a source may have scored, where no model has work."""
        if self.is_computing:
            return True
        waiting = [source for source in self._sources.values() if source.pending]
        return bool(waiting) and waiting[0].wait(timeout_s)

    def close(self) -> None:
        """Close the sources and drop what is pending."""
        for source in self._sources.values():
            source.close()
        for queue in self._queues.values():
            queue.clear()

    def _note_tail(self, key: int) -> None:
        """Count how long a completion has waited for a model's score."""
        if self._metrics is not None and not self._items[key].is_held_out:
            self._metrics.add_mean("reward/tail_s", time.monotonic() - self._came[key])

    def _enter(self, name: str, key: int, outcome: Outcome) -> None:
        """Note what a part says of an item, which may be the last word on it."""
        is_counted = outcome.kind == "score" and not self._items[key].is_held_out
        if is_counted and self._metrics is not None:
            self._metrics.add_mean(f"reward/{name}/mean", outcome.value)
        said = self._said[key]
        said[name] = outcome
        if len(said) == len(self._parts):
            del self._items[key]
            del self._came[key]
            del self._said[key]
            self._done.append((key, self._sum(said)))

    def _sum(self, said: dict[str, Outcome]) -> Outcome:
        """The outcome of all parts, which does not depend on who spoke first."""
        total = 0.0
        for_novelty = 0.0
        abstention = None
        for part in self._parts:
            outcome = said[part.name]
            if outcome.kind == "error":
                return Outcome.error(self._reason(part, outcome))
            if outcome.kind == "abstain":
                abstention = abstention or Outcome.abstain(self._reason(part, outcome))
                continue
            weighted = part.weight * outcome.value
            if part.name in self.novelties:
                for_novelty += weighted
            else:
                total += weighted
        if abstention is not None:
            return abstention
        without_novelty = total if self.novelties else None
        return finite(total + for_novelty, without_novelty)

    def _reason(self, part: Part, outcome: Outcome) -> str:
        if len(self._parts) == 1:
            return outcome.reason
        return f"{part.name}: {outcome.reason}"


def models_of(parts: Sequence[Part], group: ExecutorGroup) -> list[ShardedScorer]:
    """Load those of the parts that are models, each rank its own share."""
    models = []
    for part in parts:
        if isinstance(part.what, ScorerSettings):
            models.append(ShardedScorer(part.what, group))
    return models


def parts_alone(
    parts: Sequence[Part],
    device: torch.device,
    *,
    on_result: Callable[[], None] = lambda: None,
) -> WeightedParts:
    """Parts whose models this rank has to itself; without metrics. What is computed together never
    depends on what came when.
    """
    models = models_of(parts, ExecutorGroup("alone", (0,), 0, device))  # no rank takes part
    queues = [ModelQueue(model, model.scores, reproducible=True) for model in models]
    return WeightedParts(parts, queues=queues, metrics=None, device=device, on_result=on_result)


class ModelQueue:
    """Batches that wait for a model, and how many of them it scores at a time.

    run: has the model score, on all its ranks. reproducible: batches are not computed together.
    """

    def __init__(self, model: ShardedScorer, run: Run, *, reproducible: bool):
        self.model = model
        self._run = run
        self._reproducible = reproducible
        self._num_batches = 0
        # (number of its batch, keys, what is asked), of one prompt each
        self._waiting: Queue[tuple[int, list[int], Asked]] = Queue()
        self.pending = 0  # items

    def submit(self, key: int, item: Item) -> None:
        """Take note of an item, whose batch is not whole yet."""

    def work(self) -> tuple[list[tuple[int, float]], int]:
        """Have the model score a round, if something waits. The scores by key, and how many tokens
        it read.
        """
        if not self._waiting:
            return [], 0
        keys, asked = self.next_round()
        scores_N = self._run(asked)
        return list(zip(keys, scores_N.tolist())), sum(one.num_tokens for one in asked)

    def put(self, batch: dict[int, Item]) -> Outcomes:
        """Queue the items of a batch by their prompts. The errors of those that are too long, are
        empty or cannot be read.
        """
        errors: Outcomes = []
        context = self.model.decoder.config.max_position_embeddings
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
                if 0 < size <= context:
                    tokens[key] = ids
                    continue
                what = f"{size} tokens, and the scorer reads 1 to {context}"
                errors.append((key, Outcome.error(what)))
            if tokens:
                asked = asked_of(list(tokens.values()))
                is_held_out = next(iter(items.values())).is_held_out
                unit = (self._num_batches, list(tokens), asked)
                self._waiting.put(unit, is_held_out=is_held_out)
                self.pending += len(tokens)
        self._num_batches += 1
        return errors

    def next_round(self) -> tuple[list[int], list[Asked]]:
        """The keys of what is scored next, and what is asked: as much as fills a microbatch on each
        rank. Where it must be reproducible, of one batch alone.
        """
        first, _, _ = self._waiting.first
        keys: list[int] = []
        asked: list[Asked] = []
        room = self.model.tokens_a_round
        while self._waiting:
            number, own, one = self._waiting.first
            is_over = asked and one.num_tokens > room
            if is_over or (self._reproducible and number != first):
                break
            self._waiting.take()
            keys += own
            asked.append(one)
            room -= one.num_tokens
        self.pending -= len(keys)
        return keys, asked

    def outcome_of(self, score: float) -> Outcome:
        """(score - shift) * scale; an error if that is no finite number."""
        settings = self.model.settings
        return finite((score - settings.shift) * settings.scale)

    def clear(self) -> None:
        """Drop everything."""
        self._waiting.clear()
        self.pending = 0

    def _tokens_of(self, item: Item) -> Tensor:
        """All tokens [P + L] of an item, as the model reads it. ValueError."""
        transcript = self.model.settings.transcript
        if transcript is None:
            return torch.cat([item.prompt.prompt_ids, item.token_ids])
        ids = transcript.ids(item.prompt.asked, item.text, has_ended=item.has_ended)
        return torch.tensor(ids, dtype=torch.int64)


def asked_of(sequences: list[Tensor]) -> Asked:
    """Sequences as completions of what they all begin with."""
    shared = len(os.path.commonprefix([tokens.tolist() for tokens in sequences]))
    return Asked(sequences[0][:shared], tuple(tokens[shared:] for tokens in sequences))


def finite(value: float, without_novelty: float | None = None) -> Outcome:
    """A score, or the error that it is none."""
    if not math.isfinite(value):
        return Outcome.error(f"the score is {value}")
    return Outcome("score", value, "", without_novelty)
