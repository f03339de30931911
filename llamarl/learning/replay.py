"""The replay buffer of Trajectory Balance with Asynchrony (TBA, arXiv 2503.18929, sections 4.1 and 4.2).

    reward, reference --Group--> put   the local buffer: come, not handed over by the ledger
                                 take  handed over; waits for the next sync step (k)
                                 join  the global buffer: completions by prompt; the oldest groups leave when it is full
                                 draw  B prompts a step, K completions each

A prompt that is generated again adds to its completions. Prompts are told apart by their token ids. What a trainer rank holds
is of its own tickets (llamarl.tickets.lane_of): a group is never split, and a prompt that comes again in a later epoch may
do so on another rank, where it is a prompt of its own.

Drawing, for each of a step's B prompts (4.2), independently:

    with probability m   a prompt with completions of the newest join*, and K of these, uniformly     (most on-policy)
    else                 any prompt, and K of its completions by p_j ~ exp(r_j / T), or uniformly     (reward priority)

(* that brought something to draw) without replacement, by Gumbel top-k, where there are K, and with replacement where there are
fewer. Prompts are drawn uniformly, none twice before each was drawn once. All is a function of (seed, step, rank) and of what
the buffer holds. Rewards are the task's own: they are shaped (llamarl.learning.shaping) when they are trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llamarl.learning.buffer import GroupBuffer, Sums, decoded
from llamarl.types import Group

PRIORITIES = ("softmax", "uniform")


@dataclass(frozen=True, slots=True)
class Draw:
    """How a step's completions are drawn; TBA's symbols."""

    prompts: int  # B, of this rank
    completions: int  # K
    most_on_policy: float  # m
    priority: str  # softmax | uniform, of the rewards
    temperature: float  # T, of the softmax, in units of reward


@dataclass(frozen=True, slots=True)
class _Columns:
    """Of the n completions of a group that may be drawn."""

    prompt: bytes  # the same for equal prompts
    place: Tensor  # [n] in the group
    start: Tensor  # [n] of its tokens in the group
    oldest: Tensor  # [n] policy version of its oldest token
    rewards: Tensor  # [n]

    @classmethod
    def of(cls, group: Group) -> "_Columns":
        whole = torch.tensor([reason != "aborted" for reason in group.finish_reasons], dtype=torch.bool)
        place = (whole & ~group.rewards.isnan() & (group.lengths > 0)).nonzero()[:, 0]
        start = (group.lengths.cumsum(0) - group.lengths)[place]
        # Versions never fall within a completion, so its first token is its oldest.
        return cls(group.prompt_ids.numpy().tobytes(), place, start, group.policy_versions[start], group.rewards[place])


@dataclass(frozen=True, slots=True)
class _Held:
    """A group in the global buffer, or on its way there."""

    group: Group
    columns: _Columns
    taken: int  # step at which the ledger handed it over
    joined: int  # sync step at which it became visible; -1: not yet


def lag_bound(*, max_lag: int, completions_per_step: int, group_size: int, sync_period: int, max_size: int) -> int:
    """The most steps that a trained token is old, of one rank: max_lag + floor((max_size - S) / A) + k - 1 (docs/replay.md).

    A = completions_per_step: handed over at each step, at least, by groups of S whose lag is then at most max_lag.
    """
    return max_lag + (max_size - group_size) // completions_per_step + sync_period - 1


class ReplayBuffer(GroupBuffer):
    """sync_period k: what was handed over joins at steps 0, k, 2k, ... max_size: completions that this rank holds.

    Completions that must not be trained on (no reward, aborted, without tokens) take their place, and are never drawn.
    """

    def __init__(self, draw: Draw, *, sync_period: int, max_size: int, seed: int, rank: int = 0):
        super().__init__()
        if draw.priority not in PRIORITIES:
            raise ValueError(f"priority={draw.priority!r}; there is {' and '.join(PRIORITIES)}")
        self.draw, self.sync_period, self.max_size, self.seed, self.rank = draw, sync_period, max_size, seed, rank
        self._waiting: list[_Held] = []  # handed over, not joined
        self._held: list[_Held] = []  # joined, oldest first
        self._table: _Table | None = None  # of what is held; None: to be made
        self._before: tuple[list[Group], list[_Held], list[_Held]] | None = None
        self._drawn = torch.empty(0, draw.completions, dtype=torch.int64)  # [B, K] rows of the table, of the step just taken

    def take(self, tickets: list[int], step: int) -> list[Group]:
        came = self._hand_over(tickets)
        self._before = came, self._waiting, self._held
        self._waiting = self._waiting + [_Held(group, _Columns.of(group), step, -1) for group in came]
        if step % self.sync_period == 0 and self._waiting:
            self._join(step)
        return self._sample(step)

    def untake(self, groups: list[Group]) -> None:
        came, self._waiting, self._held = self._before
        self._table = None
        self.put(came)

    def _join(self, step: int) -> None:
        joining = [replace(held, joined=step) for held in self._waiting]
        self._waiting, self._table = [], None
        everything = sorted(self._held + joining, key=lambda held: (held.taken, held.group.ticket))
        sizes = torch.tensor([held.group.lengths.numel() for held in everything])
        newer = sizes.flip(0).cumsum(0).flip(0)  # completions of this group and of all newer ones
        self._held = everything[int((newer > self.max_size).sum()) :]

    # -- drawing ------------------------------------------------------------------------------------------------------

    def _sample(self, step: int) -> list[Group]:
        if self._table is None:
            self._table = _Table(self._held)
        table, random = self._table, generator_of(self.seed, step, self.rank)
        self._drawn = draw_completions(table.rewards, table.prompts, table.is_newest, self.draw, random)
        return [self._group(row) for row in self._drawn]

    def _group(self, row: Tensor) -> Group:
        """One group of completions [K] from several of the same prompt; its ticket is the newest one's."""
        table = self._table
        parts = [(table.groups[g], c) for g, c in zip(table.group[row].tolist(), table.place[row].tolist())]
        lengths = torch.stack([group.lengths[c] for group, c in parts])
        spans = [(group, slice(a, a + n)) for (group, _), a, n in zip(parts, table.start[row].tolist(), lengths.tolist())]

        def tokens(field: str) -> Tensor:
            return torch.cat([getattr(group, field)[span] for group, span in spans])

        return Group(
            ticket=max(group.ticket for group, _ in parts),
            prompt_ids=parts[0][0].prompt_ids,
            lengths=lengths,
            token_ids=tokens("token_ids"),
            generator_logprobs=tokens("generator_logprobs"),
            policy_versions=tokens("policy_versions"),
            ref_logprobs=tokens("ref_logprobs"),
            rewards=table.rewards[row],
            finish_reasons=tuple(group.finish_reasons[c] for group, c in parts),
            outcomes=tuple(group.outcomes[c] for group, c in parts),
            ref_version=min(group.ref_version for group, _ in parts),
        )

    # -- metrics ------------------------------------------------------------------------------------------------------

    def sums(self, step: int) -> tuple[Sums, Sums]:
        table, drawn = self._table, self._drawn
        ages = step - table.oldest if table.oldest.numel() else torch.zeros(1)
        return {
            "size": float(table.oldest.numel()),
            "prompts": float(table.num_prompts),
            "age": float(ages.sum()),
            "drawn": float(drawn.numel()),
            "on_policy": float(table.is_newest[drawn].sum()),
            "duplicates": float(drawn.numel() - drawn.unique().numel()),
            "hidden": float(sum(held.group.lengths.numel() for held in self._waiting)),
        }, {"age_max": float(ages.max())}

    def report(self, sums: Sums, maxima: Sums) -> dict[str, float | None]:
        """buffer/*: size and prompts held, and completions that wait for a sync step; ages in steps, of the oldest token of what
        is held; of the completions drawn, how many are of the newest join (fraction) and how many repeat another (count)."""
        return {
            "buffer/size": sums["size"],
            "buffer/prompts": sums["prompts"],
            "buffer/hidden": sums["hidden"],
            "buffer/age_mean": sums["age"] / max(1.0, sums["size"]),
            "buffer/age_max": maxima["age_max"],
            "buffer/on_policy_fraction": sums["on_policy"] / max(1.0, sums["drawn"]),
            "buffer/duplicates": sums["duplicates"],
        }

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def stored(self) -> list[Group]:
        return super().stored() + [held.group for held in self._waiting + self._held]

    def state_dict(self) -> dict:
        """Also `held`: [ticket, taken, joined] of what was handed over. Draws need no state of their own."""
        return {**super().state_dict(), "held": [[h.group.ticket, h.taken, h.joined] for h in self._waiting + self._held]}

    def load(self, parts: Iterable[Mapping], finished: set[int], is_mine: Callable[[int], bool]) -> None:
        """With another number of ranks each takes what is of its own tickets now."""
        parts = list(parts)
        super().load(parts, finished, is_mine)
        held = []
        for part in parts:
            if not any(is_mine(ticket) for ticket, *_ in part.get("held", [])):
                continue
            groups = {group.ticket: group for group in decoded(part) if is_mine(group.ticket)}
            held += [
                _Held(groups[t], _Columns.of(groups[t]), taken, joined)
                for t, taken, joined in part.get("held", [])
                if t in groups
            ]
        held.sort(key=lambda h: (h.taken, h.group.ticket))
        self._waiting = [h for h in held if h.joined < 0]
        self._held, self._table = [h for h in held if h.joined >= 0], None


