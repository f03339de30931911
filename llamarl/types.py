"""The records, in the order in which data flows; one per hop. Each is frozen and checks its own
lengths at birth.

    PromptStream --Ticket--> Generator --Completion--> (Victim --Replied-->) Reward --Group-->
    (Reference --Group-->) Trainer --PackedBatch--> loss
                                              (and Stretches, to executors that read ahead)
    Trainer --Policy--> Generator

A channel carries one type of record, by which the executors at its ends ask for it.

Worked example. Ticket 7 is the prompt "3+4=" (ids [1, 7, 14, 8, 18]) with group_size 2. The
generator samples "7<eos>" under policy version 3, and "6<eos>", before whose second token new
weights came:

    Completion(7, 0, [1,7,14,8,18], [11, 2], [-0.1, -0.2], [3, 3], "stop")
    Completion(7, 1, [1,7,14,8,18], [10, 2], [-2.3, -0.1], [3, 4], "stop")

The reward scores each (1.0 and 0.0) and, once the group is whole, sends one Group whose per-token
fields are the two completions end to end: token_ids [11,2,10,2], lengths [2,2], rewards [1,0].

Token ids are the truth: text is decoded from them for rewards and never tokenised again.

Shape letters, here and wherever no other legend is given:

    G  completions of a group        T  packed tokens              D  model
    N  completions                   S  segments, or slots         V  vocabulary
    L  tokens of a completion        R  labels                     H  query heads
    P  tokens of a prompt            C  tokens of all groups       J  key/value heads
    B  groups a step                                               K  head dim
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

FinishReason = Literal["stop", "length", "aborted"]
OutcomeKind = Literal["score", "abstain", "error"]
# Why a dialogue with an environment ended: the policy or the environment was done; a tool said that
# it is over; there were as many turns, sampled tokens or tokens in all as there may be; a call that
# cannot be read; a call that took too long; the environment's state was lost; an order.
EndReason = Literal[
    "completed",
    "tool_stopped",
    "turns",
    "tokens",
    "context",
    "parse_error",
    "timeout",
    "lost",
    "aborted",
]
MESSAGES_KEY = "prompt_messages"  # in a reward's meta: the turns of a conversation
# What one completion adds to columns of metrics. They travel with it, because the row of the step
# that takes it has their means or sums (llamarl.learning.step_metrics).
Columns = Mapping[str, float]
LARGEST_REWARD = 1e18  # the deviation of a group's rewards needs their squares in float32


@dataclass(frozen=True, slots=True)
class Outcome:
    """The score of a completion, or why it has none. It is made where it becomes known: by a
    scorer, an environment or a victim, or by the generator that aborted the completion.
    """

    kind: OutcomeKind
    value: float  # NaN unless kind is "score"
    reason: str  # why, for "abstain" and "error"
    # The value of the parts that are outcomes, or without the part for novelty; None: all of it.
    success: float | None = None
    turn_rewards: tuple[float, ...] = ()  # what of the value is for a turn, by turn
    columns: Columns = field(default_factory=dict)  # of a training completion with a score

    @property
    def achieved(self) -> float:
        """The score that decides whether it succeeded. Novelty does not count as success, nor what
        `reward.outcomes` leaves out.
        """
        return self.value if self.success is None else self.success

    @classmethod
    def error(cls, reason: str) -> Outcome:
        """Return the outcome of an item that could not be scored. It is never a score of 0."""
        return cls("error", math.nan, reason)

    @classmethod
    def abstain(cls, reason: str) -> Outcome:
        """Return the outcome of an item that should have no score."""
        return cls("abstain", math.nan, reason)

    @classmethod
    def score(cls, value: float, success: float | None = None) -> Outcome:
        """Return the outcome with a score; an error if the score is not finite, or too large."""
        if not math.isfinite(value):
            return cls.error(f"the score is {value}")
        if abs(value) > LARGEST_REWARD:
            return cls.error(
                f"the score is {value:g}, beyond +-{LARGEST_REWARD:g}, whose square float32 holds; "
                "give a smaller number, or None to leave the completion out"
            )
        return cls("score", value, "", success)


@dataclass(frozen=True, slots=True)
class Ticket:
    """One unit of work: "make a group for prompt `index`". Made by the ledger, consumed by a
    generator.
    """

    index: int  # dense from 0, in prompt order; PromptStream(task, seed)[index] is its prompt
    # the last optimizer step that may train on it: version when started + max_lag, or
    # llamarl.tickets.pool.NEVER without a max_lag
    deadline: int
    # the number of its prompt among the training prompts, if a sampler chose it; None: the stream's
    prompt: int | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """A turn of a conversation, as a chat template takes it."""

    role: str  # "system", "user", "assistant" or "tool"
    content: str

    def to_dict(self) -> dict[str, str]:
        """Return {"role": ..., "content": ...}."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class Prompt:
    """The question of a ticket (or of an evaluation). Made by a task; the same on every rank."""

    prompt_ids: Tensor  # [P] int64
    text: str  # the prompt as the reward function sees it
    meta: dict[str, object]  # JSON values that the reward needs, such as {"answer": "7"}
    # The turns that the model reads. () for a prompt that is one text; task.chat and
    # task.system_prompt then say how the model reads it.
    messages: tuple[Message, ...] = ()

    @property
    def asked(self) -> str | tuple[Message, ...]:
        """The turns of a conversation, or the text of a prompt that is no conversation."""
        return self.messages or self.text

    @property
    def reward_meta(self) -> dict[str, object]:
        """The meta that a reward gets. If the prompt is a conversation, it has the turns, as
        {"role", "content"}, under MESSAGES_KEY.
        """
        if not self.messages:
            return self.meta
        return {**self.meta, MESSAGES_KEY: [message.to_dict() for message in self.messages]}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a completion came to its end, and what an environment gave for it."""

    reason: EndReason
    num_turns: int  # that the policy began
    reward: float | None  # None: the environment gave none, or there is no environment
    error: str  # what broke it, if it must not be trained on for that; "" otherwise
    # The rewards of its turns, as far as they had any; the rest of `reward` is for the whole.
    turn_rewards: tuple[float, ...] = ()


ALONE = Ending(reason="completed", num_turns=1, reward=None, error="")  # no environment
_NOT_GIVEN = torch.zeros(0)  # stands for a field that the record itself sets
NO_ROUTES = torch.zeros(0, dtype=torch.uint8)


def _set_not_given(record: object, **made: Callable[[], Tensor]) -> None:
    """Make those of these fields that were not given, in a record that is frozen."""
    for name, make in made.items():
        if getattr(record, name) is _NOT_GIVEN:
            object.__setattr__(record, name, make())


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled output. Made by a generator as soon as it finishes, consumed by the reward.

    With an environment it is a dialogue: what was sampled, and between its turns, as context, what
    the environment wrote. Its last token is a sampled one, unless none was.
    """

    ticket: int
    sample_index: int  # 0 .. group_size-1
    prompt_ids: Tensor  # [P] int64
    # [L] int64; if finish_reason is "stop", the last is a stop token, or completes a stop string
    token_ids: Tensor
    # [L] float32 nats, of the processed distribution that was sampled from
    generator_logprobs: Tensor  # 0 for context
    # [L] int64, the weights that sampled each token; of context those of the token before it
    policy_versions: Tensor
    finish_reason: FinishReason
    loss_mask: Tensor = _NOT_GIVEN  # [L] bool, whether it was sampled; not given: all were
    # [L] bool, whether the model read this token as its first, where the template has rewritten
    # what came before, prompt included; such a token is context. Not given: nowhere.
    restarts: Tensor = _NOT_GIVEN
    ending: Ending = ALONE
    prompt: int | None = None  # as of its Ticket
    columns: Columns = field(default_factory=dict)
    # [P + L, M, K], the experts of each token (llamarl.models.routing); [0]: nobody noted them
    routes: Tensor = NO_ROUTES

    def __post_init__(self):
        tokens = self.token_ids.numel()
        logprobs = self.generator_logprobs.numel()
        versions = self.policy_versions.numel()
        _set_not_given(
            self,
            loss_mask=lambda: torch.ones(tokens, dtype=torch.bool),
            restarts=lambda: torch.zeros(tokens, dtype=torch.bool),
        )
        if not tokens == logprobs == versions == self.loss_mask.numel():
            raise ValueError(
                f"Completion {self.ticket}/{self.sample_index}: {tokens} tokens but {logprobs} "
                f"logprobs, {versions} versions and a mask of {self.loss_mask.numel()}"
            )
        if len(self.routes) not in (0, self.prompt_ids.numel() + tokens):
            raise ValueError(f"Completion {self.ticket}: routes of {len(self.routes)} tokens")

    @property
    def last_turn(self) -> Tensor:
        """The token ids of the last turn, which follow the last context: all of them without an
        environment.
        """
        return self.token_ids[begin_of_turn(self.loss_mask) :]


