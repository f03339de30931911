"""Groups become microbatches of a fixed token budget: greedy collation, then one gather for all
tokens at once.

The gradient does not depend on what is packed with what: `num_loss_tokens`, `num_completions` and
`num_groups` count the batch, never a microbatch, and a loss that couples the completions of a group
gets every group whole.

Shapes: G completions of a group; N completions, P prompt tokens and C completion tokens of all
groups; of a microbatch T tokens, S segments and R labels.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, fields
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from llamarl.learning.segments import sum_by
from llamarl.learning.targets import Targets
from llamarl.types import Group, PackedBatch


@dataclass(frozen=True, slots=True)
class Packing:
    """One rank's share of an optimizer update.

    Its counts divide a loss, once they are added over ranks; they include the completions that are
    left out because their advantage is 0.
    """

    microbatches: list[PackedBatch]
    completions: list[list[int]]  # whose labels they hold, in order; numbered over all groups
    # [R] int64 each: where its labels are among the completion tokens of all groups, end to end
    places: list[Tensor]
    num_loss_tokens: int  # trained completion tokens
    num_completions: int  # trained completions
    num_groups: int  # groups of at least two trained completions
    num_trained_groups: int  # groups of at least one
    num_dropped: int  # completions left out because their advantage is 0
    num_masked: int  # completions that must not be trained on, see Group.trained
    unused_budget_fraction: float  # of the microbatches' token budgets: what no token takes, 0..1
    has_reference: bool  # ref_logprobs hold a reference's; else they are zeros without meaning


def collate(lengths: list[int], budget: int) -> list[list[int]]:
    """Indices of sequences by microbatch: longest first, each into the first with room.

    Source: Magistral, 3. Ties keep their order, so equal input gives equal output. A sequence
    longer than the budget gets a microbatch of its own. ValueError for a budget without room.
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
        place = first_open
        while place < len(bins) and free[place] < length:
            place += 1
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
    kept = flat.trained & flat.has_advantage if drop_zero_advantage else flat.trained
    families = _families(groups, flat, kept, None if whole_groups else budget_tokens)
    parts = collate([family.size for family in families], budget_tokens)
    bins = [[families[i] for i in part] for part in parts]
    if not whole_groups:
        bins = _without_emptiest(bins, flat, budget_tokens)
    microbatches, places = _build(flat, bins)
    tokens = [batch.input_ids.numel() for batch in microbatches]
    if max(tokens, default=0) > budget_tokens:
        _warn_too_long(budget_tokens, whole_groups)
    room = sum(max(size, budget_tokens) for size in tokens)
    trained_by_group = torch.bincount(flat.groups[flat.trained])
    num_trained = int(flat.trained.sum())
    return Packing(
        microbatches=microbatches,
        completions=[_completions_of(families) for families in bins],
        places=places,
        num_loss_tokens=int(flat.lengths[flat.trained].sum()),
        num_completions=num_trained,
        num_groups=int((trained_by_group > 1).sum()),
        num_trained_groups=int((trained_by_group > 0).sum()),
        num_dropped=num_trained - int(kept.sum()),
        num_masked=len(flat.trained) - num_trained,
        unused_budget_fraction=1 - sum(tokens) / room if room else 0.0,
        has_reference=flat.per_token["ref_logprobs"] is not None,
    )


def filler() -> PackedBatch:
    """A microbatch that trains nothing: for a rank with fewer than its FSDP peers, who all must run
    the same number.
    """
    zero = torch.zeros(1, dtype=torch.int64)
    none = torch.zeros(0, dtype=torch.int64)
    number = torch.zeros(0)
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
    moved = {f.name: getattr(batch, f.name).to(device, non_blocking=True) for f in fields(batch)}
    return PackedBatch(**moved)


@dataclass(frozen=True, slots=True)
class _Flat:
    """All groups end to end."""

    prompt_ids: Tensor  # [P]
    per_token: dict[str, Tensor | None]  # [C] each: what becomes a field of the labels; None: zeros
    prompt_starts: Tensor  # [N] into prompt_ids; completions of a group share theirs
    prompt_lengths: Tensor  # [N]
    starts: Tensor  # [N] into the completion tokens
    lengths: Tensor  # [N]
    groups: Tensor  # [N] number of its group
    rewards: Tensor  # [N] float32, shaped
    group_tokens: Tensor  # [N] float32, trained tokens of its group
    has_advantage: Tensor  # [N] bool: that of some token is not 0
    trained: Tensor  # [N] bool