class _Table:
    """Columns over the N completions that may be drawn, oldest group first."""

    def __init__(self, held: list[_Held]):
        columns = [h.columns for h in held if h.columns.place.numel()]
        self.groups = [h.group for h in held if h.columns.place.numel()]
        joined = torch.tensor([h.joined for h in held if h.columns.place.numel()], dtype=torch.int64)
        ids: dict[bytes, int] = {}
        prompts = torch.tensor([ids.setdefault(c.prompt, len(ids)) for c in columns], dtype=torch.int64)
        counts = torch.tensor([c.place.numel() for c in columns], dtype=torch.int64)
        none = torch.empty(0, dtype=torch.int64)
        self.group = torch.arange(len(columns)).repeat_interleave(counts)  # [N] place in groups
        self.place = torch.cat([none, *(c.place for c in columns)])  # [N] in the group
        self.start = torch.cat([none, *(c.start for c in columns)])  # [N] of its tokens in the group
        self.oldest = torch.cat([none, *(c.oldest for c in columns)])  # [N] policy version
        self.rewards = torch.cat([torch.empty(0), *(c.rewards for c in columns)])  # [N]
        self.prompts = prompts.repeat_interleave(counts)  # [N]
        self.num_prompts = len(ids)
        self.is_newest = (joined == (joined.max() if len(joined) else -1)).repeat_interleave(counts)  # [N] bool


