"""The replay buffer of Trajectory Balance with Asynchrony (TBA, arXiv 2503.18929, sections 4.1 and
4.2).

    reward, reference --Group--> put   the local buffer: come, not handed over by the ledger
                                 take  handed over; waits for the next sync step (k)
                                 join  the global buffer: completions by prompt; the oldest groups
                                       leave when it is full
                                 draw  B prompts a step, K completions each

A prompt that is generated again adds to its completions. Two prompts are the same if their token
ids are equal; likewise completions. Of equal completions only the newest can be drawn. Older copies
still count towards max_size. A trainer rank holds groups of its own tickets
(llamarl.comm.channel.dp_rank_of): a group is never split, and a prompt that comes again in a
later epoch may do so on another rank, where it is a prompt of its own.

Drawing, for each of a step's B prompts (4.2), independently:

    with probability m   most on-policy: a prompt with some of the newest* completions, and K of
                         these, uniformly
    else                 reward priority: any prompt, and K of its completions by
                         p_j ~ exp(r_j / T), or uniformly

(* by the policy version of their oldest token, those that joined last first among equals; as many
as the newest join brought to draw)

without replacement, by Gumbel top-k, where there are K, and with replacement where there are fewer.
Prompts are drawn uniformly from those whose turn it is (`choose_prompts`): none comes again, in
this step or a later one, before all that such a draw could take were drawn. All is a function of
(seed, step, rank), of what the buffer holds and of the turns. Rewards are the task's own: they are
shaped (llamarl.learning.targets) when they are trained on.

Shapes: B prompts a step, K completions of each; N completions and P prompts that may be drawn, C of
them at most of one prompt; n completions of a group.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, compress

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llamarl.comm import wire
from llamarl.comm.channel import dp_rank_of
from llamarl.comm.together import TrainerRanks
from llamarl.learning.buffer import GroupBuffer, stored_group
from llamarl.types import Group

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """Settings of a step's draw; the comments have TBA's symbols."""

    prompts: int  # B, of this rank
    completions: int  # K
    most_on_policy: float  # m
    priority: str  # softmax | uniform, of the rewards
    temperature: float  # T, of the softmax, in units of reward


@dataclass(frozen=True, slots=True)
class _Row:
    """A completion that may be drawn."""

    group: Group
    place: int  # in the group
    span: slice  # of its tokens in the group
    joined: int  # sync step at which it becomes visible
    oldest: int  # policy version of its oldest token
    reward: float
    prompt: bytes
    completion: bytes  # the same for equal completions


@dataclass(frozen=True, slots=True)
class _Held:
    """A group that the ledger handed over, and those of its completions that may be drawn."""

    group: Group
    taken: int  # step at which it was handed over
    joined: int  # sync step at which it becomes visible
    rows: list[_Row]


def lag_bound(
    *, max_lag: int, completions_per_step: int, group_size: int, sync_period: int, max_size: int
) -> int:
    """Return how many steps a token that one rank trains on is old at most: max_lag +
    floor((max_size - S) / A) + k - 1 (docs/algorithms.md).

    A = completions_per_step: at least so many are handed over at each step, by groups of S whose
    lag is then at most max_lag.
    """
    return max_lag + (max_size - group_size) // completions_per_step + sync_period - 1


@dataclass(kw_only=True, eq=False, repr=False)
class ReplayBuffer(GroupBuffer):
    """sync_period k: what was handed over joins at steps 0, k, 2k, ... max_size: completions that
    this rank holds. grow_until: the step from which on it holds no more than it held at that step
    (TBA, B.3), or at the first one after it that held enough to draw from. None: it grows to
    max_size. good_reward: completions of at least so much are counted, each once; None: none are.

    max_lag: of what is handed over, as a GroupBuffer's. most_lag: what lag_bound says of the rest;
    an older group leaves, which happens only after a resume on another number of ranks. None: no
    bound. Completions that must not be trained on (no reward, aborted, without tokens) and copies
    take their place, and are never drawn.
    """

    draw: DrawSettings
    sync_period: int
    max_size: int
    seed: int
    rank: int = 0
    num_ranks: int = 1
    most_lag: int | None = None
    grow_until: int | None = None
    good_reward: float | None = None

    def __post_init__(self):
        super().__post_init__()
        self._held: list[_Held] = []  # handed over, oldest first; the last ones may be hidden yet
        self._passed: set[bytes] = set()  # prompts drawn since their turn came
        self._good: set[int] = set()  # digests of this rank's share of the good ones, ever
        self._found: list[int] = []  # those of newer ones, whoever's share they are
        self._room = self.max_size  # completions
        self._grows = self.grow_until is not None  # until its room is what it holds

    def take(self, tickets: list[int], step: int) -> list[Group]:
        """Take in the groups that were handed over, and return those that step `step` draws."""
        came = super().take(tickets, step)
        # For `untake`: what was held and had passed before.
        self._before = (came, self._held, self._passed, self._room, self._grows)
        held = self._held + [self._hold(group, step) for group in self._shared(came)]
        joined = [h for h in held if h.joined <= step]
        hidden = held[len(joined) :]
        sizes = torch.tensor([h.group.lengths.numel() for h in joined])
        newer = sizes.flip(0).cumsum(0)  # completions of a group and of all newer ones
        kept = self._not_too_old(joined[int((newer > self._room).sum()) :], step)
        self._stop_growing(kept, step)
        self._held = kept + hidden
        # What the step just taken has to tell, in numbers.
        self._told = {"hidden": sum(h.group.lengths.numel() for h in hidden)}
        return self._sample(kept, step)

    def untake(self, groups: list[Group]) -> None:
        """Restore what was held, and whose turn it was, before the step just taken."""
        came, self._held, self._passed, self._room, self._grows = self._before
        self.put(came)

    # --- What differs where ranks draw from one buffer ---

    @property
    def _stream(self) -> int:
        """The number of the rank whose random numbers it draws by."""
        return self.rank

    def _shared(self, groups: list[Group]) -> list[Group]:
        """Return the groups that join, given those that were handed over here."""
        return groups

    def _agreed(self, drawn: Tensor) -> Tensor:
        """Return the draw [B, K], the same on all ranks that draw together."""
        return drawn

    def _trained_here(self, drawn: Tensor) -> Tensor:
        """Return those of the completions drawn [B, K] that this rank trains on."""
        return drawn

    def _holds(self, ticket: int, is_mine: bool) -> bool:
        """Whether this rank holds a ticket's group. is_mine: the ticket is one of its own."""
        return is_mine

    def _stores(self, ticket: int) -> bool:
        """Whether this rank's part of a checkpoint has the ticket's group."""
        return True

    def _share_of(self, rooms: list[int]) -> int:
        """Return this rank's room, given those that all ranks stored."""
        least = self.draw.prompts * self.draw.completions
        return max(least, sum(rooms) // self.num_ranks)

    def _counts(self) -> bool:
        """Whether this rank's metrics are to be added to those of other ranks."""
        return True

    def _hold(self, group: Group, step: int) -> _Held:
        """Make the record of a group that was handed over at a step; the next sync step makes it
        visible.
        """
        joined = -(-step // self.sync_period) * self.sync_period
        bounds = [0, *group.lengths.cumsum(0).tolist()]
        rows = []
        for place in group.trained.nonzero()[:, 0].tolist():
            span = slice(bounds[place], bounds[place + 1])
            row = _Row(
                group=group,
                place=place,
                span=span,
                joined=joined,
                # Versions never fall within a completion, so its first token is its oldest.
                oldest=int(group.policy_versions[span.start]),
                reward=float(group.rewards[place]),
                prompt=_prompt_of(group),
                completion=group.token_ids[span].numpy().tobytes(),
            )
            rows.append(row)
            if self.good_reward is not None and row.reward >= self.good_reward:
                self._found.append(_digest_of(row))
        return _Held(group, step, joined, rows)

    def _stop_growing(self, held: list[_Held], step: int) -> None:
        """Fix the room where growth ends: there is room for what is held then, and no more."""
        if not self._grows or self.grow_until is None or step < self.grow_until:
            return
        size = sum(h.group.lengths.numel() for h in held)
        if size >= self.draw.prompts * self.draw.completions:
            self._room = size
            self._grows = False

    def _not_too_old(self, held: list[_Held], step: int) -> list[_Held]:
        if self.most_lag is None:
            return held
        first = step - self.most_lag  # version
        kept = []
        for h in held:
            if all(row.oldest >= first for row in h.rows):
                kept.append(h)
        if len(kept) < len(held):
            log.warning(
                "step %d: %d of %d groups left the replay buffer for tokens of more than %d steps "
                "ago: the rank that held them before had newer ones to put in their place",
                step,
                len(held) - len(kept),
                len(held),
                self.most_lag,
            )
        return kept

    # --- Drawing ---

    def _sample(self, held: list[_Held], step: int) -> list[Group]:
        came = list(chain.from_iterable(h.rows for h in held))
        numbers: dict[bytes, int] = {}  # of the prompts, in the order in which they came
        # Among equal completions of a prompt only the last to come can be drawn, in its own place.
        last: dict[tuple[bytes, bytes], _Row] = {}
        for row in came:
            numbers.setdefault(row.prompt, len(numbers))
            last.pop((row.prompt, row.completion), None)
            last[row.prompt, row.completion] = row
        rows = list(last.values())
        is_newest = newest_of(
            torch.tensor([row.oldest for row in rows], dtype=torch.int64),
            torch.tensor([row.joined for row in rows], dtype=torch.int64),
        )
        passed = torch.tensor([prompt in self._passed for prompt in numbers], dtype=torch.bool)
        drawn = draw_completions(
            torch.tensor([row.reward for row in rows]),
            torch.tensor([numbers[row.prompt] for row in rows], dtype=torch.int64),
            is_newest,
            passed,
            self.draw,
            rng_of(self.seed, step, self._stream),
        )
        drawn = self._agreed(drawn)
        self._passed = set(compress(numbers, passed.tolist()))
        ages = [step - row.oldest for row in rows]
        self._told |= {
            "size": len(rows),
            "prompts": len(numbers),
            "copies": len(came) - len(rows),
            "age": sum(ages),
            "age_max": max(ages, default=0),
            "age_min": min(ages, default=0),
            "drawn": drawn.numel(),
            "on_policy": int(is_newest[drawn].sum()),
            "duplicates": drawn.numel() - drawn.unique().numel(),
        }
        groups = []
        for places in self._trained_here(drawn).tolist():
            groups.append(_joined([rows[place] for place in places]))
        return groups

    def metrics(self, ranks: TrainerRanks) -> dict[str, float]:
        """Collective over ranks: return metrics named buffer/*.

        They count completions that may be drawn, and their prompts; copies of them that are held
        too; completions that wait for a sync step; and ages in steps, of the oldest token of what
        may be drawn (age_min: on the rank where the newest is oldest). Of the completions drawn
        they say how many are of the newest (fraction), and how many repeat another, token for token
        (count). With good_reward they also count the different completions of at least that reward
        that were ever handed over.
        """
        found = {}
        if self.good_reward is not None:
            found["buffer/distinct_good"] = self._num_good(ranks)
        told = self._told if self._counts() else dict.fromkeys(self._told, 0)
        sums = ranks.sum(**told)
        return {
            "buffer/size": sums["size"],
            "buffer/prompts": sums["prompts"],
            "buffer/copies": sums["copies"],
            "buffer/hidden": sums["hidden"],
            "buffer/age_mean": sums["age"] / max(1.0, sums["size"]),
            "buffer/age_max": ranks.max(age=self._told["age_max"])["age"],
            "buffer/age_min": ranks.max(age=self._told["age_min"])["age"],
            "buffer/on_policy_fraction": sums["on_policy"] / max(1.0, sums["drawn"]),
            "buffer/duplicates": sums["duplicates"],
            **found,
        }

    def _num_good(self, ranks: TrainerRanks) -> float:
        """Return how many different completions of good reward have ever come to any rank. Each is
        kept by the rank that its digest names.
        """
        mine = torch.tensor(self._found, dtype=torch.int64).numpy().tobytes()
        for message in ranks.gather(mine):
            if message:
                self._keep_good(torch.frombuffer(bytearray(message), dtype=torch.int64))
        self._found = []
        return ranks.sum(good=len(self._good))["good"]

    def _keep_good(self, digests: Tensor) -> None:
        is_mine = digests % self.num_ranks == self.rank
        self._good.update(digests[is_mine].tolist())

    # --- Checkpoints ---

    def _load_room(self, parts: list[Mapping]) -> None:
        """Take the room from parts in the order of the ranks. A part without a room still grew."""
        if self.grow_until is None:
            return
        buffers = [part for part in parts if "held" in part]  # and not of tensor-parallel peers
        if len(buffers) == self.num_ranks:
            room = buffers[self.rank].get("room")
        else:
            rooms = [part["room"] for part in buffers if "room" in part]
            room = self._share_of(rooms) if rooms else None
        if room is not None:
            self._room = room
            self._grows = False

    def stored(self) -> list[Group]:
        """Return every group that a checkpoint must hold: hidden and visible ones."""
        return super().stored() + [h.group for h in self._stored()]

    def _stored(self) -> list[_Held]:
        return [h for h in self._held if self._stores(h.group.ticket)]

    def state_dict(self) -> dict:
        """Return the groups, and besides `held`: [ticket, taken] of what was handed over; `passed`:
        the newest ticket of each prompt that was drawn since its turn came; `room`: once it grows
        no more.
        """
        held = [[h.group.ticket, h.taken] for h in self._stored()]
        newest = {_prompt_of(h.group): h.group.ticket for h in self._held}
        passed = sorted(newest[prompt] for prompt in self._passed)
        state = {**super().state_dict(), "held": held, "passed": passed}
        if self.grow_until is not None and not self._grows:
            state["room"] = self._room
        if self.good_reward is not None:
            state["good"] = torch.tensor(sorted(self._good), dtype=torch.int64)
        return state

    def load(
        self, parts: Iterable[Mapping], finished: set[int], is_mine: Callable[[int], bool]
    ) -> None:
        """Take the groups of this rank's own tickets. On as many ranks as had saved them each has
        the room that it had; on another number its share of all.
        """
        parts = list(parts)
        super().load(parts, finished, is_mine)
        passed: set[int] = set()
        for part in parts:
            if "good" in part:
                self._keep_good(part["good"])
        self._found = []
        self._load_room(parts)
        for part in parts:
            passed |= set(part.get("passed", []))
            held = part.get("held", [])
            for number, (ticket, step) in enumerate(held, start=len(part["buffered"])):
                if self._holds(ticket, is_mine(ticket)):
                    self._held.append(self._hold(stored_group(part, number), step))
        self._held.sort(key=lambda h: (h.taken, h.group.ticket))
        groups = [h.group for h in self._held]
        self._passed = {_prompt_of(g) for g in groups if g.ticket in passed}


def _digest_of(row: _Row) -> int:
    """Return a number from 0 to 2**63 - 1 that is equal for equal completions of equal prompts."""
    digest = hashlib.blake2b(row.prompt + b"|" + row.completion, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class SharedReplayBuffer(ReplayBuffer):
    """Holds the whole buffer on every trainer rank: what is handed over to any rank joins on all.
    All draw the same B prompts of the step, and each rank trains on its share, each prompt's K
    completions on one rank.

    So a prompt's completions meet wherever they were sent, and what is drawn is what one rank with
    the same groups draws. draw, max_size: of all ranks together. `take` is collective.
    """

    def attach(self, ranks: TrainerRanks) -> None:
        self._ranks = ranks

    @property
    def _stream(self) -> int:
        return 0

    def _shared(self, groups: list[Group]) -> list[Group]:
        message = wire.encode(groups) if groups else b""
        come: list[Group] = []
        for theirs in self._ranks.gather(bytes(message)):
            come += wire.decode(theirs) if theirs else []
        return sorted(come, key=lambda group: group.ticket)

    def _agreed(self, drawn: Tensor) -> Tensor:
        # The first rank's: processors may differ in a softmax's last bit.
        first = self._ranks.gather(drawn.numpy().tobytes())[0]
        if not first:
            return drawn
        return torch.frombuffer(bytearray(first), dtype=torch.int64).view(drawn.shape)

    def _trained_here(self, drawn: Tensor) -> Tensor:
        return drawn[self.rank :: self.num_ranks]

    def _holds(self, ticket: int, is_mine: bool) -> bool:
        return True

    def _stores(self, ticket: int) -> bool:
        return dp_rank_of(ticket, self.num_ranks) == self.rank

    def _share_of(self, rooms: list[int]) -> int:
        return rooms[0]

    def _counts(self) -> bool:
        return self.rank == 0


class SplitReplayBuffer(SharedReplayBuffer):
    """A SharedReplayBuffer in which each rank trains on an equal share of every prompt's K
    completions, so that all ranks share each prompt. K is a multiple of the ranks.
    """

    def _trained_here(self, drawn: Tensor) -> Tensor:
        return drawn[:, self.rank :: self.num_ranks]


def _prompt_of(group: Group) -> bytes:
    """Return a key that is equal for equal prompts."""
    return group.prompt_ids.numpy().tobytes()


def _joined(rows: list[_Row]) -> Group:
    """Join completions [K] of the same prompt as one group; its ticket is that of their newest
    group.
    """
    groups = [row.group for row in rows]

    def tokens(field: str) -> Tensor:
        return torch.cat([getattr(row.group, field)[row.span] for row in rows])

    num_prompt = groups[0].prompt_ids.numel()
    routes = [groups[0].routes[:num_prompt]]
    for row in rows:
        routes.append(row.group.routes[num_prompt:][row.span])
    return Group(
        ticket=max(group.ticket for group in groups),
        prompt_ids=groups[0].prompt_ids,
        lengths=torch.tensor([row.span.stop - row.span.start for row in rows]),
        token_ids=tokens("token_ids"),
        generator_logprobs=tokens("generator_logprobs"),
        policy_versions=tokens("policy_versions"),
        ref_logprobs=tokens("ref_logprobs"),
        rewards=torch.tensor([row.reward for row in rows]),
        finish_reasons=tuple(row.group.finish_reasons[row.place] for row in rows),
        outcomes=tuple(row.group.outcomes[row.place] for row in rows),
        trained=torch.ones(len(rows), dtype=torch.bool),  # others are not held
        ref_version=min(group.ref_version for group in groups),
        loss_mask=tokens("loss_mask"),
        restarts=tokens("restarts"),
        turn_rewards=tokens("turn_rewards"),
        columns=tuple(row.group.columns[row.place] for row in rows),
        routes=torch.cat(routes),
    )


def rng_of(seed: int, step: int, rank: int) -> torch.Generator:
    """Return the random generator of one step on one rank."""
    digest = hashlib.blake2b(f"replay {seed} {step} {rank}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def newest_of(versions: Tensor, joined: Tensor) -> Tensor:
    """Return [N] bool: the most on-policy ones of N completions that may be drawn.

    versions [N] int64: policy version of the oldest token; joined [N] int64: sync step of the join.
    As many as the newest join brought, the highest versions first and among equals those that
    joined last; with those that equal the last of them in both, so that none is left out by its
    place. What a slow way to the buffer has made old is so not taken for new because it came last.
    """
    if not joined.numel():
        return torch.empty(0, dtype=torch.bool)
    count = int((joined == joined.max()).sum())
    ages = torch.stack([versions, joined], dim=1)  # in order of age: oldest rows first
    _, ranks_N = ages.unique(dim=0, return_inverse=True)  # sorted by version, then by join
    least = ranks_N.sort(descending=True).values[count - 1]
    return ranks_N >= least


def draw_completions(
    rewards: Tensor,
    prompts: Tensor,
    is_newest: Tensor,
    passed: Tensor,
    draw: DrawSettings,
    random: torch.Generator,
) -> Tensor:
    """Return [B, K] int64: which of the N completions a step trains on, a row a prompt; [0, K] if
    there are none.

    rewards [N], finite; prompts [N] int64: whose completion it is, 0 to P - 1, each with at least
    one; is_newest [N] bool: whether it is of the newest; passed [P] bool: see
    `choose_prompts`, which brings it up to date.
    """
    if not rewards.numel():
        return torch.empty(0, draw.completions, dtype=torch.int64)
    recent = torch.rand(draw.prompts, generator=random) < draw.most_on_policy
    recent &= bool(is_newest.any())
    has_newest = torch.zeros_like(passed)
    has_newest[prompts[is_newest]] = True
    row = choose_prompts(has_newest, passed, recent, random)
    own = [(prompts == prompt).nonzero()[:, 0] for prompt in row]
    candidates = pad_sequence(own, batch_first=True, padding_value=-1)  # [B, C]
    may = (candidates >= 0) & (is_newest[candidates] | ~recent[:, None])
    prior = torch.zeros_like(rewards, dtype=torch.float64)
    if draw.priority == "softmax":
        prior = rewards.double() / draw.temperature
    # The most on-policy ones are equally likely.
    logits = torch.where(recent[:, None], 0.0, prior[candidates]).masked_fill(~may, -torch.inf)
    k = draw.completions
    uniform = torch.rand(logits.shape, generator=random, dtype=torch.float64)
    uniform = uniform.clamp(min=torch.finfo(torch.float64).tiny)
    gumbel = -(-uniform.log()).log()
    columns = torch.multinomial(logits.softmax(1), k, replacement=True, generator=random)
    if logits.shape[1] >= k:
        without_replacement = (logits + gumbel).topk(k, dim=1).indices
        has_enough = may.sum(1, keepdim=True) >= k
        columns = torch.where(has_enough, without_replacement, columns)
    return candidates.gather(1, columns)


def choose_prompts(
    has_newest: Tensor, passed: Tensor, recent: Tensor, random: torch.Generator
) -> Tensor:
    """Return [B] int64: one of the P prompts for each draw, in turn.

    A draw by recency (recent [B] bool) may take the prompts of the newest ones (has_newest [P]
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
