"""The two ends of a Weights channel as executors see them: bind a model's parameters, then publish or swap."""

from __future__ import annotations

from typing import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llamarl.control import Control
from llamarl.ddma import layout
from llamarl.ddma.plan import Plan, make_plan
from llamarl.ddma.transfer import Link, LocalLink, Publisher, RankLink, Subscriber, WeightsError

NamedParameters = list[tuple[str, nn.Parameter]]
TRANSPORTS = ("auto", "shm", "gloo")


class WeightsRoute:
    """What both ends agree on before any model exists: ranks, links, and the dtype that travels (the destination's)."""

    def __init__(
        self,
        name: str,
        *,
        sources: tuple[int, ...],
        destinations: tuple[int, ...],
        dtype: torch.dtype,
        transport: str,
        hosts: list[str],
        group: dist.ProcessGroup | None,
        control: Control,
        deadline_s: float,
    ):
        if transport not in TRANSPORTS:
            raise ValueError(f"weights.transport={transport}: need one of {', '.join(TRANSPORTS)}")
        self.name, self.sources, self.destinations, self.dtype = name, sources, destinations, dtype
        self.control, self.deadline_s = control, deadline_s
        self._transport, self._hosts, self._group, self._local = transport, hosts, group, LocalLink()

    def link(self, peer: int) -> Link:
        """The link between this rank and a peer on the other side. WeightsError if the transport asked for cannot reach it."""
        if peer == self.control.rank:
            return self._local
        same_host = self._hosts[peer] == self._hosts[self.control.rank]
        if self._transport == "shm" and not same_host:
            raise WeightsError(
                f"weights.transport=shm: ranks {self.control.rank} and {peer} are on different hosts; use gloo, or auto"
            )
        return RankLink(peer, self._group, "gloo" if self._transport == "gloo" or not same_host else "shm")

    def plan(self, parameters: NamedParameters) -> tuple[Plan, list[layout.RankLayout], list[layout.RankLayout]]:
        """(plan, source layouts, destination layouts) for these global parameters."""
        specs = [layout.Parameter(name, tuple(p.shape)) for name, p in parameters]
        sources = layout.fsdp(specs, len(self.sources), self.dtype.itemsize)
        destinations = layout.replicated(specs, len(self.destinations), self.dtype.itemsize)
        return make_plan(sources, destinations, self.dtype.itemsize), sources, destinations


def views(flat: Tensor, of: layout.RankLayout, dtype: torch.dtype) -> Iterable[tuple[str, Tensor]]:
    """(name, typed view) of each slice in a rank's flat uint8 buffer."""
    for s in of.slices:
        yield s.name, flat[s.start_bytes : s.start_bytes + s.numel * dtype.itemsize].view(dtype).view(s.lengths)


class WeightsSender:
    """The trainer rank's end."""

    def __init__(self, route: WeightsRoute):
        self._route = route
        self._publisher: Publisher | None = None

    def bind(self, parameters: NamedParameters) -> Plan:
        """Publish these parameters from now on: plain, or FSDP2-sharded over the channel's source ranks. Returns the plan."""
        route = self._route
        plan, sources, _ = route.plan(parameters)
        me = route.sources.index(route.control.rank)
        self._parameters, self._layout = parameters, sources[me]
        for (name, p), s in zip(parameters, self._layout.slices):
            local = p.to_local() if isinstance(p, DTensor) else p
            if tuple(local.shape) != s.lengths:
                raise WeightsError(f"{name}: rank {route.control.rank} holds {tuple(local.shape)}, the plan expects {s.lengths}")
        links = [(route.link(peer), plan.link(me, i)) for i, peer in enumerate(route.destinations)]
        self._publisher = Publisher(route.name, self._layout.size_bytes, links, route.control, route.deadline_s)
        return plan

    def publish(self, version: int, *, evaluate: bool, must_differ: bool) -> float:
        """Stage this rank's shard as `version`; it travels behind. Returns the stall in seconds."""
        return self._publisher.publish(version, self._stage, evaluate=evaluate, must_differ=must_differ)

    @torch.no_grad()
    def _stage(self, slot: Tensor) -> None:
        for (_, p), (_, view) in zip(self._parameters, views(slot, self._layout, self._route.dtype)):
            view.copy_(p.to_local() if isinstance(p, DTensor) else p)

    @property
    def bytes_per_sync(self) -> int:
        return self._publisher.bytes_per_sync

    def close(self) -> None:
        if self._publisher:
            self._publisher.close()


class WeightsReceiver:
    """The generator rank's end."""

    def __init__(self, route: WeightsRoute):
        self._route = route
        self._subscriber: Subscriber | None = None

    def bind(self, parameters: NamedParameters) -> None:
        """Receive into these parameters from now on. Each must have the channel's dtype."""
        route = self._route
        plan, sources, destinations = route.plan(parameters)
        me = route.destinations.index(route.control.rank)
        self._parameters, self._layout = parameters, destinations[me]
        links = [(route.link(peer), plan.link(i, me)) for i, peer in enumerate(route.sources)]
        sizes = [s.size_bytes for s in sources]
        self._subscriber = Subscriber(route.name, self._layout.size_bytes, links, sizes, route.control)

    @property
    def staged(self) -> tuple[int, bool] | None:
        """(version, whether it must be evaluated) that `swap` would bring in, or None."""
        return self._subscriber.staged

    @torch.no_grad()
    def swap(self) -> tuple[int, bool] | None:
        """Put the staged version in place: an exchange of pointers on CPU, one copy (graphs stay valid) on a GPU."""
        taken = self._subscriber.swap()
        if taken is None:
            return None
        version, evaluate, buffer = taken
        for (_, parameter), (_, view) in zip(self._parameters, views(buffer, self._layout, self._route.dtype)):
            if parameter.device.type == "cpu":
                parameter.data = view
            else:
                parameter.copy_(view)
        return version, evaluate

    def close(self) -> None:
        if self._subscriber:
            self._subscriber.close()
