"""Shared by engines: slots, samples that wait for one, completions that are fetched."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from torch import Tensor

from llamarl.inference.requests import Recorded, Request, TokenIds, on_cpu
from llamarl.inference.sampler import SamplingParams
from llamarl.inference.stop_strings import Decode, StopStrings
from llamarl.types import NO_ROUTES, Completion, FinishReason


class SlotEngine:
    """The part of a GenerationEngine (llamarl.inference.protocol, where the calls are described in
    full) that does not depend on who computes. A subclass moves samples from `_waiting` to
    `_running`, and hands each to `_finish` when it has ended.
    """

    _running: Collection  # the samples that hold a slot

    def __init__(self, vocab_size: int, max_slots: int, max_len: int, decode: Decode | None = None):
        self.max_slots = max_slots
        self.max_len = max_len
        self.policy_version = 0
        self._vocab_size = vocab_size
        self._decode = decode
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self._waiting: deque[Request] = deque()
        self._finished: list[tuple[int, Completion]] = []

    @property
    def num_live(self) -> int:
        """How many samples hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """How many samples were submitted and hold no slot yet."""
        return sum(request.num_waiting for request in self._waiting)

    @property
    def free_slots(self) -> int:
        """How many more samples could be live."""
        return self.max_slots - self.num_live

    def submit(
        self,
        ticket: int,
        prompt_ids: TokenIds,
        params: SamplingParams,
        *,
        stream: int = 0,
    ) -> None:
        """Queue params.n samples of a prompt. stream tells kinds of work (training, evaluation)
        with equal tickets apart.

        ValueError for an empty prompt, one that does not fit max_len with max_new_tokens, ids
        outside the vocabulary, or stop strings without `decode`.
        """
        self._queue(Request(stream, ticket, on_cpu(prompt_ids), params, end=params.n))

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that `submit` refuses."""
        request.check(self._vocab_size, self.max_len)
        if request.params.stop_strings and self._decode is None:
            raise ValueError(
                f"ticket {request.ticket}: stop_strings={list(request.params.stop_strings)} need "
                "the engine's decode, which gives the text of token ids; or use stop_token_ids"
            )

    def _queue(self, request: Request) -> None:
        self.check(request)
        self._waiting.append(request)

    def _end_of_text(
        self, params: SamplingParams, token_ids: Sequence[int], seen: int
    ) -> int | None:
        """Returns how many of a sample's tokens to keep, if a stop string ends behind the first
        `seen` of them; otherwise None.
        """
        if not params.stop_strings:
            return None
        stops = self._stops.get(params.stop_strings)
        if stops is None:
            assert self._decode is not None, "a request that needs it was refused"
            stops = StopStrings(params.stop_strings, self._decode)
            self._stops[params.stop_strings] = stops
        return stops.end_of(token_ids, seen=seen, least=params.min_new_tokens)

    def pop_finished(self) -> list[tuple[int, Completion]]:
        """Return (stream, completion) of every sample that ended since the last call, in the order
        in which they were found ended.
        """
        finished, self._finished = self._finished, []
        return finished

    def offloadable(self) -> list[Tensor]:
        """Return what may leave the device between two steps, and must be back before the next."""
        return []

    def close(self) -> None:
        """Release what does not go with the engine."""

    def _finish(
        self,
        request: Request,
        index: int,
        recorded: Recorded,
        reason: FinishReason,
        routes: Tensor = NO_ROUTES,
    ) -> None:
        """Sample `index` of a request has ended."""
        completion = Completion(
            ticket=request.ticket,
            sample_index=index,
            prompt_ids=request.prompt_ids,
            finish_reason=reason,
            routes=routes,
            **recorded._asdict(),
        )
        self._finished.append((request.stream, completion))

    def _abort_waiting(self, ticket: int | None, stream: int | None) -> int:
        """Abort samples without a slot."""
        before = self.num_waiting
        for _ in range(len(self._waiting)):
            request = self._waiting.popleft()
            if not request.is_of(ticket, stream):
                self._waiting.append(request)
                continue
            for index in range(request.num_started, request.end):
                self._finish(request, index, request.recorded, "aborted")
        return before - self.num_waiting