def _flatten(groups: list[Group], targets: list[Targets]) -> _Flat:
    _check(groups, targets)
    prompt_lengths = torch.tensor([g.prompt_ids.numel() for g in groups])
    sizes = torch.tensor([g.lengths.numel() for g in groups])
    lengths = torch.cat([g.lengths for g in groups])
    trained = torch.cat([g.trained for g in groups])
    group_of = torch.arange(len(groups)).repeat_interleave(sizes)
    completion_of = torch.arange(len(lengths)).repeat_interleave(lengths)
    advantages = torch.cat([t.advantages for t in targets]).float()
    nonzero_advantages = sum_by((advantages != 0).float(), completion_of, len(lengths))
    trained_tokens = torch.where(trained, lengths, 0).float()
    return _Flat(
        prompt_ids=torch.cat([g.prompt_ids for g in groups]),
        per_token={
            "labels": torch.cat([g.token_ids for g in groups]),
            "generator_logprobs": torch.cat([g.generator_logprobs for g in groups]),
            "ref_logprobs": _joined([g.ref_logprobs for g in groups]),
            "advantages": advantages,
            "returns": _joined([t.returns for t in targets]),
            "old_values": _joined([t.old_values for t in targets]),
            "policy_versions": torch.cat([g.policy_versions for g in groups]),
        },
        prompt_starts=_starts(prompt_lengths).repeat_interleave(sizes),
        prompt_lengths=prompt_lengths.repeat_interleave(sizes),
        starts=_starts(lengths),
        lengths=lengths,
        groups=group_of,
        rewards=torch.cat([t.rewards for t in targets]).float(),
        group_tokens=sum_by(trained_tokens, group_of, len(groups))[group_of],
        has_advantage=nonzero_advantages > 0,
        trained=trained,
    )


def _joined(tensors: list[Tensor]) -> Tensor | None:
    """End to end; None where all are empty."""
    return torch.cat(tensors) if any(t.numel() for t in tensors) else None


def _check(groups: list[Group], targets: list[Targets]) -> None:
    """ValueError, see pack."""
    if len(targets) != len(groups) or not all(map(_fits, targets, groups)):
        raise ValueError(
            "targets do not fit the groups: give rewards [G] and an advantage for every token of "
            "each group"
        )
    begun = [(t, g) for t, g in zip(targets, groups) if g.token_ids.numel()]
    if len({g.ref_logprobs.numel() > 0 for _, g in begun}) > 1:
        raise ValueError(
            "ref_logprobs in some groups and not in others: every group must pass the reference, "
            "or none"
        )
    if len({t.returns.numel() > 0 for t, _ in begun}) > 1:
        raise ValueError(
            "returns in some groups and not in others: a value head is trained on every group, or "
            "none"
        )
    if not all(g.prompt_ids.numel() for g in groups):
        raise ValueError(
            "an empty prompt: the first token needs something to look at; let the task add a bos "
            "token"
        )
    for g, t in zip(groups, targets):
        advantages_are_finite = t.advantages[g.trained_tokens].isfinite().all()
        rewards_are_finite = t.rewards[g.trained].isfinite().all()
        if not (advantages_are_finite and rewards_are_finite):
            raise ValueError(
                f"ticket {g.ticket}: an advantage or a shaped reward is not finite; the function "
                "that made it must give a number to what is to be trained"
            )


def _fits(targets: Targets, group: Group) -> bool:
    tokens = group.token_ids.numel()
    num_returns = targets.returns.numel()
    return (
        targets.rewards.shape == group.rewards.shape
        and targets.advantages.shape == group.token_ids.shape
        and num_returns == targets.old_values.numel()
        and num_returns in (0, tokens)
    )


# --- What goes into which microbatch ---


