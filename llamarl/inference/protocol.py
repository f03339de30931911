"""Protocols of an engine: what the generator needs of one, whoever wrote it.

    engine.submit(ticket=7, prompt_ids=prompt_ids, params=params)
    while engine.num_live or engine.num_waiting:
        engine.step(chunk=16)              # between two steps: new weights, new work, aborts
        for stream, completion in engine.pop_finished():
            ...

`Engine` (native PyTorch) and `VLLMEngine` are the two that there are; what does not depend on who
computes they have from `SlotEngine` (llamarl.inference.slots). An engine that is added belongs into
the list at the head of tests/unit/test_engine_contract.py, which holds every engine to what is said
here, and gets a BuildEngine (llamarl.inference.build).

Engines take plain values and know no ticket rules, no channels and no versions but the number that
they stamp on tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeGuard

from torch import Tensor, nn

from llamarl.executor import ExecutorGroup
from llamarl.inference.requests import NewTokens, Partial, TokenIds
from llamarl.inference.sampler import SamplingParams
from llamarl.models.config import ModelConfig
from llamarl.types import Completion

Bind = Callable[[ModelConfig, list[tuple[str, nn.Parameter]]], object]


class GenerationEngine(Protocol):
    """An engine samples completions from weights that others exchange between two of its steps.

    A sample is submitted, waits for a slot, is live while it is decoded, and is handed out once
    when it has ended. No call but `step` samples a token that is handed out.
    """

    policy_version: int  # of the weights in use; the next token is stamped with it

    @property
    def num_live(self) -> int:
        """How many samples hold a slot."""

    @property
    def num_waiting(self) -> int:
        """How many samples were submitted and hold no slot yet."""

    @property
    def free_slots(self) -> int:
        """How many more samples could be live."""

    def submit(
        self,
        ticket: int,
        prompt_ids: TokenIds,
        params: SamplingParams,
        *,
        stream: int = 0,
    ) -> None:
        """Queue params.n samples of a prompt, whose sample_index runs from 0.

        prompt_ids: [P] int64. stream: a number that tells kinds of work with equal tickets apart
        (training, evaluation). The tokens of a sample depend on (seed, stream, ticket,
        sample_index) and the logits, not on the slot or on what runs beside it.

        ValueError for an empty prompt, one that leaves no room for max_new_tokens, ids outside the
        vocabulary, or stop strings if the engine was not given a `decode`.
        """

    def step(self, chunk: int) -> int:
        """Start what fits, sample up to `chunk` tokens for every live sample, and return how many
        tokens were sampled.

        RuntimeError if the logits were not finite; ValueError for a chunk below 1.
        """

    def pop_finished(self) -> list[tuple[int, Completion]]:
        """Return (stream, completion) of every sample that ended since the last call, in the order
        in which they were found ended.

        A completion's logprobs are those of the distribution that was sampled from, and each token
        carries the policy version that sampled it.
        """

    def weights_changed(self, version: int, *, recompute_kv: bool = False) -> None:
        """Note that the parameters now hold the weights of `version`.

        Live samples go on: their next tokens are sampled from these weights and carry this version.
        recompute_kv: their cache is computed again by these weights; otherwise it stays.
        """

    def abort(self, ticket: int | None = None, *, stream: int | None = None) -> int:
        """End every unfinished sample of a ticket and a stream (None: of all), with the tokens that
        it has, and return how many those were.

        Each is still handed out, with finish_reason "aborted", so that its group becomes whole.
        """

    def score(
        self,
        prompt_ids: TokenIds,
        token_ids: TokenIds,
        temperature: float = 1.0,
    ) -> Tensor:
        """Return the logprobs, [L] float32 nats, of L given tokens behind a prompt, under the
        weights in force and by the computation that samples. What it samples next is not changed by
        it.
        """

    def offloadable(self) -> list[Tensor]:
        """Return tensors that may leave the device between two steps but must be back before the
        next.
        """

    def close(self) -> None:
        """Release what does not go with the object: processes, files. What runs is lost."""


class ResumableEngine(GenerationEngine, Protocol):
    """An engine whose unfinished samples outlive it, in a checkpoint. With any other they start
    again.
    """

    def export_partials(self) -> list[Partial]:
        """Return every sample that has not ended, as it is between two steps. The engine keeps
        them.
        """

    def submit_partial(self, partial: Partial) -> None:
        """Queue what remains of a sample: under the same weights it goes on token for token.

        ValueError as in `submit`, and if it has ended, or has not a logprob and a version a token.
        """


class StreamingEngine(GenerationEngine, Protocol):
    """An engine that tells what it samples before a completion has ended."""

    def new_tokens(self, stream: int) -> list[NewTokens]:
        """Return what the live samples of a stream have sampled since the last call, in the order
        in which they were sampled; those of a sample that goes on elsewhere from its first token
        on.

        Tokens are told once. Those with which a sample ends are not: its completion has them.
        """


class QuantizedEngine(GenerationEngine, Protocol):
    """An engine that may hold quantised weights: its whole distributions are compared then."""

    def score_all(
        self,
        prompt_ids: TokenIds,
        token_ids: TokenIds,
        temperature: float = 1.0,
    ) -> Tensor:
        """Return logprobs, [L, V] float32 nats: as `score`, of the whole vocabulary at the place of
        each token.
        """


class TalkingEngine(GenerationEngine, Protocol):
    """An engine whose completions are dialogues with environments."""

    def when_answered(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, from any thread, when an environment has answered."""

    @property
    def num_acting(self) -> int:
        """How many environments are at work: their completions go on when they answer."""

    def wait(self, timeout_s: float) -> None:
        """Block until an environment has answered, at most so long."""


def can_talk(engine: GenerationEngine) -> TypeGuard[TalkingEngine]:
    """Returns whether an engine is a TalkingEngine."""
    return _has_calls_of(engine, TalkingEngine)


def can_resume(engine: GenerationEngine) -> TypeGuard[ResumableEngine]:
    """Returns whether an engine is a ResumableEngine."""
    return _has_calls_of(engine, ResumableEngine)


def can_stream(engine: GenerationEngine) -> TypeGuard[StreamingEngine]:
    """Returns whether an engine is a StreamingEngine."""
    return _has_calls_of(engine, StreamingEngine)


def can_hold_quantized(engine: GenerationEngine) -> TypeGuard[QuantizedEngine]:
    """Returns whether an engine is a QuantizedEngine."""
    return _has_calls_of(engine, QuantizedEngine)


def _has_calls_of(engine: GenerationEngine, protocol: type) -> bool:
    # Not by isinstance, because since Python 3.12 it ignores __getattr__, by which an engine may
    # wrap another.
    names = [name for name in vars(protocol) if not name.startswith("_")]
    return all(hasattr(engine, name) for name in names)


# Builds the engine of a rank of the generator, without weights. Collective over the ranks that
# share a copy of the model. Bind must be called once, with the config and the parameters under
# their Hugging Face names, as soon as they exist: new weights will arrive in them, and it may put
# other memory under them.
BuildEngine = Callable[[ExecutorGroup, Bind], GenerationEngine]