def generator_of(seed: int, step: int, rank: int) -> torch.Generator:
    """The randomness of one step on one rank."""
    digest = hashlib.blake2b(f"replay {seed} {step} {rank}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def draw_completions(rewards: Tensor, prompts: Tensor, is_newest: Tensor, draw: Draw, random: torch.Generator) -> Tensor:
    """[B, K] int64: which of the N completions a step trains on, a row a prompt; [0, K] of none.

    rewards [N], finite; prompts [N]: whose completion it is; is_newest [N] bool: whether it is of the newest join.
    """
    if not rewards.numel():
        return torch.empty(0, draw.completions, dtype=torch.int64)
    recent = torch.rand(draw.prompts, generator=random) < draw.most_on_policy
    recent &= bool(is_newest.any())
    by_prompt = prompts.argsort(stable=True)
    anyone, counts = prompts.unique(return_counts=True)
    chosen = torch.where(
        recent, _dealt(prompts[is_newest].unique(), recent, random), _dealt(anyone, ~recent, random)
    )  # fmt: skip
    row = torch.searchsorted(anyone, chosen)
    place = torch.arange(int(counts[row].max()))  # C, of the prompt with the most completions
    inside = place < counts[row][:, None]  # [B, C]
    first = (counts.cumsum(0) - counts)[row][:, None]
    candidates = by_prompt[(first + place).clamp(max=len(prompts) - 1)]  # [B, C]
    may = inside & (is_newest[candidates] | ~recent[:, None])
    # The most on-policy ones are equally likely.
    prior = rewards.double() / draw.temperature if draw.priority == "softmax" else torch.zeros_like(rewards, dtype=torch.float64)
    logits = torch.where(recent[:, None], 0.0, prior[candidates]).masked_fill(~may, -torch.inf)
    return candidates.gather(1, _draw_rows(logits, may.sum(1), draw.completions, random))


def _dealt(values: Tensor, slots: Tensor, random: torch.Generator) -> Tensor:
    """[B]: values in random order, over and over, one to each slot that is true."""
    order = torch.randperm(max(1, len(values)), generator=random)
    place = (slots.cumsum(0) - 1).clamp(min=0)
    return (values if len(values) else values.new_zeros(1))[order[place % len(order)]]


def _draw_rows(logits: Tensor, counts: Tensor, k: int, random: torch.Generator) -> Tensor:
    """[B, k] columns of logits [B, C], row by row by softmax(logits): without replacement where counts >= k."""
    uniform = torch.rand(logits.shape, generator=random, dtype=torch.float64).clamp(min=torch.finfo(torch.float64).tiny)
    without = (logits - (-uniform.log()).log()).topk(min(k, logits.shape[1]), dim=1).indices
    if bool((counts >= k).all()):
        return without
    again = torch.multinomial(logits.softmax(1), k, replacement=True, generator=random)
    return again if without.shape[1] < k else torch.where((counts >= k)[:, None], without, again)
