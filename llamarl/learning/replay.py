"""The replay buffer of Trajectory Balance with Asynchrony (TBA, arXiv 2503.18929, sections 4.1 and
4.2).

    reward, reference --Group--> put   the local buffer: come, not handed over by the ledger
                                 take  handed over; waits for the next sync step (k)
                                 join  the global buffer: completions by prompt; the oldest groups
                                       leave when it is full
                                 draw  B prompts a step, K completions each

A prompt that is generated again adds to its completions. Prompts are told apart by their token ids,
and so are a prompt's completions: of equal ones the last to come is drawn, the others are copies,
which only take their place. What a trainer rank holds is of its own tickets
(llamarl.comm.channel.dp_rank_of): a group is never split, and a prompt that comes again in a
later epoch may do so on another rank, where it is a prompt of its own.

Drawing, for each of a step's B prompts (4.2), independently:

    with probability m   most on-policy: a prompt with completions of the newest join*, and K of
                         these, uniformly
    else                 reward priority: any prompt, and K of its completions by
                         p_j ~ exp(r_j / T), or uniformly

(* that brought something to draw) without replacement, by Gumbel top-k, where there are K, and with
replacement where there are fewer. Prompts are drawn uniformly from those whose turn it is
(`choose_prompts`): none comes again, in this step or a later one, before all that such a draw could
take were drawn. All is a function of (seed, step, rank), of what the buffer holds and of the turns.
Rewards are the task's own: they are shaped (llamarl.learning.shaping) when they are trained on.

Shapes: B prompts a step, K completions of each; N completions and P prompts that may be drawn, C of
them at most of one prompt; n completions of a group.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llamarl.learning.buffer import GroupBuffer, Sums, decoded
from llamarl.types import Group
from llamarl.words.choices import PRIORITIES

log = logging.getLogger(__name__)


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
    tokens: tuple[bytes, ...]  # [n] the same for equal completions

    @classmethod
    def of(cls, group: Group) -> _Columns:
        place = group.trained.nonzero()[:, 0]
        start = (group.lengths.cumsum(0) - group.lengths)[place]
        completions = group.token_ids.split(group.lengths.tolist())
        return cls(
            prompt=group.prompt_ids.numpy().tobytes(),
            place=place,
            start=start,
            # Versions never fall within a completion, so its first token is its oldest.
            oldest=group.policy_versions[start],
            rewards=group.rewards[place],
            tokens=tuple(completions[i].numpy().tobytes() for i in place.tolist()),
        )


@dataclass(frozen=True, slots=True)
class _Held:
    """A group in the global buffer, or on its way there."""

    group: Group
    columns: _Columns
    taken: int  # step at which the ledger handed it over
    joined: int  # sync step at which it became visible; -1: not yet

    @classmethod
    def of(cls, group: Group, *, taken: int, joined: int = -1) -> _Held:
        return cls(group=group, columns=_Columns.of(group), taken=taken, joined=joined)


@dataclass(frozen=True, slots=True)
class _Before:
    """What a step that is given up goes back to."""

    came: list[Group]
    waiting: list[_Held]
    held: list[_Held]
    passed: frozenset[bytes]


def lag_bound(
    *, max_lag: int, completions_per_step: int, group_size: int, sync_period: int, max_size: int
) -> int:
    """The most steps that a trained token is old, of one rank: max_lag + floor((max_size - S) / A)
    + k - 1 (docs/replay.md).

    A = completions_per_step: handed over at each step, at least, by groups of S whose lag is then
    at most max_lag.
    """
    return max_lag + (max_size - group_size) // completions_per_step + sync_period - 1


class ReplayBuffer(GroupBuffer):
    """sync_period k: what was handed over joins at steps 0, k, 2k, ... max_size: completions that
    this rank holds.

    max_lag: of what is handed over, as a GroupBuffer's. most_lag: what lag_bound says of the rest;
    a group that is older leaves, which none is before a resume on another number of ranks. None: no
    bound. Completions that must not be trained on (no reward, aborted, without tokens) and copies
    take their place, and are never drawn.
    """

    def __init__(
        self,
        draw: Draw,
        *,
        sync_period: int,
        max_size: int,
        seed: int,
        rank: int = 0,
        max_lag: int | None = None,
        most_lag: int | None = None,
    ):
        super().__init__(max_lag)
        self.most_lag = most_lag
        if draw.priority not in PRIORITIES:
            raise ValueError(f"priority={draw.priority!r}; there is {' and '.join(PRIORITIES)}")
        self.draw = draw
        self.sync_period = sync_period
        self.max_size = max_size
        self.seed = seed
        self.rank = rank
        self._waiting: list[_Held] = []  # handed over, not joined
        self._held: list[_Held] = []  # joined, oldest first
        self._table: _Table | None = None  # of what is held; None: to be made
        self._passed: frozenset[bytes] = frozenset()  # prompts drawn since their turn came
        self._before: _Before | None = None
        # [B, K] rows of the table, of the step just taken.
        self._drawn = torch.empty(0, draw.completions, dtype=torch.int64)

    def take(self, tickets: list[int], step: int) -> list[Group]:
        came = self._hand_over(tickets, step)
        self._before = _Before(
            came=came, waiting=self._waiting, held=self._held, passed=self._passed
        )
        self._waiting = [*self._waiting, *(_Held.of(group, taken=step) for group in came)]
        if step % self.sync_period == 0 and self._waiting:
            self._join(step)
        if self.most_lag is not None:
            self._let_go_of_older_than(step - self.most_lag, step)
        return self._sample(step)

    def untake(self, groups: list[Group]) -> None:
        before = self._before
        self._waiting = before.waiting
        self._held = before.held
        self._passed = before.passed
        self._table = None
        self.put(before.came)

    def _join(self, step: int) -> None:
        joining = [replace(held, joined=step) for held in self._waiting]
        self._waiting = []
        self._table = None
        everything = sorted(self._held + joining, key=lambda held: (held.taken, held.group.ticket))
        sizes = torch.tensor([held.group.lengths.numel() for held in everything])
        newer = sizes.flip(0).cumsum(0).flip(0)  # completions of this group and of all newer ones
        self._held = everything[int((newer > self.max_size).sum()) :]

    def _let_go_of_older_than(self, version: int, step: int) -> None:
        kept = [held for held in self._held if not bool((held.columns.oldest < version).any())]
        if len(kept) == len(self._held):
            return
        log.warning(
            "step %d: %d of %d groups left the replay buffer for tokens of more than %d steps ago: "
            "the rank that held them before had newer ones to put in their place",
            step,
            len(self._held) - len(kept),
            len(self._held),
            self.most_lag,
        )
        self._held = kept
        self._table = None

    # --- Drawing ---

    def _sample(self, step: int) -> list[Group]:
        if self._table is None:
            self._table = _Table(self._held)
        table = self._table
        random = rng_of(self.seed, step, self.rank)
        passed = torch.tensor([p in self._passed for p in table.prompt_ids], dtype=torch.bool)
        self._drawn = draw_completions(
            table.rewards, table.prompts, table.is_newest, passed, self.draw, random
        )
        self._passed = frozenset(p for p, done in zip(table.prompt_ids, passed.tolist()) if done)
        return [self._group(row) for row in self._drawn]

    def _group(self, row: Tensor) -> Group:
        """One group of completions [K] from several of the same prompt; its ticket is the newest
        one's.
        """
        table = self._table
        groups = [table.groups[number] for number in table.group[row].tolist()]
        places = table.place[row].tolist()
        lengths = [int(group.lengths[place]) for group, place in zip(groups, places)]
        spans = [
            slice(start, start + length)
            for start, length in zip(table.start[row].tolist(), lengths)
        ]

        def tokens(field: str) -> Tensor:
            return torch.cat([getattr(group, field)[span] for group, span in zip(groups, spans)])

        return Group(
            ticket=max(group.ticket for group in groups),
            prompt_ids=groups[0].prompt_ids,
            lengths=torch.tensor(lengths),
            token_ids=tokens("token_ids"),
            generator_logprobs=tokens("generator_logprobs"),
            policy_versions=tokens("policy_versions"),
            ref_logprobs=tokens("ref_logprobs"),
            rewards=table.rewards[row],
            finish_reasons=tuple(group.finish_reasons[p] for group, p in zip(groups, places)),
            outcomes=tuple(group.outcomes[p] for group, p in zip(groups, places)),
            ref_version=min(group.ref_version for group in groups),
        )

    # --- Metrics ---

    def sums(self, step: int) -> tuple[Sums, Sums]:
        table = self._table
        drawn = self._drawn
        ages = step - table.oldest if table.oldest.numel() else torch.zeros(1)
        sums = {
            "size": float(table.oldest.numel()),
            "prompts": float(table.num_prompts),
            "age": float(ages.sum()),
            "drawn": float(drawn.numel()),
            "on_policy": float(table.is_newest[drawn].sum()),
            "copies": float(table.num_copies),
            "duplicates": float(drawn.numel() - drawn.unique().numel()),
            "hidden": float(sum(held.group.lengths.numel() for held in self._waiting)),
        }
        return sums, {"age_max": float(ages.max())}

    def report(self, sums: Sums, maxima: Sums) -> dict[str, float | None]:
        """buffer/*: completions that may be drawn, and their prompts; copies of them that are held
        too; those that wait for a sync step; ages in steps, of the oldest token of what may be
        drawn; of the completions drawn, how many are of the newest join (fraction), and how many
        repeat another, token for token (count).
        """
        return {
            "buffer/size": sums["size"],
            "buffer/prompts": sums["prompts"],
            "buffer/copies": sums["copies"],
            "buffer/hidden": sums["hidden"],
            "buffer/age_mean": sums["age"] / max(1.0, sums["size"]),
            "buffer/age_max": maxima["age_max"],
            "buffer/on_policy_fraction": sums["on_policy"] / max(1.0, sums["drawn"]),
            "buffer/duplicates": sums["duplicates"],
        }

    # --- Checkpoints ---

    def stored(self) -> list[Group]:
        return super().stored() + [held.group for held in self._waiting + self._held]

    def state_dict(self) -> dict:
        """Also `held`: [ticket, taken, joined] of what was handed over; `passed`: the newest ticket
        of each prompt that was drawn since its turn came.
        """
        held = [[h.group.ticket, h.taken, h.joined] for h in self._waiting + self._held]
        newest = {h.columns.prompt: h.group.ticket for h in self._held}
        passed = sorted(newest[prompt] for prompt in self._passed)
        return {**super().state_dict(), "held": held, "passed": passed}

    def load(
        self, parts: Iterable[Mapping], finished: set[int], is_mine: Callable[[int], bool]
    ) -> None:
        """With another number of ranks each takes what is of its own tickets now."""
        parts = list(parts)
        super().load(parts, finished, is_mine)
        held: list[_Held] = []
        passed: set[int] = set()
        for part in parts:
            passed |= set(part.get("passed", []))
            mine = [entry for entry in part.get("held", []) if is_mine(entry[0])]
            if not mine:
                continue
            groups = {group.ticket: group for group in decoded(part)}
            for ticket, taken, joined in mine:
                held.append(_Held.of(groups[ticket], taken=taken, joined=joined))
        held.sort(key=lambda h: (h.taken, h.group.ticket))
        self._waiting = [h for h in held if h.joined < 0]
        self._held = [h for h in held if h.joined >= 0]
        self._table = None
        self._passed = frozenset(h.columns.prompt for h in self._held if h.group.ticket in passed)


class _Table:
    """Columns over the N completions that may be drawn, oldest group first."""

    def __init__(self, held: list[_Held]):
        held = [h for h in held if h.columns.place.numel()]
        columns = [h.columns for h in held]
        kept = _last_of_equal(columns)
        self.groups = [h.group for h in held]
        joined = torch.tensor([h.joined for h in held], dtype=torch.int64)
        ids: dict[bytes, int] = {}
        prompts = torch.tensor(
            [ids.setdefault(c.prompt, len(ids)) for c in columns], dtype=torch.int64
        )
        counts = torch.tensor([c.place.numel() for c in columns], dtype=torch.int64)
        none = torch.empty(0, dtype=torch.int64)
        newest = joined == (joined.max() if len(joined) else -1)
        # [N] each: number of its group, place in it, start of its tokens in it, policy version of
        # its oldest token.
        self.group = torch.arange(len(columns)).repeat_interleave(counts)[kept]
        self.place = torch.cat([none, *(c.place for c in columns)])[kept]
        self.start = torch.cat([none, *(c.start for c in columns)])[kept]
        self.oldest = torch.cat([none, *(c.oldest for c in columns)])[kept]
        # [N] each: reward, number of its prompt, whether it is of the newest join.
        self.rewards = torch.cat([torch.empty(0), *(c.rewards for c in columns)])[kept]
        self.prompts = prompts.repeat_interleave(counts)[kept]
        self.is_newest = newest.repeat_interleave(counts)[kept]
        self.prompt_ids = list(ids)  # of each prompt, by number
        self.num_prompts = len(ids)
        self.num_copies = int((~kept).sum())


def _last_of_equal(columns: list[_Columns]) -> Tensor:
    """[n of all] bool: false where the prompt has a completion of the same tokens later on."""
    last: dict[tuple[bytes, bytes], int] = {}
    size = 0
    for c in columns:
        for tokens in c.tokens:
            last[c.prompt, tokens] = size
            size += 1
    kept = torch.zeros(size, dtype=torch.bool)
    kept[list(last.values())] = True
    return kept


def rng_of(seed: int, step: int, rank: int) -> torch.Generator:
    """The randomness of one step on one rank."""
    digest = hashlib.blake2b(f"replay {seed} {step} {rank}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def draw_completions(
    rewards: Tensor,
    prompts: Tensor,
    is_newest: Tensor,
    passed: Tensor,
    draw: Draw,
    random: torch.Generator,
) -> Tensor:
    """[B, K] int64: which of the N completions a step trains on, a row a prompt; [0, K] of none.

    rewards [N], finite; prompts [N] int64: whose completion it is, 0 to P - 1, each with at least
    one; is_newest [N] bool: whether it is of the newest join; passed [P] bool: see
    `choose_prompts`, which brings it up to date.
    """
    if not rewards.numel():
        return torch.empty(0, draw.completions, dtype=torch.int64)
    recent = torch.rand(draw.prompts, generator=random) < draw.most_on_policy
    recent &= bool(is_newest.any())
    by_prompt = prompts.argsort(stable=True)
    counts = prompts.bincount(minlength=len(passed))
    has_newest = torch.zeros_like(passed)
    has_newest[prompts[is_newest]] = True
    row = choose_prompts(has_newest, passed, recent, random)
    place = torch.arange(int(counts[row].max()))  # C, of the prompt with the most completions
    inside = place < counts[row][:, None]  # [B, C]
    first = (counts.cumsum(0) - counts)[row][:, None]
    candidates = by_prompt[(first + place).clamp(max=len(prompts) - 1)]  # [B, C]
    may = inside & (is_newest[candidates] | ~recent[:, None])
    prior = torch.zeros_like(rewards, dtype=torch.float64)
    if draw.priority == "softmax":
        prior = rewards.double() / draw.temperature
    # The most on-policy ones are equally likely.
    logits = torch.where(recent[:, None], 0.0, prior[candidates]).masked_fill(~may, -torch.inf)
    return candidates.gather(1, _draw_rows(logits, may.sum(1), draw.completions, random))


def choose_prompts(
    has_newest: Tensor, passed: Tensor, recent: Tensor, random: torch.Generator
) -> Tensor:
    """[B] int64: one of the P prompts for each draw, in turn.

    A draw by recency (recent [B] bool) may take the prompts of the newest join (has_newest [P]
    bool, some of them), any other draw every prompt. It takes one whose turn it is, uniformly:
    passed [P] bool, kept from step to step and changed in place, has those that were drawn since
    their turn came. Where all that it may take have passed, their turn comes again, of those that
    this step drew least often first.
    """
    times = torch.zeros_like(passed, dtype=torch.int64)  # drawn in this step
    chosen = []
    for by_recency in recent.tolist():
        may = has_newest if by_recency else torch.ones_like(passed)
        if bool((passed | ~may).all()):
            passed &= ~may
        due = may & ~passed
        due &= times == times[due].min()
        places = due.nonzero()[:, 0]
        prompt = places[torch.randint(len(places), (), generator=random)]
        passed[prompt] = True
        times[prompt] += 1
        chosen.append(prompt)
    return torch.stack(chosen)


def _draw_rows(logits: Tensor, counts: Tensor, k: int, random: torch.Generator) -> Tensor:
    """[B, k] columns of logits [B, C], row by row by softmax(logits): without replacement where
    counts >= k.
    """
    uniform = torch.rand(logits.shape, generator=random, dtype=torch.float64)
    uniform = uniform.clamp(min=torch.finfo(torch.float64).tiny)
    gumbel = -(-uniform.log()).log()
    without = (logits + gumbel).topk(min(k, logits.shape[1]), dim=1).indices
    has_enough = counts >= k
    if bool(has_enough.all()):
        return without
    again = torch.multinomial(logits.softmax(1), k, replacement=True, generator=random)
    if without.shape[1] < k:
        return again
    return torch.where(has_enough[:, None], without, again)
