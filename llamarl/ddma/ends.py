"""The two ends of a Weights channel as executors see them: bind a model's parameters, then publish
or swap.

trainer      sender.bind(config, named_parameters);    sender.publish(version, ...)
generator    receiver.bind(config, named_parameters);  receiver.swap() between two chunks
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llamarl.comm.control import Control
from llamarl.comm.groups import RankInfo
from llamarl.ddma.copies import Copier, fold
from llamarl.ddma.layout import FUSED, Buffer, Destination, Source, buffer_of, parameters_to_send
from llamarl.ddma.links import LocalLink, RankLink, make_slots
from llamarl.ddma.payload import (
    BUCKET_BYTES,
    Bucket,
    Progress,
    buckets_of,
    buckets_of_buffer,
    size_of,
)
from llamarl.ddma.plan import Plan, make_plan
from llamarl.ddma.subscriber import Incoming, Staged, Subscriber
from llamarl.ddma.transfer import Outgoing, Publisher
from llamarl.ddma.transports import choose_transports
from llamarl.errors import WeightsError
from llamarl.models.config import ModelConfig
from llamarl.models.quantize import QUANTIZED, quantize_rows
from llamarl.models.sharding import SCALE, parameter_shapes

NamedParameters = list[tuple[str, nn.Parameter]]
_IN_PLACE = {
    "local",
    "shm",
    "cuda_ipc",
}  # the receiver reads the sender's memory, so many receivers cost the sender nothing


class WeightsRoute:
    """What both ends agree on before any model exists: ranks, topologies, what travels and how.

    on_host: keep staging memory off the GPU even where both ends are on it. dtype: the generator's.
    quantize: none, fp8 or int8; keep: fragments of names of projections that stay in dtype.
    WeightsError if the transport asked for cannot join two ranks.
    """

    def __init__(
        self,
        name: str,
        *,
        sources: tuple[int, ...],
        destinations: tuple[int, ...],
        source: Source,
        destination: Destination,
        dtype: torch.dtype,
        quantize: str,
        keep: tuple[str, ...],
        transport: str,
        on_host: bool = False,
        ends: list[RankInfo],
        group: dist.ProcessGroup | None,
        device_group: dist.ProcessGroup | None,
        control: Control,
        timeout_s: float,
    ):
        self.name, self.sources, self.destinations, self.source, self.destination = (
            name,
            sources,
            destinations,
            source,
            destination,
        )
        self.dtype, self.quantize, self.keep = dtype, quantize, keep
        self.control, self.timeout_s = control, timeout_s
        self._group, self._device_group, self._local = group, device_group, LocalLink()
        t = destination.tp
        handed_on = [
            (a, b) for i, a in enumerate(destinations) for b in destinations[i % t :: t] if b > a
        ]
        pairs = [(a, b) for a in sources for b in destinations] + handed_on
        joined = [replace(end, gpu=None) for end in ends] if on_host else ends
        self._transports = choose_transports(transport, [(joined[a], joined[b]) for a, b in pairs])
        # Both ends of every link digest in the same memory.
        gpus = all(ends[rank].gpu for rank in (*sources, *destinations))
        self.on_device = (
            gpus and not on_host and not {"shm", "gloo"} & set(self._transports.values())
        )
        self.bucket_bytes = BUCKET_BYTES["cuda" if self.on_device else "cpu"]
        kernels = {ends[rank].kernel for rank in (*sources, *destinations)}
        self.copier = Copier(
            "device"
            if self.on_device
            else "lanes"
            if len(kernels) == 1 and "" not in kernels
            else "xxh3"
        )
        self.busy = _ranks_outnumber_cores(ends, {*sources, *destinations}, control.rank)
        in_place = all(self._transports[a, b] in _IN_PLACE for a in sources for b in destinations)
        self._feed = "direct" if in_place else "auto"
        if (
            not in_place
        ):  # what is handed on lies in a receiver's own memory, which no other process has mapped
            self._transports |= {
                pair: "gloo" for pair in handed_on if self._transports[pair] == "shm"
            }

    def transport(self, peer: int, *, sending: bool) -> str:
        me = self.control.rank
        return self._transports[(me, peer) if sending else (peer, me)]

    def link(self, peer: int, *, sending: bool) -> LocalLink:
        if peer == self.control.rank:
            return self._local
        transport = self.transport(peer, sending=sending)
        return RankLink(
            peer, self._group, transport, self._device_group if transport == "nccl" else None
        )

    def plan(self, config: ModelConfig) -> Plan:
        quantized = QUANTIZED.get(self.quantize)
        return make_plan(
            config,
            parameters_to_send(config, self.dtype, quantized, self.keep),
            self.source,
            self.destination,
            feed=self._feed,
        )


class WeightsSender:
    """The trainer rank's end."""

    def __init__(self, route: WeightsRoute):
        self._route = route
        self._publisher: Publisher | None = None

    def bind(
        self,
        config: ModelConfig,
        parameters: NamedParameters,
        tensor_group: dist.ProcessGroup | None = None,
    ) -> Plan:
        """Publish these parameters from now on: plain, or DTensors sharded as the route's Source
        says. Returns the plan.

        tensor_group: the ranks that share each layer, if there are several. WeightsError if a
        parameter's local shape is not what the topology says.
        """
        route, self._tensor_group = self._route, tensor_group
        self._plan = plan = route.plan(config)
        self._rank = route.sources.index(route.control.rank)
        self._parameters = dict(parameters)
        self._device = _local(parameters[0][1]).device
        self._scratch: dict[str, Tensor] = {}  # quantised shards
        for p in plan.parameters:
            expected = route.source.box(config, p, self._rank).lengths
            if (
                not p.name.endswith(SCALE)
                and (held := tuple(_local(self._parameters[p.name]).shape)) != expected
            ):
                raise WeightsError(
                    f"{p.name}: rank {route.control.rank} holds {held}, the topology says {expected}"
                )
            if p.dtype.itemsize == 1 or p.name.endswith(SCALE):
                self._scratch[p.name] = torch.empty(expected, dtype=p.dtype, device=self._device)
        self._buckets: list[tuple[int, Bucket]] = []  # of all links: base in the slot, bucket
        links, base, peers = [], 0, []
        for t in range(route.destination.tp):
            buckets = tuple(buckets_of(plan.pieces(self._rank, t), route.bucket_bytes))
            for replica in plan.feeds(self._rank) if buckets else []:
                place = replica * route.destination.tp + t
                peers.append(peer := route.destinations[place])
                handed_on = plan.follower(place) is not None
                links.append(
                    Outgoing(
                        route.link(peer, sending=True), base, len(self._buckets), buckets, handed_on
                    )
                )
            self._buckets += [(base, bucket) for bucket in buckets]
            base += size_of(buckets)
        self._passes = _passes([bucket for _, bucket in self._buckets])
        in_shared_memory = "shm" in {route.transport(peer, sending=True) for peer in peers}
        slots = make_slots(
            base, self._device if route.on_device else torch.device("cpu"), shared=in_shared_memory
        )
        self._views = {slot.data_ptr(): self._views_of(slot) for slot in slots.tensors}
        self._sources: list[list[Tensor]] = []
        self._pointers: list[int] = []
        self._publisher = Publisher(
            route.name,
            slots,
            links,
            len(self._buckets),
            route.control,
            route.timeout_s,
            route.copier,
            streams=not route.busy
            and self._device.type == "cpu",  # a device's copies are not counted as they end
        )
        return plan

    def publish(
        self, version: int, *, evaluate: bool, must_differ: bool, canary: Callable[[], dict] = dict
    ) -> float:
        """Stage this rank's shard as `version`; it travels behind. Returns the stall in seconds,
        without that of canary().

        See Publisher.publish.
        """
        began = time.monotonic()
        self._quantize()
        held_s = time.monotonic() - began
        return held_s + self._publisher.publish(
            version, self._stage, evaluate=evaluate, must_differ=must_differ, canary=canary
        )

    def has_room(self) -> bool:
        """False where `publish` would wait for a receiver that only this rank's own loop can move
        on.
        """
        route = self._route
        return route.control.rank not in route.destinations or self._publisher.has_room()

    @property
    def receivers(self) -> tuple[int, ...]:
        """Ranks."""
        return self._route.destinations

    @torch.no_grad()
    def _quantize(self) -> None:
        """Collective over the tensor-parallel peers, and so not left to whether this rank has a
        slot to stage in.
        """
        largest = self._largest_of_split_rows()
        for name, quantized in self._scratch.items():
            if not name.endswith(SCALE):
                shard, scale = _local(self._parameters[name]), self._scratch[name + SCALE]
                quantize_rows(shard, self._route.quantize, quantized, scale, largest.get(name))

    @torch.no_grad()
    def _stage(self, slot: Tensor, progress: Progress) -> None:
        views, sources = self._views[slot.data_ptr()], self._current_sources()
        if self._route.copier.one_pass and self._device.type == "cpu":
            return self._stage_in_one_pass(views, sources, progress)
        for number, (targets, held) in enumerate(zip(views, sources)):
            torch._foreach_copy_(targets, held, non_blocking=True)
            event = None
            if self._device.type == "cuda":
                event = torch.cuda.Event()
                event.record()
            progress.mark(number, event)

    def _stage_in_one_pass(
        self, views: list[list[Tensor]], sources: list[list[Tensor]], progress: Progress
    ) -> None:
        digests = [[0] * len(targets) for targets in views]
        left = [len(targets) for targets in views]
        for moves in self._passes:
            found = self._route.copier.copy_rows(
                [views[n][i] for n, i in moves], [sources[n][i] for n, i in moves]
            )
            for (number, i), digest in zip(moves, found):
                digests[number][i] = digest
                left[number] -= 1
                if not left[number]:
                    progress.mark(number, digest=fold(digests[number]))

    def _largest_of_split_rows(self) -> dict[str, Tensor]:
        """Absmax of each row of the quantised weights whose columns lie on several ranks.
        Collective over these.
        """
        if self._route.source.tp == 1:
            return {}
        shapes = parameter_shapes(self._plan.config)
        names = [
            n
            for n in self._scratch
            if n in shapes and self._route.source.splits_columns(self._plan.config, n, shapes[n])
        ]
        rows = [_local(self._parameters[name]).abs().amax(1).float() for name in names]
        if not rows:
            return {}
        every = torch.cat(rows)
        dist.all_reduce(every, dist.ReduceOp.MAX, group=self._tensor_group)
        return dict(zip(names, every.split([len(r) for r in rows])))

    def _views_of(self, slot: Tensor) -> list[list[Tensor]]:
        """Of each bucket, a typed view of the slot for each move."""
        return [
            [
                slot[base + m.start : base + m.end]
                .view(m.piece.parameter.dtype)
                .view(m.piece.box.lengths)
                for m in bucket.moves
            ]
            for base, bucket in self._buckets
        ]

    def _current_sources(self) -> list[list[Tensor]]:
        """Of each bucket, the part of this rank's shard that each move carries. Kept while the
        parameters stay where they are.
        """
        held = {name: _local(p) for name, p in self._parameters.items()} | self._scratch
        pointers = [tensor.data_ptr() for tensor in held.values()]
        if pointers != self._pointers:
            plan, source = self._plan, self._route.source
            boxes = {p.name: source.box(plan.config, p, self._rank) for p in plan.parameters}
            self._sources = [
                [
                    held[m.piece.parameter.name][m.piece.box.within(boxes[m.piece.parameter.name])]
                    for m in bucket.moves
                ]
                for _, bucket in self._buckets
            ]
            self._pointers = pointers
        return self._sources

    @property
    def bytes_per_sync(self) -> int:
        """Over all ranks."""
        return self._plan.num_bytes

    def close(self) -> None:
        """Close once: its executor does so at its end, and the controller whatever happens."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()


class WeightsReceiver:
    """The generator rank's end."""

    def __init__(self, route: WeightsRoute):
        self._route = route
        self._subscriber: Subscriber | None = None

    def bind(self, config: ModelConfig, parameters: NamedParameters) -> None:
        """Receive into these parameters from now on: this rank's parts, in the dtype that travels,
        or fused (layout.FUSED).

        WeightsError if one has another shape or dtype than what will come.
        """
        route = self._route
        plan = route.plan(config)
        me = route.destinations.index(route.control.rank)
        t = me % route.destination.tp
        fuse = any(group in name for group in FUSED for name, _ in parameters)
        of = buffer_of(config, plan.parameters, route.destination, t, fuse=fuse)
        device = parameters[0][1].device
        self._parameters = [p for _, p in parameters]
        feeders, upstream = plan.feeders(me)
        whole = tuple(buckets_of_buffer(of, route.bucket_bytes))
        incoming = [
            Incoming(
                route.link(route.sources[s], sending=False),
                tuple(buckets_of(plan.pieces(s, t), route.bucket_bytes)),
                f"trainer rank {route.sources[s]}",
            )
            for s in feeders
        ]
        if upstream is not None:
            peer = route.destinations[upstream]
            incoming = [Incoming(route.link(peer, sending=False), whole, f"generator rank {peer}")]
        after, follower = plan.follower(me), None
        if after is not None:
            handed_on = plan.follower(after) is not None
            follower = Outgoing(
                route.link(route.destinations[after], sending=True), 0, 0, whole, handed_on
            )
        # On a GPU graphs hold the parameters' addresses, so weights are copied over; else two
        # buffers change places.
        self._exchange = device.type == "cpu"
        where = {"device": device} if route.on_device else {"pin_memory": device.type == "cuda"}
        buffers = [
            torch.zeros(of.num_bytes, dtype=torch.uint8, **where)
            for _ in range(2 if self._exchange else 1)
        ]
        self._views = {flat.data_ptr(): _views(flat, of, parameters) for flat in buffers}
        self._subscriber = Subscriber(
            route.name,
            of,
            buffers,
            incoming,
            route.control,
            route.timeout_s,
            route.copier,
            follower,
            in_order=route.destination.tp > 1,
        )

    @property
    def staged(self) -> Staged | None:
        """What `swap` would bring in, or None."""
        return self._subscriber.staged

    @property
    def overtakable(self) -> bool:
        """See Subscriber.overtakable."""
        return self._subscriber.overtakable

    def skip(self, version: int) -> None:
        """See Subscriber.skip."""
        self._subscriber.skip(version)

    @torch.no_grad()
    def swap(self) -> Staged | None:
        """Put the staged version in place: an exchange of pointers on CPU, one copy (graphs stay
        valid) on a GPU.
        """
        return self._subscriber.swap(self._put_in_place)

    def _put_in_place(self, buffer: Tensor) -> None:
        views = self._views[buffer.data_ptr()]
        if self._exchange:
            for parameter, view in zip(self._parameters, views):
                parameter.data = view
        else:
            torch._foreach_copy_(self._parameters, views, non_blocking=True)
            torch.cuda.current_stream().synchronize()  # then the buffer may be written again

    def close(self) -> None:
        """Close once: its executor does so at its end, and the controller whatever happens."""
        subscriber, self._subscriber = self._subscriber, None
        if subscriber is not None:
            subscriber.close()


