"""StepWatch: keeps what a step knows of its groups, for people who look at it afterwards.

    begin(groups, ...)   the groups of the step, and their targets
    note(...)            the trainer's logprobs of a microbatch, in the first pass over a minibatch
    take()               all of it, by group

It only holds on to tensors that are there anyway: what is trained does not depend on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from llamarl.learning.targets import Targets
from llamarl.types import Group


@dataclass(frozen=True, slots=True)
class SeenGroup:
    """A group of a step, with what the trainer made of it."""

    group: Group
    targets: Targets | None  # None: it was left out of the update
    # [T] float32, under the weights that the step began with; NaN where they were not computed:
    # context, and completions that nothing is learned from
    trainer_logprobs: Tensor


class StepWatch:
    """Holds one step at a time, on one rank."""

    def __init__(self):
        self._groups: list[Group] = []
        self._trained: list[Group] = []
        self._targets: list[Targets] = []
        self._cuts: list[slice] = []
        self._noted: list[tuple[int, Tensor, Tensor]] = []

    def begin(
        self, groups: list[Group], trained: list[Group], targets: list[Targets], cuts: list[slice]
    ) -> None:
        """Note a step's groups; those of them that are trained on, with their targets; and which
        of these are trained on together.
        """
        self._groups = groups
        self._trained = trained
        self._targets = targets
        self._cuts = cuts
        self._noted = []

    def note(self, minibatch: int, places: Tensor, logprobs: Tensor) -> None:
        """Note the trainer's logprobs [R] of labels, whose places [R] are among the completion
        tokens of a minibatch's groups.
        """
        self._noted.append((minibatch, places, logprobs))

    def take(self) -> list[SeenGroup]:
        """Return the step's groups in their order, and forget them."""
        logprobs = self._by_group()
        seen = []
        number_of = {id(group): number for number, group in enumerate(self._trained)}
        for group in self._groups:
            number = number_of.get(id(group))
            if number is None:
                nothing = torch.full((group.token_ids.numel(),), math.nan)
                seen.append(SeenGroup(group=group, targets=None, trainer_logprobs=nothing))
                continue
            one = SeenGroup(
                group=group, targets=self._targets[number], trainer_logprobs=logprobs[number]
            )
            seen.append(one)
        self.begin([], [], [], [])
        return seen

    def _by_group(self) -> list[Tensor]:
        """Return the logprobs [T] of each group that is trained on."""
        found: list[Tensor] = []
        for number, cut in enumerate(self._cuts):
            sizes = [group.token_ids.numel() for group in self._trained[cut]]
            logprobs_C = torch.full((sum(sizes),), math.nan)
            for minibatch, places, logprobs in self._noted:
                if minibatch == number:
                    logprobs_C[places.cpu()] = logprobs.float().cpu()
            found += logprobs_C.split(sizes)
        return found
