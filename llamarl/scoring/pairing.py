"""PairMaker: makes preference pairs from prompts, in one process.

    prompts --engine--> completions --Scorer--> Outcomes --PairRule--> lines, Tally
       |--references--> candidates -|

While one batch of prompts is scored, the next is sampled, so that waiting for a judge costs little.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from llamarl.inference import Engine, SamplingParams
from llamarl.inference.offline import completions_of
from llamarl.scoring.assembly import ErrorRate, item_of
from llamarl.scoring.pairs import Candidate, PairRule, Tally, label, row_of
from llamarl.scoring.scorer import Item, Scorer
from llamarl.tasks.base import PromptMaker
from llamarl.tasks.special import reply_ids, text_ids
from llamarl.types import Completion, Outcome, Prompt

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
    tally: Tally


class PairMaker:
    """Samples completions of prompts, lets a scorer score them, and pairs them.

    engine: None: nothing is sampled. scorer: started, and used by nothing else. sampling: its n is
    the number of completions. prompt_of: gives the prompt of a number. targets_of: gives a row's
    own answers, by key.
    tokenizer: the policy's. RewardError if more than max_error_rate of the outcomes are errors.
    """

    def __init__(
        self,
        *,
        engine: Engine | None,
        scorer: Scorer,
        sampling: SamplingParams,
        chunk_tokens: int,
        prompt_of: Callable[[int], Prompt],
        targets_of: Callable[[Prompt], Mapping[str, str]],
        tokenizer,
        prompts: PromptMaker,
        rule: PairRule,
        max_error_rate: float,
    ):
        self._engine = engine
        self._scorer = scorer
        self._sampling = sampling
        self._chunk_tokens = chunk_tokens
        self._prompt_of = prompt_of
        self._targets_of = targets_of
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._rule = rule
        self._errors = ErrorRate(scorer.name, max_error_rate)
        self._keys = itertools.count()
        self._numbers: dict[int, int] = {}  # of the prompts, by key, until its outcome is known
        self._outcomes: dict[int, Outcome] = {}  # by key, until its batch is settled
        self._counted: Counter[str] = Counter()  # the scorer's counts in settled batches

    def make(self, batches: Iterable[range]) -> Iterator[tuple[str, Tally]]:
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
        batch = _Batch({}, Tally(prompts=len(numbers)))
        for number in numbers:
            batch.answered[number] = _Answered(self._prompt_of(number))
        if self._engine is None:
            for number, answered in batch.answered.items():
                self._submit(number, answered, [], batch.tally)
            return batch
        for number, answered in batch.answered.items():
            prompt_ids = answered.prompt.prompt_ids.tolist()
            self._engine.submit(number, prompt_ids, self._sampling, stream=STREAM)
        samples: dict[int, list[Completion]] = {number: [] for number in numbers}
        for finished in completions_of(self._engine, self._chunk_tokens):
            for _, completion in finished:
                number = completion.ticket
                samples[number].append(completion)
                if len(samples[number]) == self._sampling.n:
                    own = sorted(samples.pop(number), key=lambda c: c.sample_index)
                    self._submit(number, batch.answered[number], own, batch.tally)
            self._collect()
        return batch

    def _submit(
        self, number: int, answered: _Answered, samples: list[Completion], tally: Tally
    ) -> None:
        """Make candidates of a prompt's completions, and submit them to be scored."""
        for completion in samples:
            item = item_of(completion, answered.prompt, self._decode, self._tokenizer.decode)
            tally.completions += 1
            tally.cut += not item.has_ended
            self._add(answered, completion.sample_index, item, tally)
        for name, text in self._targets_of(answered.prompt).items():
            self._add_reference(answered, name, text, tally)
        count = len(answered.candidates)
        if count < 2:
            return
        for places in self._rule.batches(number, count):
            keys = {place: next(self._keys) for place in places}
            for place, key in keys.items():
                self._numbers[key] = number
                self._scorer.submit(key, answered.items[place])
            self._scorer.release(list(keys.values()))
            answered.batches.append(keys)

    def _add_reference(self, answered: _Answered, key: str, text: str, tally: Tally) -> None:
        """Make a candidate of the row's own answer, unless it is longer than a sample may be."""
        prompt_ids = answered.prompt.prompt_ids.tolist()
        ids = reply_ids(self._tokenizer, prompt_ids, text, chat=self._prompts.shows_turns)
        if len(ids) > self._sampling.max_new_tokens:
            tally.long_references += 1
            return
        item = Item(
            prompt=answered.prompt,
            token_ids=torch.tensor(ids, dtype=torch.int64),
            text=text,
            has_ended=True,
            is_held_out=False,
            decode_raw=self._tokenizer.decode,
        )
        tally.references += 1
        self._add(answered, key, item, tally)

    def _add(self, answered: _Answered, origin: int | str, item: Item, tally: Tally) -> None:
        """Make an item a candidate, unless its text is empty."""
        if not item.text.strip():
            tally.empty += 1
            return
        last = int(answered.prompt.prompt_ids[-1])
        ids = text_ids(self._tokenizer, item.text, behind=last)
        answered.candidates.append(Candidate(origin, item.text, tuple(ids)))
        answered.items.append(item)
        length = answered.prompt.prompt_ids.numel() + len(ids) + 1
        tally.longest = max(tally.longest, length)

    def _settle(self, batch: _Batch) -> tuple[str, Tally]:
        """Return the lines of a batch once all its items are scored."""
        wanted: set[int] = set()
        for answered in batch.answered.values():
            for keys in answered.batches:
                wanted.update(keys.values())
        self._collect()
        while not wanted <= self._outcomes.keys():
            self._scorer.wait(WAIT_S)
            self._collect()
        lines = []
        for number, answered in batch.answered.items():
            for row in self._rows(number, answered, batch.tally):
                lines.append(json.dumps(row) + "\n")
        self._count_orders(batch.tally)
        return "".join(lines), batch.tally

    def _rows(self, number: int, answered: _Answered, tally: Tally) -> list[dict[str, object]]:
        """Return the lines of a prompt's pairs."""
        rule = self._rule
        rows = []
        unscored: set[int] = set()
        for keys in answered.batches:
            outcomes = {place: self._outcomes.pop(key) for place, key in keys.items()}
            scores = {place: outcome.value for place, outcome in outcomes.items()}
            unscored.update(place for place in outcomes if outcomes[place].kind != "score")
            for one, other in rule.pairs_of(scores):
                pair = label(
                    answered.candidates[one],
                    answered.candidates[other],
                    (scores[one], scores[other]),
                    is_flipped=rule.is_flipped(number, (one, other)),
                )
                tally.enter(pair)
                if not isinstance(pair, str):
                    turns = self._prompts.turns(answered.prompt.asked)
                    row = row_of(pair, turns, number=number, margin_coef=rule.margin_coef)
                    rows.append(row)
        tally.unscored += len(unscored)
        return rows

    def _collect(self) -> None:
        """Take the outcomes that are known. RewardError if too many are errors."""
        outcomes = self._scorer.poll()
        for key, outcome in outcomes:
            self._errors.add(outcome, self._numbers.pop(key))
            self._outcomes[key] = outcome
        if outcomes:
            self._errors.check()

    def _count_orders(self, tally: Tally) -> None:
        """Count the comparisons of judges since the last batch was settled."""
        counts = Counter(self._scorer.counts)
        since = counts - self._counted
        tally.compared = since["pairs"]
        tally.order_ties = since["order_ties"]
        self._counted = counts

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
