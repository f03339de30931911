"""Prompts by number: ticket i always has the same prompt."""

from __future__ import annotations

import random
from functools import lru_cache

from llamarl.tasks.base import Task, sample_digest
from llamarl.tasks.mixture import PART_KEY, REWARD_KEY, MixtureTask, Schedule
from llamarl.types import Prompt


class PromptStream:
    """Gives the prompt of each ticket: stream[ticket] is a pure function of (task, seed).

    It is epochs of the training prompts, each in an order of its own.
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
        """A text that is equal for streams of the same prompts in the same order, and for no
        others.

        It covers the number of prompts, their order, the digest of all rows, and the token ids of a
        sample, which depend on tokenizer, chat template and system prompt too.
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


AnyPrompts = PromptStream | MixedPrompts


def prompts_of(task: Task, seed: int) -> AnyPrompts:
    """Return the prompts of a task by ticket number."""
    if isinstance(task, MixtureTask):
        return MixedPrompts(task, seed)
    return PromptStream(task, seed)


def part_of(prompt: Prompt) -> str | None:
    """Return the part of a mixture that a prompt belongs to; None if it belongs to none."""
    part = prompt.meta.get(PART_KEY)
    return part if isinstance(part, str) and REWARD_KEY in prompt.meta else None
