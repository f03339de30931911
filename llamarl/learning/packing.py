"""Groups become microbatches of a fixed token budget: greedy collation, then one gather for all tokens at once.

The gradient does not depend on what is packed with what: `num_loss_tokens` counts the batch, never a microbatch.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import torch
from torch import Tensor

from llamarl.types import Group, PackedBatch


@dataclass(frozen=True, slots=True)
class Packing:
    """One rank's share of an optimizer step. Add num_loss_tokens and num_completions over ranks before they divide a loss."""

    microbatches: list[PackedBatch]
    completions: list[list[int]]  # whose labels they hold, in order; numbered over all groups
    num_loss_tokens: int  # trained completion tokens, also those left out because their advantage is 0
    num_completions: int  # trained completions, also those left out because their advantage is 0
    num_dropped: int  # completions left out because their advantage is 0
    num_masked: int  # completions that must not be trained on: no reward, aborted, or without tokens
    padding_fraction: float  # unused share of the token budget, 0..1
    has_reference: bool  # ref_logprobs hold a reference's; otherwise they are zeros and mean nothing


def collate(lengths: list[int], budget: int) -> list[list[int]]:
    """Indices of sequences by microbatch: longest first, each into the first microbatch with room        (Magistral, 3)

    Ties keep their order, so equal input gives equal output. A sequence longer than the budget gets a microbatch of its own.
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


def pack(groups: list[Group], advantages: list[Tensor], *, budget_tokens: int, drop_zero_advantage: bool) -> Packing:
    """Collate the trained completions of `groups` with their advantages ([G] a group) and shift them, on the CPU.

    A prompt of P tokens is computed once for all completions of its group in a microbatch, which takes P + sum(L - 1) of
    the budget; a group over the budget is cut into several. One completion over the budget gets a microbatch of its own
    (warned once). Aborted completions and those with a NaN reward are left out and counted nowhere but in num_masked.
    drop_zero_advantage also leaves out those whose advantage is 0: right for pure policy gradients, where they add nothing
    and still count in the denominators; wrong with a KL or entropy term, which they would add.
    ValueError for an empty prompt, advantages that do not fit or are not finite, or ref_logprobs in only some groups.
    """
    if not groups:
        return Packing([], [], 0, 0, 0, 0, 0.0, False)
    flat = _flatten(groups, advantages)
    trainable = flat.trainable
    kept = trainable & (flat.advantages != 0) if drop_zero_advantage else trainable
    families = _families(groups, kept.tolist(), flat.lengths.tolist(), budget_tokens)
    bins = collate([f.size for f in families], budget_tokens)
    microbatches = _build(flat, [[families[i] for i in b] for b in bins])
    tokens = [batch.input_ids.numel() for batch in microbatches]
    if max(tokens, default=0) > budget_tokens:
        _warn_too_long(budget_tokens)
    room = sum(max(t, budget_tokens) for t in tokens)
    return Packing(
        microbatches=microbatches,
        completions=[[c for i in b for c in families[i].completions] for b in bins],
        num_loss_tokens=int(flat.lengths[trainable].sum()),
        num_completions=int(trainable.sum()),
        num_dropped=int(trainable.sum() - kept.sum()),
        num_masked=int((~trainable).sum()),
        padding_fraction=1 - sum(tokens) / room if room else 0.0,
        has_reference=flat.ref_logprobs is not None,
    )


def filler() -> PackedBatch:
    """A microbatch that trains nothing: for a rank with fewer than its FSDP peers, who all must run the same number."""
    zero, none, number = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    return PackedBatch(zero, zero, torch.tensor([0, 1]), zero - 1, none, none, number, number, number, none)


def to_device(batch: PackedBatch, device: torch.device | str) -> PackedBatch:
    """The batch with every tensor on `device`."""
    return replace(batch, **{f.name: getattr(batch, f.name).to(device, non_blocking=True) for f in fields(batch)})


@dataclass(frozen=True, slots=True)
class _Flat:
    """All groups end to end: N completions, S = all prompt tokens, C = all completion tokens."""

    prompt_ids: Tensor  # [S]
    token_ids: Tensor  # [C]
    generator_logprobs: Tensor  # [C]
    ref_logprobs: Tensor | None  # [C]
    policy_versions: Tensor  # [C]
    prompt_starts: Tensor  # [N] into prompt_ids; completions of a group share theirs
    prompt_lengths: Tensor  # [N]
    starts: Tensor  # [N] into token_ids
    lengths: Tensor  # [N]
    advantages: Tensor  # [N]
    trainable: Tensor  # [N] bool


def _flatten(groups: list[Group], advantages: list[Tensor]) -> _Flat:
    if len(advantages) != len(groups) or any(a.shape != g.rewards.shape for a, g in zip(advantages, groups)):
        raise ValueError("advantages do not fit the groups: give one [G] tensor for each group")
    if len({g.ref_logprobs.numel() == g.token_ids.numel() for g in groups if g.token_ids.numel()}) > 1:
        raise ValueError("ref_logprobs in some groups and not in others: every group must pass the reference, or none")
    reference = any(g.ref_logprobs.numel() for g in groups)
    prompt_lengths = torch.tensor([g.prompt_ids.numel() for g in groups])
    if not prompt_lengths.all():
        raise ValueError("an empty prompt: the first token needs something to look at; let the task add a bos token")
    sizes = torch.tensor([g.lengths.numel() for g in groups])
    lengths, all_advantages = torch.cat([g.lengths for g in groups]), torch.cat(advantages).float()
    whole = torch.tensor([reason != "aborted" for g in groups for reason in g.finish_reasons])
    trainable = whole & ~torch.cat([g.rewards for g in groups]).isnan() & (lengths > 0)
    if not all_advantages[trainable].isfinite().all():
        raise ValueError("an advantage is not finite; the function that made it must give 0 to what is not to be trained")
    return _Flat(
        prompt_ids=torch.cat([g.prompt_ids for g in groups]),
        token_ids=torch.cat([g.token_ids for g in groups]),
        generator_logprobs=torch.cat([g.generator_logprobs for g in groups]),
        ref_logprobs=torch.cat([g.ref_logprobs for g in groups]) if reference else None,
        policy_versions=torch.cat([g.policy_versions for g in groups]),
        prompt_starts=_starts(prompt_lengths).repeat_interleave(sizes),
        prompt_lengths=prompt_lengths.repeat_interleave(sizes),
        starts=_starts(lengths),
        lengths=lengths,
        advantages=all_advantages,
        trainable=trainable,
    )


@dataclass(frozen=True, slots=True)
class _Family:
    """Completions that share one computed prompt in a microbatch."""

    prompt: int  # number of the group
    completions: list[int]  # numbers of the completions, over all groups
    size: int  # packed tokens


def _families(groups: list[Group], kept: list[bool], lengths: list[int], budget: int) -> list[_Family]:
    """Kept completions by group, cut where one more would pass the budget."""
    families, n = [], 0
    for number, group in enumerate(groups):
        prompt = group.prompt_ids.numel()
        members: list[int] = []
        size = prompt
        for completion in range(n, n + group.lengths.numel()):
            if not kept[completion]:
                continue
            if members and size + lengths[completion] - 1 > budget:
                families.append(_Family(number, members, size))
                members, size = [], prompt
            members.append(completion)
            size += lengths[completion] - 1
        if members:
            families.append(_Family(number, members, size))
        n += group.lengths.numel()
    return families


def _build(flat: _Flat, bins: list[list[_Family]]) -> list[PackedBatch]:
    """Lay out the segments of all microbatches end to end, gather their tokens at once, then cut them apart."""
    if not bins:
        return []
    prompt_starts, prompt_lengths = flat.prompt_starts.tolist(), flat.prompt_lengths.tolist()
    starts, lengths = flat.starts.tolist(), flat.lengths.tolist()
    completions_at = flat.prompt_ids.numel()  # where completion tokens start in the source
    segments: list[tuple[int, int, int, int]] = []  # (place in the source, tokens, first position, parent)
    trained: list[tuple[int, int, int]] = []  # (completion, row of its prompt's last token, row of its first token)
    cuts = [(0, 0, 0)]  # (tokens, segments, labels) before each microbatch
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
        cuts.append((tokens, len(segments), labels))
    source, size, first, parents = torch.tensor(segments).T
    completion, prompt_row, own_row = torch.tensor(trained).T
    inside = _ramp(size)
    # Label j of a completion is predicted by its prompt's last token if j = 0, else by its own token j - 1.
    count = flat.lengths[completion]
    place = _ramp(count)
    rows = torch.where(place == 0, prompt_row.repeat_interleave(count), own_row.repeat_interleave(count) + place - 1)
    token = flat.starts[completion].repeat_interleave(count) + place
    per_token = dict(
        input_ids=torch.cat([flat.prompt_ids, flat.token_ids])[source.repeat_interleave(size) + inside],
        positions=first.repeat_interleave(size) + inside,
    )
    per_label = dict(
        labels=flat.token_ids[token],
        generator_logprobs=flat.generator_logprobs[token],
        ref_logprobs=torch.zeros(len(token)) if flat.ref_logprobs is None else flat.ref_logprobs[token],
        advantages=flat.advantages[completion].repeat_interleave(count),
        policy_versions=flat.policy_versions[token],
    )
    boundaries = torch.cat([torch.zeros(1, dtype=torch.int64), size.cumsum(0)])
    microbatches = []
    for (t0, s0, r0), (t1, s1, r1) in pairwise(cuts):
        microbatches.append(
            PackedBatch(
                cu_seqlens=boundaries[s0 : s1 + 1] - t0,
                parents=parents[s0:s1],
                rows=rows[r0:r1] - t0,
                **{name: values[t0:t1] for name, values in per_token.items()},
                **{name: values[r0:r1] for name, values in per_label.items()},
            )
        )
    return microbatches


def _ramp(sizes: Tensor) -> Tensor:
    """0 .. n-1 for each n, end to end."""
    return torch.arange(int(sizes.sum())) - _starts(sizes).repeat_interleave(sizes)


def _starts(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


@functools.cache
def _warn_too_long(budget_tokens: int) -> None:
    warnings.warn(
        f"sequences longer than trainer.microbatch_tokens={budget_tokens} get microbatches of their own and need more memory "
        "than it promises; raise it to at least the longest prompt plus max_new_tokens",
        stacklevel=3,
    )