class _Family(NamedTuple):
    """Completions that share one computed prompt in a microbatch."""

    prompt: int  # number of the group
    completions: list[int]  # numbers of the completions, over all groups
    size: int  # packed tokens


def _completions_of(families: list[_Family]) -> list[int]:
    return list(chain.from_iterable(family.completions for family in families))


def _families(groups: list[Group], flat: _Flat, kept: Tensor, budget: int | None) -> list[_Family]:
    """The kept [N] completions by group; what a prompt and its completions have over the budget is
    collated (None: never).
    """
    families = []
    is_kept = kept.tolist()
    lengths = flat.lengths.tolist()
    first = 0
    for number, group in enumerate(groups):
        prompt = group.prompt_ids.numel()
        end = first + group.lengths.numel()
        own = [completion for completion in range(first, end) if is_kept[completion]]
        first = end
        sizes = [lengths[completion] - 1 for completion in own]
        room = max(1, sum(sizes)) if budget is None else budget - prompt
        parts = collate(sizes, room) if room > 0 else [[i] for i in range(len(own))]
        for part in parts:
            completions = sorted(own[i] for i in part)
            size = prompt + sum(sizes[i] for i in part)
            families.append(_Family(number, completions, size))
    return families


def _without_emptiest(bins: list[list[_Family]], flat: _Flat, budget: int) -> list[list[_Family]]:
    """While the completions of the emptiest microbatch fit into the holes of the others, they go
    there: one microbatch less.
    """
    prompt_lengths = flat.prompt_lengths.tolist()
    lengths = flat.lengths.tolist()
    while len(bins) > 1:
        fewer = _without(_emptiest(bins), bins, prompt_lengths, lengths, budget)
        if fewer is None:
            return bins
        bins = fewer
    return bins


def _emptiest(bins: list[list[_Family]]) -> int:
    return min(range(len(bins)), key=lambda b: sum(family.size for family in bins[b]))


def _without(
    place: int,
    bins: list[list[_Family]],
    prompt_lengths: list[int],
    lengths: list[int],
    budget: int,
) -> list[list[_Family]] | None:
    """The microbatches without that at `place`, whose completions go into holes of the others; None
    if they do not fit.

    The longest goes first, where its prompt is computed anyway or else into the first hole that
    holds a prompt more.
    """
    others = [{family.prompt: family for family in b} for b in bins[:place] + bins[place + 1 :]]
    free = [budget - sum(family.size for family in b.values()) for b in others]
    prompt_of = {}
    for family in bins[place]:
        prompt_of |= dict.fromkeys(family.completions, family.prompt)
    for completion in sorted(prompt_of, key=lambda c: -lengths[c]):
        prompt = prompt_of[completion]
        size = lengths[completion] - 1
        with_prompt = size + prompt_lengths[completion]
        costs = [size if prompt in b else with_prompt for b in others]
        fitting = [b for b in range(len(others)) if costs[b] <= free[b]]
        if not fitting:
            return None
        hole = min(fitting, key=lambda b: prompt not in others[b])
        members = [completion]
        if prompt in others[hole]:
            members += others[hole][prompt].completions
            size += others[hole][prompt].size
        else:
            size = with_prompt
        others[hole][prompt] = _Family(prompt, sorted(members), size)
        free[hole] -= costs[hole]
    return [list(b.values()) for b in others]


# --- Laying them out ---


class _Segment(NamedTuple):
    """A prompt, or what a completion feeds the model."""

    source: int  # place of its first token among all prompt tokens, then all completion tokens
    size: int
    first_position: int
    parent: int  # number of its prompt's segment in the microbatch; -1: it is a prompt


class _Trained(NamedTuple):
    """A completion and where its labels are predicted, as rows over all microbatches."""

    completion: int
    prompt_row: int  # of its prompt's last token
    own_row: int  # of its own first token


class _Cut(NamedTuple):
    """What lies before a microbatch."""

    tokens: int
    segments: int
    labels: int
    completions: int