@dataclass(frozen=True, slots=True)
class Stretch:
    """The next tokens of a completion that is still being sampled, for executors that read ahead.
    Made by a generator between two chunks, consumed by the reward and the reference.

    A stretch may be lost without harm, because the completion holds its tokens again.
    """

    ticket: int
    sample_index: int
    begin: int  # how many tokens of the completion come before it
    token_ids: Tensor  # [n] int64
    has_ended: bool  # whether the completion ends here, aborted or not
    prompt: int | None = None  # as of its Ticket

    def __post_init__(self):
        if self.begin < 0 or self.token_ids.dim() != 1 or self.token_ids.dtype != torch.int64:
            raise ValueError(
                f"Stretch {self.ticket}/{self.sample_index}: begin={self.begin}, "
                f"{self.token_ids.dtype} tokens of shape {list(self.token_ids.shape)}; "
                "need begin >= 0 and [n] int64"
            )


@dataclass(frozen=True, slots=True)
class EvalCompletion:
    """A completion of a held-out prompt. Each prompt gets a greedy one and k sampled ones. Made by
    a generator as soon as it finishes, consumed by the reward.
    """

    prompt_index: int  # among all held-out prompts: the task's own, then those of each set
    greedy: bool
    sample_index: int  # 0 .. k-1 for sampled ones; 0 for the greedy one
    # [L] int64; if finish_reason is "stop", the last is a stop token, or completes a stop string
    token_ids: Tensor
    policy_versions: Tensor  # [L] int64, all equal: an evaluation measures one version
    finish_reason: FinishReason
    loss_mask: Tensor = _NOT_GIVEN  # [L] bool, as of a Completion
    ending: Ending = ALONE

    def __post_init__(self):
        num_tokens = self.token_ids.numel()
        num_versions = self.policy_versions.numel()
        _set_not_given(self, loss_mask=lambda: torch.ones(num_tokens, dtype=torch.bool))
        if not num_versions == num_tokens == self.loss_mask.numel():
            raise ValueError(
                f"EvalCompletion of held-out prompt {self.prompt_index}: {num_tokens} tokens but "
                f"{num_versions} versions and a mask of {self.loss_mask.numel()}"
            )

    @property
    def last_turn(self) -> Tensor:
        """As of a Completion."""
        return self.token_ids[begin_of_turn(self.loss_mask) :]


