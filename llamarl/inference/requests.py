"""What is asked of an engine, and how far it has come with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llamarl.inference.sampler import SamplingParams
from llamarl.types import Completion, FinishReason


@dataclass(frozen=True, slots=True)
class Recorded:
    """The L tokens that were sampled of one completion so far."""

    token_ids: Tensor  # [L] int64
    generator_logprobs: Tensor  # [L] float32 nats
    policy_versions: Tensor  # [L] int64


def _nothing() -> Recorded:
    """What a completion has that has not begun."""
    none = torch.empty(0, dtype=torch.int64)
    return Recorded(token_ids=none, generator_logprobs=torch.empty(0), policy_versions=none)


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


@dataclass(slots=True)
class Request:
    """A submitted prompt; its samples num_started..end-1 take slots as they come free, in order."""

    stream: int
    ticket: int
    prompt_ids: Tensor  # [P] int64, on the CPU
    params: SamplingParams
    end: int
    num_started: int = 0
    recorded: Recorded = field(default_factory=_nothing)  # what its only sample has already
    num_cached: int = 0  # tokens of a long prompt that wait in the staging slot

    @classmethod
    def of_prompt(
        cls, stream: int, ticket: int, prompt_ids: Tensor | Sequence[int], params: SamplingParams
    ) -> Request:
        """All params.n samples of a prompt."""
        return cls(
            stream=stream,
            ticket=ticket,
            prompt_ids=torch.as_tensor(prompt_ids, dtype=torch.int64, device="cpu"),
            params=params,
            end=params.n,
        )

    @classmethod
    def of_partial(cls, partial: Partial) -> Request:
        """What remains of one sample."""
        return cls(
            stream=partial.stream,
            ticket=partial.ticket,
            prompt_ids=partial.prompt_ids.cpu(),
            params=partial.params,
            end=partial.sample_index + 1,
            num_started=partial.sample_index,
            recorded=Recorded(
                token_ids=partial.token_ids,
                generator_logprobs=partial.generator_logprobs,
                policy_versions=partial.policy_versions,
            ),
        )

    def check(self, vocab_size: int, max_len: int) -> None:
        """ValueError for an empty prompt, one that max_len has no room for, or unknown ids.

        For a partial completion also if it has ended, or has not a logprob and a version a token.
        """
        self._check_lengths(max_len)
        who = f"ticket {self.ticket}"
        check_vocabulary(f"{who}: prompt ids", self.ids, vocab_size)
        stops = torch.tensor(self.params.stop_token_ids, dtype=torch.int64)
        check_vocabulary(f"{who}: stop tokens", stops, vocab_size)
        done = self.recorded.token_ids
        is_stopped = done.numel() > 0 and int(done[-1]) in self.params.stop_token_ids
        if is_stopped or done.numel() >= self.params.max_new_tokens:
            raise ValueError(
                f"{who}: a completion of {done.numel()} tokens that has ended cannot go on"
            )

    def _check_lengths(self, max_len: int) -> None:
        prompt, ticket = self.prompt_ids, self.ticket
        if prompt.dim() != 1 or prompt.numel() == 0:
            raise ValueError(
                f"ticket {ticket}: prompt_ids of shape {list(prompt.shape)}; "
                "need [P] with at least one token"
            )
        if self.max_tokens > max_len:
            raise ValueError(
                f"ticket {ticket}: {prompt.numel()} prompt tokens + "
                f"max_new_tokens={self.params.max_new_tokens} exceed max_len={max_len}; "
                "give the engine a larger max_len, or shorten either"
            )
        had = self.recorded
        tensors = (had.token_ids, had.generator_logprobs, had.policy_versions)
        shapes = [list(tensor.shape) for tensor in tensors]
        if len(shapes[0]) != 1 or any(shape != shapes[0] for shape in shapes):
            raise ValueError(
                f"ticket {ticket}: tokens, logprobs and versions of shapes {shapes}; need [L] each"
            )

    @property
    def num_waiting(self) -> int:
        """How many of its samples hold no slot yet."""
        return self.end - self.num_started

    @property
    def max_tokens(self) -> int:
        """The most tokens that prompt and completion may have together."""
        return self.prompt_ids.numel() + self.params.max_new_tokens

    @property
    def ids(self) -> Tensor:
        """[P + L] int64, what is prefilled before its samples start."""
        return torch.cat([self.prompt_ids, self.recorded.token_ids])

    def is_of(self, ticket: int | None, stream: int | None) -> bool:
        """Whether it is of this ticket and this stream; None: of any."""
        return ticket in (None, self.ticket) and stream in (None, self.stream)


@dataclass(frozen=True, slots=True)
class Admission:
    """Samples begin..end-1 of a request, which start together: they share one prefill."""

    request: Request
    begin: int
    end: int

    @property
    def num_samples(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a request."""

    request: Request
    index: int

    def partial(self, had: Recorded) -> Partial:
        """It as it is now, which is to go on later."""
        return Partial(
            stream=self.request.stream,
            ticket=self.request.ticket,
            sample_index=self.index,
            prompt_ids=self.request.prompt_ids,
            token_ids=had.token_ids,
            generator_logprobs=had.generator_logprobs,
            policy_versions=had.policy_versions,
            params=self.request.params,
        )

    def completion(self, had: Recorded, reason: FinishReason) -> Completion:
        """It as it has ended."""
        return Completion(
            ticket=self.request.ticket,
            sample_index=self.index,
            prompt_ids=self.request.prompt_ids,
            token_ids=had.token_ids,
            generator_logprobs=had.generator_logprobs,
            policy_versions=had.policy_versions,
            finish_reason=reason,
        )


def check_vocabulary(what: str, ids: Tensor, vocab_size: int) -> None:
    """ValueError if `ids`, [N] int64, are of another kind, or one lies outside the vocabulary."""
    if ids.dim() != 1 or ids.dtype != torch.int64:
        raise ValueError(f"{what}: {list(ids.shape)} {ids.dtype}; need [N] int64")
    if not ids.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{what} {low}..{high} lie outside the model's vocabulary of {vocab_size}; "
            "is the tokenizer another model's?"
        )
