"""Continuous batching over KV-cache slots.

    submit -> waiting --schedule--> rows: prefill, decode, ... --retire--> pop_finished

    engine = Engine.from_hf(DIR)
    params = SamplingParams(max_new_tokens=64, stop_token_ids=(2,), n=8)
    engine.submit(ticket=7, prompt_ids=[1, 7, 14], params=params)
    while engine.num_live or engine.num_waiting:
        engine.step(chunk=16)                     # between two steps: new weights, new work, aborts
        finished += engine.pop_finished()

A prompt is prefilled once for all its samples that start together. The same submissions in the same
order give the same bits; the slot, the batch and the chunk size change a sample only through the
rounding of its logits.

The cache holds at most cache_tokens places (and one row more for a long prompt and for `score`): a
sample starts when as many rows as then run, each as long as the longest may become, fit. Until then
it waits.

LIMITS. K/V are not paged: each row has max_len places on a GPU, and on a CPU as many as the longest
row that runs. Nothing of a prompt is kept once its samples have started: there is no prefix cache,
and equal prompts of two tickets are computed twice. One long prompt at a time is prefilled in
pieces; a second waits for it. There is no speculative decoding. Stop strings are looked for between
steps, on the host: what a row sampled behind one is dropped.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from llamarl.inference.cache import SlotCache
from llamarl.inference.graph import DecodeGraphs
from llamarl.inference.requests import (
    NewTokens,
    Partial,
    Recorded,
    Request,
    Sample,
    TokenIds,
    check_vocabulary,
    on_cpu,
)
from llamarl.inference.rows import Rows
from llamarl.inference.runner import ModelRunner, batches
from llamarl.inference.sampler import SamplingParams, process
from llamarl.inference.slots import SlotEngine
from llamarl.inference.stop_strings import Decode
from llamarl.models.build import Decoder, build_decoder, read_config
from llamarl.models.hf import load_weights
from llamarl.models.sharding import num_parameters
from llamarl.native.allocator import keep_freed_memory
from llamarl.types import FinishReason

_DTYPES = ("float32", "bfloat16", "float16")
# On a CPU ended rows are taken out, and new ones admitted, in the middle of a step once so many
# operations were done for them in vain: about what that costs.
_WORTH_FLOPS = 2e8


class Engine(SlotEngine):
    """Samples completions from a decoder whose parameters others may exchange between steps.

    decoder: on `device` (moved there if it is not), in `dtype` (None: as it is).
    max_slots: rows decoded at once.
    max_len: most tokens of prompt and completion together.
    cache_tokens: places of the K/V cache (None: max_slots x max_len).
    prefill_chunk: a longer prompt is prefilled in pieces of so many tokens, one a step, so that
    decoding goes on.
    cuda_graphs: on a GPU, replay a token's kernels as one graph.
    reproducible: take the same kernels in every run; else those that this machine's clock shows to
    be clearly faster.
    decode: token ids -> their text. Samples with stop strings need it.

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
    ):
        if max_slots < 1 or max_len < 2:
            raise ValueError(
                f"max_slots={max_slots}, max_len={max_len}: need at least 1 slot and 2 tokens"
            )
        places = decoder.config.max_position_embeddings
        if decoder.config.traits.learned_positions and max_len > places:
            raise ValueError(
                f"max_len={max_len}: {decoder.config.architecture} has learned positions for "
                f"{places}"
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
        self._prefill_chunk = prefill_chunk
        self._rows = Rows(max_slots, max_len, self.device)
        self._running: list[Sample] = []  # row -> its sample
        self._retired_tokens = 0
        self._staging: int | None = None  # the slot of the prompt that is prefilled in pieces
        self._recompute_due = False
        self._restage_due = False
        self._version = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._runner = ModelRunner(
            self.decoder, self._cache, rows=max_slots, reproducible=reproducible
        )
        # Of a row's token; the same on every tensor-parallel rank.
        self._flops_per_token = 2 * num_parameters(decoder.config)
        self._wasted_flops = 0.0  # since ended rows were last taken out
        # Places that the next token of any row attends to, at most; 0: to be looked up.
        self._reach = 0
        self._graphs = None
        if cuda_graphs and not self._on_cpu and decoder.tensor_parallel is None:
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
        **options,
    ) -> Engine:
        """The engine of a Hugging Face directory. device None: the GPU if there is one; options:
        the constructor's others.

        Errors: read_config's, load_weights'.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"dtype={dtype!r}: need one of {', '.join(_DTYPES)}")
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        decoder = build_decoder(read_config(path), dtype=getattr(torch, dtype))
        load_weights(decoder, path, device=device)
        return cls(decoder, max_slots=max_slots, max_len=max_len, device=device, **options)

    def submit_partial(self, partial: Partial) -> None:
        """Queue what remains of a sample: under the same weights it goes on token for token.

        ValueError as in submit, and for tokens without a logprob and a version each.
        """
        had = {name: getattr(partial, name) for name in Recorded._fields}
        request = Request(
            stream=partial.stream,
            ticket=partial.ticket,
            prompt_ids=on_cpu(partial.prompt_ids),
            params=partial.params,
            end=partial.sample_index + 1,
            num_started=partial.sample_index,
            recorded=Recorded(**had),
        )
        self._queue(request)

    # Not in inference mode: what it hands out takes part in training.
    @torch.inference_mode(False)
    @torch.no_grad()
    def export_partials(self) -> list[Partial]:
        """Every sample that has not ended, as it is between two steps. The engine keeps them:
        abort() lets go.
        """
        recorded = self._rows.recorded(range(self.num_live))
        unfinished = list(zip(self._running, recorded))
        for request in self._waiting:
            for index in range(request.num_started, request.end):
                unfinished.append((Sample(request, index), request.recorded))
        partials = []
        for (request, index), had in unfinished:
            partial = Partial(
                stream=request.stream,
                ticket=request.ticket,
                sample_index=index,
                prompt_ids=request.prompt_ids,
                params=request.params,
                **had._asdict(),
            )
            partials.append(partial)
        return partials

    # Not in inference mode: they are sent to others.
    @torch.inference_mode(False)
    @torch.no_grad()
    def new_tokens(self, stream: int) -> list[NewTokens]:
        """What the live samples of a stream have sampled since the last call; none twice."""
        found = []
        for (request, index), (begin, token_ids) in zip(
            self._running, self._rows.news(self.num_live)
        ):
            if request.stream == stream and token_ids.numel():
                found.append(NewTokens(request.ticket, index, begin, token_ids))
        return found

    @torch.inference_mode()
    def step(self, chunk: int) -> int:
        """Admit what fits, and sample up to `chunk` tokens for every row. Returns how many were
        sampled.

        RuntimeError if the logits were not finite.
        """
        if chunk < 1:
            raise ValueError(f"chunk={chunk}: need at least 1 token")
        before = self._num_sampled()
        self._take_in_weights()
        if self._running:
            self._look_at_rows()
        admitted = self._schedule()
        for turn in range(chunk):
            if turn and self._is_retiring_worth_it():
                self._retire()
                admitted = self._schedule(pieces=False)
            if not self._running:
                break
            if admitted:
                self._start(admitted)
                admitted = []
            else:
                self._advance(self.num_live)
        self._retire()
        return self._num_sampled() - before

    def weights_changed(self, version: int, *, recompute_kv: bool = False) -> None:
        """Take it that the decoder's parameters are now those of `version`: tokens sampled from
        here on carry it.

        Cached K/V stay those of the weights that computed them, unless recompute_kv: then the next
        step computes them anew. A prompt that is cached in part has no completion yet: it goes on
        as one of the new weights alone.
        """
        self.policy_version = version
        self._version.fill_(version)
        self._runner.weights_changed()
        self._recompute_due |= recompute_kv
        self._restage_due = True

    def abort(self, ticket: int | None = None, *, stream: int | None = None) -> int:
        """End every unfinished sample of a ticket and a stream (None: of all), with the tokens it
        has. Returns how many.

        Each still yields a completion, with finish_reason "aborted", so that its group becomes
        whole.
        """
        rows = []
        for row, sample in enumerate(self._running):
            if sample.request.is_of(ticket, stream):
                rows.append(row)
        if rows:
            self._rows.live[rows] = False
            self._retire(aborted=True)
        num_ended = len(rows) + self._abort_waiting(ticket, stream)
        if not any(request.num_cached for request in self._waiting):
            self._staging = None
        return num_ended

    def score(
        self,
        prompt_ids: TokenIds,
        token_ids: TokenIds,
        temperature: float = 1.0,
    ) -> Tensor:
        """[L] float32: logprobs of given tokens by the path that samples them (prefill, then one
        cached token at a time).

        For parity checks; running samples are not disturbed.
        """
        tokens = torch.as_tensor(token_ids, dtype=torch.int64, device=self.device)
        logprobs_LV = self.score_all(prompt_ids, tokens, temperature)
        return logprobs_LV.gather(1, tokens[:, None]).squeeze(1)

    def offloadable(self) -> list[Tensor]:
        """What may leave the device between two steps, and must be back before the next."""
        if self._on_cpu:
            # The parameters are views of the weights' buffers there, which other threads write.
            return self._cache.layers
        return [*self.decoder.parameters(), *self._cache.layers]

    @torch.inference_mode()
    def score_all(
        self,
        prompt_ids: TokenIds,
        token_ids: TokenIds,
        temperature: float = 1.0,
    ) -> Tensor:
        """[L, V] float32: the whole vocabulary's logprobs at the place of each of these tokens.

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
        slot = self._num_held if self._on_cpu else self._cache.rows - 2
        self._reserve(slot + 1, request.max_tokens)
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

    @property
    def _num_held(self) -> int:
        """Slots, from the first on, that rows and the prompt in pieces have."""
        staged = 0 if self._staging is None else self._staging + 1
        return max(self.num_live, staged)

    def _take_in_weights(self) -> None:
        """What the cache holds and how the passes compute follow weights that have changed."""
        self._runner.refresh()
        if self._recompute_due:
            self._recompute()
        if self._restage_due:
            # The pieces of a long prompt all at once: it is not set back.
            for request in self._waiting:
                for begin in range(0, request.num_cached, self._prefill_chunk):
                    self._extend(request, begin)
        self._recompute_due = False
        self._restage_due = False

    def _is_retiring_worth_it(self) -> bool:
        """Whether enough was computed in vain, with this turn, for rows that have ended.

        A GPU always goes on: counting the ended rows waits for the device, which is free on a CPU
        alone.
        """
        if not self._on_cpu:
            return False
        is_live = self._rows.live[: self.num_live]
        num_ended = int((~is_live).sum())
        self._wasted_flops += num_ended * self._flops_per_token
        return num_ended == self.num_live or self._wasted_flops >= _WORTH_FLOPS

    def _schedule(self, *, pieces: bool = True) -> list[Sample]:
        """Give free slots to waiting samples, in order: they become the last rows.

        pieces: also go on with a prompt that is prefilled in pieces.
        """
        self._wasted_flops = 0.0
        self._reach = 0
        first = self.num_live
        longest = max((sample.request.max_tokens for sample in self._running), default=0)
        while self._waiting:
            request = self._waiting[0]
            longest = max(longest, request.max_tokens)
            most = min(self.max_slots, self._cache.rows_of(longest))
            room = most - self.num_live
            if room < 1 or not self._one_piece_left(request, pieces):
                break
            # Tokens that partial completions bring were not sampled here.
            self._retired_tokens -= request.recorded.token_ids.numel()
            begin = request.num_started
            request.num_started = min(request.end, begin + room)
            for index in range(begin, request.num_started):
                self._running.append(Sample(request, index))
            if not request.num_waiting:
                self._waiting.popleft()
        self._reserve(self.num_live, 0)
        return self._running[first:]

    def _one_piece_left(self, request: Request, pieces: bool) -> bool:
        """Whether a prompt's turn for its last (or only) piece has come; if not, prefill a piece,
        or all but it if nothing decodes.
        """
        while request.ids.numel() - request.num_cached > self._prefill_chunk:
            is_another_staged = self._staging is not None and not request.num_cached
            if is_another_staged or not pieces:
                return False
            if self._staging is None:
                self._staging = self.num_live if self._on_cpu else self._cache.rows - 1
            self._reserve(self._staging + 1, request.max_tokens)
            self._extend(request, request.num_cached)
            request.num_cached += self._prefill_chunk
            if self._running:
                return False
        return pieces or not request.num_cached

    def _extend(self, request: Request, begin: int) -> Tensor:
        """Prefill the piece of a long prompt that begins there, in the staging slot. Logits [1, V]
        of its last token.
        """
        piece = request.ids[begin : begin + self._prefill_chunk]
        assert self._staging is not None, "it was given to this prompt's first piece"
        return self._runner.prefill(self._staging, [piece], [1], start=begin)

    def _start(self, admitted: list[Sample]) -> None:
        """A token for every row: those that ran decode, the new ones, which are the last, are
        prefilled; natively both in one pass.
        """
        first = self.num_live - len(admitted)
        num_samples = Counter(sample.request for sample in admitted)
        requests = list(num_samples)
        # Of those that start together only the first can have been prefilled in pieces.
        is_staged = requests[0].num_cached > 0
        done = 0  # rows that have their token
        if first and (is_staged or not self._runner.native):
            self._advance(first)
            done = first
        self._rows.start(first, admitted)
        self._look_at_rows()
        if is_staged:
            # Its last piece; its K/V go from the staging slot to the rows of its samples.
            staged = requests.pop(0)
            count = num_samples[staged]
            logits_1V = self._extend(staged, staged.num_cached)
            targets = torch.arange(first, first + count, device=self.device)
            assert self._staging is not None, "its pieces before are there"
            source = torch.full_like(targets, self._staging)
            self._cache.copy(source, targets, staged.ids.numel())
            staged.num_cached = 0
            self._staging = None
            done = self._append(done, logits_1V.expand(count, -1))
        prompts = [request.ids for request in requests]
        copies = [num_samples[request] for request in requests]
        for batch in batches(prompts):
            decoding = slice(done, first)  # none after the first batch
            logits_RV = self._runner.prefill(
                max(done, first),
                prompts[batch],
                copies[batch],
                self._rows.token[decoding],
                self._rows.position[decoding],
            )
            done = self._append(done, logits_RV)
        self._reach = 0

    def _reserve(self, rows: int, length: int) -> None:
        """Room in the cache for as many rows, none of which loses anything."""
        held = [sample.request for sample in self._running]
        held += [request for request in self._waiting if request.num_cached]
        lengths = [request.max_tokens for request in held]
        longest = max([length, *lengths])
        self._cache.reserve(max(rows, self._num_held), longest)

    def _recompute(self) -> None:
        """The cache under the new weights: what the rows have read, and a long prompt's pieces from
        the first on.
        """
        sequences = []  # that the rows have read
        recorded = self._rows.recorded(range(self.num_live))
        for sample, had in zip(self._running, recorded):
            parts = [sample.request.prompt_ids, had.token_ids[:-1]]
            sequences.append(torch.cat(parts))
        for batch in batches(sequences):
            prompts = sequences[batch]
            self._runner.prefill(batch.start, prompts, [1] * len(prompts))
        for request in self._waiting:
            request.num_cached = 0
        self._staging = None

    def _append(self, first: int, logits_RV: Tensor) -> int:
        """Sample a token for each of the rows from `first` on, and return the row behind them."""
        rows = slice(first, first + logits_RV.shape[0])
        self._rows.append(rows, logits_RV, self._version, self._demands)
        return rows.stop

    def _look_at_rows(self) -> None:
        """What the rows demand of the sampler, and whether graphs still fit."""
        self._demands = self._rows.demands(self.num_live)
        if self._graphs:
            self._graphs.check(
                [*self.decoder.parameters(), *self._cache.layers, *self._rows.tables()]
            )

    def _advance(self, num_rows: int) -> None:
        """A token for each of the first rows."""
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
        tokens = self._rows.token[:num_rows]
        positions = self._rows.position[:num_rows]
        logits_NV = self._runner.decode(0, tokens, positions, longest)
        self._append(0, logits_NV)

    @torch.inference_mode()
    def _retire(self, aborted: bool = False) -> None:
        """Turn ended rows into completions, and move the last rows into the holes, so that rows
        stay dense.
        """
        num_rows = self.num_live
        self._end_at_stop_strings()
        live = self._rows.live[:num_rows].tolist()
        ended = [row for row in range(num_rows) if not live[row]]
        if not ended:
            return
        self._emit(ended, aborted)
        num_live = num_rows - len(ended)
        holes = [row for row in ended if row < num_live]
        movers = [row for row in range(num_live, num_rows) if live[row]]
        if holes:
            source = torch.tensor(movers, device=self.device)
            target = torch.tensor(holes, device=self.device)
            self._cache.copy(source, target, self._longest(num_rows))
            self._rows.move(source, target)
            for mover, hole in zip(movers, holes):
                self._running[hole] = self._running[mover]
        del self._running[num_live:]
        self._rows.live[num_live:] = False

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
            self._finish(*sample, had, reason)
            self._retired_tokens += had.token_ids.numel()

    def _longest(self, num_rows: int) -> int:
        """Places that the next token of any of the first rows attends to."""
        return int(self._rows.position[:num_rows].max()) + 1

    def _num_sampled(self) -> int:
        """Tokens sampled so far, ever."""
        counts = self._rows.count[: self.num_live]
        return self._retired_tokens + int(counts.sum())
