"""Staging: copies a trainer rank's shard into a slot, in the order in which it travels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.ddma.layout import Region
from llamarl.ddma.payload import Bucket, BucketProgress
from llamarl.ddma.plan import TransferPlan
from llamarl.ddma.route import WeightsRoute
from llamarl.errors import WeightsError
from llamarl.models.fsdp import local
from llamarl.models.quantize import quantize_rows
from llamarl.models.sharding import SCALE


class Staging:
    """Copies one rank's shard into slots, bucket by bucket.

    buckets: of all links, in the order of their numbers. tensor_group: the ranks that share each
    layer, if there are several. WeightsError if a parameter's local shape is not what the topology
    says.
    """

    def __init__(
        self,
        route: WeightsRoute,
        plan: TransferPlan,
        parameters: Mapping[str, Tensor],
        buckets: list[Bucket],
        tensor_group: dist.ProcessGroup | None,
    ):
        self._route = route
        self._plan = plan
        self._parameters = parameters
        self._buckets = buckets
        self._tensor_group = tensor_group
        self._device = local(next(iter(parameters.values()))).device
        rank = route.sources.index(route.rank)
        self._boxes = {p.name: route.source.box(plan.config, p, rank) for p in plan.parameters}
        self._quantized: dict[str, Tensor] = {}  # what does not travel as it is held
        for p in plan.parameters:
            lengths = self._boxes[p.name].lengths
            is_scale = p.name.endswith(SCALE)
            held = lengths if is_scale else tuple(local(parameters[p.name]).shape)
            if held != lengths:
                raise WeightsError(
                    f"{p.name}: rank {route.rank} holds {held}, the topology says {lengths}"
                )
            if is_scale or p.dtype.itemsize == 1:
                place = torch.empty(lengths, dtype=p.dtype, device=self._device)
                self._quantized[p.name] = place

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
    def fill(self, slot: Tensor, progress: BucketProgress) -> None:
        """Copy the shard into a slot [bytes] uint8. Marks each bucket as it becomes whole."""
        held = {name: local(p) for name, p in self._parameters.items()}
        held |= self._quantized
        for bucket in self._buckets:
            targets = [region.view_in(slot) for region in bucket.regions]
            sources = [self._part(held, region) for region in bucket.regions]
            torch._foreach_copy_(targets, sources, non_blocking=True)
            event = None
            if self._device.type == "cuda":
                event = torch.cuda.Event()
                event.record()
            progress.mark(event)

    def _part(self, held: dict[str, Tensor], region: Region) -> Tensor:
        """Return a region's part of this rank's shard."""
        return held[region.name][region.box.within(self._boxes[region.name])]

    def _largest_of_split_rows(self) -> dict[str, Tensor]:
        """Collective over the ranks that hold parts of one row: return the row's absmax, for
        quantised weights.

        The result is empty if every row lies on one rank.
        """
        if self._route.source.tp == 1:
            return {}
        largest: dict[str, Tensor] = {}
        for p in self._plan.parameters:
            if p.name not in self._quantized or p.name.endswith(SCALE):
                continue
            held = local(self._parameters[p.name])
            if held.shape[1] < p.shape[1]:
                largest[p.name] = held.abs().amax(1).float()
        if not largest:
            return {}
        every = torch.cat(list(largest.values()))
        dist.all_reduce(every, dist.ReduceOp.MAX, group=self._tensor_group)
        parts = every.split([len(rows) for rows in largest.values()])
        return dict(zip(largest, parts))
