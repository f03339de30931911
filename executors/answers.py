"""AnswerScoring: an attack's score is the mean over the victim's answers to it.

    submit(attack with M answers) --M items--> Scoring --M outcomes--> mean --> poll

What scores sees each answer as a completion of the prompt that the attack is. So a function, a
judge, a model, or parts of these may score it. An attack one of whose answers has no score has
none. Novelty is that of the attack, which each of its answers names.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from executors.scoring import Item, Scoring
from llamarl.executor import Meter
from llamarl.tasks.source import Outcome, Outcomes
from llamarl.types import Answered, Prompt


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How answers are read, and when an attack counts as a success.

    decode: the text of the victim's tokens. threshold: an attack succeeds with a mean score above
    it. decode_raw: their text with special tokens; None: there are none.
    """

    decode: Callable[[list[int]], str]
    threshold: float
    decode_raw: Callable[[list[int]], str] | None = None

    def attack(self, item: Item, answered: Answered) -> Attack:
        """An attack with the texts of its answers."""
        texts = [self.decode(token_ids.tolist()) for token_ids in answered.answers]
        return Attack(item, answered, texts)


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack to score. item: itself; answered: with its answers; texts: of these."""

    item: Item
    answered: Answered
    texts: list[str]


class AnswerScoring:
    """Scores attacks by what scores their answers; is a Scoring, of Attacks.

    scoring: of the answers. metrics: gets reward/success, the share of trained-on attacks that
    succeed.
    """

    def __init__(self, scoring: Scoring, settings: AnswerSettings, metrics: Meter):
        self.name = scoring.name
        self.start = scoring.start
        self.wait = scoring.wait
        self._scoring = scoring
        self._settings = settings
        self._metrics = metrics
        self._keys = itertools.count()
        self._owners: dict[int, int] = {}  # the attack of each answer that is being scored
        # Of each attack the outcomes of its answers, by their keys, in order; None: not known yet.
        self._said: dict[int, dict[int, Outcome | None]] = {}
        self._is_held_out: dict[int, bool] = {}
        self._done: deque[tuple[int, Outcome]] = deque()

    @property
    def pending(self) -> int:
        """The number of answers that are being scored."""
        return self._scoring.pending

    def submit(self, key: int, attack: Attack) -> None:
        """Have the answers to an attack scored; one that has none to score has its outcome."""
        answered = attack.answered
        self._is_held_out[key] = attack.item.is_held_out
        if answered.outcome != "score":
            make = Outcome.error if answered.outcome == "error" else Outcome.abstain
            self._done.append((key, make(answered.reason)))
            return
        items = self._items(attack)
        if not any(item.text.strip() for item in items):
            reason = f"the victim's {len(items)} answers are empty"
            self._done.append((key, Outcome.error(reason)))
            return
        self._said[key] = {}
        for item in items:
            own = next(self._keys)
            self._owners[own] = key
            self._said[key][own] = None
            self._scoring.submit(own, item)

    def release(self, keys: Sequence[int]) -> None:
        """The answers to these attacks are a batch."""
        batch: list[int] = []
        for key in keys:
            batch += self._said.get(key, {})
        self._scoring.release(batch)

    def poll(self) -> Outcomes:
        """The outcomes of attacks all of whose answers have one."""
        for own, outcome in self._scoring.poll():
            key = self._owners.pop(own)
            said = self._said[key]
            said[own] = outcome
            if all(one is not None for one in said.values()):
                del self._said[key]
                self._done.append((key, mean_outcome(list(said.values()))))
        done = list(self._done)
        self._done.clear()
        for key, outcome in done:
            is_held_out = self._is_held_out.pop(key)
            if outcome.kind == "score" and not is_held_out:
                succeeds = outcome.achieved > self._settings.threshold
                self._metrics.add_mean("reward/success", float(succeeds))
        return done

    def close(self) -> None:
        """Drop everything."""
        self._scoring.close()
        self._owners.clear()
        self._said.clear()

    def _items(self, attack: Attack) -> list[Item]:
        """The answers, each as a completion of the attack."""
        answered = attack.answered
        prompt = Prompt(
            prompt_ids=answered.prompt_ids, text=attack.item.text, meta=attack.item.prompt.meta
        )
        items = []
        for token_ids, text, has_ended in zip(answered.answers, attack.texts, answered.has_ended):
            item = Item(
                prompt=prompt,
                token_ids=token_ids,
                text=text,
                has_ended=has_ended,
                is_held_out=attack.item.is_held_out,
                attack=attack.item,
                decode_raw=self._settings.decode_raw,
            )
            items.append(item)
        return items


def mean_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """The mean score of answers; the first error, or else the first abstention, if any has none."""
    for kind, make in (("error", Outcome.error), ("abstain", Outcome.abstain)):
        for number, outcome in enumerate(outcomes, start=1):
            if outcome.kind == kind:
                return make(f"answer {number} of {len(outcomes)}: {outcome.reason}")
    value = sum(outcome.value for outcome in outcomes) / len(outcomes)
    without_novelty = None
    if any(outcome.without_novelty is not None for outcome in outcomes):
        without_novelty = sum(outcome.achieved for outcome in outcomes) / len(outcomes)
    return Outcome("score", value, "", without_novelty)