@dataclass(frozen=True, slots=True)
class Replies:
    """An attack with the victim's M replies end to end, A tokens of the victim's tokenizer. See
    Replied and EvalReplied.
    """

    attack: Completion | EvalCompletion
    prompt_ids: Tensor  # [P] int64, the victim's tokens: what it read; [0] if it was not asked
    lengths: Tensor  # [M] int64; [0] if it was not asked
    token_ids: Tensor  # [A] int64; a reply that has ended ends with a stop token of the victim
    has_ended: tuple[bool, ...]  # M: whether it ended by itself rather than for lack of room
    outcome: OutcomeKind  # "score": to be scored; otherwise the attack's outcome without replies
    reason: str  # why, for "abstain" and "error"

    def __post_init__(self):
        num_tokens = self.token_ids.numel()
        num_replies = self.lengths.numel()
        name = type(self).__name__
        if int(self.lengths.sum()) != num_tokens or len(self.has_ended) != num_replies:
            raise ValueError(
                f"{name}: {num_replies} lengths that sum to {int(self.lengths.sum())}, but "
                f"{num_tokens} tokens and {len(self.has_ended)} ends"
            )
        if (self.outcome == "score") != (num_replies > 0):
            raise ValueError(f"{name}: {num_replies} replies, and outcome {self.outcome!r}")

    @property
    def replies(self) -> tuple[Tensor, ...]:
        """The M replies, [L] each."""
        return self.token_ids.split(self.lengths.tolist())