def _ranks_outnumber_cores(ends: list[RankInfo], ranks: set[int], me: int) -> bool:
    """Whether those at work on this rank's host have less than a core each, so that what goes on at
    once only goes on slower.
    """
    here = [end for end in ends if end.rank in ranks and end.host == ends[me].host]
    return len(here) > ends[me].num_cores


def _passes(buckets: list[Bucket]) -> list[list[tuple[int, int]]]:
    """(bucket, move in it) of all moves, those of the same rows of a parameter together: half a row
    at a time is read at half the speed.
    """
    together: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
    for number, bucket in enumerate(buckets):
        for i, move in enumerate(bucket.moves):
            box = move.piece.box
            together.setdefault(
                (move.piece.parameter.name, box.offsets[0], box.lengths[0]), []
            ).append((number, i))
    return list(together.values())


def _local(p: Tensor) -> Tensor:
    p = p.detach()
    return p.to_local() if isinstance(p, DTensor) else p


def _views(flat: Tensor, of: Buffer, parameters: NamedParameters) -> list[Tensor]:
    """The typed view of each parameter in a buffer."""
    out = []
    for name, parameter in parameters:
        members = [of.held[n] for n in of.fused.get(name, (name,)) if n in of.held]
        if not members:
            raise WeightsError(
                f"{name}: the generator's model has it, the trainer's weights do not"
            )
        dtype, shape = members[0].parameter.dtype, members[0].box.lengths
        shape = (sum(m.box.lengths[0] for m in members), *shape[1:])
        if (parameter.dtype, tuple(parameter.shape)) != (dtype, shape):
            raise WeightsError(
                f"{name}: the generator holds {tuple(parameter.shape)} {parameter.dtype}, {shape} {dtype} would come"
            )
        start = members[0].start
        size = sum(m.num_bytes for m in members)
        out.append(flat[start : start + size].view(dtype).view(shape))
    return out
