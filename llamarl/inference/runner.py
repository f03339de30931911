"""The decoder over the cache: prompts whole or in chunks, a token for each running row, rows again
under new weights.

The prompt of an admission is computed once, and its K/V go to a slot for each of its samples.
Shapes: T tokens, M rows that decode, N sequences (those rows and the prompts), R new rows, V
vocabulary, D model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from weakref import WeakMethod

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.inference.cache import Decode, Pieces, Prefill, SlotCache
from llamarl.inference.decode import NativeDecode, has_own_code
from llamarl.machine.choice import fastest
from llamarl.models.attention import AttentionContext
from llamarl.models.build import Decoder

_TRIAL_ROWS = 32  # of the decode step by which the ways are compared
_PREFILL_TOKENS = 4096  # of one prefill, padding included
_NONE = torch.empty(0, dtype=torch.int64)


class ModelRunner:
    """Runs what the engine asks for: natively where that can be, else by the module.

    There are up to three ways: the native pass with products by tile instructions, or by vectors,
    and the module. reproducible: the first of those that this machine has; else the one that a
    decode step of `rows` rows shows to be clearly faster, measured before the first pass and kept
    for later runs on the machine (llamarl.machine.choice). notes_routes: keep the routes of each
    token in the cache.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: SlotCache,
        *,
        rows: int,
        reproducible: bool,
        notes_routes: bool = False,
    ):
        self._notes_routes = notes_routes
        self._decoder, self._cache = decoder, cache
        self._absent_rows = decoder.absent_rows
        fits = NativeDecode.fits(decoder, cache.device, cache.dtype)
        self.native = NativeDecode(decoder, cache.dtype) if fits else None
        self._rows = min(rows, _TRIAL_ROWS)
        self._undecided = fits and not reproducible

    def weights_changed(self) -> None:
        """Note that the weights have changed, which `refresh` cannot always see by itself."""
        if self.native:
            self.native.stale = True

    def refresh(self) -> None:
        """See whether the weights are others, or the model has been given a hook since. Call it
        before a pass, or several.
        """
        if self.native and has_own_code(self._decoder):
            self.take("module")
            self._undecided = False
        if self._undecided:
            self._undecided = False
            self.take(self._fastest_way())
        if self.native:
            self.native.refresh()

    def take(self, way: str) -> None:
        """Compute by "tiles", "vectors" or "module" from now on, if there is that way."""
        if way == "module":
            self.native = None
        elif self.native is not None:
            self.native.use_tiles = way == "tiles"

    def _fastest_way(self) -> str:
        """Return the fastest way to decode, by the time of a step in the first slots. Nothing may
        be running: their first place is written to.
        """
        native = self.native
        assert native is not None, "there is a choice where kernels fit"
        self._cache.reserve(self._rows, 1)
        zeros_N = torch.zeros(self._rows, dtype=torch.int64)
        native.refresh()

        def step(way: str) -> None:
            self.native = native
            self.take(way)
            self.decode(0, zeros_N, zeros_N, 1)

        ways = {name: partial(step, name) for name in ("tiles", "vectors", "module")}
        if not native.has_tiles:
            del ways["tiles"]
        model = f"{self._decoder.config} {self._cache.dtype}"
        sizes = f"{self._rows} rows {torch.get_num_threads()} threads"
        way = fastest("decoding", ways, key=f"{native.version} {model} {sizes}")
        self.native = native
        return way

    def decode(
        self,
        first_slot: int,
        tokens_N: Tensor,
        positions_N: Tensor,
        longest: int,
        live_N: Tensor | None = None,
    ) -> Tensor:
        """Run one token a row, in slots first_slot onwards, at positions_N < longest. Returns
        logits [N, V] of the next. live_N: bool, the rows whose tokens count; None: all.
        """
        if self.native:
            slots_N = torch.arange(first_slot, first_slot + tokens_N.numel())
            return self._narrowed(self.native(tokens_N, positions_N, self._cache, slots_N))
        context = Decode(self._cache, positions_N, longest, first_slot)
        logits_NV = self._decoder(tokens_N, positions_N, context)
        slots_N = torch.arange(first_slot, first_slot + len(tokens_N), device=tokens_N.device)
        self._note_routes(slots_N, positions_N, live_N)
        return self._narrowed(logits_NV)

    def prefill(
        self,
        first_slot: int,
        prompts: list[Tensor],
        copies: list[int],
        tokens_M: Tensor = _NONE,
        positions_M: Tensor = _NONE,
        *,
        starts: Sequence[int] = (),
    ) -> Tensor:
        """Run each prompt once and keep its K/V in the next copies[i] slots, from first_slot on.
        Next logits [M + R, V], those of a prompt once a slot. prompts: token ids on the CPU.

        tokens_M, positions_M: of running rows in the slots before first_slot, which decode in the
        same pass. Natively alone: the weights are read once for both then, so that new rows hardly
        hold up the others.
        starts: how many places the first slot of each holds already, behind which it goes on. By
        the module such sequences are padded to the longest. Not given: none.
        """
        device = self._cache.device
        num_decoding = tokens_M.numel()
        first_slot -= num_decoding
        ones = [1] * num_decoding
        lengths = [prompt.numel() for prompt in prompts]
        lengths_N = torch.tensor(ones + lengths)
        copies_N = torch.tensor(ones + copies)
        ends_N = lengths_N.cumsum(0)
        slots_N = first_slot + copies_N.cumsum(0) - copies_N
        held = list(starts) or [0] * len(prompts)
        starts_N = torch.cat([positions_M.cpu(), torch.tensor(held, dtype=torch.int64)])
        tokens_T = torch.cat([tokens_M.cpu(), *prompts])
        offsets_N = ends_N - lengths_N - starts_N
        offsets_T = offsets_N.repeat_interleave(lengths_N)
        positions_T = torch.arange(tokens_T.numel()) - offsets_T
        slots_T = slots_N.repeat_interleave(lengths_N)
        last_N = ends_N - 1
        if self.native:
            logits_NV = self.native(tokens_T, positions_T, self._cache, slots_T, last_N)
        else:
            positions_T = positions_T.to(device)
            last_N = last_N.to(device)
            context: AttentionContext
            if not starts:
                cu_seqlens = F.pad(ends_N.to(device), (1, 0))
                context = Prefill(self._cache, cu_seqlens, slots_T.to(device), positions_T)
            else:
                context = Pieces(self._cache, slots_N, starts_N, lengths_N)

            def project_last(h_TD: Tensor, w_VD: Tensor) -> Tensor:
                return self._decoder.project(h_TD[last_N], w_VD)

            logits_NV = self._decoder(tokens_T.to(device), positions_T, context, project_last)
            self._note_routes(slots_T.to(device), positions_T)
        self._narrowed(logits_NV)
        inputs_R = torch.arange(len(lengths_N)).repeat_interleave(copies_N)
        computed_R = slots_N[inputs_R]
        slots_R = torch.arange(len(inputs_R)) + first_slot
        is_copy_R = computed_R != slots_R
        source = computed_R[is_copy_R].to(device)
        target = slots_R[is_copy_R].to(device)
        self._cache.copy(source, target, int(lengths_N.max()))
        return logits_NV[inputs_R.to(device)]

    def _note_routes(
        self, slots_T: Tensor, positions_T: Tensor, live_T: Tensor | None = None
    ) -> None:
        """Keep the routes of the tokens just read."""
        if not self._notes_routes:
            return
        assert self._decoder.routing is not None, "a dense model has no routes"
        if live_T is None:
            live_T = torch.ones_like(slots_T, dtype=torch.bool)
        self._cache.write_routes(slots_T, positions_T, self._decoder.routing.taken, live_T)

    def _narrowed(self, logits_NV: Tensor) -> Tensor:
        """Take the rows that no token has out of the distribution, in place."""
        if self._absent_rows is not None:
            logits_NV.index_fill_(1, self._absent_rows, -math.inf)
        return logits_NV


