"""Staging: a trainer rank's shard, copied into a slot in the dtype and the order in which it
travels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.ddma.copies import fold
from llamarl.ddma.payload import Bucket, Move, Progress
from llamarl.ddma.plan import Plan
from llamarl.ddma.route import WeightsRoute
from llamarl.errors import WeightsError
from llamarl.models.fsdp import local
from llamarl.models.quantize import quantize_rows
from llamarl.models.sharding import SCALE, parameter_shapes


class Staging:
    """Copies one rank's shard into slots, bucket by bucket.

    buckets: of all links, in the order of their numbers, each with the byte of a slot where its
    link's bytes begin. tensor_group: the ranks that share each layer, if there are several.
    WeightsError if a parameter's local shape is not what the topology says.
    """

    def __init__(
        self,
        route: WeightsRoute,
        plan: Plan,
        parameters: Mapping[str, Tensor],
        buckets: list[tuple[int, Bucket]],
        tensor_group: dist.ProcessGroup | None,
    ):
        self._route = route
        self._config = plan.config
        self._parameters = parameters
        self._buckets = buckets
        self._tensor_group = tensor_group
        self._device = local(next(iter(parameters.values()))).device
        rank = route.sources.index(route.rank)
        self._boxes = {p.name: route.source.box(plan.config, p, rank) for p in plan.parameters}
        self._quantized = self._allocate_quantized(plan)  # what does not travel as it is held
        self._passes = _passes([bucket for _, bucket in buckets])
        self._views: dict[int, list[list[Tensor]]] = {}  # by the slot's address
        self._sources: list[list[Tensor]] = []
        self._addresses: list[int] = []  # of the tensors that _sources are parts of

    @torch.no_grad()
    def quantize(self) -> None:
        """Collective over the tensor-parallel peers: quantise this rank's rows anew."""
        largest = self._largest_of_split_rows()
        for name, quantized in self._quantized.items():
            if not name.endswith(SCALE):
                quantize_rows(
                    local(self._parameters[name]),
                    self._route.quantize,
                    q_out=quantized,
                    scale_out=self._quantized[name + SCALE],
                    largest_O=largest.get(name),
                )

    @torch.no_grad()
    def fill(self, slot: Tensor, progress: Progress) -> None:
        """Copy the shard into a slot [bytes] uint8. Marks each bucket as it becomes whole."""
        views = self._views_of(slot)
        sources = self._current_sources()
        if self._route.copier.one_pass and self._device.type == "cpu":
            self._fill_in_one_pass(views, sources, progress)
            return
        for number, targets in enumerate(views):
            torch._foreach_copy_(targets, sources[number], non_blocking=True)
            event = None
            if self._device.type == "cuda":
                event = torch.cuda.Event()
                event.record()
            progress.mark(number, event)

    def _fill_in_one_pass(
        self, views: list[list[Tensor]], sources: list[list[Tensor]], progress: Progress
    ) -> None:
        """Copy and digest together, so that the digests are known when a bucket is whole."""
        digests = [[0] * len(targets) for targets in views]
        num_missing = [len(targets) for targets in views]
        for moves in self._passes:
            found = self._route.copier.copy_rows(
                [views[number][i] for number, i in moves],
                [sources[number][i] for number, i in moves],
            )
            for (number, i), digest in zip(moves, found):
                digests[number][i] = digest
                num_missing[number] -= 1
                if not num_missing[number]:
                    progress.mark(number, digest=fold(digests[number]))

    def _allocate_quantized(self, plan: Plan) -> dict[str, Tensor]:
        quantized = {}
        for p in plan.parameters:
            is_scale = p.name.endswith(SCALE)
            lengths = self._boxes[p.name].lengths
            if not is_scale:
                self._check(p.name, lengths)
            if is_scale or p.dtype.itemsize == 1:
                quantized[p.name] = torch.empty(lengths, dtype=p.dtype, device=self._device)
        return quantized

    def _check(self, name: str, lengths: tuple[int, ...]) -> None:
        held = tuple(local(self._parameters[name]).shape)
        if held != lengths:
            raise WeightsError(
                f"{name}: rank {self._route.rank} holds {held}, the topology says {lengths}"
            )

    def _largest_of_split_rows(self) -> dict[str, Tensor]:
        """Collective over the ranks that hold parts of one row: its absmax, for quantised weights.

        Empty where every row lies on one rank.
        """
        source = self._route.source
        if source.tp == 1:
            return {}
        shapes = parameter_shapes(self._config)
        weights = [name for name in self._quantized if name in shapes]
        names = [n for n in weights if source.splits_columns(self._config, n, shapes[n])]
        if not names:
            return {}
        rows = [local(self._parameters[name]).abs().amax(1).float() for name in names]
        every = torch.cat(rows)
        dist.all_reduce(every, dist.ReduceOp.MAX, group=self._tensor_group)
        return dict(zip(names, every.split([len(r) for r in rows])))

    def _views_of(self, slot: Tensor) -> list[list[Tensor]]:
        """A typed view of the slot for each move of each bucket. Kept: there are few slots."""
        address = slot.data_ptr()
        if address not in self._views:
            views = []
            for base, bucket in self._buckets:
                views.append([_view(slot[base:], move) for move in bucket.moves])
            self._views[address] = views
        return self._views[address]

    def _current_sources(self) -> list[list[Tensor]]:
        """The part of this rank's shard that each move of each bucket carries.

        Kept while the parameters stay where they are.
        """
        held = {name: local(p) for name, p in self._parameters.items()} | self._quantized
        addresses = [tensor.data_ptr() for tensor in held.values()]
        if addresses != self._addresses:
            self._addresses = addresses
            self._sources = []
            for _, bucket in self._buckets:
                parts = []
                for move in bucket.moves:
                    within = move.piece.box.within(self._boxes[move.name])
                    parts.append(held[move.name][within])
                self._sources.append(parts)
        return self._sources


def _view(flat: Tensor, move: Move) -> Tensor:
    """A move's piece, in its own shape and dtype, as a view of its link's bytes."""
    piece = move.piece
    return flat[move.start : move.end].view(piece.parameter.dtype).view(piece.box.lengths)


def _passes(buckets: list[Bucket]) -> list[list[tuple[int, int]]]:
    """(bucket, move in it) of all moves; those of the same rows of a parameter come together.

    Half a row at a time is read at half the speed.
    """
    together: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
    for number, bucket in enumerate(buckets):
        for i, move in enumerate(bucket.moves):
            box = move.piece.box
            rows = (move.name, box.offsets[0], box.lengths[0])
            together.setdefault(rows, []).append((number, i))
    return list(together.values())
