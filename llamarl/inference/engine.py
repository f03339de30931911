"""Continuous batching over KV-cache slots.

    submit -> waiting --admit--> prefill, first token -> rows --decode--> ... --retire--> pop_finished

    engine = Engine.from_hf(DIR)
    engine.submit(ticket=7, prompt_ids=[1, 7, 14], params=SamplingParams(max_new_tokens=64,
    stop_token_ids=(2,), n=8)) while engine.num_live or engine.num_waiting:
        engine.step(chunk=16)                     # between two steps: new weights, new work, aborts
        finished += engine.pop_finished()

A prompt is prefilled once for all its samples that start together. The same submissions in the same
order give the same bits; the slot, the batch and the chunk size change a sample only through the
rounding of its logits.

The cache holds at most cache_tokens places (and one row more for a long prompt and for `score`): a
sample starts when as many rows as then run, each as long as the longest may become, fit. Until then
it waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from llamarl.inference.cache import SlotCache
from llamarl.inference.graph import DecodeGraphs
from llamarl.inference.rows import Partial, Request, Rows, check_vocabulary
from llamarl.inference.runner import Job, ModelRunner, batches
from llamarl.inference.sampler import SamplingParams, process
from llamarl.models.build import Decoder, build_decoder, read_config
from llamarl.models.hf import load_weights
from llamarl.native.allocator import keep_freed_memory
from llamarl.types import Completion, FinishReason

_DTYPES = ("float32", "bfloat16", "float16")
_CHUNK = 32  # of `generate`
# Ended rows are taken out, and new ones admitted, once about as many operations were done for them
# in vain as that is worth.
_WASTE = 2e8


class Engine:
    """Samples completions from a decoder whose parameters others may exchange between steps.

    decoder: on `device` (moved there if it is not), in `dtype` (None: as it is).  max_slots: rows decoded at once.
    max_len: most tokens of prompt and completion together.  cache_tokens: places of the K/V cache (None: max_slots x max_len).
    prefill_chunk: a longer prompt is prefilled in pieces of so many tokens, one a step, so that
    decoding goes on. cuda_graphs: on a GPU, replay a token's kernels as one graph. reproducible:
    take the same kernels in every run; else those that this machine's clock shows to be clearly
    faster.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_slots: int,
        max_len: int,
        cache_tokens: int | None = None,
        prefill_chunk: int = 512,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        cuda_graphs: bool = True,
        reproducible: bool = True,
    ):
        if max_slots < 1 or max_len < 2:
            raise ValueError(
                f"max_slots={max_slots}, max_len={max_len}: need at least 1 slot and 2 tokens"
            )
        self.device = torch.device(device)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.decoder = decoder.to(device=self.device, dtype=dtype)
        self.max_slots, self.max_len = max_slots, max_len
        self.policy_version = 0
        self.dtype = decoder.tok_embeddings.weight.dtype
        budget = max_slots * max_len if cache_tokens is None else cache_tokens
        if budget < max_len or prefill_chunk < 1:
            raise ValueError(
                f"cache_tokens={cache_tokens}, prefill_chunk={prefill_chunk}: need at least max_len={max_len} places and 1 token"
            )
        self._cache = SlotCache(decoder, max_slots, max_len, budget)
        self._prefill_chunk = prefill_chunk
        self._rows = Rows.empty(max_slots, max_len, self.device)
        self._running: list[tuple[Request, int]] = []  # row -> its request and sample index
        self._waiting: deque[Request] = deque()
        self._finished: list[tuple[int, Completion]] = []
        self._retired_tokens = 0
        self._staging: int | None = None  # the slot of the prompt that is prefilled in pieces
        self._recompute_due = self._restage_due = False
        self._version = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._runner = ModelRunner(
            self.decoder, self._cache, rows=max_slots, reproducible=reproducible
        )
        self._flops = (
            2 * decoder.config.num_parameters
        )  # of a row's token; the same on every tensor-parallel rank
        self._graphs = None
        if cuda_graphs and self.device.type == "cuda" and decoder.tensor_parallel is None:
            self._graphs = DecodeGraphs(
                self.device, self._cache.rows - 2, self._cache.capacity, self._decode_rows
            )
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
        **options,
    ) -> Engine:
        """The engine of a Hugging Face directory. device None: the GPU if there is one; options:
        the constructor's others.

        Errors: read_config's, load_weights'.
        """
        if isinstance(dtype, str) and dtype not in _DTYPES:
            raise ValueError(f"dtype={dtype!r}: need one of {', '.join(_DTYPES)}")
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        decoder = load_weights(build_decoder(read_config(path), dtype=dtype), path, device=device)
        return cls(decoder, max_slots=max_slots, max_len=max_len, device=device, **options)

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

    def submit(
        self,
        ticket: int,
        prompt_ids: Tensor | Sequence[int],
        params: SamplingParams,
        *,
        stream: int = 0,
    ) -> None:
        """Queue params.n samples of a prompt. stream tells kinds of work (training, evaluation)
        with equal tickets apart.

        ValueError for an empty prompt, one that does not fit max_len with max_new_tokens, or ids
        outside the vocabulary.
        """
        self._waiting.append(self._request(stream, ticket, prompt_ids, params))

    def submit_partial(self, partial: Partial) -> None:
        """Queue what remains of a sample: under the same weights it goes on token for token.

        ValueError as in submit, and for tokens without a logprob and a version each.
        """
        prompt = partial.prompt_ids.cpu()
        index = partial.sample_index
        request = Request(
            partial.stream, partial.ticket, prompt, partial.params, index + 1, index, partial
        )
        request.check(self.decoder.config.vocab_size, self.max_len)
        self._waiting.append(request)

    # Not in inference mode: what it hands out takes part in training.
    @torch.inference_mode(False)
    @torch.no_grad()
    def export_partials(self) -> list[Partial]:
        """Every sample that has not ended, as it is between two steps. The engine keeps them:
        abort() lets go.
        """
        recorded = self._rows.recorded(list(range(self.num_live))) if self._running else []
        samples = [(request, index, had) for (request, index), had in zip(self._running, recorded)]
        samples += [(r, i, r.recorded) for r in self._waiting for i in range(r.num_started, r.end)]
        return [
            Partial(r.stream, r.ticket, i, r.prompt_ids, *had, r.params) for r, i, had in samples
        ]

    @torch.inference_mode()
    def step(self, chunk: int) -> int:
        """Admit what fits, and sample up to `chunk` tokens for every row. Returns how many were
        sampled.

        RuntimeError if the logits were not finite.
        """
        if chunk < 1:
            raise ValueError(f"chunk={chunk}: need at least 1 token")
        before = self._num_sampled()
        self._runner.refresh()
        if self._recompute_due:
            self._recompute()
        if self._restage_due:
            self._restage()
        first, jobs = self._admit()
        if first:
            self._demands = self._rows.demands(first)
        self._check_graphs()
        waste, longest = 0.0, 0  # longest 0: to be looked up
        for turn in range(chunk if self._running else 0):
            # Counting the ended rows waits for the device: between tokens that is free on a CPU
            # alone.
            between = turn and self.device.type == "cpu"
            ended = self.num_live - int(self._rows.live[: self.num_live].sum()) if between else 0
            waste += ended * self._flops
            if waste >= _WASTE or ended == self.num_live:
                self._retire()
                first, jobs = self._admit(pieces=False)
                waste, longest = 0.0, 0
                if not self._running:
                    break
            if jobs:
                self._start(first, jobs)
                jobs, longest = [], 0
            else:
                longest = (
                    min(longest + 1, self._cache.capacity)
                    if longest
                    else self._longest(self.num_live)
                )
                self._advance(self.num_live, longest)
        self._retire()
        return self._num_sampled() - before

    def pop_finished(self) -> list[tuple[int, Completion]]:
        """(stream, completion) of every sample that ended since the last call, in the order in
        which they were found ended.
        """
        finished, self._finished = self._finished, []
        return finished

    def weights_changed(self, version: int, *, recompute_kv: bool = False) -> None:
        """The decoder's parameters are now those of `version`: tokens sampled from here on carry
        it.

        Cached K/V stay those of the weights that computed them, unless recompute_kv: then the next
        step computes them anew. A prompt that is cached in part has no completion yet: it goes on
        as one of the new weights alone.
        """
        self.policy_version = version
        self._version.fill_(version)
        self._runner.weights_changed()
        self._recompute_due |= recompute_kv
        self._restage_due = self._staging is not None

    def load_weights(
        self, source: str | Path | Mapping[str, Tensor], version: int, *, recompute_kv: bool = False
    ) -> None:
        """Take a directory's weights, or whole tensors by their Hugging Face names (all of them),
        as those of `version`.

        ValueError naming what is absent, unknown or of another shape; nothing is loaded by halves
        then.
        """
        load_weights(self.decoder, source)
        self.weights_changed(version, recompute_kv=recompute_kv)

    def abort(self, ticket: int | None = None, *, stream: int | None = None) -> int:
        """End every unfinished sample of a ticket and a stream (None: of all), with the tokens it
        has. Returns how many.

        Each still yields a completion, with finish_reason "aborted", so that its group becomes
        whole.
        """

        def meant(request: Request) -> bool:
            return ticket in (None, request.ticket) and stream in (None, request.stream)

        rows = [row for row, (request, _) in enumerate(self._running) if meant(request)]
        if rows:
            self._rows.live[torch.tensor(rows, device=self.device)] = False
            self._retire(aborted=True)
        stopped = [request for request in self._waiting if meant(request)]
        if any(request.num_cached for request in stopped):
            self._staging = None
        self._waiting = deque(request for request in self._waiting if not meant(request))
        for request in stopped:
            for index in range(request.num_started, request.end):
                self._finish(request, index, *request.recorded, "aborted")
        return len(rows) + sum(request.num_waiting for request in stopped)

    def generate(
        self, prompts: Sequence[Tensor | Sequence[int]], params: SamplingParams
    ) -> list[list[Completion]]:
        """params.n completions of each prompt, in order (prompt i is ticket i). RuntimeError if
        other work is under way.
        """
        if self._running or self._waiting or self._finished:
            raise RuntimeError(
                "generate needs the engine to itself: finish, pop or abort what was submitted before"
            )
        for ticket, prompt in enumerate(prompts):
            self.submit(ticket, prompt, params)
        while self._running or self._waiting:
            self.step(_CHUNK)
        found = sorted(
            (c for _, c in self.pop_finished()), key=lambda c: (c.ticket, c.sample_index)
        )
        return [found[i : i + params.n] for i in range(0, len(found), params.n)]

    def score(
        self,
        prompt_ids: Tensor | Sequence[int],
        token_ids: Tensor | Sequence[int],
        temperature: float = 1.0,
    ) -> Tensor:
        """[L] float32: logprobs of given tokens by the path that samples them (prefill, then one
        cached token at a time).

        For parity checks; running samples are not disturbed.
        """
        tokens = torch.as_tensor(token_ids, dtype=torch.int64, device=self.device)
        return self.score_all(prompt_ids, tokens, temperature).gather(1, tokens[:, None]).squeeze(1)

    def cache_tensors(self) -> list[Tensor]:
        """What the cache holds now: may leave the device between steps, and must be back before the
        next.
        """
        return [*self._cache.keys, *self._cache.values]

    @torch.inference_mode()
    def score_all(
        self,
        prompt_ids: Tensor | Sequence[int],
        token_ids: Tensor | Sequence[int],
        temperature: float = 1.0,
    ) -> Tensor:
        """[L, V] float32: the whole vocabulary's logprobs at the place of each of these tokens.

        ValueError for what does not fit max_len, or ids outside the vocabulary.
        """
        tokens = torch.as_tensor(token_ids, dtype=torch.int64)
        check_vocabulary("token ids to score", tokens, self.decoder.config.vocab_size)
        tokens = tokens.to(self.device)
        params = SamplingParams(max_new_tokens=max(1, tokens.numel()), temperature=temperature)
        request = self._request(0, 0, prompt_ids, params)
        self._runner.refresh()
        slot = max(self.num_live, -1 if self._staging is None else self._staging) + (
            self._staging is not None
        )
        slot = slot if self.device.type == "cpu" else self._cache.rows - 2
        self._reserve(slot + 1, request.max_tokens)
        logits = [self._runner.prefill(slot, [(request, 0, 1)])]
        for i in range(tokens.numel() - 1):
            position = request.prompt_ids.numel() + i
            at = torch.tensor([position], device=self.device)
            logits.append(self._runner.decode(slot, tokens[i : i + 1], at, position + 1))
        processed = process(
            torch.cat(logits), temperature_N=torch.tensor([temperature], device=self.device)
        )
        return processed.log_softmax(1)[: tokens.numel()]

    def _request(
        self, stream: int, ticket: int, prompt_ids: Tensor | Sequence[int], params: SamplingParams
    ) -> Request:
        request = Request(
            stream,
            ticket,
            torch.as_tensor(prompt_ids, dtype=torch.int64, device="cpu"),
            params,
            params.n,
        )
        request.check(self.decoder.config.vocab_size, self.max_len)
        return request

    def _admit(self, *, pieces: bool = True) -> tuple[int, list[Job]]:
        """Give free slots to waiting samples, in order. Returns the first new row, and the jobs of
        the new rows.

        pieces: also go on with a prompt that is prefilled in pieces.
        """
        first, jobs = self.num_live, []
        longest = (
            max((request.max_tokens for request, _ in self._running), default=0)
            if self._waiting
            else 0
        )
        while self._waiting:
            request = self._waiting[0]
            longest = max(longest, request.max_tokens)
            room = min(self.max_slots, self._cache.rows_of(longest)) - self.num_live
            if room < 1 or not self._one_piece_left(request, pieces):
                break
            begin = request.num_started
            end = request.num_started = min(request.end, begin + room)
            jobs.append((request, begin, end))
            self._running.extend((request, index) for index in range(begin, end))
            if not request.num_waiting:
                self._waiting.popleft()
        if jobs:
            self._retired_tokens -= sum(
                r.partial.token_ids.numel() for r, _, _ in jobs if r.partial
            )
            self._reserve(self.num_live, 0)
        return first, jobs

    def _one_piece_left(self, request: Request, pieces: bool) -> bool:
        """Whether a prompt's turn for its last (or only) piece has come; if not, prefill a piece,
        or all but it if nothing decodes.
        """
        while (ids := request.ids).numel() - request.num_cached > self._prefill_chunk:
            if not pieces or (
                self._staging is not None and not request.num_cached
            ):  # one prompt at a time
                return False
            if self._staging is None:
                self._staging = self.num_live if self.device.type == "cpu" else self._cache.rows - 1
            self._reserve(self._staging + 1, request.max_tokens)
            end = request.num_cached + self._prefill_chunk
            self._runner.extend(self._staging, request.num_cached, ids[request.num_cached : end])
            request.num_cached = end
            if self._running:
                return False
        return pieces or not request.num_cached

    def _prefill_last(self, first: int, job: Job) -> Tensor:
        """The last piece of a long prompt, whose K/V go from the staging slot to rows first.. of
        its samples. Logits [R, V].
        """
        (request, begin, end), slot = job, self._staging
        logits_1V = self._runner.extend(slot, request.num_cached, request.ids[request.num_cached :])
        targets = torch.arange(first, first + end - begin, device=self.device)
        self._cache.copy(torch.full_like(targets, slot), targets, request.ids.numel())
        request.num_cached, self._staging = 0, None
        return logits_1V.expand(end - begin, -1)

    def _reserve(self, rows: int, length: int) -> None:
        """Room in the cache for as many rows, none of which loses anything."""
        staged = (r for r in self._waiting if r.num_cached)
        longest = max(
            [length, *(r.max_tokens for r, _ in self._running), *(r.max_tokens for r in staged)]
        )
        self._cache.reserve(
            max(rows, self.num_live, 0 if self._staging is None else self._staging + 1), longest
        )

    def _recompute(self) -> None:
        """The cache under the new weights: what the rows have read, and a long prompt's pieces from
        the first on.
        """
        tokens, counts = self._rows.tokens.cpu(), self._rows.count[: self.num_live].tolist()
        read = [
            torch.cat([r.prompt_ids, tokens[i, : counts[i] - 1]])
            for i, (r, _) in enumerate(self._running)
        ]
        self._runner.recompute(read)
        for request in self._waiting:
            request.num_cached = 0
        self._staging = None
        self._recompute_due = self._restage_due = False

    def _restage(self) -> None:
        """The cached pieces of a long prompt under the new weights, at once: it is not set back."""
        for request in self._waiting:
            for begin in range(0, request.num_cached, self._prefill_chunk):
                end = min(begin + self._prefill_chunk, request.num_cached)
                self._runner.extend(self._staging, begin, request.ids[begin:end])
        self._restage_due = False

    def _start(self, first: int, jobs: list[Job]) -> None:
        """A token for every row: those before `first` decode, the new ones are prefilled; natively
        both in one pass.
        """
        done = 0  # rows that have their token
        if first and (not self._runner.native or jobs[0][0].num_cached):
            self._advance(first, self._longest(first))
            done = first
        self._rows.start(first, jobs)
        self._demands = self._rows.demands(self.num_live)
        self._check_graphs()
        while jobs:
            size = (
                1
                if jobs[0][0].num_cached
                else next(batches([request.ids.numel() for request, _, _ in jobs]))
            )
            batch, jobs = jobs[:size], jobs[size:]
            if batch[0][0].num_cached:
                logits_RV = self._prefill_last(first, batch[0])
            else:
                along = (
                    (self._rows.token[:first], self._rows.position[:first]) if done < first else ()
                )
                logits_RV = self._runner.prefill(first, batch, *along)
            rows = slice(done, done + logits_RV.shape[0])
            self._rows.append(rows, logits_RV, self._version, self._demands)
            first = done = rows.stop

    def _check_graphs(self) -> None:
        if self._graphs:
            self._graphs.check(
                [*self.decoder.parameters(), *self.cache_tensors(), *self._rows.tables()]
            )

    def _advance(self, num_rows: int, longest: int) -> None:
        """A token for each of the first rows."""
        if self._graphs:
            self._graphs.run(num_rows, longest, self._demands)
        else:
            self._decode_rows(num_rows, longest)

    def _decode_rows(self, num_rows: int, longest: int) -> None:
        """`_advance` without a graph: decoded, sampled and recorded in place."""
        rows = slice(0, num_rows)
        logits_RV = self._runner.decode(
            0, self._rows.token[rows], self._rows.position[rows], longest
        )
        self._rows.append(rows, logits_RV, self._version, self._demands)

    @torch.inference_mode()
    def _retire(self, aborted: bool = False) -> None:
        """Turn ended rows into completions, and move the last rows into the holes, so that rows
        stay dense.
        """
        rows, num_rows = self._rows, self.num_live
        live = rows.live[:num_rows].tolist()
        num_live = sum(live)
        if num_live == num_rows:
            return
        self._emit([row for row in range(num_rows) if not live[row]], aborted)
        if holes := [row for row in range(num_live) if not live[row]]:
            movers = [row for row in range(num_live, num_rows) if live[row]]
            source, target = (torch.tensor(x, device=self.device) for x in (movers, holes))
            self._cache.copy(source, target, self._longest(num_rows))
            rows.move(source, target)
            for mover, hole in zip(movers, holes):
                self._running[hole] = self._running[mover]
        del self._running[num_live:]
        rows.live[num_live:] = False

    # Not in inference mode: a completion's tensors take part in training.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _emit(self, ended: list[int], aborted: bool) -> None:
        recorded = self._rows.recorded(ended)
        if not torch.cat([logprobs for _, logprobs, _ in recorded]).isfinite().all():
            raise RuntimeError(
                f"logits are not finite under policy version {self.policy_version}: "
                f"its weights hold NaN or infinity, or overflow {self.dtype}"
            )
        for row, (token_ids, logprobs, versions) in zip(ended, recorded):
            request, sample_index = self._running[row]
            stopped = int(token_ids[-1]) in request.params.stop_token_ids
            reason = "aborted" if aborted else "stop" if stopped else "length"
            self._finish(request, sample_index, token_ids, logprobs, versions, reason)
            self._retired_tokens += token_ids.numel()

    def _finish(
        self,
        request: Request,
        index: int,
        tokens: Tensor,
        logprobs: Tensor,
        versions: Tensor,
        reason: FinishReason,
    ):
        completion = Completion(
            request.ticket, index, request.prompt_ids, tokens, logprobs, versions, reason
        )
        self._finished.append((request.stream, completion))

    def _longest(self, num_rows: int) -> int:
        """Places that the next token of any of the first rows attends to."""
        return int(self._rows.position[:num_rows].max()) + 1 if num_rows else 0

    def _num_sampled(self) -> int:
        """Tokens sampled so far, ever."""
        return self._retired_tokens + int(self._rows.count[: self.num_live].sum())
