"""Preference pairs of a prompt's completions: which two are compared, which is better, and the row
for it.

    completions --batches--> what is scored together --pairs_of--> label --> Pair | why not

    pairing      pairs a prompt    source
    all          each two of n     4 choose 2 (Noukhovitch et al. 2024, section 5)
    best_worst   1                 the highest and the lowest of n (Pace et al. 2024)
    random       1                 two samples of a prompt (Stiennon et al. 2020)
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from llamarl.words.choices import Pairing

Turns = str | list[dict[str, str]]  # a prompt as a model reads it: a text, or messages


@dataclass(frozen=True, slots=True)
class Candidate:
    """A completion or an answer of the row, which may be in a pair."""

    origin: int | str  # a sample's number, or the key of the row's own answer
    text: str
    token_ids: tuple[int, ...]  # the tokens of the text alone, as a reward model reads them


@dataclass(frozen=True, slots=True)
class PairRule:
    """Makes pairs from scored candidates. It is a function of the seed and the prompt's number.

    compares: the scorer says which of two is better and has no number for one alone, so with
    pairing=all each pair is a question of its own. label_noise: the probability that the sides of a
    pair are exchanged. margin_coef: the factor between the scores' difference and a row's margin.
    """

    pairing: Pairing
    compares: bool
    label_noise: float
    margin_coef: float
    seed: int

    def batches(self, number: int, count: int) -> list[tuple[int, ...]]:
        """Return the places of candidates that are scored together, of `count` >= 2."""
        places = range(count)
        if self.pairing == "random":
            drawn = self._draw("pair", number).sample(places, 2)
            return [tuple(sorted(drawn))]
        if self.pairing == "all" and self.compares:
            return list(itertools.combinations(places, 2))
        return [tuple(places)]

    def pairs_of(self, scores: Mapping[int, float]) -> list[tuple[int, int]]:
        """Return which two of a batch are compared, by place. scores: by place; NaN: no score."""
        scored = [place for place, score in scores.items() if not math.isnan(score)]
        if len(scored) < 2:
            return []
        if self.pairing == "best_worst":
            # Among equal scores the first counts as best and the last as worst.
            best = max(scored, key=lambda place: scores[place])
            worst = min(reversed(scored), key=lambda place: scores[place])
            return [(best, worst)]
        return list(itertools.combinations(scored, 2))

    def is_flipped(self, number: int, places: tuple[int, int]) -> bool:
        """Whether noise exchanges the sides of this pair of prompt `number`."""
        low, high = sorted(places)
        return self._draw("noise", number, low, high).random() < self.label_noise

    def _draw(self, *what: object) -> random.Random:
        words = [str(word) for word in (self.seed, *what)]
        return random.Random(" ".join(words))


@dataclass(frozen=True, slots=True)
class Pair:
    """Two candidates, and the verdict about them."""

    chosen: Candidate
    rejected: Candidate
    chosen_score: float
    rejected_score: float
    is_flipped: bool  # noise has exchanged the sides, so the lower score is chosen

    @property
    def difference(self) -> float:
        """The difference of the scores; never negative."""
        return abs(self.chosen_score - self.rejected_score)


NoPair = Literal["tie", "equal texts"]


def label(
    one: Candidate, other: Candidate, scores: tuple[float, float], *, is_flipped: bool
) -> Pair | NoPair:
    """Return the pair of two candidates with these scores, or the reason why they make none."""
    if one.token_ids == other.token_ids:
        return "equal texts"
    first, second = scores
    if first == second:
        return "tie"
    is_first_chosen = (first > second) != is_flipped
    if is_first_chosen:
        return Pair(one, other, first, second, is_flipped=is_flipped)
    return Pair(other, one, second, first, is_flipped=is_flipped)


def row_of(pair: Pair, turns: Turns, *, number: int, margin_coef: float) -> dict[str, object]:
    """Return a line of the file: the keys that recipes/reward_model.py reads, and others to check
    it by.
    """
    return {
        "prompt": turns,
        "chosen": _side(pair.chosen.text, turns),
        "rejected": _side(pair.rejected.text, turns),
        "margin": margin_coef * pair.difference,
        "chosen_score": pair.chosen_score,
        "rejected_score": pair.rejected_score,
        "chosen_sample": pair.chosen.origin,
        "rejected_sample": pair.rejected.origin,
        "flipped": pair.is_flipped,
        "number": number,
    }


def _side(text: str, turns: Turns) -> Turns:
    """Return a side of a pair in the same form as its prompt."""
    if isinstance(turns, str):
        return text
    return [{"role": "assistant", "content": text}]


@dataclass(slots=True)
class Tally:
    """Counts of the outcomes of prompts, completions and pairs."""

    prompts: int = 0
    completions: int = 0  # sampled
    cut: int = 0  # those that max_new_tokens cut
    references: int = 0
    long_references: int = 0  # left out
    empty: int = 0  # left out
    unscored: int = 0  # completions and references without a score
    pairs: int = 0
    flipped: int = 0
    ties: int = 0
    equal_texts: int = 0
    difference: float = 0.0  # of the scores, summed over pairs
    longest: int = 0  # most tokens of a prompt with a candidate and the end token
    compared: int = 0  # pairs that a judge was asked about in both orders
    order_ties: int = 0  # those whose verdicts followed the place
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        """Add the counts of another tally."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            whole = max(mine, theirs) if field.name == "longest" else mine + theirs
            setattr(self, field.name, whole)

    def enter(self, pair: Pair | NoPair) -> None:
        """Count the outcome of two candidates."""
        if pair == "tie":
            self.ties += 1
        elif pair == "equal texts":
            self.equal_texts += 1
        else:
            self.pairs += 1
            self.flipped += pair.is_flipped
            self.difference += pair.difference

    def table(self) -> list[str]:
        """Return the counts for people, a line each."""
        mean = self.difference / self.pairs if self.pairs else math.nan
        agreement = "no judge compared"
        if self.compared:
            share = 1.0 - self.order_ties / self.compared
            agreement = f"{share:.1%} of {self.compared:,} comparisons"
        values = {
            "prompts": f"{self.prompts:,}",
            "completions": f"{self.completions:,}, {self.cut:,} of them cut at max_new_tokens",
            "references": f"{self.references:,}, {self.long_references:,} more too long",
            "pairs": f"{self.pairs:,}, {self.flipped:,} of them flipped",
            "ties": f"{self.ties:,}",
            "equal texts": f"{self.equal_texts:,}",
            "empty": f"{self.empty:,}",
            "unscored": f"{self.unscored:,}",
            "mean margin": f"{mean:.4g}",
            "orders agree": agreement,
            "seconds": f"{self.seconds:.1f}",
        }
        return [f"{name:<14}{value}" for name, value in values.items()]