def _lay_out(
    flat: _Flat, bins: list[list[_Family]]
) -> tuple[list[_Segment], list[_Trained], list[_Cut]]:
    """Microbatch after microbatch, each family's prompt and behind it its completions."""
    prompt_starts = flat.prompt_starts.tolist()
    prompt_lengths = flat.prompt_lengths.tolist()
    starts = flat.starts.tolist()
    lengths = flat.lengths.tolist()
    completions_at = flat.prompt_ids.numel()  # where completion tokens start in the source
    segments = []
    trained = []
    cuts = [_Cut(0, 0, 0, 0)]
    tokens = 0
    labels = 0
    for families in bins:
        first_segment = len(segments)
        for family in families:
            one = family.completions[0]
            prompt = prompt_lengths[one]
            parent = len(segments) - first_segment
            segments.append(_Segment(prompt_starts[one], prompt, 0, -1))
            tokens += prompt
            prompt_row = tokens - 1
            for completion in family.completions:
                size = lengths[completion] - 1  # the last token is only ever a label
                trained.append(_Trained(completion, prompt_row, tokens))
                if size:
                    source = completions_at + starts[completion]
                    segments.append(_Segment(source, size, prompt, parent))
                tokens += size
                labels += size + 1
        cuts.append(_Cut(tokens, len(segments), labels, len(trained)))
    return segments, trained, cuts


def _build(flat: _Flat, bins: list[list[_Family]]) -> tuple[list[PackedBatch], list[Tensor]]:
    """Lay out the segments of all microbatches end to end, gather their tokens at once, then cut
    them apart.

    Returns the microbatches, and for each the places of its labels.
    """
    if not bins:
        return [], []
    segments, trained, cuts = _lay_out(flat, bins)
    source, size, first_position, parents = torch.tensor(segments).T
    completion, prompt_row, own_row = torch.tensor(trained).T
    boundaries = torch.cat([torch.zeros(1, dtype=torch.int64), size.cumsum(0)])

    inside = _ramp(size)
    token_source = torch.cat([flat.prompt_ids, flat.per_token["labels"]])
    input_ids = token_source[source.repeat_interleave(size) + inside]
    positions = first_position.repeat_interleave(size) + inside

    # Label j of a completion is predicted by its prompt's last token if j = 0, else by its own
    # token j - 1.
    count = flat.lengths[completion]
    label = _ramp(count)
    by_prompt = prompt_row.repeat_interleave(count)
    by_itself = own_row.repeat_interleave(count) + label - 1
    rows = torch.where(label == 0, by_prompt, by_itself)
    places = flat.starts[completion].repeat_interleave(count) + label
    per_label = {}
    for name, values in flat.per_token.items():
        per_label[name] = torch.zeros(len(places)) if values is None else values[places]

    microbatches = []
    for start, end in pairwise(cuts):
        tokens = slice(start.tokens, end.tokens)
        labels = slice(start.labels, end.labels)
        within = slice(start.completions, end.completions)
        members = completion[within]
        batch = PackedBatch(
            input_ids=input_ids[tokens],
            positions=positions[tokens],
            cu_seqlens=boundaries[start.segments : end.segments + 1] - start.tokens,
            parents=parents[start.segments : end.segments],
            rows=rows[labels] - start.tokens,
            completions=torch.arange(len(members)).repeat_interleave(count[within]),
            groups=flat.groups[members].unique(return_inverse=True)[1],
            rewards=flat.rewards[members],
            group_tokens=flat.group_tokens[members],
            **{name: values[labels] for name, values in per_label.items()},
        )
        microbatches.append(batch)
    return microbatches, [places[start.labels : end.labels] for start, end in pairwise(cuts)]


def _ramp(sizes: Tensor) -> Tensor:
    """0 .. n-1 for each n, end to end."""
    return torch.arange(int(sizes.sum())) - _starts(sizes).repeat_interleave(sizes)


def _starts(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


@functools.cache
def _warn_too_long(budget_tokens: int, whole_groups: bool) -> None:
    what = "sequences"
    remedy = "the longest prompt plus max_new_tokens"
    if whole_groups:
        what = "groups (which this loss needs whole)"
        remedy = "the longest prompt plus group_size times max_new_tokens"
    warnings.warn(
        f"{what} longer than trainer.microbatch_tokens={budget_tokens} get microbatches of their "
        "own and need more memory than it promises; raise it to at least "
        f"{remedy}",
        stacklevel=3,
    )
