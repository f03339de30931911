"""Which sequences go into which microbatch: greedy collation by length. Pure numbers."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass


def collate(lengths: list[int], budget: float) -> list[list[int]]:
    """Return the indices of sequences by microbatch: longest first, each into the first with room.

    Source: Magistral, 3. Ties keep their order, so equal input gives equal output. A sequence
    longer than the budget gets a microbatch of its own. ValueError for a budget without room.
    """
    if budget < 1:
        raise ValueError(f"budget={budget}: a microbatch needs room for a token")
    bins: list[list[int]] = []
    free: list[float] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        with_room = (place for place, room in enumerate(free) if length <= room)
        place = next(with_room, len(bins))
        if place == len(bins):
            bins.append([])
            free.append(budget)
        bins[place].append(index)
        free[place] -= length
    return bins


@dataclass(slots=True)
class Bin:
    """The completions that go into a microbatch together."""

    members: dict[int, list[int]]  # completions, ascending, by the group whose prompt they share
    size: int  # packed tokens


def collate_groups(
    members: list[list[int]],
    prompt_sizes: list[int],
    lengths: list[int],
    budget: int,
    *,
    whole_groups: bool,
    largest_over_ranks: Callable[[list[int]], list[int]] | None,
) -> list[Bin]:
    """Return the completions by microbatch; see `pack` (llamarl.learning.packing).

    members: the completions of each group. prompt_sizes: tokens of each group's prompt, which its
    completions in a microbatch share. lengths: tokens of each completion behind it.

    First what a group has over the budget is collated, then the parts of all groups. While the
    completions of the emptiest microbatch fit into the holes of the others, they go there: one
    microbatch less.
    """
    parts = []
    for number, completions in enumerate(members):
        prompt = prompt_sizes[number]
        sizes = [lengths[completion] for completion in completions]
        cuts = [[i] for i in range(len(completions))]
        if whole_groups or budget > prompt:
            cuts = collate(sizes, math.inf if whole_groups else budget - prompt)
        for cut in cuts:
            own = sorted(completions[i] for i in cut)
            size = prompt + sum(sizes[i] for i in cut)
            parts.append(Bin({number: own}, size))
    sizes = [part.size for part in parts]
    if largest_over_ranks is not None:
        sizes = largest_over_ranks(sizes)
    bins = []
    for places in collate(sizes, budget):
        joined = Bin({}, 0)
        for place in places:
            joined.members |= parts[place].members
            joined.size += parts[place].size
        bins.append(joined)
    while bins and not whole_groups:
        fewer = _without_emptiest(bins, prompt_sizes, lengths, budget)
        if fewer is None:
            break
        bins = fewer
    return bins


def _without_emptiest(
    bins: list[Bin], prompt_sizes: list[int], lengths: list[int], budget: int
) -> list[Bin] | None:
    """Return the microbatches without the emptiest, whose completions go into holes of the others;
    None if they do not fit.

    The longest goes first, where its prompt is computed anyway or else into the first hole that
    holds a prompt more.
    """
    emptiest = min(bins, key=lambda b: b.size)
    others = [deepcopy(b) for b in bins if b is not emptiest]
    group_of: dict[int, int] = {}
    for number, members in emptiest.members.items():
        group_of |= dict.fromkeys(members, number)
    for completion in sorted(group_of, key=lambda c: -lengths[c]):
        number = group_of[completion]
        own = lengths[completion]
        with_prompt = own + prompt_sizes[number]
        costs = [own if number in b.members else with_prompt for b in others]
        holes = [i for i, b in enumerate(others) if b.size + costs[i] <= budget]
        if not holes:
            return None
        hole = min(holes, key=lambda i: costs[i])
        others[hole].size += costs[hole]
        insort(others[hole].members.setdefault(number, []), completion)
    return others
