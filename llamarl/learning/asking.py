"""How the ranks of an executor, which act as one, share the requests to a model.

first rank: asked --to_message--> broadcast ---------------> its share --+
the others:                     broadcast --from_message--> their shares
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.executor import ExecutorGroup

Microbatch = TypeVar("Microbatch")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: the completions of one prompt that are to be scored. ValueError for a sequence
    without any token.
    """

    prompt_ids: Tensor  # [P] int64; [0] where the completions have no token in common
    completions: tuple[Tensor, ...]  # [L] int64 each

    def __post_init__(self):
        if not self.prompt_ids.numel() and not all(c.numel() for c in self.completions):
            raise ValueError("a sequence without tokens has no last one to be scored at")

    @property
    def num_tokens(self) -> int:
        """The tokens of the prompt and of all completions."""
        return self.prompt_ids.numel() + sum(c.numel() for c in self.completions)


def to_message(asked: Sequence[Asked]) -> Tensor:
    """Encode requests as one message of whole numbers [n] int64, for other ranks: for each prompt
    its length, how many completions it has and their lengths, then the tokens of all.
    """
    sizes = []
    tokens = []
    for one in asked:
        lengths = [completion.numel() for completion in one.completions]
        sizes += [one.prompt_ids.numel(), len(lengths), *lengths]
        tokens += [one.prompt_ids, *one.completions]
    head = torch.tensor([len(asked), *sizes], dtype=torch.int64)
    return torch.cat([head, *tokens])


def from_message(words: Tensor) -> list[Asked]:
    """Decode a message of `to_message`."""
    number, *rest = words.tolist()
    place = 0
    lengths = []  # of each prompt: its own, then those of its completions
    for _ in range(number):
        end = place + 2 + rest[place + 1]
        lengths.append([rest[place], *rest[place + 2 : end]])
        place = end
    tokens = words[1 + place :]
    asked = []
    for own in lengths:
        prompt_ids, *completions = tokens[: sum(own)].split(own)
        asked.append(Asked(prompt_ids, tuple(completions)))
        tokens = tokens[sum(own) :]
    return asked


def broadcast(words: Tensor, group: ExecutorGroup) -> None:
    """Collective over the executor's ranks: send the first rank's message, in host memory, to
    all.
    """
    if group.size > 1:
        dist.broadcast(words, group.ranks[0], group=group.process_group)


def own_share(
    microbatches: list[Microbatch], filler: Microbatch, group: ExecutorGroup
) -> list[Microbatch]:
    """Return this rank's share of all microbatches. Every rank gets as many, with fillers at the
    end, because all must run the same number where the model is sharded.
    """
    own = microbatches[group.data_index :: group.data_size]
    most = math.ceil(len(microbatches) / group.data_size)
    return own + [filler] * (most - len(own))


def join_shares(values_N: Tensor, group: ExecutorGroup) -> None:
    """Collective over the executor's ranks: fill values on the CPU, of which each rank has those of
    its share and zeros elsewhere, with the values of all ranks.
    """
    if group.size == 1:
        return
    if group.tensor_index:
        values_N.zero_()  # the first of those that share a copy speaks for them
    dist.all_reduce(values_N, group=group.process_group)
