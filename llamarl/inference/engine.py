"""Continuous batching over KV-cache slots.

    submit -> waiting --admit--> prefill, first token -> rows --decode--> ... --retire--> pop_finished

    engine = Engine.from_hf(DIR)
    engine.submit(ticket=7, prompt_ids=[1, 7, 14], params=SamplingParams(max_new_tokens=64, stop_token_ids=(2,), n=8))
    while engine.num_live or engine.num_waiting:
        engine.step(chunk=16)                     # between two steps: new weights, new work, aborts
        finished += engine.pop_finished()

A prompt is prefilled once for all its samples that start together. The same submissions in the same order give the same
bits; the slot, the batch and the chunk size change a sample only through the rounding of its logits.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.allocator import keep_freed_memory
from llamarl.inference.cache import Decode, Prefill, SlotCache
from llamarl.inference.decode import PackedDecode
from llamarl.inference.rows import Request, Rows
from llamarl.inference.sampler import SamplingParams, process
from llamarl.models.build import Decoder, build_decoder, read_config
from llamarl.models.hf import load_weights
from llamarl.types import Completion, FinishReason

_DTYPES = ("float32", "bfloat16", "float16")
_PREFILL_TOKENS = 4096  # of one prefill, padding included
_CHUNK = 32  # of `generate`
_WORTH_MOVING = 16  # rows are made dense again once one in this many has ended


class Engine:
    """Samples completions from a decoder whose parameters others may exchange between steps.

    decoder: on `device` (moved there if it is not), in `dtype` (None: as it is).  max_slots: rows decoded at once.
    max_len: most tokens of prompt and completion together.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_slots: int,
        max_len: int,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ):
        if max_slots < 1 or max_len < 2:
            raise ValueError(f"max_slots={max_slots}, max_len={max_len}: need at least 1 slot and 2 tokens")
        config, self.device = decoder.config, torch.device(device)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.decoder = decoder.to(device=self.device, dtype=dtype)
        self.max_slots, self.max_len = max_slots, max_len
        self.policy_version = 0
        self.dtype = decoder.output_weight.dtype
        self._cache = SlotCache(
            num_layers=config.num_hidden_layers,
            max_slots=max_slots + 1,  # the last is for `score`
            max_len=max_len,
            num_kv_heads=decoder.num_cached_kv_heads,
            head_dim=config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        self._rows = Rows.empty(max_slots, max_len, self.device)
        self._running: list[tuple[Request, int]] = []  # row -> its request and sample index
        self._waiting: deque[Request] = deque()
        self._finished: list[tuple[int, Completion]] = []
        self._retired_tokens = 0
        self._packed = PackedDecode(self.decoder) if PackedDecode.fits(self.decoder, self.device, self.dtype) else None
        # Built here, so that the tables are no inference tensors: a trainer may share the decoder.
        decoder.rotary(torch.zeros(1, dtype=torch.int64, device=self.device), max_len)

    @classmethod
    def from_hf(
        cls,
        path: str | Path,
        *,
        dtype: str | torch.dtype = "bfloat16",
        max_slots: int = 32,
        max_len: int = 1024,
        device: str | torch.device | None = None,
    ) -> "Engine":
        """The engine of a Hugging Face directory. device None: the GPU if there is one. Errors: read_config's, load_weights'."""
        if isinstance(dtype, str) and dtype not in _DTYPES:
            raise ValueError(f"dtype={dtype!r}: need one of {', '.join(_DTYPES)}")
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        decoder = load_weights(build_decoder(read_config(path), dtype=dtype), path, device=device)
        return cls(decoder, max_slots=max_slots, max_len=max_len, device=device)

    @property
    def num_live(self) -> int:
        """Samples that hold a slot."""
        return len(self._running)

    @property
    def free_slots(self) -> int:
        return self.max_slots - len(self._running)

    @property
    def num_waiting(self) -> int:
        """Samples that were submitted and hold no slot yet."""
        return sum(request.num_waiting for request in self._waiting)

    def submit(self, ticket: int, prompt_ids: Tensor | Sequence[int], params: SamplingParams, *, stream: int = 0) -> None:
        """Queue params.n samples of a prompt. stream tells kinds of work (training, evaluation) with equal tickets apart.

        ValueError for an empty prompt, one that does not fit max_len with max_new_tokens, or ids outside the vocabulary.
        """
        self._waiting.append(self._request(stream, ticket, prompt_ids, params))

    @torch.inference_mode()
    def step(self, chunk: int) -> int:
        """Admit what fits, then decode up to `chunk` tokens for every row. Returns the number of tokens sampled.

        RuntimeError if the logits were not finite.
        """
        if chunk < 1:
            raise ValueError(f"chunk={chunk}: need at least 1 token")
        before = self._num_sampled()
        first, jobs = self._admit()
        if not self._running:
            return 0
        demands = self._rows.demands(self.num_live)
        for batch in _prefill_batches(jobs):
            logits_RV = self._prefill(first, batch)
            rows = slice(first, first + logits_RV.shape[0])
            self._rows.append(rows, logits_RV, self.policy_version, demands)
            first = rows.stop
        longest = self._longest()
        for _ in range(chunk):
            # Counting the ended rows waits for the device: between tokens that is free on a CPU alone.
            if self.device.type == "cpu" and self._num_ended() * _WORTH_MOVING >= self.num_live:
                self._retire()
                if not self._running:
                    break
                longest = self._longest()
            rows = slice(0, self.num_live)
            logits_RV = self._decode(0, self._rows.token[rows], self._rows.position[rows], longest)
            self._rows.append(rows, logits_RV, self.policy_version, demands)
            longest = min(longest + 1, self._cache.capacity)
        self._retire()
        return self._num_sampled() - before

    def pop_finished(self) -> list[tuple[int, Completion]]:
        """(stream, completion) of every sample that ended since the last call, in the order in which they were found ended."""
        finished, self._finished = self._finished, []
        return finished

    def weights_changed(self, version: int) -> None:
        """The decoder's parameters are now those of `version`: tokens sampled from here on carry it. Cached K/V stay."""
        self.policy_version = version

    def abort(self, ticket: int | None = None, *, stream: int | None = None) -> int:
        """End every unfinished sample of a ticket and a stream (None: of all), with the tokens it has. Returns how many.

        Each still yields a completion, with finish_reason "aborted", so that its group becomes whole.
        """

        def meant(request: Request) -> bool:
            return ticket in (None, request.ticket) and stream in (None, request.stream)

        rows = [row for row, (request, _) in enumerate(self._running) if meant(request)]
        if rows:
            self._rows.live[torch.tensor(rows, device=self.device)] = False
            self._retire(aborted=True)
        stopped = [request for request in self._waiting if meant(request)]
        self._waiting = deque(request for request in self._waiting if not meant(request))
        nothing = torch.empty(0, dtype=torch.int64)
        for request in stopped:
            for index in range(request.num_started, request.params.n):
                self._finish(request, index, nothing, torch.empty(0), nothing, "aborted")
        return len(rows) + sum(request.num_waiting for request in stopped)

    def generate(self, prompts: Sequence[Tensor | Sequence[int]], params: SamplingParams) -> list[list[Completion]]:
        """params.n completions of each prompt, in order (prompt i is ticket i). RuntimeError if other work is under way."""
        if self._running or self._waiting or self._finished:
            raise RuntimeError("generate needs the engine to itself: finish, pop or abort what was submitted before")
        for ticket, prompt in enumerate(prompts):
            self.submit(ticket, prompt, params)
        while self._running or self._waiting:
            self.step(_CHUNK)
        found = sorted((c for _, c in self.pop_finished()), key=lambda c: (c.ticket, c.sample_index))
        return [found[i : i + params.n] for i in range(0, len(found), params.n)]

    def score(self, prompt_ids: Tensor | Sequence[int], token_ids: Tensor | Sequence[int], temperature: float = 1.0) -> Tensor:
        """[L] float32: logprobs of given tokens by the path that samples them (prefill, then one cached token at a time).

        For parity checks; running samples are not disturbed.
        """
        tokens = torch.as_tensor(token_ids, dtype=torch.int64, device=self.device)
        return self.score_all(prompt_ids, tokens, temperature).gather(1, tokens[:, None]).squeeze(1)

    def cache_tensors(self) -> list[Tensor]:
        """What the cache holds now: may leave the device between steps, and must be back before the next."""
        return [*self._cache.keys, *self._cache.values]

    @torch.inference_mode()
    def score_all(self, prompt_ids: Tensor | Sequence[int], token_ids: Tensor | Sequence[int], temperature: float = 1.0) -> Tensor:
        """[L, V] float32: at the place of each of these tokens, the logprobs of the whole vocabulary."""
        slot = self.num_live
        tokens = torch.as_tensor(token_ids, dtype=torch.int64, device=self.device)
        params = SamplingParams(max_new_tokens=max(1, tokens.numel()), temperature=temperature)
        request = self._request(0, 0, prompt_ids, params)
        self._cache.reserve(request.max_tokens)
        logits = [self._prefill(slot, [(request, 0, 1)])]
        for i in range(tokens.numel() - 1):
            position = request.prompt_ids.numel() + i
            at = torch.tensor([position], device=self.device)
            logits.append(self._decode(slot, tokens[i : i + 1], at, position + 1))
        processed = process(torch.cat(logits), temperature_N=torch.tensor([temperature], device=self.device))
        return processed.log_softmax(1)[: tokens.numel()]

    def _request(self, stream: int, ticket: int, prompt_ids: Tensor | Sequence[int], params: SamplingParams) -> Request:
        prompt = torch.as_tensor(prompt_ids, dtype=torch.int64, device="cpu")
        vocab = self.decoder.config.vocab_size
        if prompt.dim() != 1 or prompt.numel() == 0:
            raise ValueError(f"ticket {ticket}: prompt_ids of shape {list(prompt.shape)}; need [P] with at least one token")
        if prompt.numel() + params.max_new_tokens > self.max_len:
            raise ValueError(
                f"ticket {ticket}: {prompt.numel()} prompt tokens + max_new_tokens={params.max_new_tokens} exceed "
                f"max_len={self.max_len}; give the engine a larger max_len, or shorten either"
            )
        low, high = torch.aminmax(prompt)
        if low < 0 or high >= vocab or any(t >= vocab for t in params.stop_token_ids):
            raise ValueError(
                f"ticket {ticket}: prompt ids {int(low)}..{int(high)} or stop tokens {params.stop_token_ids} lie outside "
                f"the model's vocabulary of {vocab}; is the tokenizer another model's?"
            )
        return Request(stream, ticket, prompt, params)

    def _admit(self) -> tuple[int, list[tuple[Request, int, int]]]:
        """Give free slots to waiting samples. Returns the first new row, and (request, first sample, end) for the new rows."""
        first, jobs = self.num_live, []
        while self._waiting and self.free_slots:
            request = self._waiting[0]
            begin = request.num_started
            end = request.num_started = min(request.params.n, begin + self.free_slots)
            jobs.append((request, begin, end))
            self._running.extend((request, index) for index in range(begin, end))
            if not request.num_waiting:
                self._waiting.popleft()
        if jobs:
            self._rows.start(first, jobs)
            self._cache.reserve(max(request.max_tokens for request, _, _ in jobs))
        return first, jobs

    def _prefill(self, first_slot: int, jobs: list[tuple[Request, int, int]]) -> Tensor:
        """Run each prompt once and keep its K/V in a slot for each sample, from first_slot on. Next logits [rows, V]."""
        lengths_N = torch.tensor([request.prompt_ids.numel() for request, _, _ in jobs])
        copies_N = torch.tensor([end - begin for _, begin, end in jobs])
        ends_N, slots_N = lengths_N.cumsum(0), first_slot + copies_N.cumsum(0) - copies_N
        starts_T, slots_T = torch.stack([ends_N - lengths_N, slots_N]).repeat_interleave(lengths_N, dim=1)
        prompt_R = torch.arange(len(jobs)).repeat_interleave(copies_N)
        tokens_T = torch.cat([request.prompt_ids for request, _, _ in jobs])
        positions_T = torch.arange(tokens_T.numel()) - starts_T
        tokens_T, positions_T, slots_T, ends_N, prompt_R, slots_N = (
            x.to(self.device) for x in (tokens_T, positions_T, slots_T, ends_N, prompt_R, slots_N)
        )
        context = Prefill(self._cache, F.pad(ends_N, (1, 0)), slots_T, positions_T)
        logits_NV = self.decoder(tokens_T, positions_T, context, lambda h_TD, w_VD: F.linear(h_TD[ends_N - 1], w_VD))
        if prompt_R.numel() > len(jobs):
            self._cache.share(slots_N, prompt_R, first_slot, context.longest)
        return logits_NV[prompt_R]

    def _decode(self, first_slot: int, tokens_N: Tensor, positions_N: Tensor, longest: int) -> Tensor:
        """One token a row, in slots first_slot onwards. Logits [N, V] of the next."""
        if self._packed:
            self._packed.refresh()
        return (self._packed or self.decoder)(tokens_N, positions_N, Decode(self._cache, positions_N, longest, first_slot))

    @torch.inference_mode()
    def _retire(self, aborted: bool = False) -> None:
        """Turn ended rows into completions, and move the last rows into the holes, so that rows stay dense."""
        rows, num_rows = self._rows, self.num_live
        live = rows.live[:num_rows].tolist()
        num_live = sum(live)
        if num_live == num_rows:
            return
        self._emit([row for row in range(num_rows) if not live[row]], aborted)
        holes = [row for row in range(num_live) if not live[row]]
        if holes:
            movers = [row for row in range(num_live, num_rows) if live[row]]
            source, target = (torch.tensor(x, device=self.device) for x in (movers, holes))
            self._cache.copy(source, target, self._longest())
            rows.move(source, target)
            for mover, hole in zip(movers, holes):
                self._running[hole] = self._running[mover]
        del self._running[num_live:]

    # Not in inference mode: a completion's tensors take part in training.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _emit(self, ended: list[int], aborted: bool) -> None:
        index = torch.tensor(ended, device=self.device)
        rows = self._rows
        lengths_N = rows.count[index]
        lengths = lengths_N.tolist()
        recorded_NL = torch.arange(max(lengths), device=self.device) < lengths_N[:, None]
        tokens, logprobs, versions = (
            table[index, : max(lengths)][recorded_NL].cpu() for table in (rows.tokens, rows.logprobs, rows.versions)
        )
        if not logprobs.isfinite().all():
            raise RuntimeError(
                f"logits are not finite under policy version {self.policy_version}: "
                f"its weights hold NaN or infinity, or overflow {self.dtype}"
            )
        last = tokens[lengths_N.cpu().cumsum(0) - 1].tolist()
        parts = zip(ended, last, tokens.split(lengths), logprobs.split(lengths), versions.split(lengths))
        for row, last_token, token_ids, generator_logprobs, policy_versions in parts:
            request, sample_index = self._running[row]
            reason = "aborted" if aborted else "stop" if last_token in request.params.stop_token_ids else "length"
            self._finish(request, sample_index, token_ids, generator_logprobs, policy_versions, reason)
        self._retired_tokens += sum(lengths)

    def _finish(
        self,
        request: Request,
        sample_index: int,
        token_ids: Tensor,
        generator_logprobs: Tensor,
        policy_versions: Tensor,
        reason: FinishReason,
    ) -> None:
        completion = Completion(
            request.ticket, sample_index, request.prompt_ids, token_ids, generator_logprobs, policy_versions, reason
        )
        self._finished.append((request.stream, completion))

    def _num_ended(self) -> int:
        return self.num_live - int(self._rows.live[: self.num_live].sum())

    def _longest(self) -> int:
        """Places that the next token of any row attends to."""
        return int(self._rows.position[: self.num_live].max()) + 1

    def _num_sampled(self) -> int:
        """Tokens sampled so far, ever."""
        return self._retired_tokens + int(self._rows.count[: self.num_live].sum())


def _prefill_batches(jobs: list[tuple[Request, int, int]]) -> Iterator[list[tuple[Request, int, int]]]:
    """Consecutive prompts that together, padded to the longest, have at most _PREFILL_TOKENS tokens (or one longer prompt)."""
    batch, longest = [], 0
    for job in jobs:
        longest = max(longest, job[0].prompt_ids.numel())
        if batch and longest * (len(batch) + 1) > _PREFILL_TOKENS:
            yield batch
            batch, longest = [], job[0].prompt_ids.numel()
        batch.append(job)
    if batch:
        yield batch
