"""One decoded and sampled token for all rows, as one CUDA graph.

A graph is recorded for a number of rows (rounded up), a cache length (rounded up) and a set of
sampler options. Its tensors must keep their addresses: the rows' tables, the cache and the
parameters, into which a swap copies new weights. If one has moved, all graphs are recorded again.
Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from weakref import WeakMethod

import torch
from torch import Tensor

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
