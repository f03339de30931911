"""ReplyMean: an attack's score is the mean over the victim's replies to it.

    submit(attack with M replies) --M items--> a Scorer --M outcomes--> mean --> poll

The scorer sees each reply as a completion whose prompt is the attack. So any function, judge, model
or sum of these can score it. If one of an attack's replies has no score, the attack has none.
Novelty is the attack's, which each of its replies names.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llamarl.scoring.scorer import Around, Item, Outcomes, Scorer
from llamarl.types import Outcome, Prompt, Replies


@dataclass(frozen=True, slots=True)
class ReplySettings:
    """Settings of how replies are read, and when an attack counts as a success.

    decode: gives the text of the victim's tokens. threshold: an attack succeeds with a mean score
    above it. decode_raw: gives their text with special tokens; None: there are none.
    """

    decode: Callable[[list[int]], str]
    threshold: float
    decode_raw: Callable[[list[int]], str] | None = None

    def with_replies(self, attack: Item, sent: Replies) -> Item:
        """Return an attack with its replies, each as a completion of the attack; or, without
        replies, with its outcome.
        """
        if sent.outcome != "score":
            make = Outcome.error if sent.outcome == "error" else Outcome.abstain
            return dataclasses.replace(attack, known=make(sent.reason))
        prompt = Prompt(prompt_ids=sent.prompt_ids, text=attack.text, meta=attack.prompt.meta)
        replies = []
        for token_ids, has_ended in zip(sent.replies, sent.has_ended):
            reply = Item(
                prompt=prompt,
                token_ids=token_ids,
                text=self.decode(token_ids.tolist()),
                has_ended=has_ended,
                is_held_out=attack.is_held_out,
                attack=attack,
                decode_raw=self.decode_raw,
            )
            replies.append(reply)
        known = None
        if not any(reply.text.strip() for reply in replies):
            known = Outcome.error(f"the victim's {len(replies)} replies are empty")
        return dataclasses.replace(attack, replies=tuple(replies), known=known)


class ReplyMean(Around):
    """Scores attacks by a scorer of their replies.

    scorer: scores the replies. An attack's column reward/success is 1 if it succeeds and 0 if not.
    """

    def __init__(self, scorer: Scorer, settings: ReplySettings):
        super().__init__(scorer)
        self._settings = settings
        self._keys = itertools.count()
        self._owners: dict[int, int] = {}  # by key of a reply in scoring: its attack's key
        # By attack: the outcomes of its replies, by their keys, in order; None: not known yet.
        self._said: dict[int, dict[int, Outcome | None]] = {}
        self._done: deque[tuple[int, Outcome]] = deque()

    def submit(self, key: int, item: Item) -> None:
        """Submit the replies to an attack, unless its outcome is known without them."""
        if item.known is not None:
            self._done.append((key, item.known))
            return
        self._said[key] = {}
        for reply in item.replies:
            own = next(self._keys)
            self._owners[own] = key
            self._said[key][own] = None
            self.scorer.submit(own, reply)

    def release(self, keys: Sequence[int]) -> None:
        """Note that the replies to these attacks make a batch."""
        batch: list[int] = []
        for key in keys:
            batch += self._said.get(key, {})
        self.scorer.release(batch)

    def poll(self) -> Outcomes:
        """Return the outcomes of attacks all of whose replies have one."""
        for own, outcome in self.scorer.poll():
            key = self._owners.pop(own)
            said = self._said[key]
            said[own] = outcome
            outcomes = [one for one in said.values() if one is not None]
            if len(outcomes) == len(said):
                del self._said[key]
                self._done.append((key, mean_outcome(outcomes)))
        done = []
        for key, outcome in self._done:
            if outcome.kind == "score":
                succeeds = outcome.achieved > self._settings.threshold
                columns = {**outcome.columns, "reward/success": float(succeeds)}
                outcome = dataclasses.replace(outcome, columns=columns)
            done.append((key, outcome))
        self._done.clear()
        return done

    def close(self) -> None:
        """Drop what is pending, and close the scorer."""
        self.scorer.close()
        self._owners.clear()
        self._said.clear()


def mean_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the mean score of replies. If one has no score, return the first error, otherwise the
    first abstention.
    """
    for kind, make in (("error", Outcome.error), ("abstain", Outcome.abstain)):
        for number, outcome in enumerate(outcomes, start=1):
            if outcome.kind == kind:
                return make(f"reply {number} of {len(outcomes)}: {outcome.reason}")
    value = sum(outcome.value for outcome in outcomes) / len(outcomes)
    success = None
    if any(outcome.success is not None for outcome in outcomes):
        success = sum(outcome.achieved for outcome in outcomes) / len(outcomes)
    told: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for name, told_value in outcome.columns.items():
            told[name].append(told_value)
    columns = {name: sum(numbers) / len(numbers) for name, numbers in told.items()}
    return Outcome("score", value, "", success, columns=columns)
