"""Prompts by number: ticket i always has the same prompt."""

from __future__ import annotations

import random
from functools import lru_cache

from llamarl.tasks.base import Task, sample_digest
from llamarl.tasks.forms import PART_KEY, REWARD_KEY
from llamarl.tasks.parts import MixtureTask, Schedule
from llamarl.types import Prompt


class PromptStream:
    """Prompts of tickets: stream[ticket] is a pure function of (task, seed). Each epoch has all
    training prompts, in an order of its own.
    """

    def __init__(self, task: Task, seed: int):
        if task.num_train < 1:
            raise ValueError("the task has no training prompts")
        self._task = task
        self._seed = seed
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def _epoch_order(self, epoch: int) -> list[int]:
        order = list(range(self._task.num_train))
        random.Random(f"prompts {self._seed} {epoch}").shuffle(order)
        return order

    @property
    def fingerprint(self) -> str:
        """A text that identifies the prompts and their order.

        It covers the number of prompts, their order, the digest of all rows, and the token ids of a
        sample, so that another tokenizer, chat template or system prompt changes it.
        """
        num_prompts = self._task.num_train
        sample = sample_digest(self._task.train_prompt, num_prompts)
        return (
            f"{num_prompts} in order {self._seed}, rows {self._task.train_digest}, sample {sample}"
        )

    def __getitem__(self, ticket: int) -> Prompt:
        epoch, place = divmod(ticket, self._task.num_train)
        return self._task.train_prompt(self._order(epoch)[place])


class MixedPrompts:
    """Gives the prompts of a mixture: each part has a PromptStream of its own, in its own epochs.
    ValueError for a weight that is too small.
    """

    def __init__(self, task: MixtureTask, seed: int):
        self._task = task
        self._schedule = Schedule(task.weights, seed)
        self._streams = {name: PromptStream(part, seed) for name, part in task.parts.items()}

    @property
    def fingerprint(self) -> str:
        """A text of the parts in their order, how often each is asked, and each one's own
        fingerprint.
        """
        parts = []
        for name, stream in self._streams.items():
            parts.append(f"{self._schedule.shares[name]} of {name}: {stream.fingerprint}")
        return "; ".join(parts)

    def __getitem__(self, ticket: int) -> Prompt:
        draw = self._schedule[ticket]
        return self._task.prompt_of(draw.part, self._streams[draw.part][draw.number])


class ChosenPrompts:
    """Prompts of tickets: the sampler's choice, or else the stream's prompt.

    A generator learns a choice from the grant, another executor from a generator's record. Only the
    newest MOST choices are kept, which is more than can be in work.
    """

    MOST = 1 << 18  # choices

    def __init__(self, task: Task, seed: int):
        self.stream = PromptStream(task, seed)
        self._task = task
        self._choices: dict[int, int] = {}  # ticket -> number of its prompt

    @property
    def fingerprint(self) -> str:
        """As of the stream."""
        return self.stream.fingerprint

    def note(self, ticket: int, prompt: int | None) -> None:
        """Note which prompt was chosen for a ticket; None: none was. One that is no longer there,
        because a run goes on with fewer rows, is not noted.
        """
        if prompt is None or prompt >= self._task.num_train:
            return
        self._choices[ticket] = prompt
        while len(self._choices) > self.MOST:
            del self._choices[next(iter(self._choices))]

    def chosen(self, ticket: int) -> int | None:
        """Return the number of a ticket's prompt, if one was chosen."""
        return self._choices.get(ticket)

    def __getitem__(self, ticket: int) -> Prompt:
        if ticket in self._choices:
            return self._task.train_prompt(self._choices[ticket])
        return self.stream[ticket]


AnyPrompts = PromptStream | MixedPrompts | ChosenPrompts


def prompts_of(task: Task, seed: int, *, chosen: bool = False) -> AnyPrompts:
    """Return the prompts of a task by ticket number. chosen: a sampler chooses among them."""
    if chosen:
        return ChosenPrompts(task, seed)
    if isinstance(task, MixtureTask):
        return MixedPrompts(task, seed)
    return PromptStream(task, seed)


def fixed(prompts: AnyPrompts) -> AnyPrompts:
    """Return prompts that are a function of the ticket's number alone."""
    return prompts.stream if isinstance(prompts, ChosenPrompts) else prompts


def note(prompts: AnyPrompts, ticket: int, prompt: int | None) -> None:
    """Note which prompt was chosen for a ticket, where a sampler chooses."""
    if isinstance(prompts, ChosenPrompts):
        prompts.note(ticket, prompt)


def chosen(prompts: AnyPrompts, ticket: int) -> int | None:
    """Return the number of the prompt that was chosen for a ticket, if one was."""
    return prompts.chosen(ticket) if isinstance(prompts, ChosenPrompts) else None


def part_of(prompt: Prompt) -> str | None:
    """Return the part of a mixture that a prompt belongs to; None if it belongs to none."""
    part = prompt.meta.get(PART_KEY)
    return part if isinstance(part, str) and REWARD_KEY in prompt.meta else None
