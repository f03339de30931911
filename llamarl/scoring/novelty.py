"""Novelty: how unlike a completion is to those that came before it, as a part of a reward.

    a group's texts --embed--> vectors --against the history--> 1 - mean cosine to the nearest
                                  |
                                  +--a later step's group comes--> history

This is the part by embeddings of the novelty reward of curiosity-driven red-teaming (Hong et al.
2024), which Lee et al. 2024 and TBA (arXiv 2503.18929, 5.2) add to PPO as a baseline.

A step has as many tickets as a training step. When the first group of a later step comes, the
history takes the completions of earlier steps, in the order of their tickets, so that in a
synchronous run a score does not depend on timing. A ticket that is scored again, as after a resume,
is not compared with itself. Held-out completions are scored and never enter the history. With a
victim the attacks are compared, not the replies.

Shapes: N completions of a batch, M of the history, E numbers of a vector.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llamarl.executor import State
from llamarl.scoring.embedding import (
    Embedder,
    EmbedderSettings,
    load_embedder,
    mean_pairwise_distance,
    unit,
)
from llamarl.scoring.scorer import Item, Outcomes, Queue, Scorer, Site
from llamarl.types import Outcome

if TYPE_CHECKING:
    from llamarl.scoring.kinds.novelty import NoveltyKindSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Past:
    """Training completions that were scored, each with ticket, sample_index and vector."""

    places_M2: Tensor  # int64
    units_ME: Tensor  # float32

    def where(self, kept_M: Tensor) -> _Past:
        return _Past(self.places_M2[kept_M], self.units_ME[kept_M])

    def without(self, ticket: int) -> _Past:
        is_other_M = self.places_M2[:, 0] != ticket
        return self if bool(is_other_M.all()) else self.where(is_other_M)

    def with_more(self, other: _Past) -> _Past:
        return _Past(
            torch.cat([self.places_M2, other.places_M2]), torch.cat([self.units_ME, other.units_ME])
        )

    def newest(self, count: int) -> _Past:
        """Return the last `count` in the order of their places."""
        places = self.places_M2.tolist()
        order = sorted(range(len(places)), key=places.__getitem__)
        return self.where(torch.tensor(order[-count:], dtype=torch.int64))


# torch.cat takes a tensor without elements for one of any width.
_NOTHING = _Past(torch.zeros((0, 2), dtype=torch.int64), torch.zeros(0))


class Novelty(Scorer):
    """Scores batches of completions. Their column diversity/cosine_distance is of their group.

    groups_per_step: tickets of a step.
    """

    is_novelty = True
    computes = True

    def __init__(
        self,
        name: str,
        settings: NoveltyKindSettings,
        embedder: EmbedderSettings,
        groups_per_step: int,
        site: Site,
    ):
        self.name = name
        self._settings = settings
        self._embedder_settings = embedder
        self._groups_per_step = groups_per_step
        self._device = site.group.device
        self._items: dict[int, Item] = {}
        self._released: Queue[list[int]] = Queue()
        self._embedder: Embedder | None = None
        self._history = _NOTHING  # oldest first
        self._come = _NOTHING  # completions of the newest step
        self._step = 0  # the newest step of which a completion has come

    @property
    def pending(self) -> int:
        """The number of items whose batch is whole and not scored yet."""
        return sum(map(len, self._released))

    def start(self) -> None:
        """Load the model. ValueError or OSError for what cannot be used."""
        self._embedder = load_embedder(self._embedder_settings, self._device)

    def submit(self, key: int, item: Item) -> None:
        """Take one item, which waits for its batch."""
        self._items[key] = item

    def release(self, keys: Sequence[int]) -> None:
        """Note that these items are all of a batch."""
        if keys:
            is_held_out = self._items[keys[0]].is_held_out
            self._released.put(list(keys), is_held_out=is_held_out)

    def poll(self) -> Outcomes:
        """Score a batch."""
        if not self._released:
            return []
        keys = self._released.take()
        assert self._embedder is not None, "poll comes after start"
        said = [self._items.pop(key).of_policy for key in keys]
        items = list(dict.fromkeys(said))  # one attack has several replies
        units_NE = unit(self._embedder.embed([item.text for item in items])).float()
        if not items[0].is_held_out:
            assert items[0].sample is not None, "a training completion is a ticket's"
            self._begin(items[0].sample[0])
        scores = dict(zip(items, self._novelty(units_NE).tolist()))
        columns: dict[str, float] = {}
        if not items[0].is_held_out:
            places = torch.tensor([item.sample for item in items])
            self._come = self._come.with_more(_Past(places, units_NE))
            if len(items) > 1:
                columns["diversity/cosine_distance"] = mean_pairwise_distance(units_NE)
        outcomes = []
        for key, item in zip(keys, said):
            outcomes.append((key, Outcome("score", scores[item], "", columns=columns)))
        return outcomes

    def close(self) -> None:
        """Drop what is pending."""
        self._items.clear()
        self._released.clear()

    def state_dict(self) -> State:
        """Return the history: places [M, 2] int64 (ticket, sample_index), units [M, E], and the
        name of the embedder.
        """
        past = self._history.with_more(self._come)
        if not len(past.places_M2):
            return {}
        return {
            "places": past.places_M2,
            "units": past.units_ME,
            "embedder": self._embedder_settings.path,
        }

    def load_state_dict(self, state: Mapping[str, Tensor | str]) -> None:
        """Go on with a saved history. Begin anew, with a warning, if another embedder made it."""
        if state.get("embedder") != self._embedder_settings.path:
            log.warning(
                "reward %s: the checkpoint's history has vectors of %s, which cannot be compared "
                "with those of %s, so the history begins anew",
                self.name,
                state.get("embedder"),
                self._embedder_settings.path,
            )
            return
        places = state["places"]
        units = state["units"]
        assert isinstance(places, Tensor) and isinstance(units, Tensor), "state_dict has tensors"
        past = _Past(places, units)
        steps_M = past.places_M2[:, 0] // self._groups_per_step
        self._step = int(steps_M.max())
        self._history = past.where(steps_M < self._step)
        self._come = past.where(steps_M == self._step)

    def _begin(self, ticket: int) -> None:
        """Forget earlier completions of a ticket. If it belongs to a later step, first move what
        has come into the history.
        """
        self._history = self._history.without(ticket)
        self._come = self._come.without(ticket)
        step = ticket // self._groups_per_step
        if step > self._step:
            self._step = step
            past = self._history.with_more(self._come)
            self._history = past.newest(self._settings.history)
            self._come = _NOTHING

    def _novelty(self, units_NE: Tensor) -> Tensor:
        """[N]: 1 - the mean cosine with the nearest; 1 without a history."""
        if not len(self._history.units_ME):
            return torch.ones(len(units_NE))
        cosines_NM = units_NE @ self._history.units_ME.T
        nearest = self._settings.nearest
        if nearest is not None and nearest < cosines_NM.shape[1]:
            cosines_NM = cosines_NM.topk(nearest, dim=1).values
        return 1 - cosines_NM.mean(1)
