"""Several tasks in one run: the parts of a mixture, to train on, and the sets of eval.sets.

A mixture, by weight: `task=mixture task.parts={...}`.

    ticket --part_of--> (part, its n-th ticket) --the part's own epochs--> prompt

Tickets come in blocks of BLOCK. Each block has as many tickets of a part as its weight says, in an
order drawn from (seed, block): so which part a ticket takes, and the how manieth of that part it
is, are pure functions of (seed, ticket), and a resumed run goes on in the middle of every part.

Held-out prompts, by number: eval.num_prompts=2 eval.sets={a: {..., num_prompts: 3}, b: {...}}

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
import hashlib
import json
import random
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from typing import TypeVar

from llamarl.tasks.base import Task, sample_digest
from llamarl.tasks.forms import PART_KEY, REWARD_KEY, SET_KEY
from llamarl.types import Prompt
from llamarl.words.choices import OWN, column_of

BLOCK = 4096  # tickets; a weight is kept to a part in so many


def shares(weights: Mapping[str, float], count: int) -> dict[str, int]:
    """Share `count` by weight in whole numbers. What is left over goes to the largest remainders,
    among equal ones to the first.
    """
    whole = sum(weights.values())
    exact = {name: count * weight / whole for name, weight in weights.items()}
    found = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: found[name] - exact[name])
    for name in by_remainder[: count - sum(found.values())]:
        found[name] += 1
    return found


@dataclass(frozen=True, slots=True)
class PartTicket:
    """The part that a ticket of a mixture takes, and which ticket of that part it is."""

    part: str
    number: int  # of the part's own tickets, from 0


class Schedule:
    """Says which part each ticket takes: a pure function of the weights, the seed and the ticket.

    ValueError for a weight so small that no ticket takes its part.
    """

    def __init__(self, weights: Mapping[str, float], seed: int):
        self._seed = seed
        self.shares = shares(weights, BLOCK)  # of each block, by part
        for name, share in self.shares.items():
            if not share:
                raise ValueError(
                    f"task.parts.{name}.weight={weights[name]:g}: less than one prompt in "
                    f"{BLOCK:,} would be of it; raise it, or leave the part out"
                )
        self._names = list(self.shares)
        self._block = lru_cache(maxsize=4)(self._order)

    def _order(self, block: int) -> tuple[array, array]:
        """Return, for each ticket of a block, its part and how many of that part are before it
        there.
        """
        parts = array("l")
        for number, name in enumerate(self._names):
            parts.extend([number] * self.shares[name])
        random.Random(f"parts {self._seed} {block}").shuffle(parts)
        seen = [0] * len(self._names)
        earlier = array("l")
        for part in parts:
            earlier.append(seen[part])
            seen[part] += 1
        return parts, earlier

    def __getitem__(self, ticket: int) -> PartTicket:
        block, place = divmod(ticket, BLOCK)
        parts, earlier = self._block(block)
        name = self._names[parts[place]]
        return PartTicket(name, block * self.shares[name] + earlier[place])


class MixtureTask:
    """A task made of several, by name. Its prompts by number are those of the parts, one part after
    the other; Schedule says in which order a run takes them.

    weights: by name. num_eval: of all held-out prompts; each part gives its share by weight, and
    fewer where it has no more.
    """

    name = "mixture"

    def __init__(self, parts: Mapping[str, Task], weights: Mapping[str, float], num_eval: int):
        self.parts = dict(parts)
        self.weights = dict(weights)
        given = shares(weights, num_eval)
        self._held_out = {name: min(given[name], task.num_eval) for name, task in parts.items()}
        self._train_ends = list(accumulate(task.num_train for task in parts.values()))
        self._eval_ends = list(accumulate(self._held_out.values()))
        self.num_train = self._train_ends[-1]
        self.num_eval = self._eval_ends[-1]
        rewards = {task.default_reward for task in parts.values()}
        self.default_reward = "llamarl.tasks.rewards:part_reward"
        if len(rewards) == 1:
            (self.default_reward,) = rewards
        self.train_digest = self._digest([task.train_digest for task in parts.values()])
        self.eval_digest = self._digest([task.eval_digest for task in parts.values()])

    def _digest(self, digests: Sequence[str]) -> str:
        """Return a digest of the parts' digests; "" if one of the parts makes its rows on
        demand.
        """
        if "" in digests:
            return ""
        text = json.dumps([list(self.parts), digests])
        return hashlib.sha256(text.encode()).hexdigest()

    def prompt_of(self, part: str, prompt: Prompt) -> Prompt:
        """Return a part's prompt, with the part's name and its own reward in its meta. ValueError
        for one whose meta has a name there already.
        """
        if PART_KEY in prompt.meta:
            raise ValueError(
                f'task.parts.{part}: the key "{PART_KEY}" of a row is where a reward finds the '
                "part of a mixture that a prompt is of; rename the rows' own"
            )
        own = {PART_KEY: part, REWARD_KEY: self.parts[part].default_reward}
        return dataclasses.replace(prompt, meta={**prompt.meta, **own})

    @property
    def firsts(self) -> list[int]:
        """The first training prompt of each part."""
        return [0, *self._train_ends[:-1]]

    def train_prompt(self, i: int) -> Prompt:
        """Return training prompt i: the parts' prompts lie one part after the other."""
        name, number = self._find(i, self._train_ends)
        return self.prompt_of(name, self.parts[name].train_prompt(number))

    def eval_prompt(self, j: int) -> Prompt:
        """Return held-out prompt j, in the same order of parts."""
        name, number = self._find(j, self._eval_ends)
        return self.prompt_of(name, self.parts[name].eval_prompt(number))

    def _find(self, number: int, ends: Sequence[int]) -> tuple[str, int]:
        place = bisect_right(ends, number)
        begin = ends[place - 1] if place else 0
        return list(self.parts)[place], number - begin


# --- Held-out prompts ---

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
