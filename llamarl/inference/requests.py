"""The requests to an engine, and how far each has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from llamarl.inference.cache import Kept, Key
from llamarl.inference.sampler import SamplingParams, check_vector

TokenIds = Tensor | Sequence[int]  # [L], as a caller has them


class Recorded(NamedTuple):
    """The L tokens of one completion so far: what was sampled, and between turns context."""

    token_ids: Tensor  # [L] int64
    generator_logprobs: Tensor  # [L] float32 nats
    policy_versions: Tensor  # [L] int64
    loss_mask: Tensor  # [L] bool, whether it was sampled
    restarts: Tensor  # [L] bool, whether the model's reading begins anew with it


class NewTokens(NamedTuple):
    """The n tokens that were sampled of one completion since it was last asked."""

    ticket: int
    sample_index: int
    begin: int  # its tokens before them
    token_ids: Tensor  # [n] int64, on the CPU


ALL_SAMPLED = torch.ones(0, dtype=torch.bool)  # stands for a mask in which every token is
NO_RESTART = torch.zeros(0, dtype=torch.bool)  # stands for a mask in which none is
_NONE = torch.empty(0, dtype=torch.int64)
# What a completion has that has not begun.
NOTHING = Recorded(_NONE, torch.empty(0), _NONE, _NONE.bool(), _NONE.bool())


@dataclass(frozen=True, slots=True)
class Partial:
    """A sample that has not ended. Made by one engine's export_partials, consumed by any other's
    submit_partial.
    """

    stream: int
    ticket: int
    sample_index: int
    prompt_ids: Tensor  # [P] int64
    token_ids: Tensor  # [L] int64, L from 0 to max_new_tokens - 1
    generator_logprobs: Tensor  # [L] float32
    policy_versions: Tensor  # [L] int64
    params: SamplingParams
    # [L] bool, whether it was sampled; not given: all were. Behind context it goes on even after a
    # stop token.
    loss_mask: Tensor = ALL_SAMPLED
    restarts: Tensor = NO_RESTART  # [L] bool, as of a Completion; not given: nowhere

    def __post_init__(self):
        count = self.token_ids.numel()
        if self.loss_mask is ALL_SAMPLED:
            object.__setattr__(self, "loss_mask", torch.ones(count, dtype=torch.bool))
        if self.restarts is NO_RESTART:
            object.__setattr__(self, "restarts", torch.zeros(count, dtype=torch.bool))

    @classmethod
    def of(cls, request: Request, sample_index: int, recorded: Recorded) -> Partial:
        """Return a sample of a request with what it has so far."""
        return cls(
            stream=request.stream,
            ticket=request.ticket,
            sample_index=sample_index,
            prompt_ids=request.prompt_ids,
            params=request.params,
            **recorded._asdict(),
        )


@dataclass(slots=True, eq=False)
class Request:
    """A submitted prompt; its samples num_started..end-1 take slots as they come free, in order."""

    stream: int
    ticket: int
    prompt_ids: Tensor  # [P] int64, on the CPU
    params: SamplingParams
    end: int
    num_started: int = 0
    recorded: Recorded = NOTHING  # the tokens that its only sample has already
    num_cached: int = 0  # tokens of a long prompt that wait in the staging slot
    kept: Kept = field(default_factory=Kept)  # of its only sample, which stopped and goes on
    num_read: int = field(init=False)  # how many tokens its samples have read before they start

    def __post_init__(self):
        had = self.recorded
        self.num_read = self.prompt_ids.numel() + had.token_ids.numel()
        if had.restarts.any():
            self.num_read = self.ids.numel()

    def check(self, vocab_size: int, max_len: int) -> None:
        """Raise ValueError for an empty prompt, one that max_len has no room for, or unknown ids.

        For a partial completion also if it has ended, or has not a logprob, a version and a mark of
        the mask a token.
        """
        who = f"ticket {self.ticket}"
        prompt = self.prompt_ids
        if prompt.dim() != 1 or prompt.numel() == 0:
            raise ValueError(
                f"{who}: prompt_ids of shape {list(prompt.shape)}; need [P] with at least one token"
            )
        if self.max_tokens > max_len:
            raise ValueError(
                f"{who}: {prompt.numel()} prompt tokens + "
                f"max_new_tokens={self.params.max_new_tokens} exceed max_len={max_len}; "
                "give the engine a larger max_len, or shorten either"
            )
        done = self.recorded.token_ids
        count = done.numel()
        if any(tensor.shape != (count,) for tensor in self.recorded):
            shapes = [list(tensor.shape) for tensor in self.recorded]
            raise ValueError(
                f"{who}: tokens, logprobs, versions and masks of shapes {shapes}; need [L] each"
            )
        stop_ids = self.params.stop_token_ids
        check_vocabulary(f"{who}: prompt ids", self.ids, vocab_size)
        stops = torch.tensor(stop_ids, dtype=torch.int64)
        check_vocabulary(f"{who}: stop tokens", stops, vocab_size)
        is_sampled = count > 0 and bool(self.recorded.loss_mask[-1])
        is_stopped = is_sampled and int(done[-1]) in stop_ids
        if is_stopped or count >= self.params.max_new_tokens:
            raise ValueError(f"{who}: a completion of {count} tokens that has ended cannot go on")

    @property
    def key(self) -> Key:
        """The key of its last sample, which is the only one of a completion that goes on."""
        return self.stream, self.ticket, self.end - 1

    @property
    def num_waiting(self) -> int:
        """How many of its samples hold no slot yet."""
        return self.end - self.num_started

    @property
    def num_tokens(self) -> int:
        """How many tokens are prefilled before its samples start."""
        return self.num_read - self.kept.places

    @property
    def max_tokens(self) -> int:
        """The most tokens that prompt and completion may have together."""
        had = self.recorded.token_ids.numel()
        return self.num_read + self.params.max_new_tokens - had

    @property
    def ids(self) -> Tensor:
        """Return what its samples have read before they start, [P + L] int64: kept or prefilled."""
        had = self.recorded
        return read_by_model(self.prompt_ids, had.token_ids, had.restarts)

    def is_of(self, ticket: int | None, stream: int | None) -> bool:
        """Return whether it is of this ticket and this stream; None: of any."""
        is_of_ticket = ticket in (None, self.ticket)
        return is_of_ticket and stream in (None, self.stream)


def on_cpu(ids: TokenIds) -> Tensor:
    """Return ids, as a caller has them, as [L] int64 on the CPU."""
    return torch.as_tensor(ids, dtype=torch.int64, device="cpu")


def check_vocabulary(what: str, ids: Tensor, vocab_size: int) -> None:
    """Raise ValueError if `ids`, [N] int64, are of another kind, or one lies outside the
    vocabulary.
    """
    check_vector(what, ids, ids.numel(), torch.int64, ids.device)
    if not ids.numel():
        return
    low, high = torch.aminmax(ids)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{what} {low}..{high} lie outside the model's vocabulary of {vocab_size}; "
            "is the tokenizer another model's?"
        )


def read_by_model(prompt_ids: Tensor, token_ids: Tensor, restarts: Tensor) -> Tensor:
    """Return the tokens [M] that the model has read when it samples behind a completion's tokens
    [L]: from the newest restart [L] on, or prompt [P] and all.
    """
    begins = restarts.nonzero()
    if begins.numel():
        return token_ids[int(begins[-1]) :]
    return torch.cat([prompt_ids, token_ids])
