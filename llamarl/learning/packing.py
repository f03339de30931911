"""Groups become microbatches of a fixed token budget: greedy collation, then one gather for all tokens at once.

The gradient does not depend on what is packed with what: `num_loss_tokens` counts the batch, never a microbatch.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from llamarl.types import Group, PackedBatch


@dataclass(frozen=True, slots=True)
class Packing:
    """One rank's share of an optimizer step. Add num_loss_tokens and num_completions over ranks before they divide a loss."""

    microbatches: list[PackedBatch]
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

    A sequence of P prompt and L completion tokens takes P + L - 1 of the budget; one longer than that gets a microbatch of
    its own (warned once). Aborted completions and those with a NaN reward are left out and counted nowhere but in num_masked.
    drop_zero_advantage also leaves out those whose advantage is 0: right for pure policy gradients, where they add nothing
    and still count in the denominators; wrong with a KL or entropy term, which they would add.
    ValueError for an empty prompt, advantages that do not fit or are not finite, or ref_logprobs in only some groups.
    """
    if not groups:
        return Packing([], 0, 0, 0, 0, 0.0, False)
    flat = _flatten(groups, advantages)
    trainable = flat.trainable
    kept = trainable & (flat.advantages != 0) if drop_zero_advantage else trainable
    chosen = kept.nonzero().squeeze(1)
    sizes = (flat.prompt_lengths + flat.lengths - 1)[chosen]
    bins = collate(sizes.tolist(), budget_tokens)
    microbatches = _build(flat, chosen, sizes, bins)
    tokens = [batch.input_ids.numel() for batch in microbatches]
    if max(tokens, default=0) > budget_tokens:
        _warn_too_long(budget_tokens)
    room = sum(max(t, budget_tokens) for t in tokens)
    return Packing(
        microbatches=microbatches,
        num_loss_tokens=int(flat.lengths[trainable].sum()),
        num_completions=int(trainable.sum()),
        num_dropped=int(trainable.sum() - kept.sum()),
        num_masked=int((~trainable).sum()),
        padding_fraction=1 - sum(tokens) / room if room else 0.0,
        has_reference=flat.ref_logprobs is not None,
    )


def filler() -> PackedBatch:
    """A microbatch that trains nothing: for a rank with fewer than its FSDP peers, who all must run the same number."""
    zero, number = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    return PackedBatch(zero, zero, zero, torch.tensor([0, 1]), zero.bool(), number, number, number, zero - 1)


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


def _build(flat: _Flat, chosen: Tensor, sizes: Tensor, bins: list[list[int]]) -> list[PackedBatch]:
    """Gather all microbatches end to end, then cut them apart. chosen [M]: which completions; sizes [M]: their packed tokens."""
    if not bins:
        return []
    order = torch.tensor([i for b in bins for i in b])
    n, size = chosen[order], sizes[order]  # [M] in packed order
    ends = size.cumsum(0)
    row = torch.arange(len(n)).repeat_interleave(size)  # [T] the sequence of each token
    of = n[row]
    positions = torch.arange(len(row)) - (ends - size)[row]

    # A place j of a sequence is token j of its prompt, or token j - P of its completion; its label is place j + 1.
    after = positions - flat.prompt_lengths[of]  # >= 0: the input is a completion token; >= -1: the label is
    loss_mask = after >= -1
    source = torch.cat([flat.prompt_ids, flat.token_ids])
    in_prompt, in_completion = flat.prompt_starts[of] + positions, len(flat.prompt_ids) + flat.starts[of] + after
    input_ids = source[torch.where(after < 0, in_prompt, in_completion)]
    labels = source[torch.where(loss_mask, in_completion + 1, in_prompt + 1)]
    place = (flat.starts[of] + after + 1).clamp(min=0)  # of the label among completion tokens

    def of_label(values: Tensor, outside: float) -> Tensor:
        return torch.where(loss_mask, values[place], outside)

    zeros = torch.zeros(len(row))
    per_token = dict(
        input_ids=input_ids,
        labels=labels,
        positions=positions,
        loss_mask=loss_mask,
        generator_logprobs=of_label(flat.generator_logprobs, 0.0),
        ref_logprobs=zeros if flat.ref_logprobs is None else of_label(flat.ref_logprobs, 0.0),
        advantages=torch.where(loss_mask, flat.advantages[of], 0.0),
        policy_versions=of_label(flat.policy_versions, -1),
    )
    sequences = [len(b) for b in bins]
    boundaries = torch.cat([torch.zeros(1, dtype=torch.int64), ends])  # [M+1], over all microbatches
    microbatches, first = [], 0
    for count in sequences:
        cu_seqlens = boundaries[first:first + count + 1]
        begin, end = int(cu_seqlens[0]), int(cu_seqlens[-1])
        cut = {name: values[begin:end] for name, values in per_token.items()}
        microbatches.append(PackedBatch(cu_seqlens=cu_seqlens - begin, **cut))
        first += count
    return microbatches


def _starts(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


@functools.cache
def _warn_too_long(budget_tokens: int) -> None:
    warnings.warn(
        f"sequences longer than trainer.microbatch_tokens={budget_tokens} get microbatches of their own and need more memory "
        "than it promises; raise it to at least the longest prompt plus max_new_tokens",
        stacklevel=3,
    )
