"""Groups become microbatches of a fixed token budget: greedy collation, then one gather for all
tokens at once.

The gradient does not depend on what is packed with what: `num_loss_tokens`, `num_completions` and
`num_groups` count the batch, never a microbatch, and a loss that couples the completions of a group
gets every group whole.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import torch
from torch import Tensor

from llamarl.learning.segments import sum_by
from llamarl.learning.targets import Targets
from llamarl.types import Group, PackedBatch


@dataclass(frozen=True, slots=True)
class Packing:
    """One rank's share of an optimizer update. Add the counts that divide a loss over ranks first."""

    microbatches: list[PackedBatch]
    completions: list[list[int]]  # whose labels they hold, in order; numbered over all groups
    places: list[
        Tensor
    ]  # [R] int64 each: where its labels are among the completion tokens of all groups, end to end
    num_loss_tokens: (
        int  # trained completion tokens, also those left out because their advantage is 0
    )
    num_completions: int  # trained completions, likewise
    num_groups: int  # groups of at least two trained completions, likewise
    num_trained_groups: int  # groups of at least one, likewise
    num_dropped: int  # completions left out because their advantage is 0
    num_masked: (
        int  # completions that must not be trained on: no reward, aborted, or without tokens
    )
    unused_budget_fraction: (
        float  # share of the microbatches' token budgets that no token takes, 0..1
    )
    has_reference: (
        bool  # ref_logprobs hold a reference's; otherwise they are zeros and mean nothing
    )


def collate(lengths: list[int], budget: int) -> list[list[int]]:
    """Indices of sequences by microbatch: longest first, each into the first microbatch with room        (Magistral, 3)

    Ties keep their order, so equal input gives equal output. A sequence longer than the budget gets
    a microbatch of its own.
    """
    if budget < 1:
        raise ValueError(f"budget={budget}: a microbatch needs room for a token")
    smallest = min(lengths, default=0)
    bins: list[list[int]] = []
    free: list[int] = []
    first_open = 0  # bins before it have no room for any sequence
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        while first_open < len(bins) and free[first_open] < smallest:
            first_open += 1
        place = next((b for b in range(first_open, len(bins)) if free[b] >= length), len(bins))
        if place == len(bins):
            bins.append([])
            free.append(budget)
        bins[place].append(index)
        free[place] -= length
    return bins


def pack(
    groups: list[Group],
    targets: list[Targets],
    *,
    budget_tokens: int,
    drop_zero_advantage: bool,
    whole_groups: bool = False,
) -> Packing:
    """Collate the trained completions of `groups` with their targets and shift them, on the CPU.

    A prompt of P tokens is computed once for all completions of its group in a microbatch, which
    takes P + sum(L - 1) of the budget; a group is cut where it is over the budget, or where its
    parts fill holes that save a whole microbatch, and with whole_groups never. What cannot be cut
    and is over the budget gets a microbatch of its own (warned once). Aborted completions and those
    with a NaN reward are left out and counted nowhere but in num_masked. drop_zero_advantage also
    leaves out those whose advantages are all 0: right for pure policy gradients, where they add
    nothing and still count in the denominators; wrong where a loss has other terms. ValueError for
    an empty prompt, targets that do not fit or are not finite, or ref_logprobs in only some groups.
    """
    if not groups:
        return Packing(
            microbatches=[],
            completions=[],
            places=[],
            num_loss_tokens=0,
            num_completions=0,
            num_groups=0,
            num_trained_groups=0,
            num_dropped=0,
            num_masked=0,
            unused_budget_fraction=0.0,
            has_reference=False,
        )
    flat = _flatten(groups, targets)
    kept = flat.trainable & flat.has_advantage if drop_zero_advantage else flat.trainable
    families = _families(
        groups, kept.tolist(), flat.lengths.tolist(), None if whole_groups else budget_tokens
    )
    bins = [[families[i] for i in b] for b in collate([f.size for f in families], budget_tokens)]
    if not whole_groups:
        bins = _without_emptiest(
            bins, flat.prompt_lengths.tolist(), flat.lengths.tolist(), budget_tokens
        )
    microbatches, places = _build(flat, bins)
    tokens = [batch.input_ids.numel() for batch in microbatches]
    if max(tokens, default=0) > budget_tokens:
        _warn_too_long(budget_tokens, whole_groups)
    room = sum(max(t, budget_tokens) for t in tokens)
    trained_by_group = torch.bincount(flat.groups[flat.trainable])
    return Packing(
        microbatches=microbatches,
        completions=[[c for family in b for c in family.completions] for b in bins],
        places=places,
        num_loss_tokens=int(flat.lengths[flat.trainable].sum()),
        num_completions=int(flat.trainable.sum()),
        num_groups=int((trained_by_group > 1).sum()),
        num_trained_groups=int((trained_by_group > 0).sum()),
        num_dropped=int(flat.trainable.sum() - kept.sum()),
        num_masked=int((~flat.trainable).sum()),
        unused_budget_fraction=1 - sum(tokens) / room if room else 0.0,
        has_reference=flat.per_token["ref_logprobs"] is not None,
    )