@dataclass(frozen=True, slots=True)
class Replied(Replies):
    """The replies to a Completion, which is an attack. Made by a victim, consumed by the reward."""

    @property
    def ticket(self) -> int:
        """The attack's ticket, by which it is routed."""
        assert isinstance(self.attack, Completion), "replies to a held-out attack have no ticket"
        return self.attack.ticket


@dataclass(frozen=True, slots=True)
class EvalReplied(Replies):
    """The replies to an EvalCompletion. Made by a victim, consumed by the reward."""


@dataclass(frozen=True, slots=True)
class Group:
    """All G scored completions of one ticket, end to end, T = sum(lengths). Made by the reward;
    consumed by the trainer.
    """

    ticket: int
    prompt_ids: Tensor  # [P] int64
    lengths: Tensor  # [G] int64
    token_ids: Tensor  # [T] int64
    generator_logprobs: Tensor  # [T] float32
    policy_versions: Tensor  # [T] int64
    ref_logprobs: Tensor  # [T] float32, or [0] when no reference executor runs
    rewards: Tensor  # [G] float32, of no meaning where the completion is not trained on
    finish_reasons: tuple[str, ...]  # G
    outcomes: tuple[str, ...]  # G
    # [G] bool: the completions that are trained on. Not given: those with a score. Never an aborted
    # one, nor one without sampled tokens.
    trained: Tensor = _NOT_GIVEN
    # policy version of the reference that made ref_logprobs; 0: the weights before training
    ref_version: int = 0
    loss_mask: Tensor = _NOT_GIVEN  # [T] bool, as of a Completion
    restarts: Tensor = _NOT_GIVEN  # [T] bool, as of a Completion
    # [T] float32: what of a completion's reward is for the turn that ends with the token
    turn_rewards: Tensor = _NOT_GIVEN
    # [G] float32: the outcomes, which are what of the rewards says whether a completion succeeded,
    # without novelty and other shaping; not given: the rewards
    achieved: Tensor = _NOT_GIVEN
    columns: tuple[Columns, ...] = ()  # G; not given: none has any
    routes: Tensor = NO_ROUTES  # [P + T, M, K], the prompt's first; as of a Completion

    def __post_init__(self):
        tokens = int(self.lengths.sum())
        size = self.lengths.numel()
        _set_not_given(
            self,
            achieved=lambda: self.rewards,
            turn_rewards=lambda: torch.zeros(tokens),
            loss_mask=lambda: torch.ones(tokens, dtype=torch.bool),
            restarts=lambda: torch.zeros(tokens, dtype=torch.bool),
            trained=lambda: torch.tensor([o == "score" for o in self.outcomes], dtype=torch.bool),
        )
        if not self.columns:
            object.__setattr__(self, "columns", ({},) * size)
        of_turns = ("loss_mask", "restarts", "turn_rewards")
        for name in ("token_ids", "generator_logprobs", "policy_versions", *of_turns):
            elements = getattr(self, name).numel()
            if elements != tokens:
                raise ValueError(
                    f"Group {self.ticket}: {name} has {elements} elements, lengths sum to {tokens}"
                )
        if bool((self.restarts & self.loss_mask).any()):
            raise ValueError(f"Group {self.ticket}: reading begins anew with a sampled token")
        if self.ref_logprobs.numel() not in (0, tokens):
            raise ValueError(
                f"Group {self.ticket}: ref_logprobs has {self.ref_logprobs.numel()} elements, "
                f"need 0 or {tokens}"
            )
        if len(self.routes) not in (0, self.prompt_ids.numel() + tokens):
            raise ValueError(f"Group {self.ticket}: routes of {len(self.routes)} tokens")
        num_rewards = self.rewards.numel()
        if self.achieved.numel() != num_rewards:
            raise ValueError(
                f"Group {self.ticket}: {num_rewards} rewards but {self.achieved.numel()} outcomes"
            )
        reasons, outcomes, columns = map(len, (self.finish_reasons, self.outcomes, self.columns))
        if not (num_rewards == reasons == outcomes == columns == size):
            raise ValueError(
                f"Group {self.ticket}: {size} lengths, but {num_rewards} rewards, {reasons} finish "
                f"reasons, {outcomes} outcomes and columns of {columns}"
            )
        not_aborted = [reason != "aborted" for reason in self.finish_reasons]
        may_be = torch.tensor(not_aborted, dtype=torch.bool) & (self.sampled_lengths > 0)
        object.__setattr__(self, "trained", self.trained & may_be)

    @classmethod
    def of(cls, scored: Sequence[tuple[Completion, Outcome]]) -> Group:
        """Join the scored completions of one ticket, in sample order. ValueError if they belong to
        several tickets.
        """
        scored = sorted(scored, key=lambda one: one[0].sample_index)
        parts = [completion for completion, _ in scored]
        outcomes = [outcome for _, outcome in scored]
        tickets = sorted({c.ticket for c in parts})
        if len(tickets) != 1:
            raise ValueError(f"completions of several tickets in one group: {tickets}")
        turn_rewards = _NOT_GIVEN
        if any(outcome.turn_rewards for outcome in outcomes):
            turn_rewards = torch.cat([_at_ends_of_turns(*one) for one in scored])
        # The numbers of a completion without a score are 0, and no one reads them.
        rewards = [o.value if o.kind == "score" else 0.0 for o in outcomes]
        achieved = [o.achieved if o.kind == "score" else 0.0 for o in outcomes]
        return cls(
            ticket=tickets[0],
            prompt_ids=parts[0].prompt_ids,
            lengths=torch.tensor([c.token_ids.numel() for c in parts]),
            token_ids=torch.cat([c.token_ids for c in parts]),
            generator_logprobs=torch.cat([c.generator_logprobs for c in parts]),
            policy_versions=torch.cat([c.policy_versions for c in parts]),
            ref_logprobs=torch.empty(0),
            rewards=torch.tensor(rewards, dtype=torch.float32),
            finish_reasons=tuple(c.finish_reason for c in parts),
            outcomes=tuple(outcome.kind for outcome in outcomes),
            loss_mask=torch.cat([c.loss_mask for c in parts]),
            restarts=torch.cat([c.restarts for c in parts]),
            turn_rewards=turn_rewards,
            achieved=torch.tensor(achieved, dtype=torch.float32),
            columns=tuple({**c.columns, **outcome.columns} for c, outcome in scored),
            routes=_routes_of(parts),
        )

    @property
    def sampled_lengths(self) -> Tensor:
        """[G] int64: how many tokens of each completion were sampled, which leaves out context."""
        if self.loss_mask.all():
            return self.lengths
        completion_of = torch.arange(self.lengths.numel()).repeat_interleave(self.lengths)
        return torch.bincount(completion_of[self.loss_mask], minlength=self.lengths.numel())

    @property
    def trained_outcomes(self) -> Tensor:
        """The outcomes of the completions that are trained on, float32."""
        return self.achieved[self.trained]

    @property
    def trained_tokens(self) -> Tensor:
        """[T] bool: the tokens that are trained on, which are the sampled ones of the completions
        that are.
        """
        return self.trained.repeat_interleave(self.lengths) & self.loss_mask

    @property
    def oldest_version(self) -> int:
        """The smallest policy version in the group: its lag is the trainer's version minus this."""
        return int(self.policy_versions.min()) if self.policy_versions.numel() else 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the outcomes of a finished group say. Made by a trainer, consumed by the ledger.

    ValueError if `solved` is not between 0 and num_scored.
    """

    num_scored: int  # completions that may be trained on
    total: float  # sum of their outcomes, as the reward gave them
    teaches: bool  # whether two of their outcomes differ
    solved: float  # completions that were solved: the sum of outcomes, each clamped to 0..1

    def __post_init__(self) -> None:
        if not 0 <= self.solved <= self.num_scored:
            raise ValueError(f"{self.solved} of {self.num_scored} completions solved")

    def to_json(self) -> list:
        """Return the verdict as JSON values."""
        return [self.num_scored, self.total, self.teaches, self.solved]

    @classmethod
    def from_json(cls, values: Sequence) -> Verdict:
        """Return the verdict of JSON values."""
        num_scored, total, teaches, solved = values
        return cls(
            num_scored=int(num_scored),
            total=float(total),
            teaches=bool(teaches),
            solved=float(solved),
        )


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One microbatch: segments end to end, each prompt once and after it what its completions feed
    the model; shifted here:

        prompt [10,11] with completions [12,13] and [14], then prompt [20] with completion [21,22]:
        input_ids   10 11 | 12 | 20 | 21      positions  0 1 2 0 1      labels       12 13 14 21 22
        cu_seqlens  0 2 3 4 5                 rows       1 2 1 3 4      completions  0 0 1 2 2
        parents     -1 0 -1 2                 groups     0 0 1

    T input tokens in S segments; R labels, the trained tokens of all N completions, in order. Row r
    of the hidden states predicts label r: a prompt's last token predicts the first token of each of
    its completions, and the last token of a completion is only ever a label. What an environment
    wrote in a completion is among the inputs and no label: were 12 such a token above, the labels
    would be 13 14 21 22, and rows 2 1 3 4. What it wrote at the beginning of all completions of a
    group in the batch stands with the prompt.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, from 0 at the start of each prompt
    cu_seqlens: Tensor  # [S+1] int64
    parents: Tensor  # [S] int64, a completion's prompt; -1 for prompts and for what is read anew
    rows: Tensor  # [R] int64 into T
    labels: Tensor  # [R] int64
    places: Tensor  # [R] int64, a label's place among all groups' completion tokens, end to end
    offsets: Tensor  # [R] int64, how many tokens of its completion come before it, context included
    generator_logprobs: Tensor  # [R] float32
    ref_logprobs: Tensor  # [R] float32, 0 without a reference
    advantages: Tensor  # [R] float32
    returns: Tensor  # [R] float32, targets of the value head for each row; 0 without one
    old_values: Tensor  # [R] float32, its values before the step; 0 without one
    policy_versions: Tensor  # [R] int64
    completions: Tensor  # [R] int64, which of the N completions a label belongs to, ascending
    groups: Tensor  # [N] int64, which of the microbatch's groups a completion belongs to
    rewards: Tensor  # [N] float32, shaped, finite
    group_tokens: Tensor  # [N] float32, trained tokens of its whole group, in all microbatches
    routes: Tensor = NO_ROUTES  # [T, M, K], as of a Completion


def begin_of_turn(loss_mask: Tensor) -> int:
    """Return how many of a completion's tokens come before its last turn, by their mask [L]."""
    if loss_mask.all():
        return 0
    context = (~loss_mask).nonzero()
    return int(context[-1]) + 1


