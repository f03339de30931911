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

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

FinishReason = Literal["stop", "length", "aborted"]
OutcomeKind = Literal["score", "abstain", "error"]
MESSAGES_KEY = "prompt_messages"  # in a reward's meta: the turns of a conversation


@dataclass(frozen=True, slots=True)
class Ticket:
    """One unit of work: "make a group for prompt `index`". Made by the ledger, consumed by a
    generator.
    """

    index: int  # dense from 0, in prompt order; PromptStream(task, seed)[index] is its prompt
    # the last optimizer step that may train on it: version when started + max_lag, or
    # llamarl.tickets.ledger.NEVER without a max_lag
    deadline: int


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
class Completion:
    """One sampled output. Made by a generator as soon as it finishes, consumed by the reward."""

    ticket: int
    sample_index: int  # 0 .. group_size-1
    prompt_ids: Tensor  # [P] int64
    # [L] int64; if finish_reason is "stop", the last is a stop token, or completes a stop string
    token_ids: Tensor
    # [L] float32 nats, of the processed distribution that was sampled from
    generator_logprobs: Tensor
    policy_versions: Tensor  # [L] int64, the weights that sampled each token
    finish_reason: FinishReason

    def __post_init__(self):
        tokens = self.token_ids.numel()
        logprobs = self.generator_logprobs.numel()
        versions = self.policy_versions.numel()
        if not tokens == logprobs == versions:
            raise ValueError(
                f"Completion {self.ticket}/{self.sample_index}: {tokens} tokens but {logprobs} "
                f"logprobs and {versions} versions"
            )


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

    def __post_init__(self):
        num_tokens = self.token_ids.numel()
        num_versions = self.policy_versions.numel()
        if num_versions != num_tokens:
            raise ValueError(
                f"EvalCompletion of held-out prompt {self.prompt_index}: "
                f"{num_tokens} tokens but {num_versions} versions"
            )


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
class ScoredCompletion:
    """A completion and the reward's verdict on it. Lives inside the reward executor until its group
    is whole.
    """

    completion: Completion
    outcome: OutcomeKind
    reward: float  # NaN unless outcome is "score"
    reason: str  # why, for "abstain" and "error"


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
    rewards: Tensor  # [G] float32, NaN where the completion must not be trained on
    finish_reasons: tuple[str, ...]  # G
    outcomes: tuple[str, ...]  # G
    # policy version of the reference that made ref_logprobs; 0: the weights before training
    ref_version: int = 0

    def __post_init__(self):
        tokens = int(self.lengths.sum())
        size = self.lengths.numel()
        for field in ("token_ids", "generator_logprobs", "policy_versions"):
            elements = getattr(self, field).numel()
            if elements != tokens:
                raise ValueError(
                    f"Group {self.ticket}: {field} has {elements} elements, lengths sum to {tokens}"
                )
        if self.ref_logprobs.numel() not in (0, tokens):
            raise ValueError(
                f"Group {self.ticket}: ref_logprobs has {self.ref_logprobs.numel()} elements, "
                f"need 0 or {tokens}"
            )
        if not (self.rewards.numel() == len(self.finish_reasons) == len(self.outcomes) == size):
            raise ValueError(
                f"Group {self.ticket}: {size} lengths but {self.rewards.numel()} rewards"
            )

    @classmethod
    def of(cls, scored: list[ScoredCompletion]) -> Group:
        """Join the scored completions of one ticket, in sample order. ValueError if they belong to
        several tickets.
        """
        scored = sorted(scored, key=lambda s: s.completion.sample_index)
        parts = [s.completion for s in scored]
        tickets = sorted({c.ticket for c in parts})
        if len(tickets) != 1:
            raise ValueError(f"completions of several tickets in one group: {tickets}")
        return cls(
            ticket=tickets[0],
            prompt_ids=parts[0].prompt_ids,
            lengths=torch.tensor([c.token_ids.numel() for c in parts]),
            token_ids=torch.cat([c.token_ids for c in parts]),
            generator_logprobs=torch.cat([c.generator_logprobs for c in parts]),
            policy_versions=torch.cat([c.policy_versions for c in parts]),
            ref_logprobs=torch.empty(0),
            rewards=torch.tensor([s.reward for s in scored], dtype=torch.float32),
            finish_reasons=tuple(c.finish_reason for c in parts),
            outcomes=tuple(s.outcome for s in scored),
        )

    @property
    def trained(self) -> Tensor:
        """[G] bool: the completions that are trained on, which have tokens and a reward and were
        not aborted.
        """
        not_aborted = [reason != "aborted" for reason in self.finish_reasons]
        has_tokens = self.lengths > 0
        return torch.tensor(not_aborted, dtype=torch.bool) & ~self.rewards.isnan() & has_tokens

    @property
    def trained_tokens(self) -> Tensor:
        """[T] bool: the tokens of the completions that are trained on."""
        return self.trained.repeat_interleave(self.lengths)

    @property
    def oldest_version(self) -> int:
        """The smallest policy version in the group: its lag is the trainer's version minus this."""
        return int(self.policy_versions.min()) if self.policy_versions.numel() else 0


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
    its completions, and the last token of a completion is only ever a label.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, from 0 at the start of each prompt
    cu_seqlens: Tensor  # [S+1] int64
    parents: Tensor  # [S] int64, a completion's prompt; -1 for prompts
    rows: Tensor  # [R] int64 into T
    labels: Tensor  # [R] int64
    places: Tensor  # [R] int64, a label's place among all groups' completion tokens, end to end
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


class Policy:
    """The policy's weights, of every version. Made by the trainer, consumed by generators.

    The type only names what a channel of weights carries; no object of it is made. The channel's
    ends move tensors from shard to shard (llamarl.ddma).
    """


class ReferencePolicy(Policy):
    """The policy's weights, of the versions that a reference is reset to."""
