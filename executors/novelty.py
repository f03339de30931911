"""Novelty: how unlike a completion is to those that came before it, as a part of a reward.

    a group's texts --embed--> vectors --against the history--> 1 - mean cosine to the nearest
                                  |
                                  +--its step is whole--> history

The novelty reward of curiosity-driven red-teaming (Hong et al. 2024), which Lee et al. 2024 and TBA
(arXiv 2503.18929, 5.2) give PPO to compare with; its part by embeddings.

The history takes the groups of a step when all of them are scored, in an order of their texts' own,
so that in step with the trainer a score depends on no arrival. Held-out completions are scored and
never enter it. It is in no checkpoint: a run that goes on begins with an empty one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executors.scoring import Item
from llamarl.executor import Meter
from llamarl.learning.embedding import (
    Embedder,
    EmbedderSettings,
    load_embedder,
    mean_pairwise_distance,
    unit,
)
from llamarl.tasks.source import Outcome, Outcomes


@dataclass(frozen=True, slots=True)
class NoveltySettings:
    """history: completions that are remembered, the newest. nearest: how many of them a completion
    is compared with, the most similar ones; None: all, as Hong et al. do. groups_per_step: groups
    that enter together.
    """

    embedder: EmbedderSettings
    history: int
    nearest: int | None
    groups_per_step: int


class Novelty:
    """Scores batches of completions; is a Scoring (executors/scoring.py).

    metrics: gets diversity/cosine_distance, of a group's completions; None: nobody asks.
    """

    def __init__(
        self,
        name: str,
        settings: NoveltySettings,
        device: torch.device,
        metrics: Meter | None = None,
    ):
        self.name = name
        self._settings = settings
        self._device = device
        self._metrics = metrics
        self._items: dict[int, Item] = {}
        self._released: deque[list[int]] = deque()
        self._embedder: Embedder | None = None
        self._past_ME: Tensor | None = None  # unit vectors, oldest first
        # Of the groups of the step that is under way: each text with its vector [E].
        self._come: list[tuple[str, Tensor]] = []
        self._num_groups = 0

    @property
    def pending(self) -> int:
        """The number of items whose batch is whole and not scored."""
        return sum(map(len, self._released))

    def start(self) -> None:
        """Load the model. ValueError or OSError for what cannot be used."""
        self._embedder = load_embedder(self._settings.embedder, self._device)

    def submit(self, key: int, item: Item) -> None:
        """Take one item, which waits for its batch."""
        self._items[key] = item

    def release(self, keys: Sequence[int]) -> None:
        """These items are all of a batch."""
        if keys:
            self._released.append(list(keys))

    def poll(self) -> Outcomes:
        """Score a batch."""
        if not self._released:
            return []
        keys = self._released.popleft()
        items = [self._items.pop(key) for key in keys]
        texts = [item.text for item in items]
        units_NE = unit(self._embedder.embed(texts))
        scores = self._novelty(units_NE).tolist()
        if not items[0].is_held_out:
            self._remember(texts, units_NE)
        return [(key, Outcome("score", score, "")) for key, score in zip(keys, scores)]

    def wait(self, timeout_s: float) -> bool:
        """`poll` has something to do as soon as a batch is whole."""
        return bool(self._released)

    def close(self) -> None:
        """Drop what is pending."""
        self._items.clear()
        self._released.clear()

    def _novelty(self, units_NE: Tensor) -> Tensor:
        """[N]: 1 - the mean cosine to the nearest; 1 without a history."""
        if self._past_ME is None:
            return torch.ones(len(units_NE))
        cosines_NM = units_NE @ self._past_ME.T
        nearest = self._settings.nearest
        if nearest is not None and nearest < cosines_NM.shape[1]:
            cosines_NM = cosines_NM.topk(nearest, dim=1).values
        return 1 - cosines_NM.mean(1)

    def _remember(self, texts: Sequence[str], units_NE: Tensor) -> None:
        """Note a group; the history takes it with the rest of its step."""
        if self._metrics is not None and len(texts) > 1:
            distance = mean_pairwise_distance(units_NE)
            self._metrics.add_mean("diversity/cosine_distance", distance)
        self._come += zip(texts, units_NE)
        self._num_groups += 1
        if self._num_groups < self._settings.groups_per_step:
            return
        # Vectors of equal texts may differ by what else their batches held.
        self._come.sort(key=lambda entry: (entry[0], entry[1].tolist()))
        new_ME = torch.stack([vector for _, vector in self._come])
        if self._past_ME is not None:
            new_ME = torch.cat([self._past_ME, new_ME])
        self._past_ME = new_ME[-self._settings.history :]
        self._come = []
        self._num_groups = 0