def filler() -> PackedBatch:
    """A microbatch that trains nothing: for a rank with fewer than its FSDP peers, who all must run
    the same number.
    """
    zero, none, number = (
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0),
    )
    return PackedBatch(
        input_ids=zero,
        positions=zero,
        cu_seqlens=torch.tensor([0, 1]),
        parents=zero - 1,
        rows=none,
        labels=none,
        generator_logprobs=number,
        ref_logprobs=number,
        advantages=number,
        returns=number,
        old_values=number,
        policy_versions=none,
        completions=none,
        groups=none,
        rewards=number,
        group_tokens=number,
    )


def to_device(batch: PackedBatch, device: torch.device | str) -> PackedBatch:
    """The batch with every tensor on `device`."""
    return replace(
        batch,
        **{f.name: getattr(batch, f.name).to(device, non_blocking=True) for f in fields(batch)},
    )


@dataclass(frozen=True, slots=True)
class _Flat:
    """All groups end to end: N completions, S = all prompt tokens, C = all completion tokens."""

    prompt_ids: Tensor  # [S]
    per_token: dict[str, Tensor | None]  # [C] each: what becomes a field of the labels; None: zeros
    prompt_starts: Tensor  # [N] into prompt_ids; completions of a group share theirs
    prompt_lengths: Tensor  # [N]
    starts: Tensor  # [N] into the completion tokens
    lengths: Tensor  # [N]
    groups: Tensor  # [N] number of its group
    rewards: Tensor  # [N] float32, shaped
    group_tokens: Tensor  # [N] float32, trained tokens of its group
    has_advantage: Tensor  # [N] bool: that of some token is not 0
    trainable: Tensor  # [N] bool


def _flatten(groups: list[Group], targets: list[Targets]) -> _Flat:
    _check(groups, targets)
    prompt_lengths = torch.tensor([g.prompt_ids.numel() for g in groups])
    sizes = torch.tensor([g.lengths.numel() for g in groups])
    lengths, advantages = (
        torch.cat([g.lengths for g in groups]),
        torch.cat([t.advantages for t in targets]).float(),
    )
    rewards, able = (
        torch.cat([t.rewards for t in targets]).float(),
        torch.cat([g.trained for g in groups]),
    )
    has_advantage = torch.zeros(len(lengths)).index_add(
        0, torch.arange(len(lengths)).repeat_interleave(lengths), (advantages != 0).float()
    )

    def joined(tensors: list[Tensor]) -> Tensor | None:
        return torch.cat(tensors) if any(t.numel() for t in tensors) else None

    groups_of = torch.arange(len(groups)).repeat_interleave(sizes)
    trained_tokens = torch.where(able, lengths, 0).float()

    return _Flat(
        prompt_ids=torch.cat([g.prompt_ids for g in groups]),
        per_token=dict(
            labels=torch.cat([g.token_ids for g in groups]),
            generator_logprobs=torch.cat([g.generator_logprobs for g in groups]),
            ref_logprobs=joined([g.ref_logprobs for g in groups]),
            advantages=advantages,
            returns=joined([t.returns for t in targets]),
            old_values=joined([t.old_values for t in targets]),
            policy_versions=torch.cat([g.policy_versions for g in groups]),
        ),
        prompt_starts=_starts(prompt_lengths).repeat_interleave(sizes),
        prompt_lengths=prompt_lengths.repeat_interleave(sizes),
        starts=_starts(lengths),
        lengths=lengths,
        groups=groups_of,
        rewards=rewards,
        group_tokens=sum_by(trained_tokens, groups_of, len(groups))[groups_of],
        has_advantage=has_advantage > 0,
        trainable=able,
    )