def ends_of_turns(loss_mask: Tensor) -> Tensor:
    """Return [L] bool: the last token of each turn, by a completion's mask [L]."""
    goes_on = torch.zeros_like(loss_mask)
    goes_on[:-1] = loss_mask[1:]
    return loss_mask & ~goes_on


def _routes_of(completions: Sequence[Completion]) -> Tensor:
    """Return the routes [P + T, M, K] of a group: of the prompt those of the first completion that
    has any.
    """
    noted = [c.routes for c in completions if len(c.routes)]
    if not noted:
        return NO_ROUTES
    num_prompt = completions[0].prompt_ids.numel()
    routes = [noted[0][:num_prompt]]
    for one in completions:
        nothing = noted[0].new_zeros(one.token_ids.numel(), *noted[0].shape[1:])
        routes.append(one.routes[num_prompt:] if len(one.routes) else nothing)
    return torch.cat(routes)


def _at_ends_of_turns(completion: Completion, outcome: Outcome) -> Tensor:
    """Return [L] float32: the rewards of turns where these end."""
    rewards = torch.zeros(completion.token_ids.numel())
    if not outcome.turn_rewards:
        return rewards
    places = ends_of_turns(completion.loss_mask).nonzero().flatten()
    given = torch.tensor(outcome.turn_rewards[: places.numel()], dtype=torch.float32)
    rewards[places[: given.numel()]] = given
    return rewards


class Policy:
    """The policy's weights, of every version. Made by the trainer, consumed by generators.

    The type only names what a channel of weights carries; no object of it is made. The channel's
    ends move tensors from shard to shard (llamarl.ddma).
    """


class ReferencePolicy(Policy):
    """The policy's weights, of the versions that a reference is reset to."""
