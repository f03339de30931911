"""Groups become microbatches of a fixed token budget, by greedy collation.

The gradient does not depend on what is packed with what: `num_loss_tokens`, `num_completions` and
`num_groups` count the batch, never a microbatch, and a loss that couples the completions of a group
gets every group whole.

Shapes: G completions of a group; N completions and C completion tokens of all groups; of a
microbatch T tokens, S segments and R labels.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from llamarl.comm.together import TrainerRanks
from llamarl.learning.collation import collate_groups
from llamarl.learning.segments import Segments, end_to_end, owners, runs, sum_by
from llamarl.learning.targets import Targets
from llamarl.types import NO_ROUTES, Group, PackedBatch


@dataclass(frozen=True, slots=True)
class Packing:
    """One rank's share of an optimizer update.

    Its counts divide a loss, once they are added over ranks; they include the completions that are
    left out because their advantage is 0.
    """

    microbatches: list[PackedBatch] = field(default_factory=list)
    num_loss_tokens: float = 0.0  # trained completion tokens
    num_completions: float = 0.0  # trained completions
    num_groups: float = 0.0  # groups of at least two trained completions
    num_trained_groups: float = 0.0  # groups of at least one
    room: float = 0.0  # this rank's microbatches times their token budget
    # of the microbatches' token budgets: what no token takes, 0..1
    unused_budget_fraction: float = 0.0
    # ref_logprobs hold a reference's; else they are zeros without meaning
    has_reference: bool = False

    def over(self, ranks: TrainerRanks) -> Packing:
        """Collective: return this packing with counts over all ranks, and with as many microbatches
        on each.

        A rank with fewer takes part in its peers' collectives with empty ones.
        """
        own = self.microbatches
        most = ranks.max(microbatches=float(len(own)), reference=float(self.has_reference))
        counts = ranks.sum(
            num_loss_tokens=self.num_loss_tokens,
            num_completions=self.num_completions,
            num_groups=self.num_groups,
            num_trained_groups=self.num_trained_groups,
        )
        missing = int(most["microbatches"]) - len(own)
        return replace(
            self,
            microbatches=own + [filler()] * missing,
            has_reference=most["reference"] > 0,
            **counts,
        )


def pack(
    groups: list[Group],
    targets: list[Targets],
    *,
    budget_tokens: int,
    skip_zero_advantage: bool,
    whole_groups: bool = False,
    largest_over_ranks: Callable[[list[int]], list[int]] | None = None,
) -> Packing:
    """Collate the trained completions of `groups` with their targets and shift them, on the CPU.

    A prompt of P tokens is computed once for all completions of its group in a microbatch, which
    takes P + sum(L - 1) of the budget. What an environment wrote is read as the rest is, and is no
    label, so that no loss sees it. What it said to all completions of a group before their first
    turn counts as the prompt's. A group is cut where it is over the budget, or where its parts fill
    holes that save a whole microbatch, and with whole_groups never. What cannot be cut and is over
    the budget gets a microbatch of its own (warned once). Completions that are not trained on are
    left out and counted nowhere. skip_zero_advantage also leaves out those whose advantages are all
    0: right for pure policy gradients, where they add nothing and still count in the denominators;
    wrong where a loss has other terms. largest_over_ranks: where every rank has a share of the same
    groups, each rank's sizes -> the largest ones; with it a group's shares are in the microbatch of
    the same number on all ranks. ValueError for an empty prompt, targets that do not fit or are not
    finite, ref_logprobs in only some groups, or shared groups that are cut or of which anything is
    left out.
    """
    if not groups:
        return Packing()
    flat = _flatten(groups, targets)
    kept = flat.trained & flat.has_advantage if skip_zero_advantage else flat.trained
    if largest_over_ranks is not None and not (whole_groups and bool(kept.all())):
        raise ValueError(
            "ranks share these groups, so each trains on all of its part, uncut: the loss needs "
            "whole_groups and uses_all_completions, and no completion may be without a reward"
        )
    members: list[list[int]] = [[] for _ in groups]
    completions = kept.nonzero().flatten()
    for completion, number in zip(completions.tolist(), flat.groups[completions].tolist()):
        members[number].append(completion)
    bins = collate_groups(
        members,
        flat.prompt_sizes,
        flat.input_lengths.tolist(),
        budget_tokens,
        whole_groups=whole_groups,
        largest_over_ranks=largest_over_ranks,
    )
    tokens = [b.size for b in bins]
    if max(tokens, default=0) > budget_tokens:
        _warn_too_long(budget_tokens, whole_groups)
    taken = sum(max(size, budget_tokens) for size in tokens)
    trained_by_group = torch.bincount(flat.groups[flat.trained])
    return Packing(
        microbatches=[_build(flat, b.members) for b in bins],
        num_loss_tokens=float(flat.sampled_lengths[flat.trained].sum()),
        num_completions=float(flat.trained.sum()),
        num_groups=float((trained_by_group > 1).sum()),
        num_trained_groups=float((trained_by_group > 0).sum()),
        room=float(len(bins) * budget_tokens),
        unused_budget_fraction=1 - sum(tokens) / taken if taken else 0.0,
        has_reference=any(g.ref_logprobs.numel() for g in groups),
    )


def filler() -> PackedBatch:
    """Return a microbatch that trains nothing. A rank with fewer microbatches than its FSDP peers
    uses it, because all must run the same number.
    """
    none = torch.zeros(0, dtype=torch.int64)
    number = torch.zeros(0)
    return PackedBatch(
        **Segments().packed(),
        rows=none,
        labels=none,
        places=none,
        offsets=none,
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


@dataclass(frozen=True, slots=True)
class _Flat:
    """The sequences of all groups end to end. A group's opening is the context that its trained
    completions all begin with.
    """

    prompt_sizes: list[int]  # tokens of each group's prompt and opening
    lengths: Tensor  # [N], behind the opening; of no meaning unless trained
    sampled_lengths: Tensor  # [N], without context
    starts: Tensor  # [N] int64: the place of its first token behind the opening among all
    loss_mask: Tensor  # [C] bool, whether a token was sampled
    restarts: dict[int, list[int]]  # by completion: places where the model's reading begins anew
    input_lengths: Tensor  # [N]: how many of those behind the opening are computed
    groups: Tensor  # [N] number of its group
    completions: Tensor  # [C] number of its completion
    tokens: Tensor  # int64: the tokens of all completions, then of each prompt and its opening
    routes: Tensor  # [.., M, K] of these tokens; [0]: nobody noted them
    trained: Tensor  # [N] bool
    has_advantage: Tensor  # [N] bool: that of some token is not 0
    per_token: dict[str, Tensor]  # [C] each: what becomes a field of the labels
    per_completion: dict[str, Tensor]  # [N] each: what becomes a field of the completions


def _flatten(groups: list[Group], targets: list[Targets]) -> _Flat:
    _check(groups, targets)
    lengths = end_to_end(groups, "lengths")
    loss_mask = end_to_end(groups, "loss_mask")
    group_of = owners(torch.tensor([g.lengths.numel() for g in groups]))
    completion_of = owners(lengths)
    # As `sampled_lengths` of each group.
    sampled_lengths = sum_by(loss_mask.long(), completion_of, len(lengths))
    trained = end_to_end(groups, "trained")
    openings = [_opening_of(group) for group in groups]
    opening_sizes = torch.tensor([opening.numel() for opening in openings])[group_of]
    own_lengths = lengths - opening_sizes
    restarts = end_to_end(groups, "restarts")
    num_restarts = sum_by(restarts.float(), completion_of, len(lengths))
    advantages = end_to_end(targets, "advantages").float()
    per_token = {
        "labels": end_to_end(groups, "token_ids"),
        "offsets": torch.arange(len(loss_mask)) - (lengths.cumsum(0) - lengths)[completion_of],
        "generator_logprobs": end_to_end(groups, "generator_logprobs"),
        "ref_logprobs": end_to_end(groups, "ref_logprobs"),
        "advantages": advantages,
        "returns": end_to_end(targets, "returns"),
        "old_values": end_to_end(targets, "old_values"),
        "policy_versions": end_to_end(groups, "policy_versions"),
    }
    for name in ("ref_logprobs", "returns", "old_values"):
        if not per_token[name].numel():
            per_token[name] = torch.zeros_like(advantages)
    nonzero_advantages = sum_by((advantages != 0).float(), completion_of, len(lengths))
    trained_tokens = torch.where(trained, sampled_lengths, 0).float()
    group_tokens = sum_by(trained_tokens, group_of, len(groups))[group_of]
    prompts = [torch.cat([g.prompt_ids, opening]) for g, opening in zip(groups, openings)]
    flat = _Flat(
        prompt_sizes=[prompt.numel() for prompt in prompts],
        lengths=own_lengths,
        sampled_lengths=sampled_lengths,
        starts=lengths.cumsum(0) - own_lengths,
        loss_mask=loss_mask,
        restarts=_by_completion(restarts, completion_of),
        input_lengths=own_lengths - 1 - num_restarts.long(),
        groups=group_of,
        completions=completion_of,
        tokens=torch.cat([per_token["labels"], *prompts]),
        routes=_routes_of(groups, openings),
        trained=trained,
        has_advantage=nonzero_advantages > 0,
        per_token=per_token,
        per_completion={
            "rewards": end_to_end(targets, "rewards").float(),
            "group_tokens": group_tokens,
        },
    )
    _check_finite(flat, [g.ticket for g in groups])
    return flat


def _routes_of(groups: list[Group], openings: list[Tensor]) -> Tensor:
    """Return the routes of all completions' tokens, then of each prompt and its opening; [0]
    without any.
    """
    noted = [group.routes for group in groups if len(group.routes)]
    if not noted:
        return NO_ROUTES
    of_completions = []
    of_prompts = []
    for group, opening in zip(groups, openings):
        num_prompt = group.prompt_ids.numel()
        routes = group.routes
        if not len(routes):
            num_tokens = num_prompt + group.token_ids.numel()
            routes = noted[0].new_zeros(num_tokens, *noted[0].shape[1:])
        own = routes[num_prompt:]
        of_completions.append(own)
        of_prompts.append(routes[:num_prompt])
        if opening.numel():  # all trained completions begin with it
            first = int(group.lengths[: int(group.trained.long().argmax())].sum())
            of_prompts.append(own[first : first + opening.numel()])
    return torch.cat([*of_completions, *of_prompts])


def _opening_of(group: Group) -> Tensor:
    """Return the context [K] that all trained completions of a group begin with."""
    none = group.token_ids[:0]
    if group.loss_mask.all() or not group.trained.any():
        return none
    sizes = group.lengths.tolist()
    rows = group.trained.nonzero().flatten().tolist()
    masks = group.loss_mask.split(sizes)
    firsts = [int(masks[row].long().argmax()) for row in rows]  # the first sampled token of each
    most = min(firsts)
    restarts = group.restarts.split(sizes)
    if any(restarts[row][: first + 1].any() for row, first in zip(rows, firsts)):
        return none  # it is read anew, without the prompt
    token_ids = group.token_ids.split(sizes)
    heads_RK = torch.stack([token_ids[row][:most] for row in rows])
    is_same = (heads_RK == heads_RK[0]).all(0)
    return heads_RK[0, : int(is_same.long().cumprod(0).sum())]


def _check(groups: list[Group], targets: list[Targets]) -> None:
    """Raise the ValueErrors that `pack` names."""
    has_reference = {g.ref_logprobs.numel() > 0 for g in groups if g.token_ids.numel()}
    if len(has_reference) > 1:
        raise ValueError(
            "ref_logprobs in some groups and not in others: every group must pass the reference, "
            "or none"
        )
    for g, t in zip(groups, targets, strict=True):
        if t.rewards.shape != g.rewards.shape or t.advantages.shape != g.token_ids.shape:
            raise ValueError(
                "targets do not fit the groups: give rewards [G] and an advantage for every token "
                "of each group"
            )
        if not g.prompt_ids.numel():
            raise ValueError(
                "an empty prompt: the first token needs something to look at; let the task add a "
                "bos token"
            )


def _check_finite(flat: _Flat, tickets: list[int]) -> None:
    """Raise ValueError if what is to be trained has a number that is not finite. tickets: of each
    group.
    """
    is_broken = ~flat.per_completion["rewards"].isfinite()
    advantages = flat.per_token["advantages"]
    is_broken[flat.completions[flat.loss_mask & ~advantages.isfinite()]] = True
    broken = (is_broken & flat.trained).nonzero().flatten().tolist()
    if broken:
        ticket = tickets[int(flat.groups[broken[0]])]
        raise ValueError(
            f"ticket {ticket}: an advantage or a shaped reward is not finite; the function that "
            "made it must give a number to what is to be trained"
        )


def _build(flat: _Flat, members: dict[int, list[int]]) -> PackedBatch:
    """Build the microbatch of these completions by group: each prompt and behind it its
    completions.
    """
    segments = Segments()  # of the tokens' places
    tokens = torch.arange(len(flat.tokens))
    prompt_starts = list(accumulate(flat.prompt_sizes, initial=len(flat.completions)))
    sizes_of = flat.lengths.tolist()
    starts = flat.starts.tolist()
    reading_starts = []  # of what is read at once: the place of its first token,
    reading_sizes = []  # its tokens,
    first_rows = []  # the row that predicts the first of them,
    rows_before = []  # and the one before that of its first token
    for number, completions in members.items():
        prompt = flat.prompt_sizes[number]
        start = prompt_starts[number]
        end = start + prompt
        parent = segments.add(tokens[start:end])
        last_of_prompt = segments.num_tokens - 1
        for completion in completions:
            reading = _readings(flat, completion, starts[completion], sizes_of[completion])
            for begin, end, is_anew in reading:
                reading_starts.append(begin)
                reading_sizes.append(end - begin)
                # What is read anew is a segment of its own, and its first token no label.
                first_rows.append(last_of_prompt)
                rows_before.append(segments.num_tokens - 1)
                read = tokens[begin : end - 1]  # the last token is only ever a label
                if read.numel() and is_anew:
                    segments.add(read)
                elif read.numel():
                    segments.add(read, position=prompt, parent=parent)
    chosen = list(chain.from_iterable(members.values()))
    lengths = torch.tensor(reading_sizes)
    places = runs(torch.tensor(reading_starts), lengths)
    # Label j is predicted by the prompt's last token if j = 0, else by token j - 1.
    rows = runs(torch.tensor(rows_before), lengths)
    rows[lengths.cumsum(0) - lengths] = torch.tensor(first_rows)
    is_label = flat.loss_mask[places]  # context is read, and is no label
    labels = places[is_label]
    packed = segments.packed()
    read_places = packed.pop("input_ids")
    return PackedBatch(
        **packed,
        input_ids=flat.tokens[read_places],
        routes=flat.routes[read_places] if len(flat.routes) else NO_ROUTES,
        rows=rows[is_label],
        places=labels,
        completions=torch.arange(len(chosen)).repeat_interleave(flat.sampled_lengths[chosen]),
        groups=flat.groups[chosen].unique(return_inverse=True)[1],
        **{name: values[labels] for name, values in flat.per_token.items()},
        **{name: values[chosen] for name, values in flat.per_completion.items()},
    )


def _by_completion(restarts: Tensor, completion_of: Tensor) -> dict[int, list[int]]:
    """Return the places that are marked, [C] bool, by the number of their completion."""
    found: dict[int, list[int]] = {}
    places = restarts.nonzero().flatten()
    for place, completion in zip(places.tolist(), completion_of[places].tolist()):
        found.setdefault(completion, []).append(place)
    return found


def _readings(flat: _Flat, completion: int, start: int, length: int) -> list[tuple[int, int, bool]]:
    """Return the places of a completion's tokens, [begin, end), by what the model read of it at
    once: first behind the prompt, then (True) wherever its reading began anew.
    """
    bounds = [start, *flat.restarts.get(completion, ()), start + length]
    found = []
    for number, (begin, end) in enumerate(pairwise(bounds)):
        if end > begin:
            found.append((begin, end, number > 0))
    return found


@functools.cache
def _warn_too_long(budget_tokens: int, whole_groups: bool) -> None:
    what = "sequences"
    remedy = "the longest prompt plus max_new_tokens"
    if whole_groups:
        what = "groups (which this loss needs whole)"
        remedy = "the longest prompt plus group_size times max_new_tokens"
    warnings.warn(
        f"{what} longer than trainer.microbatch_tokens={budget_tokens} get microbatches of their "
        "own and need more memory than it promises; trainer.activation_checkpointing=true holds a "
        "fraction of it (+dry_run=true says both in GiB), or raise the budget to at least "
        f"{remedy}",
        stacklevel=3,
    )