def _check(groups: list[Group], targets: list[Targets]) -> None:
    if len(targets) != len(groups) or any(
        t.rewards.shape != g.rewards.shape
        or t.advantages.shape != g.token_ids.shape
        or {t.returns.numel(), t.old_values.numel()} not in ({0}, {g.token_ids.numel()})
        for t, g in zip(targets, groups)
    ):
        raise ValueError(
            "targets do not fit the groups: give rewards [G] and an advantage for every token of each group"
        )
    if (
        len({g.ref_logprobs.numel() == g.token_ids.numel() for g in groups if g.token_ids.numel()})
        > 1
    ):
        raise ValueError(
            "ref_logprobs in some groups and not in others: every group must pass the reference, or none"
        )
    if (
        len(
            {
                t.returns.numel() == g.token_ids.numel()
                for t, g in zip(targets, groups)
                if g.token_ids.numel()
            }
        )
        > 1
    ):
        raise ValueError(
            "returns in some groups and not in others: a value head is trained on every group, or none"
        )
    if not all(g.prompt_ids.numel() for g in groups):
        raise ValueError(
            "an empty prompt: the first token needs something to look at; let the task add a bos token"
        )
    for g, t in zip(groups, targets):
        advantages_are_finite = t.advantages[g.trained_tokens].isfinite().all()
        rewards_are_finite = t.rewards[g.trained].isfinite().all()
        if not (advantages_are_finite and rewards_are_finite):
            raise ValueError(
                f"ticket {g.ticket}: an advantage or a shaped reward is not finite; the function that made it must give a "
                "number to what is to be trained"
            )


@dataclass(frozen=True, slots=True)
class _Family:
    """Completions that share one computed prompt in a microbatch."""

    prompt: int  # number of the group
    completions: list[int]  # numbers of the completions, over all groups
    size: int  # packed tokens


def _families(
    groups: list[Group], kept: list[bool], lengths: list[int], budget: int | None
) -> list[_Family]:
    """Kept completions by group; what a prompt and its completions have over the budget is collated
    (None: never).
    """
    families, n = [], 0
    for number, group in enumerate(groups):
        prompt = group.prompt_ids.numel()
        own = [c for c in range(n, n + group.lengths.numel()) if kept[c]]
        n += group.lengths.numel()
        sizes = [lengths[c] - 1 for c in own]
        room = max(1, sum(sizes)) if budget is None else budget - prompt
        parts = collate(sizes, room) if room > 0 else [[i] for i in range(len(own))]
        families += [
            _Family(number, sorted(own[i] for i in part), prompt + sum(sizes[i] for i in part))
            for part in parts
        ]
    return families


def _without_emptiest(
    bins: list[list[_Family]], prompt_lengths: list[int], lengths: list[int], budget: int
) -> list[list[_Family]]:
    """While the completions of the emptiest microbatch fit into the holes of the others, they go
    there: one microbatch less.

    The longest goes first, where its prompt is computed anyway or else into the first hole that
    holds a prompt more.
    """
    while len(bins) > 1:
        emptiest = min(range(len(bins)), key=lambda b: sum(family.size for family in bins[b]))
        others = [
            {family.prompt: family for family in b} for i, b in enumerate(bins) if i != emptiest
        ]
        free = [budget - sum(family.size for family in b.values()) for b in others]
        moved = [(family.prompt, c) for family in bins[emptiest] for c in family.completions]
        for prompt, completion in sorted(moved, key=lambda m: -lengths[m[1]]):
            costs = [
                lengths[completion] - 1 + (0 if prompt in b else prompt_lengths[completion])
                for b in others
            ]
            fitting = [b for b, (cost, room) in enumerate(zip(costs, free)) if cost <= room]
            if not fitting:
                return bins
            place = min(fitting, key=lambda b: prompt not in others[b])
            family = others[place].get(prompt, _Family(prompt, [], prompt_lengths[completion]))
            size = family.size + lengths[completion] - 1
            others[place][prompt] = _Family(prompt, sorted([*family.completions, completion]), size)
            free[place] -= costs[place]
        bins = [list(b.values()) for b in others]
    return bins


