"""Weighted: makes one score of the scores of several scorers.

    submit, hear, forget, release --> each part --Outcome--> sum of weight * value --> poll

If one part gives an error or abstains, the item has no score, whatever the other parts give. The
part for novelty is also reported alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from llamarl.executor import State
from llamarl.scoring.scorer import Item, MakeScorer, Outcomes, Scorer, Site
from llamarl.types import Outcome, Stretch
from llamarl.words.choices import part_column


@dataclass(frozen=True, slots=True)
class WeightedPart:
    """A part of a reward: a scorer and the weight of its scores."""

    name: str
    make: MakeScorer
    weight: float = 1.0


class Weighted(Scorer):
    """Scores items by all parts.

    outcomes: the names of the parts that say whether an item succeeded; (): all but novelty.
    """

    def __init__(self, parts: Sequence[WeightedPart], site: Site, *, outcomes: Sequence[str] = ()):
        self.name = " + ".join(part.name for part in parts)
        self._parts = parts
        self._outcomes = frozenset(outcomes)
        self.scorers: dict[str, Scorer] = {part.name: part.make(site) for part in parts}
        self._said: dict[int, dict[str, Outcome]] = {}  # by key: the outcomes by part
        self._done: Outcomes = []

    @property
    def pending(self) -> int:
        """The largest number of items that a part is scoring."""
        return max(scorer.pending for scorer in self.scorers.values())

    @property
    def is_computing(self) -> bool:
        """Whether the next `poll` computes."""
        return any(scorer.is_computing for scorer in self.scorers.values())

    @property
    def counts(self) -> Mapping[str, int]:
        """The sum of its parts' counts."""
        counts: Counter[str] = Counter()
        for scorer in self.scorers.values():
            # Copy first, because a judge's thread may be adding a count.
            counts.update(dict(scorer.counts))
        return counts

    def load(self) -> None:
        """Load the models of all parts."""
        for scorer in self.scorers.values():
            scorer.load()

    def start(self) -> None:
        """Start all parts."""
        for scorer in self.scorers.values():
            scorer.start()

    def submit(self, key: int, item: Item) -> None:
        """Submit an item to all parts."""
        self._said[key] = {}
        for scorer in self.scorers.values():
            scorer.submit(key, item)

    def hear(self, stretch: Stretch, prompt_ids: Tensor) -> None:
        """Pass new tokens of a completion to all parts."""
        for scorer in self.scorers.values():
            scorer.hear(stretch, prompt_ids)

    def forget(self, ticket: int, sample_index: int) -> None:
        """Let all parts drop what they read ahead of a completion."""
        for scorer in self.scorers.values():
            scorer.forget(ticket, sample_index)

    def release(self, keys: Sequence[int]) -> None:
        """Release a batch to all parts."""
        for scorer in self.scorers.values():
            scorer.release(keys)

    def poll(self) -> Outcomes:
        """Return the items that all parts have scored."""
        for name, scorer in self.scorers.items():
            for key, outcome in scorer.poll():
                self._enter(name, key, outcome)
        self.has_read_ahead = any(scorer.has_read_ahead for scorer in self.scorers.values())
        done = self._done
        self._done = []
        return done

    def wait(self, timeout_s: float) -> bool:
        """Block until a part may have scored, unless one computes on this thread."""
        if self.is_computing:
            return True
        waiting = [scorer for scorer in self.scorers.values() if scorer.pending]
        return bool(waiting) and waiting[0].wait(timeout_s)

    def close(self) -> None:
        """Close all parts."""
        for scorer in self.scorers.values():
            scorer.close()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of all parts."""
        for scorer in self.scorers.values():
            yield from scorer.tensors()

    def state_dict(self) -> State:
        """Return each part's state, under its name."""
        state: dict[str, object] = {}
        for name, scorer in self.scorers.items():
            for key, value in scorer.state_dict().items():
                state[f"{name}/{key}"] = value
        return state

    def load_state_dict(self, state: Mapping) -> None:
        """Go on from each part's saved state."""
        for name, scorer in self.scorers.items():
            own = {}
            for key, value in state.items():
                of_part, _, field = key.rpartition("/")
                if of_part == name:
                    own[field] = value
            if own:
                scorer.load_state_dict(own)

    def _enter(self, name: str, key: int, outcome: Outcome) -> None:
        """Note a part's outcome for an item. It may be the last that is missing."""
        said = self._said[key]
        said[name] = outcome
        if len(said) == len(self._parts):
            del self._said[key]
            self._done.append((key, self._sum(said)))

    def _sum(self, said: Mapping[str, Outcome]) -> Outcome:
        """Return the outcome over all parts. It does not depend on which came first."""
        total = 0.0
        for_novelty = 0.0
        has_novelty = False
        of_outcomes = 0.0
        abstention = None
        for part in self._parts:
            outcome = said[part.name]
            if outcome.kind == "error":
                return Outcome.error(self._reason(part, outcome))
            if outcome.kind == "abstain":
                abstention = abstention or Outcome.abstain(self._reason(part, outcome))
                continue
            weighted = part.weight * outcome.value
            if part.name in self._outcomes:
                of_outcomes += weighted
            if self.scorers[part.name].is_novelty:
                has_novelty = True
                for_novelty += weighted
            else:
                total += weighted
        if abstention is not None:
            return abstention
        success: float | None = None
        if self._outcomes:
            success = of_outcomes
        elif has_novelty:
            success = total
        whole = Outcome.score(total + for_novelty, success)
        columns: dict[str, float] = {}
        for part in self._parts:
            columns |= said[part.name].columns
            columns[part_column(part.name)] = said[part.name].value
        return replace(whole, columns=columns)

    def _reason(self, part: WeightedPart, outcome: Outcome) -> str:
        if len(self._parts) == 1:
            return outcome.reason
        return f"{part.name}: {outcome.reason}"
