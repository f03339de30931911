"""Novelty: how unlike a completion is to those that came before it, as a part of a reward.

    a group's texts --embed--> vectors --against the history--> 1 - mean cosine to the nearest
                                  |
                                  +--a later step's group comes--> history

The novelty reward of curiosity-driven red-teaming (Hong et al. 2024), which Lee et al. 2024 and TBA
(arXiv 2503.18929, 5.2) give PPO to compare with; its part by embeddings.

A step is as many tickets as one trains on. The history takes what came of earlier steps when the
first group of a later one comes, in the order of its tickets, so that in step with the trainer a
score depends on no arrival. A ticket that is scored again, as after a resume, is not compared with
itself. Held-out completions are scored and never enter it. Of a victim's answers it is the attacks
that are compared.

Shapes: N completions of a batch, M of the history, E numbers of a vector.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
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
    is compared with, the most similar ones; None: all, as Hong et al. do. groups_per_step: tickets
    of a step.
    """

    embedder: EmbedderSettings
    history: int
    nearest: int | None
    groups_per_step: int


@dataclass(frozen=True, slots=True)
class _Remembered:
    """A training completion that was scored."""

    ticket: int
    sample_index: int
    unit_E: Tensor

    @property
    def place(self) -> tuple[int, int]:
        return self.ticket, self.sample_index


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
        self._history: list[_Remembered] = []  # oldest first
        self._history_ME: Tensor | None = None  # its vectors; None: it is empty
        self._come: list[_Remembered] = []  # of the newest step yet
        self._step = 0  # the newest of which anything came

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
        said = [self._items.pop(key).of_policy for key in keys]
        items = list(dict.fromkeys(said))  # one attack has several answers
        units_NE = unit(self._embedder.embed([item.text for item in items]))
        if not items[0].is_held_out:
            self._begin(items[0].sample[0])
        scores = dict(zip(items, self._novelty(units_NE).tolist()))
        if not items[0].is_held_out:
            self._remember(items, units_NE)
        return [(key, Outcome("score", scores[item], "")) for key, item in zip(keys, said)]

    def wait(self, timeout_s: float) -> bool:
        """`poll` has something to do as soon as a batch is whole."""
        return bool(self._released)

    def close(self) -> None:
        """Drop what is pending."""
        self._items.clear()
        self._released.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """What is remembered: places [M, 2] int64, tickets and sample_indices; units [M, E]."""
        remembered = self._history + self._come
        if not remembered:
            return {}
        return {
            "places": torch.tensor([one.place for one in remembered]),
            "units": torch.stack([one.unit_E for one in remembered]),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what was remembered."""
        remembered = []
        for (ticket, sample_index), unit_E in zip(state["places"].tolist(), state["units"]):
            remembered.append(_Remembered(ticket, sample_index, unit_E))
        self._step = max(self._step_of(one.ticket) for one in remembered)
        self._come = [one for one in remembered if self._step_of(one.ticket) == self._step]
        self._set_history([one for one in remembered if self._step_of(one.ticket) < self._step])

    def _step_of(self, ticket: int) -> int:
        return ticket // self._settings.groups_per_step

    def _begin(self, ticket: int) -> None:
        """Forget what was said of a ticket before; with a later step the history takes the rest."""
        self._come = [one for one in self._come if one.ticket != ticket]
        if any(one.ticket == ticket for one in self._history):
            self._set_history([one for one in self._history if one.ticket != ticket])
        step = self._step_of(ticket)
        if step > self._step:
            self._step = step
            every = sorted(self._history + self._come, key=lambda one: one.place)
            self._come = []
            self._set_history(every[-self._settings.history :])

    def _set_history(self, history: list[_Remembered]) -> None:
        self._history = history
        units = [one.unit_E for one in history]
        self._history_ME = torch.stack(units) if units else None

    def _novelty(self, units_NE: Tensor) -> Tensor:
        """[N]: 1 - the mean cosine to the nearest; 1 without a history."""
        if self._history_ME is None:
            return torch.ones(len(units_NE))
        cosines_NM = units_NE @ self._history_ME.T
        nearest = self._settings.nearest
        if nearest is not None and nearest < cosines_NM.shape[1]:
            cosines_NM = cosines_NM.topk(nearest, dim=1).values
        return 1 - cosines_NM.mean(1)

    def _remember(self, items: Sequence[Item], units_NE: Tensor) -> None:
        """Note a group."""
        if self._metrics is not None and len(items) > 1:
            distance = mean_pairwise_distance(units_NE)
            self._metrics.add_mean("diversity/cosine_distance", distance)
        for item, unit_E in zip(items, units_NE):
            ticket, sample_index = item.sample
            self._come.append(_Remembered(ticket, sample_index, unit_E))