def batches(sequences: list[Tensor]) -> Iterator[slice]:
    """Yield which prompts to prefill together: so many that they have _PREFILL_TOKENS tokens at
    most, padded to the longest (or one longer).
    """
    begin = longest = 0
    for end, sequence in enumerate(sequences):
        longest = max(longest, sequence.numel())
        if end > begin and longest * (end + 1 - begin) > _PREFILL_TOKENS:
            yield slice(begin, end)
            begin, longest = end, sequence.numel()
    if sequences:
        yield slice(begin, len(sequences))


_LENGTHS = 256  # places: the cache is read in multiples of so many


class DecodeGraphs:
    """record(rows, longest): a method that does the work of one token, in place, for the first
    `rows` rows and `longest` places.
    """

    def __init__(
        self, device: torch.device, max_rows: int, max_len: int, record: Callable[[int, int], None]
    ):
        # Weakly, so that graphs go with their engine, and not when garbage is collected amid
        # another's recording.
        self._record = WeakMethod(record)
        self._device = device
        self._max_rows = max_rows
        self._max_len = max_len
        self._stream = torch.cuda.Stream(device)
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._addresses: list[int] = []
        self._pool = torch.cuda.graph_pool_handle()

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Forget all graphs if one of the tensors has another address than at the last call."""
        addresses = [t.data_ptr() for t in tensors]
        if addresses != self._addresses:
            self._graphs.clear()
            self._pool = torch.cuda.graph_pool_handle()
            self._addresses = addresses

    def run(self, rows: int, longest: int, demands: Hashable) -> None:
        """Sample one token for all rows. The first call of a kind runs eagerly on a stream of its
        own, and is recorded.
        """
        # Powers of two up to 16, then multiples of 16: at most 15 rows are computed in vain.
        if rows <= 16:
            rows = 1 << (rows - 1).bit_length()
        else:
            rows = -(-rows // 16) * 16
        rows = min(rows, self._max_rows)
        lengths = -(-longest // _LENGTHS)
        longest = min(lengths * _LENGTHS, self._max_len)
        key = (rows, longest, demands)
        if key in self._graphs:
            self._graphs[key].replay()
            return
        graph = torch.cuda.CUDAGraph()
        record = self._record()
        assert record is not None, "the engine goes after its graphs"
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            record(rows, longest)
        here.wait_stream(self._stream)
        # Records and does not run. Other threads, which move weights, may use the device meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            record(rows, longest)
        self._graphs[key] = graph