def _build(flat: _Flat, bins: list[list[_Family]]) -> tuple[list[PackedBatch], list[Tensor]]:
    """Lay out the segments of all microbatches end to end, gather their tokens at once, then cut
    them apart.

    Returns the microbatches, and for each the places of its labels.
    """
    if not bins:
        return [], []
    prompt_starts, prompt_lengths = flat.prompt_starts.tolist(), flat.prompt_lengths.tolist()
    starts, lengths = flat.starts.tolist(), flat.lengths.tolist()
    completions_at = flat.prompt_ids.numel()  # where completion tokens start in the source
    segments: list[
        tuple[int, int, int, int]
    ] = []  # (place in the source, tokens, first position, parent)
    trained: list[
        tuple[int, int, int]
    ] = []  # (completion, row of its prompt's last token, row of its first token)
    cuts = [(0, 0, 0, 0)]  # (tokens, segments, labels, completions) before each microbatch
    tokens = labels = 0
    for families in bins:
        first_segment = len(segments)
        for family in families:
            one = family.completions[0]
            parent, prompt = len(segments) - first_segment, prompt_lengths[one]
            segments.append((prompt_starts[one], prompt, 0, -1))
            tokens += prompt
            last = tokens - 1
            for c in family.completions:
                trained.append((c, last, tokens))
                if lengths[c] > 1:
                    segments.append((completions_at + starts[c], lengths[c] - 1, prompt, parent))
                tokens += lengths[c] - 1
                labels += lengths[c]
        cuts.append((tokens, len(segments), labels, len(trained)))
    source, size, first, parents = torch.tensor(segments).T
    completion, prompt_row, own_row = torch.tensor(trained).T
    inside = _ramp(size)
    # Label j of a completion is predicted by its prompt's last token if j = 0, else by its own
    # token j - 1.
    count = flat.lengths[completion]
    place = _ramp(count)
    rows = torch.where(
        place == 0,
        prompt_row.repeat_interleave(count),
        own_row.repeat_interleave(count) + place - 1,
    )
    token = flat.starts[completion].repeat_interleave(count) + place
    per_token = dict(
        input_ids=torch.cat([flat.prompt_ids, flat.per_token["labels"]])[
            source.repeat_interleave(size) + inside
        ],
        positions=first.repeat_interleave(size) + inside,
    )
    per_label = {
        n: torch.zeros(len(token)) if values is None else values[token]
        for n, values in flat.per_token.items()
    }
    boundaries = torch.cat([torch.zeros(1, dtype=torch.int64), size.cumsum(0)])
    microbatches, places = [], []
    for (t0, s0, r0, n0), (t1, s1, r1, n1) in pairwise(cuts):
        inside_it = completion[n0:n1]
        microbatches.append(
            PackedBatch(
                cu_seqlens=boundaries[s0 : s1 + 1] - t0,
                parents=parents[s0:s1],
                rows=rows[r0:r1] - t0,
                completions=torch.arange(n1 - n0).repeat_interleave(count[n0:n1]),
                groups=flat.groups[inside_it].unique(return_inverse=True)[1],
                rewards=flat.rewards[inside_it],
                group_tokens=flat.group_tokens[inside_it],
                **{name: values[t0:t1] for name, values in per_token.items()},
                **{name: values[r0:r1] for name, values in per_label.items()},
            )
        )
        places.append(token[r0:r1])
    return microbatches, places


def _ramp(sizes: Tensor) -> Tensor:
    """0 .. n-1 for each n, end to end."""
    return torch.arange(int(sizes.sum())) - _starts(sizes).repeat_interleave(sizes)


def _starts(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


@functools.cache
def _warn_too_long(budget_tokens: int, whole_groups: bool) -> None:
    what, remedy = ("sequences", "the longest prompt plus max_new_tokens")
    if whole_groups:
        what, remedy = (
            "groups (which this loss needs whole)",
            "the longest prompt plus group_size times max_new_tokens",
        )
    warnings.warn(
        f"{what} longer than trainer.microbatch_tokens={budget_tokens} get microbatches of their own and need more memory "
        f"than it promises; raise it to at least {remedy}",
        stacklevel=3,
    )
