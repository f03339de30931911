"""Preference pairs of a prompt's completions: which two are compared, which is better, and the row
for it.

    completions --batches--> what is scored together --pairs_of--> label --> LabelledPair | why not

    pairing      pairs a prompt    source
    all          each two of n     4 choose 2 (Noukhovitch et al. 2024, section 5)
    best_worst   1                 the highest and the lowest of n (Pace et al. 2024)
    random       1                 two samples of a prompt (Stiennon et al. 2020)
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

from llamarl.inference import Engine, SamplingParams
from llamarl.inference.offline import completions_of
from llamarl.scoring.assembly import ErrorRate, item_of
from llamarl.scoring.scorer import Item, Scorer
from llamarl.tasks.base import PromptMaker
from llamarl.tasks.special import reply_ids, text_ids
from llamarl.types import Completion, Outcome, Prompt
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
class LabelledPair:
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
) -> LabelledPair | NoPair:
    """Return the pair of two candidates with these scores, or the reason why they make none."""
    if one.token_ids == other.token_ids:
        return "equal texts"
    first, second = scores
    if first == second:
        return "tie"
    is_first_chosen = (first > second) != is_flipped
    if is_first_chosen:
        return LabelledPair(one, other, first, second, is_flipped=is_flipped)
    return LabelledPair(other, one, second, first, is_flipped=is_flipped)


def row_of(
    pair: LabelledPair, turns: Turns, *, number: int, margin_coef: float
) -> dict[str, object]:
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
class PairCounts:
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

    def add(self, other: PairCounts) -> None:
        """Add the counts of another tally."""
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            whole = max(mine, theirs) if one.name == "longest" else mine + theirs
            setattr(self, one.name, whole)

    def enter(self, pair: LabelledPair | NoPair) -> None:
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


STREAM = 3  # the engine's stream here; training has 0, evaluations have 1 and 2
WAIT_S = 1.0  # between two looks at what is scored; every scorer limits its own waits


@dataclass(slots=True)
class _Answered:
    """A prompt, with the candidates for its pairs."""

    prompt: Prompt
    candidates: list[Candidate] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)  # the scored item of each candidate
    # For each batch of items that are scored together: their keys by candidates' places.
    batches: list[dict[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Batch:
    """Prompts that are completed together, by number."""

    answered: dict[int, _Answered]
    tally: PairCounts


@dataclass(kw_only=True)
class PairMaker:
    """Samples completions of prompts, lets a scorer score them, and pairs them.

    engine: None: nothing is sampled. scorer: started, and used by nothing else. sampling: its n is
    the number of completions. prompt_of: gives the prompt of a number. targets_of: gives a row's
    own answers, by key.
    tokenizer: the policy's. RewardError if more than max_error_rate of the outcomes are errors.
    """

    engine: Engine | None
    scorer: Scorer
    sampling: SamplingParams
    chunk_tokens: int
    prompt_of: Callable[[int], Prompt]
    targets_of: Callable[[Prompt], Mapping[str, str]]
    tokenizer: Any
    prompts: PromptMaker
    rule: PairRule
    max_error_rate: float

    def __post_init__(self):
        self._errors = ErrorRate(self.scorer.name, self.max_error_rate)
        self._keys = itertools.count()
        self._numbers: dict[int, int] = {}  # of the prompts, by key, until its outcome is known
        self._outcomes: dict[int, Outcome] = {}  # by key, until its batch is settled
        self._counted: Counter[str] = Counter()  # the scorer's counts in settled batches

    def make(self, batches: Iterable[range]) -> Iterator[tuple[str, PairCounts]]:
        """Yield the lines of each batch of prompts, in order, with the counts of its outcomes."""
        scored: deque[_Batch] = deque()
        for numbers in batches:
            scored.append(self._answer(numbers))
            if len(scored) > 1:
                yield self._settle(scored.popleft())
        while scored:
            yield self._settle(scored.popleft())

    def _answer(self, numbers: range) -> _Batch:
        """Sample completions of prompts, and hand them to the scorer prompt by prompt."""
        batch = _Batch({}, PairCounts(prompts=len(numbers)))
        for number in numbers:
            batch.answered[number] = _Answered(self.prompt_of(number))
        if self.engine is None:
            for number, answered in batch.answered.items():
                self._submit(number, answered, [], batch.tally)
            return batch
        for number, answered in batch.answered.items():
            prompt_ids = answered.prompt.prompt_ids.tolist()
            self.engine.submit(number, prompt_ids, self.sampling, stream=STREAM)
        samples: dict[int, list[Completion]] = {number: [] for number in numbers}
        for finished in completions_of(self.engine, self.chunk_tokens):
            for _, completion in finished:
                number = completion.ticket
                samples[number].append(completion)
                if len(samples[number]) == self.sampling.n:
                    own = sorted(samples.pop(number), key=lambda c: c.sample_index)
                    self._submit(number, batch.answered[number], own, batch.tally)
            self._collect()
        return batch

    def _submit(
        self, number: int, answered: _Answered, samples: list[Completion], tally: PairCounts
    ) -> None:
        """Make candidates of a prompt's completions, and submit them to be scored."""
        for completion in samples:
            item = item_of(completion, answered.prompt, self._decode, self.tokenizer.decode)
            tally.completions += 1
            tally.cut += not item.has_ended
            self._add(answered, completion.sample_index, item, tally)
        for name, text in self.targets_of(answered.prompt).items():
            self._add_reference(answered, name, text, tally)
        count = len(answered.candidates)
        if count < 2:
            return
        for places in self.rule.batches(number, count):
            keys = {place: next(self._keys) for place in places}
            for place, key in keys.items():
                self._numbers[key] = number
                self.scorer.submit(key, answered.items[place])
            self.scorer.release(list(keys.values()))
            answered.batches.append(keys)

    def _add_reference(self, answered: _Answered, key: str, text: str, tally: PairCounts) -> None:
        """Make a candidate of the row's own answer, unless it is longer than a sample may be."""
        prompt_ids = answered.prompt.prompt_ids.tolist()
        ids = reply_ids(self.tokenizer, prompt_ids, text, chat=self.prompts.shows_turns)
        if len(ids) > self.sampling.max_new_tokens:
            tally.long_references += 1
            return
        item = Item(
            prompt=answered.prompt,
            token_ids=torch.tensor(ids, dtype=torch.int64),
            text=text,
            has_ended=True,
            is_held_out=False,
            decode_raw=self.tokenizer.decode,
        )
        tally.references += 1
        self._add(answered, key, item, tally)

    def _add(self, answered: _Answered, origin: int | str, item: Item, tally: PairCounts) -> None:
        """Make an item a candidate, unless its text is empty."""
        if not item.text.strip():
            tally.empty += 1
            return
        last = int(answered.prompt.prompt_ids[-1])
        ids = text_ids(self.tokenizer, item.text, behind=last)
        answered.candidates.append(Candidate(origin, item.text, tuple(ids)))
        answered.items.append(item)
        length = answered.prompt.prompt_ids.numel() + len(ids) + 1
        tally.longest = max(tally.longest, length)

    def _settle(self, batch: _Batch) -> tuple[str, PairCounts]:
        """Return the lines of a batch once all its items are scored."""
        wanted: set[int] = set()
        for answered in batch.answered.values():
            for keys in answered.batches:
                wanted.update(keys.values())
        self._collect()
        while not wanted <= self._outcomes.keys():
            self.scorer.wait(WAIT_S)
            self._collect()
        lines = []
        for number, answered in batch.answered.items():
            for row in self._rows(number, answered, batch.tally):
                lines.append(json.dumps(row) + "\n")
        self._count_orders(batch.tally)
        return "".join(lines), batch.tally

    def _rows(self, number: int, answered: _Answered, tally: PairCounts) -> list[dict[str, object]]:
        """Return the lines of a prompt's pairs."""
        rows = []
        unscored: set[int] = set()
        for keys in answered.batches:
            outcomes = {place: self._outcomes.pop(key) for place, key in keys.items()}
            scores = {place: outcome.value for place, outcome in outcomes.items()}
            unscored.update(place for place in outcomes if outcomes[place].kind != "score")
            for one, other in self.rule.pairs_of(scores):
                pair = label(
                    answered.candidates[one],
                    answered.candidates[other],
                    (scores[one], scores[other]),
                    is_flipped=self.rule.is_flipped(number, (one, other)),
                )
                tally.enter(pair)
                if not isinstance(pair, str):
                    turns = self.prompts.turns(answered.prompt.asked)
                    coef = self.rule.margin_coef
                    rows.append(row_of(pair, turns, number=number, margin_coef=coef))
        tally.unscored += len(unscored)
        return rows

    def _collect(self) -> None:
        """Take the outcomes that are known. RewardError if too many are errors."""
        outcomes = self.scorer.poll()
        for key, outcome in outcomes:
            self._errors.add(outcome, self._numbers.pop(key))
            self._outcomes[key] = outcome
        if outcomes:
            self._errors.check()

    def _count_orders(self, tally: PairCounts) -> None:
        """Count the comparisons of judges since the last batch was settled."""
        counts = Counter(self.scorer.counts)
        since = counts - self._counted
        tally.compared = since["pairs"]
        tally.order_ties = since["order_ties"]
        self._counted = counts

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)
