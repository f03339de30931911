"""Continuous batching over KV-cache slots.

    submit -> waiting --schedule--> rows: prefill, decode, ... --retire--> pop_finished

    engine = Engine.from_hf(DIR)
    params = SamplingParams(max_new_tokens=64, stop_token_ids=(2,), n=8)
    engine.submit(ticket=7, prompt_ids=[1, 7, 14], params=params)
    while engine.num_live or engine.num_waiting:
        engine.step(chunk=16)                     # between two steps: new weights, new work, aborts
        finished += engine.pop_finished()

Each step schedules, runs and retires. llamarl.inference.schedule decides which samples run in which
slots, and this file computes them. A prompt is prefilled once for all its samples that start
together, and for neighbouring requests with the same prompt. Equal submissions in the same order
give bit-identical samples. The slot, the batch and the chunk size change a sample only through the
rounding of its logits.

The cache has at most cache_tokens places, and one more row for a long prompt and for `score`. A
sample starts once all running rows fit, each at the longest length that any of them may reach.

LIMITS. K/V are not paged: each row has max_len places on a GPU, and on a CPU as many as the longest
running row. There is no prefix cache: equal prompts that do not start together are computed twice.
One long prompt at a time is prefilled in chunks; a second waits. There is no speculative decoding.
Stop strings are searched on the host between steps; tokens sampled behind one are dropped.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.inference.agreement import check_agreement
from llamarl.inference.cache import KeptRows, SlotCache
from llamarl.inference.requests import (
    NewTokens,
    Partial,
    Recorded,
    Request,
    TokenIds,
    check_vocabulary,
    on_cpu,
    read_by_model,
)
from llamarl.inference.rows import Rows
from llamarl.inference.runner import DecodeGraphs, ModelRunner, batches
from llamarl.inference.sampler import SamplingParams, process
from llamarl.inference.schedule import PrefillChunk, Sample, Scheduler, Start, Turn
from llamarl.inference.slots import SlotEngine
from llamarl.inference.stop_strings import Decode
from llamarl.machine.allocator import keep_freed_memory
from llamarl.machine.device import choose_device
from llamarl.models.build import Decoder
from llamarl.models.peft import load_policy
from llamarl.models.sharding import num_parameters
from llamarl.types import NO_ROUTES, FinishReason

_DTYPES = ("float32", "bfloat16", "float16")


class Engine(SlotEngine):
    """Samples completions from a decoder whose parameters others may exchange between steps.

    decoder: on `device` (moved there if it is not), in `dtype` (None: as it is).
    max_slots: rows decoded at once.
    max_len: most tokens of prompt and completion together.
    cache_tokens: places of the K/V cache (None: max_slots x max_len).
    prefill_chunk: a longer prompt is prefilled in chunks of this many tokens, one per step, so that
    decoding goes on.
    cuda_graphs: on a GPU, replay a token's kernels as one graph.
    reproducible: use the same kernels in every run, instead of the fastest that a trial finds.
    decode: token ids -> their text. Samples with stop strings need it.
    kept_tokens: K/V places kept for samples that stopped by themselves, so that submit_partial can
    continue them behind an environment's answer. 0: their K/V are recomputed.
    notes_routes: completions have the routes of their tokens (llamarl.models.routing): those by
    which the K/V in the cache were computed.

    It is a GenerationEngine, and a Resumable-, Streaming- and QuantizedEngine
    (llamarl.inference.protocol), where the calls that all engines share are described in full.
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
        decode: Decode | None = None,
        kept_tokens: int = 0,
        notes_routes: bool = False,
    ):
        if max_slots < 1 or max_len < 2:
            raise ValueError(
                f"max_slots={max_slots}, max_len={max_len}: need at least 1 slot and 2 tokens"
            )
        places = decoder.config.max_position_embeddings
        if decoder.config.implementation == "transformers" and max_len > places:
            # Positions may be learned, and the modules do not say so.
            raise ValueError(
                f"max_len={max_len}: {decoder.config.architecture} has positions for {places}"
            )
        self.device = torch.device(device)
        self._on_cpu = self.device.type == "cpu"
        if self._on_cpu:
            keep_freed_memory()
        super().__init__(decoder.config.vocab_size, max_slots, max_len, decode)
        self.decoder = decoder.to(device=self.device, dtype=dtype)
        budget = max_slots * max_len if cache_tokens is None else cache_tokens
        if budget < max_len or prefill_chunk < 1:
            raise ValueError(
                f"cache_tokens={cache_tokens}, prefill_chunk={prefill_chunk}: "
                f"need at least max_len={max_len} places and 1 token"
            )
        self._cache = SlotCache(decoder, max_slots, max_len, budget)
        self._kept = KeptRows(self._cache, kept_tokens)
        self._rows = Rows(max_slots, max_len, self.device)
        self._scheduler = Scheduler(
            self._waiting,
            self._cache.room,
            max_slots=max_slots,
            prefill_chunk=prefill_chunk,
            # This is the same on every tensor-parallel rank.
            flops_per_token=2 * num_parameters(decoder.config),
        )
        # Row -> its sample.
        self._running: list[Sample[Request]] = self._scheduler.running
        self._retired_tokens = 0
        self._recompute_due = False
        self._restage_due = False
        self._version = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._runner = ModelRunner(
            self.decoder,
            self._cache,
            rows=max_slots,
            reproducible=reproducible,
            notes_routes=notes_routes,
        )
        self._notes_routes = notes_routes
        # Places that the next token of any row attends to, at most; 0: to be looked up.
        self._reach = 0
        self._graphs = None
        is_recordable = (
            decoder.config.implementation == "native" and decoder.tensor_parallel is None
        )
        if cuda_graphs and self.device.type == "cuda" and is_recordable:
            self._graphs = DecodeGraphs(
                self.device, self._cache.rows - 2, self._cache.capacity, self._decode_rows
            )
        # Built here, so that the tables are no inference tensors: a trainer may share the decoder.
        decoder.rotary(self._version, max_len)

    @classmethod
    def from_hf(
        cls,
        path: str | Path,
        *,
        dtype: str = "bfloat16",
        max_slots: int = 32,
        max_len: int = 1024,
        device: str | torch.device | None = None,
        adapter: str | Path | None = None,
        **options,
    ) -> Engine:
        """Build the engine of a Hugging Face directory. device None: choose_device's;
        adapter: a PEFT directory, whose adapters stay beside the weights; options: the
        constructor's others.

        Errors: load_policy's.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"dtype={dtype!r}: need one of {', '.join(_DTYPES)}")
        if device is None:
            device = choose_device()
        decoder = load_policy(path, adapter, dtype=getattr(torch, dtype), device=device)
        check_agreement(decoder, path, torch.device(device), getattr(torch, dtype))
        return cls(decoder, max_slots=max_slots, max_len=max_len, device=device, **options)

    def submit_partial(self, partial: Partial) -> None:
        """Queue the rest of a sample. Under the same weights its tokens are those of an
        uninterrupted one. Kept K/V are reused.

        ValueError as in submit, and for tokens without a logprob and a version each.
        """
        had = {name: getattr(partial, name) for name in Recorded._fields}
        key = (partial.stream, partial.ticket, partial.sample_index)
        kept = self._kept.of(key)
        read = read_by_model(partial.prompt_ids, partial.token_ids, partial.restarts)
        if read.numel() - kept.places > self._scheduler.prefill_chunk:
            self._kept.forget(key)  # so many are prefilled in chunks, which begin with the first
        request = Request(
            stream=partial.stream,
            ticket=partial.ticket,
            prompt_ids=on_cpu(partial.prompt_ids),
            params=partial.params,
            end=partial.sample_index + 1,
            num_started=partial.sample_index,
            recorded=Recorded(**had),
            kept=kept,
        )
        self._queue(request)

    def release(self, stream: int, ticket: int, sample_index: int) -> None:
        """Let go of the K/V of a sample that stopped and does not go on."""
        self._kept.forget((stream, ticket, sample_index))

    # Not in inference mode: what it hands out takes part in training.
    @torch.inference_mode(False)
    @torch.no_grad()
    def export_partials(self) -> list[Partial]:
        """Return every unfinished sample, as it is between two steps. The engine keeps them until
        abort().
        """
        recorded = self._rows.recorded(range(self.num_live))
        unfinished = list(zip(self._running, recorded))
        for request in self._waiting:
            for index in range(request.num_started, request.end):
                unfinished.append((Sample(request, index), request.recorded))
        return [Partial.of(request, index, had) for (request, index), had in unfinished]

    # Not in inference mode: they are sent to others.
    @torch.inference_mode(False)
    @torch.no_grad()
    def new_tokens(self, stream: int) -> list[NewTokens]:
        """Return what the live samples of a stream have sampled since the last call; none twice."""
        found = []
        for (request, index), (begin, token_ids) in zip(
            self._running, self._rows.news(self.num_live)
        ):
            if request.stream == stream and token_ids.numel():
                found.append(NewTokens(request.ticket, index, begin, token_ids))
        return found

    @torch.inference_mode()
    def step(self, chunk: int) -> int:
        """Admit what fits, and sample up to `chunk` tokens for every row. Return how many were
        sampled.

        RuntimeError if the logits were not finite.
        """
        if chunk < 1:
            raise ValueError(f"chunk={chunk}: need at least 1 token")
        before = self._num_sampled()
        self._take_in_weights()
        if self._running:
            self._look_at_rows()
        self._run(self._scheduler.schedule())
        for _ in range(1, chunk):
            if not self._running:
                break
            if self._is_retiring_worth_it():
                self._retire()
                self._run(self._scheduler.schedule(chunks=False))
            else:
                self._advance(self.num_live)
        self._retire()
        return self._num_sampled() - before

    def weights_changed(self, version: int, *, recompute_kv: bool = False) -> None:
        """Note that the decoder's parameters are now those of `version`. Tokens sampled from here
        on carry it.

        Cached K/V stay, unless recompute_kv: then the next step recomputes them. A prompt that is
        only partly cached has no completion yet, so it starts again under the new weights.
        """
        self.policy_version = version
        self._version.fill_(version)
        self._runner.weights_changed()
        self._recompute_due |= recompute_kv
        self._restage_due = True
        if recompute_kv:
            self._kept.forget_all()

    def abort(self, ticket: int | None = None, *, stream: int | None = None) -> int:
        """End every unfinished sample of a ticket and a stream (None: of all), with the tokens it
        has. Returns how many.

        Each still yields a completion, with finish_reason "aborted", so that its group becomes
        whole.
        """
        self._kept.forget_all(ticket, stream)
        rows = []
        for row, sample in enumerate(self._running):
            if sample.request.is_of(ticket, stream):
                rows.append(row)
        if rows:
            self._rows.live[rows] = False
            self._retire(aborted=True)
        return len(rows) + self._abort_waiting(ticket, stream)

    def score(
        self,
        prompt_ids: TokenIds,
        token_ids: TokenIds,
        temperature: float = 1.0,
    ) -> Tensor:
        """Return the logprobs, [L] float32, of given tokens by the path that samples them (prefill,
        then one cached token at a time).

        For parity checks; running samples are not disturbed.
        """
        tokens = torch.as_tensor(token_ids, dtype=torch.int64, device=self.device)
        logprobs_LV = self.score_all(prompt_ids, tokens, temperature)
        return logprobs_LV.gather(1, tokens[:, None]).squeeze(1)

    def offloadable(self) -> list[Tensor]:
        """Return what may leave the device between two steps, and must be back before the next."""
        if self._on_cpu:
            # The parameters are views of the weights' buffers there, which other threads write.
            return [*self._cache.layers, *self._kept.tensors()]
        return [*self.decoder.parameters(), *self._cache.layers, *self._kept.tensors()]

    @torch.inference_mode()
    def score_all(
        self,
        prompt_ids: TokenIds,
        token_ids: TokenIds,
        temperature: float = 1.0,
    ) -> Tensor:
        """Return the whole vocabulary's logprobs, [L, V] float32, at the place of each of these
        tokens.

        ValueError for what does not fit max_len, or ids outside the vocabulary.
        """
        tokens = torch.as_tensor(token_ids, dtype=torch.int64)
        check_vocabulary("token ids to score", tokens, self._vocab_size)
        tokens = tokens.to(self.device)
        count = tokens.numel()
        params = SamplingParams(max_new_tokens=max(1, count), temperature=temperature)
        request = Request(0, 0, on_cpu(prompt_ids), params, end=1)
        request.check(self._vocab_size, self.max_len)
        self._runner.refresh()
        slot = self._scheduler.lend_slot(request.max_tokens)
        self._cache.fit()
        place = request.prompt_ids.numel()
        logits = [self._runner.prefill(slot, [request.prompt_ids], [1])]
        for i in range(count - 1):
            token = tokens[i : i + 1]
            places = torch.full_like(token, place)
            place += 1
            logits.append(self._runner.decode(slot, token, places, place))
        temperature_N = torch.tensor([temperature], device=self.device)
        processed_LV = process(torch.cat(logits), temperature_N=temperature_N)
        return processed_LV.log_softmax(1)[:count]

    def _take_in_weights(self) -> None:
        """Bring the cache and the passes up to date after weights have changed."""
        self._runner.refresh()
        if self._recompute_due:
            self._recompute()
        if self._restage_due:
            # All chunks of a long prompt are computed at once, so that it is not set back.
            for chunk in self._scheduler.staged_chunks():
                self._extend(chunk)
        self._recompute_due = False
        self._restage_due = False

    def _is_retiring_worth_it(self) -> bool:
        """Return whether ended rows have wasted enough work to take them out now.

        Never on a GPU, where counting the ended rows would wait for the device.
        """
        if not self._on_cpu:
            return False
        is_live = self._rows.live[: self.num_live]
        num_ended = int((~is_live).sum())
        return self._scheduler.waste(num_ended)

    def _run(self, turn: Turn[Request]) -> None:
        """Compute what was planned: chunks of a long prompt, and a token for every row."""
        self._cache.fit()
        self._reach = 0
        for chunk in turn.chunks:
            self._extend(chunk)
        if turn.starts:
            self._start(turn)
        elif self._running:
            self._advance(self.num_live)

    def _extend(self, chunk: PrefillChunk[Request]) -> Tensor:
        """Prefill a chunk of a long prompt. Logits [1, V] of its last token."""
        ids = chunk.request.ids[chunk.begin : chunk.end]
        return self._runner.prefill(chunk.slot, [ids], [1], starts=[chunk.begin])

    def _start(self, turn: Turn[Request]) -> None:
        """Sample a token for every row. Running rows decode, and the new rows behind them are
        prefilled; the native kernel does both in one pass.
        """
        first = turn.num_decoding
        starts = turn.starts
        # Only what starts first can have been prefilled in chunks.
        last_chunk = starts[0].last_chunk
        done = 0  # rows that have their token
        if first and (last_chunk is not None or not self._runner.native):
            self._advance(first)
            done = first
        for start in starts:
            # Tokens that partial completions bring were not sampled here.
            self._retired_tokens -= start.request.recorded.token_ids.numel()
        self._rows.start(first, self._running[first:])
        self._look_at_rows()
        if last_chunk is not None:
            # The prompt's K/V go from the staging slot to the rows of its samples.
            count = len(starts[0].sample_indices)
            logits_1V = self._extend(last_chunk)
            targets = torch.arange(first, first + count, device=self.device)
            source = torch.full_like(targets, last_chunk.slot)
            self._cache.copy(source, targets, last_chunk.end)
            done = self._append(done, logits_1V.expand(count, -1))
            starts = starts[1:]
        if self._runner.native:
            self._prefill(starts, done, first)
        else:
            # The module attends in another way to samples whose K/V are kept.
            for _, alike in itertools.groupby(starts, lambda start: start.request.kept.places > 0):
                done = self._prefill(list(alike), done, first)
        self._reach = 0

    def _prefill(self, starts: list[Start[Request]], done: int, first: int) -> int:
        """Start samples in the rows behind the first `done`, with those rows of the `first` that
        have no token yet. Return the row behind them.

        Neighbours with equal prompts share one pass, as samples of one request do; natively those
        whose K/V are kept go on in the same pass.
        """
        prompts: list[Tensor] = []
        copies: list[int] = []
        places: list[int] = []
        slot = max(done, first)
        for start in starts:
            kept_places, count = start.request.kept.places, len(start.sample_indices)
            ids = self._restored(start, slot)
            slot += count
            is_same = bool(prompts) and not (kept_places or places[-1])
            if is_same and torch.equal(prompts[-1], ids):
                copies[-1] += count
                continue
            prompts.append(ids)
            copies.append(count)
            places.append(kept_places)
        for batch in batches(prompts):
            decoding = slice(done, first)  # none after the first batch
            logits_RV = self._runner.prefill(
                max(done, first),
                prompts[batch],
                copies[batch],
                self._rows.token[decoding].to(self.device),
                self._rows.position[decoding].to(self.device),
                starts=places[batch] if any(places[batch]) else (),
            )
            done = self._append(done, logits_RV)
        return done

    def _restored(self, start: Start[Request], slot: int) -> Tensor:
        """Put the K/V that are kept of a sample into its slot; return the tokens behind them."""
        request = start.request
        places = request.kept.places
        if places:
            self._kept.restore(request.kept, slot)
            self._kept.forget(request.key)
        return request.ids[places:]

    def _recompute(self) -> None:
        """Recompute the cache under the new weights: what the rows have read, and a long prompt's
        chunks from the first on.
        """
        sequences = []  # that the rows have read
        recorded = self._rows.recorded(range(self.num_live))
        for sample, had in zip(self._running, recorded):
            read = read_by_model(sample.request.prompt_ids, had.token_ids, had.restarts)
            sequences.append(read[:-1])
        for batch in batches(sequences):
            prompts = sequences[batch]
            self._runner.prefill(batch.start, prompts, [1] * len(prompts))
        self._scheduler.unstage()

    def _append(self, first: int, logits_RV: Tensor) -> int:
        """Sample a token for each of the rows from `first` on, and return the row behind them."""
        rows = slice(first, first + logits_RV.shape[0])
        self._rows.append(rows, logits_RV, self._version, self._demands)
        return rows.stop

    def _look_at_rows(self) -> None:
        """Look what the rows demand of the sampler, and whether graphs still fit."""
        self._demands = self._rows.demands(self.num_live)
        if self._graphs:
            self._graphs.check(
                [*self.decoder.parameters(), *self._cache.layers, *self._rows.tables()]
            )

    def _advance(self, num_rows: int) -> None:
        """Sample a token for each of the first rows."""
        if self._reach:
            self._reach = min(self._reach + 1, self._cache.capacity)
        else:
            self._reach = self._longest(num_rows)
        if self._graphs:
            self._graphs.run(num_rows, self._reach, self._demands)
        else:
            self._decode_rows(num_rows, self._reach)

    def _decode_rows(self, num_rows: int, longest: int) -> None:
        """`_advance` without a graph: decoded, sampled and recorded in place."""
        tokens = self._rows.token[:num_rows].to(self.device)
        positions = self._rows.position[:num_rows].to(self.device)
        live = self._rows.live[:num_rows].to(self.device)
        logits_NV = self._runner.decode(0, tokens, positions, longest, live)
        self._append(0, logits_NV)

    @torch.inference_mode()
    def _retire(self, aborted: bool = False) -> None:
        """Turn ended rows into completions, and move the last rows into their slots."""
        num_rows = self.num_live
        self._end_at_stop_strings()
        live = self._rows.live[:num_rows].tolist()
        ended = [row for row in range(num_rows) if not live[row]]
        if not ended:
            return
        self._emit(ended, aborted)
        moves = self._scheduler.retire(ended)
        if moves:
            source = torch.tensor([move.source for move in moves], device=self.device)
            target = torch.tensor([move.target for move in moves], device=self.device)
            self._cache.copy(source, target, self._longest(num_rows))
            self._rows.move(source, target)
        self._rows.live[self.num_live :] = False

    def _end_at_stop_strings(self) -> None:
        """End the rows whose text has come to a stop string, and drop what they sampled behind."""
        rows = []
        for row, sample in enumerate(self._running):
            if sample.request.params.stop_strings:
                rows.append(row)
        if not rows:
            return
        for row, (seen, token_ids) in zip(rows, self._rows.unsearched(rows)):
            params = self._running[row].request.params
            end = self._end_of_text(params, token_ids, seen)
            if end is not None:
                self._rows.stop(row, end)

    # Not in inference mode: a completion's tensors take part in training.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _emit(self, ended: list[int], aborted: bool) -> None:
        recorded = self._rows.recorded(ended)
        logprobs = torch.cat([had.generator_logprobs for had in recorded])
        if not logprobs.isfinite().all():
            raise RuntimeError(
                f"logits are not finite under policy version {self.policy_version}: "
                f"its weights hold NaN or infinity, or overflow {self._cache.dtype}"
            )
        is_stopped = self._rows.stopped[ended].tolist()
        for row, had, is_stopped_by_text in zip(ended, recorded, is_stopped):
            sample = self._running[row]
            reason: FinishReason = "length"
            if aborted:
                reason = "aborted"
            elif is_stopped_by_text:
                reason = "stop"
            elif int(had.token_ids[-1]) in sample.request.params.stop_token_ids:
                reason = "stop"
            self._finish(*sample, had, reason, self._routes_of(row, sample.request, had))
            if reason == "stop" and self._kept.keeps_any:
                # The newest token has not been read, and until it is taken out a row that has ended
                # goes on writing to the place before that.
                read = read_by_model(sample.request.prompt_ids, had.token_ids, had.restarts)
                places = read.numel() - 2
                key = (sample.request.stream, sample.request.ticket, sample.sample_index)
                self._kept.keep(key, row, places)
            self._retired_tokens += had.token_ids.numel()

    def _routes_of(self, row: int, request: Request, had: Recorded) -> Tensor:
        """Return the routes [P + L, M, K] of a row's prompt and tokens; none of what was read
        before the newest restart, and of the last token, which is not read.
        """
        if not self._notes_routes:
            return NO_ROUTES
        num_read = read_by_model(request.prompt_ids, had.token_ids, had.restarts).numel() - 1
        routes_nMK = self._cache.routes(row, num_read)
        before = request.prompt_ids.numel() + had.token_ids.numel() - num_read - 1
        return F.pad(routes_nMK, (0, 0, 0, 0, before, 1))

    def _longest(self, num_rows: int) -> int:
        """Return the most places that the next token of any of the first rows attends to."""
        return int(self._rows.position[:num_rows].max()) + 1

    def _num_sampled(self) -> int:
        """Return how many tokens were sampled so far."""
        counts = self._rows.count[: self.num_live]
        return self._retired_tokens + int(counts.sum())
