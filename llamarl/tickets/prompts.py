"""Prompts by number: ticket i is always the same prompt."""

from __future__ import annotations

import random
from functools import lru_cache

from llamarl.tasks.base import Task, sample_digest
from llamarl.types import Prompt


class PromptStream:
    """stream[ticket] is a pure function of (task, seed).

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
        """What streams of the same prompts in the same order have in common, and no others.

        Their number, the order, the digest of all rows, and of a sample of them the token ids,
        which tokenizer, chat template and system prompt decide too.
        """
        num_prompts = self._task.num_train
        sample = sample_digest(self._task.train_prompt, num_prompts)
        return (
            f"{num_prompts} in order {self._seed}, rows {self._task.train_digest}, sample {sample}"
        )

    def __getitem__(self, ticket: int) -> Prompt:
        epoch, place = divmod(ticket, self._task.num_train)
        return self._task.train_prompt(self._order(epoch)[place])
