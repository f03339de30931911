"""An engine whose completions are dialogues: to the generator it is like any other.

    submit --> Dialogues.begin ... poll: GoOn --> the inner engine samples a turn --> hear ... poll:
    Over --> pop_finished

    submit, of a prompt that is not played --> the inner engine --> pop_finished

A completion that waits for its environment is live and holds no slot: others are sampled meanwhile.
The inner engine keeps its keys and values (llamarl.inference.cache), so that a turn costs what it
adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llamarl.environments.dialogues import Dialogues, GoOn, Over
from llamarl.inference.cache import Key
from llamarl.inference.engine import Engine
from llamarl.inference.requests import NewTokens, Partial, Recorded, Request, TokenIds, on_cpu
from llamarl.inference.sampler import SamplingParams
from llamarl.types import NO_ROUTES, Completion, Prompt


class DialogueEngine:
    """Samples dialogues. It is a GenerationEngine, and a Resumable-, Streaming-, Quantized-
    and TalkingEngine (llamarl.inference.protocol), where the calls are described in full.

    inner: samples turns. make_dialogues: takes the function to call when an environment answers.
    prompt_of: gives the prompt of a stream's ticket. is_played: whether an environment answers a
    prompt's completions; other completions have one turn. reproducible: sample nothing while an
    environment is at work, so that batches do not depend on timing.
    """

    def __init__(
        self,
        inner: Engine,
        make_dialogues: Callable[[Callable[[], None]], Dialogues],
        *,
        prompt_of: Callable[[int, int], Prompt],
        is_played: Callable[[Prompt], bool] = lambda prompt: True,
        reproducible: bool,
    ):
        self.policy_version = inner.policy_version
        self._wake: Callable[[], None] = lambda: None
        self._inner = inner
        self._dialogues = make_dialogues(lambda: self._wake())
        self._prompt_of = prompt_of
        self._is_played = is_played
        self._reproducible = reproducible
        self._params: dict[Key, SamplingParams] = {}  # of dialogues that have not ended
        self._paused: dict[Key, Completion] = {}  # of those that are not in the inner engine
        self._num_plain = 0  # completions of prompts that are not played and have not ended
        self._finished: list[tuple[int, Completion]] = []
        self._dialogues.start()

    def when_answered(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, from a thread of the pool's, when an environment has answered."""
        self._wake = wake

    @property
    def num_live(self) -> int:
        """How many completions hold a slot or wait for one, or for their environment."""
        return len(self._params) + self._num_plain

    @property
    def num_waiting(self) -> int:
        """How many turns wait for a slot."""
        return self._inner.num_waiting

    @property
    def free_slots(self) -> int:
        """How many more dialogues could be sampled: those that are just beginning will be."""
        return max(0, self._inner.free_slots - self._dialogues.num_opening)

    @property
    def num_acting(self) -> int:
        """How many environments are at work."""
        return self._dialogues.num_acting

    def wait(self, timeout_s: float) -> None:
        """Block until an environment has answered, at most so long."""
        self._dialogues.wait(timeout_s)

    def submit(
        self, ticket: int, prompt_ids: TokenIds, params: SamplingParams, *, stream: int = 0
    ) -> None:
        """Begin params.n dialogues of a prompt, or completions if it is not played."""
        self._inner.check(Request(stream, ticket, on_cpu(prompt_ids), params, end=params.n))
        prompt = self._prompt_of(stream, ticket)
        assert prompt.prompt_ids.equal(on_cpu(prompt_ids)), "prompt_of gives another prompt"
        if not self._is_played(prompt):
            self._inner.submit(ticket, prompt_ids, params, stream=stream)
            self._num_plain += params.n
            return
        for index in range(params.n):
            key = (stream, ticket, index)
            assert key not in self._params, f"ticket {ticket} is in work"
            self._params[key] = params
            self._paused[key] = self._dialogues.begin(key, prompt, params)

    def submit_partial(self, partial: Partial) -> None:
        """Go on with a dialogue: its environment is played again, and then it is sampled on. What
        is not played is sampled on at once.
        """
        prompt = self._prompt_of(partial.stream, partial.ticket)
        if not self._is_played(prompt):
            self._inner.submit_partial(partial)
            self._num_plain += 1
            return
        key = (partial.stream, partial.ticket, partial.sample_index)
        completion = Completion(
            ticket=partial.ticket,
            sample_index=partial.sample_index,
            prompt_ids=partial.prompt_ids,
            finish_reason="length",
            **_recorded(partial),
        )
        self._params[key] = partial.params
        self._paused[key] = completion
        self._dialogues.restore(key, prompt, partial.params, completion)

    @torch.inference_mode(False)
    @torch.no_grad()
    def export_partials(self) -> list[Partial]:
        """Return every completion that has not ended, as it is between two steps."""
        partials = []
        for partial in self._inner.export_partials():
            key = (partial.stream, partial.ticket, partial.sample_index)
            # Its limit is of a turn; a dialogue's goes on with it.
            params = self._params.get(key, partial.params)
            partials.append(replace(partial, params=params))
        for key, completion in self._paused.items():
            partials.append(_as_partial(key, completion, self._params[key]))
        return partials

    def step(self, chunk: int) -> int:
        """Take in what environments have said, then sample up to `chunk` tokens a row."""
        if chunk < 1:
            raise ValueError(f"chunk={chunk}: need at least 1 token")
        moves, over = self._dialogues.poll()
        for one in over:
            self._end(one)
        if self._reproducible and self._dialogues.num_acting:
            return 0  # what has come is sampled once all have answered
        for move in moves:
            self._go_on(move)
        if not (self._inner.num_live or self._inner.num_waiting):
            return 0
        sampled = self._inner.step(chunk)
        self._hear()
        return sampled

    def pop_finished(self) -> list[tuple[int, Completion]]:
        """Return (stream, completion) of every completion that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def weights_changed(self, version: int, *, recompute_kv: bool = False) -> None:
        """Note that the parameters now hold the weights of `version`."""
        self.policy_version = version
        self._inner.weights_changed(version, recompute_kv=recompute_kv)

    def abort(self, ticket: int | None = None, *, stream: int | None = None) -> int:
        """End every unfinished completion of a ticket and a stream (None: of any), with the tokens
        that it has, and return how many those were.
        """
        before = self._dialogues.num_open + self._num_plain
        self._inner.abort(ticket, stream=stream)
        self._hear()
        self._dialogues.abort(ticket, stream)
        for one in self._dialogues.pop_over():
            self._end(one)
        return before - self._dialogues.num_open - self._num_plain

    def score(self, prompt_ids: TokenIds, token_ids: TokenIds, temperature: float = 1.0) -> Tensor:
        """Return the logprobs, [L] float32, of given tokens."""
        return self._inner.score(prompt_ids, token_ids, temperature)

    def score_all(
        self, prompt_ids: TokenIds, token_ids: TokenIds, temperature: float = 1.0
    ) -> Tensor:
        """Return logprobs, [L, V] float32, of the whole vocabulary."""
        return self._inner.score_all(prompt_ids, token_ids, temperature)

    def new_tokens(self, stream: int) -> list[NewTokens]:
        """Return what live dialogues of a stream have got since the last call; of one that has just
        gone on, all that it has.
        """
        return self._inner.new_tokens(stream)

    def offloadable(self) -> list[Tensor]:
        """Return tensors that may leave the device between two steps."""
        return self._inner.offloadable()

    def close(self) -> None:
        """End all environments, and the inner engine."""
        self._dialogues.close()
        self._inner.close()

    def _go_on(self, move: GoOn) -> None:
        """Sample the next turn of a dialogue, behind its context."""
        completion = with_context(
            self._paused.pop(move.key),
            move.context,
            self.policy_version,
            is_anew=move.is_anew,
        )
        if move.is_anew:
            self._inner.release(*move.key)  # the keys and values of what is read no more
        params = replace(self._params[move.key], max_new_tokens=move.most_tokens, n=1)
        self._inner.submit_partial(_as_partial(move.key, completion, params))

    def _hear(self) -> None:
        """Tell the dialogues which turns have ended, and hand out what is not played."""
        for stream, completion in self._inner.pop_finished():
            key = (stream, completion.ticket, completion.sample_index)
            if key not in self._params:
                self._inner.release(*key)
                self._num_plain -= 1
                self._finished.append((stream, completion))
                continue
            self._paused[key] = completion
            self._dialogues.hear(key, completion)

    def _end(self, over: Over) -> None:
        """Hand a dialogue out, which is over."""
        stream, ticket, index = over.key
        self._inner.release(stream, ticket, index)
        del self._params[over.key]
        del self._paused[over.key]
        completion = over.completion
        if completion.ending.error and not completion.token_ids.numel():
            # Evaluations know a completion's version by its tokens, so it is not left without any.
            filler = completion.prompt_ids[-1:].tolist()
            completion = with_context(completion, filler, self.policy_version)
        self._finished.append((stream, completion))


def with_context(
    completion: Completion, context: list[int], version: int, *, is_anew: bool = False
) -> Completion:
    """Return a completion with context behind it. version: in force, stamped on it where no token
    comes before it. is_anew: the model reads it in the place of all before it.
    """
    if not context:
        return completion
    versions = completion.policy_versions
    if versions.numel():
        version = int(versions[-1])
    size = len(context)
    restarts = torch.zeros(size, dtype=torch.bool)
    restarts[0] = is_anew
    return replace(
        completion,
        restarts=torch.cat([completion.restarts, restarts]),
        token_ids=torch.cat([completion.token_ids, torch.tensor(context)]),
        generator_logprobs=torch.cat([completion.generator_logprobs, torch.zeros(size)]),
        policy_versions=torch.cat([versions, torch.full((size,), version)]),
        loss_mask=torch.cat([completion.loss_mask, torch.zeros(size, dtype=torch.bool)]),
        routes=NO_ROUTES,  # the engine notes all anew when it goes on
    )


def _as_partial(key: Key, completion: Completion, params: SamplingParams) -> Partial:
    stream, ticket, index = key
    return Partial(
        stream=stream,
        ticket=ticket,
        sample_index=index,
        prompt_ids=completion.prompt_ids,
        params=params,
        **_recorded(completion),
    )


def _recorded(one: Completion | Partial) -> dict[str, Any]:
    """Return what was recorded of each token [L], by field."""
    return {name: getattr(one, name) for name in Recorded._fields}
