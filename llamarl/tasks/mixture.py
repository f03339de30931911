"""Several tasks as one, by weight: `task=mixture task.parts={...}`.

    ticket --part_of--> (part, its n-th ticket) --the part's own epochs--> prompt

Tickets come in blocks of BLOCK. Each block has as many tickets of a part as its weight says, in an
order drawn from (seed, block): so which part a ticket takes, and the how manieth of that part it
is, are pure functions of (seed, ticket), and a resumed run goes on in the middle of every part.
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
from itertools import accumulate

from llamarl.tasks.base import Task
from llamarl.tasks.row_keys import PART_KEY, REWARD_KEY
from llamarl.types import Prompt

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
