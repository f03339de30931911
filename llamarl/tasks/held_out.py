"""Held-out prompts, by number: those of the task, and those of each set of eval.sets.

    eval.num_prompts=2 eval.sets={a: {..., num_prompts: 3}, b: {..., num_prompts: 1}}

    set       prompts   numbers
    the task  2         0, 1                     EvalSet("", 0, 2)
    a         3         APART + 0, 1, 2          EvalSet("a", APART, 3)
    b         1         2 * APART                EvalSet("b", 2 * APART, 1)

An evaluation asks all of them. A number is that of the prompt's random numbers too, so no two
prompts share any, and how many are asked of one set changes nothing in another. What comes of it is
told by set: of the task's own as eval/reward, of the set a as eval/a/reward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from llamarl.tasks.base import Task, sample_digest
from llamarl.tasks.row_keys import PART_KEY, REWARD_KEY, SET_KEY
from llamarl.types import Prompt
from llamarl.words.choices import OWN, column_of

APART = 1 << 32  # between the first numbers of two sets

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class EvalSet:
    """A set of held-out prompts, by their numbers among all of a run's."""

    name: str
    first: int
    count: int

    @property
    def numbers(self) -> range:
        """The numbers of its prompts."""
        return range(self.first, self.first + self.count)

    @property
    def place(self) -> str:
        """Where its prompts come from, for messages about one of them."""
        return f" of eval.sets.{self.name}" if self.name else ""

    def columns(self, metrics: Mapping[str, Value]) -> dict[str, Value]:
        """Rename metrics of its prompts to its own columns: "eval/reward" becomes
        "eval/NAME/reward".
        """
        return {column_of(self.name, column): value for column, value in metrics.items()}


def section_of(prompt: Prompt) -> str:
    """Return the section of the configuration that a prompt's settings are in: "task",
    "task.parts.NAME" of a mixture, or "eval.sets.NAME".
    """
    if REWARD_KEY not in prompt.meta:
        return "task"
    if SET_KEY in prompt.meta:
        return f"eval.sets.{prompt.meta[SET_KEY]}"
    return f"task.parts.{prompt.meta[PART_KEY]}"


def own_meta(prompt: Prompt) -> dict[str, object]:
    """Return a prompt's meta without what a mixture or a set has added to it."""
    own = dict(prompt.meta)
    if REWARD_KEY in own:
        del own[REWARD_KEY]
        del own[SET_KEY if SET_KEY in own else PART_KEY]
    return own


def numbered(counts: Mapping[str, int]) -> tuple[EvalSet, ...]:
    """Return sets of so many prompts, by name and in order; without those that have none."""
    sets = []
    for place, (name, count) in enumerate(counts.items()):
        if count:
            sets.append(EvalSet(name, place * APART, count))
    return tuple(sets)


def shown_sets(sets: Sequence[EvalSet]) -> str:
    """Return what is asked, for people: "500 of the task, 20 of sums"."""
    return ", ".join(f"{one.count} of {one.name or 'the task'}" for one in sets)


def set_of(sets: Sequence[EvalSet], number: int) -> EvalSet:
    """Return the set that a prompt belongs to."""
    (found,) = [one for one in sets if number in one.numbers]
    return found


def reference_texts(
    sets: Sequence[EvalSet], prompts: Mapping[int, Prompt], key: str | None
) -> list[str] | None:
    """Return the texts that held-out rows have under this key; None without a key. prompts: the
    prompts of these sets, by number. ValueError for the first row without a text.
    """
    if key is None:
        return None
    texts = []
    for number, prompt in prompts.items():
        text = prompt.meta.get(key)
        if not isinstance(text, str) or not text:
            keys = ", ".join(prompt.meta) or "none"
            one = set_of(sets, number)
            row = f"{number - one.first}{one.place}"
            raise ValueError(
                f"eval.reference_key={key}: held-out row {row} ({prompt.text[:40]!r}) has no text "
                f"under this key to compare with (its keys: {keys}); choose another key, or "
                "eval.reference_key=null"
            )
        texts.append(text)
    return texts


class HeldOut:
    """Holds the held-out prompts of a run. own: the task's; others: by name, of eval.sets.

    counts: how many are asked of each at most, by name.
    """

    def __init__(self, own: Task, others: Mapping[str, Task], counts: Mapping[str, int]):
        self._tasks = {OWN: own, **others}
        self._counts = {}
        for name, task in self._tasks.items():
            self._counts[name] = min(counts[name], task.num_eval)
        self.sets = numbered(self._counts)

    def prompt(self, number: int) -> Prompt:
        """Return the prompt of a number."""
        place, j = divmod(number, APART)
        return self._prompt(list(self._tasks)[place], j)

    def asked(self, sets: Sequence[EvalSet]) -> dict[int, Prompt]:
        """Return the prompts of these sets by number, set after set."""
        numbers = chain.from_iterable(one.numbers for one in sets)
        return {number: self.prompt(number) for number in numbers}

    def first(self, most: int) -> tuple[EvalSet, ...]:
        """Return the sets with so many of their prompts, or as many as they have."""
        return numbered({name: min(most, task.num_eval) for name, task in self._tasks.items()})

    @property
    def rewards(self) -> dict[str, str]:
        """The reward of each set's own kind, as an import path, by name; without the task's."""
        return {name: task.default_reward for name, task in self._tasks.items() if name}

    @property
    def fingerprint(self) -> str:
        """A text that is equal for equal prompts in equal sets alone."""
        said = []
        for name, task in self._tasks.items():
            count = self._counts[name]
            sample = sample_digest(lambda j: self._prompt(name, j), count)
            known = f"{count}, rows {task.eval_digest}, sample {sample}"
            said.append(f"{name}: {known}" if name else known)
        return "; ".join(said)

    def _prompt(self, name: str, j: int) -> Prompt:
        """Return prompt j of a set, with the set's name and own reward in its meta unless it is the
        task's own.
        """
        task = self._tasks[name]
        prompt = task.eval_prompt(j)
        if not name:
            return prompt
        own = {SET_KEY: name, REWARD_KEY: task.default_reward}
        return dataclasses.replace(prompt, meta={**prompt.meta, **own})
