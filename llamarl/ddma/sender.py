"""WeightsSender: the trainer rank's end of a Weights channel.

    sender.bind(config, named_parameters)     # once
    sender.publish(version, must_differ=...)  # after every optimizer step; the rest happens behind

llamarl.ddma.protocol says how a version travels.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.ddma.layout import Region
from llamarl.ddma.links import NUM_SLOTS, Header, HeaderKind, Slots, make_slots
from llamarl.ddma.payload import Bucket, BucketProgress, buckets_of
from llamarl.ddma.plan import TransferPlan
from llamarl.ddma.protocol import (
    LinkContext,
    Outgoing,
    QueuedVersion,
    send_version,
    work_behind_the_model,
)
from llamarl.ddma.route import WeightsRoute
from llamarl.errors import PeerDied, TimedOut, WeightsError
from llamarl.models.config import ModelConfig
from llamarl.models.fsdp import local
from llamarl.models.quantize import quantize_rows
from llamarl.models.sharding import SCALE, aligned

LOOK_S = 0.2  # between two looks at whether a free slot can still be hoped for


class WeightsSender:
    """The trainer rank's end of a Weights channel."""

    def __init__(self, route: WeightsRoute):
        self._route = route
        self._publisher: Publisher | None = None

    def bind(
        self,
        config: ModelConfig,
        parameters: Sequence[tuple[str, Tensor]],
        tensor_group: dist.ProcessGroup | None = None,
    ) -> TransferPlan:
        """Publish these parameters from now on: plain, or DTensors sharded as the route says.

        tensor_group: the ranks that share each layer, if there are several. Returns the plan.
        WeightsError if a parameter's local shape is not what the topology says.
        """
        route = self._route
        self._plan = route.plan(config)
        links, buckets = self._make_links(self._plan)
        self._staging = Staging(route, self._plan, dict(parameters), buckets, tensor_group)
        device = local(parameters[0][1]).device
        slots = make_slots(
            aligned(buckets[-1].end) if buckets else 0,
            device if route.on_device else torch.device("cpu"),
            shared=any(out.link.transport == "shm" for out in links),
            pinned=device.type == "cuda",
        )
        # A device's copies are not counted as they end.
        if device.type != "cpu" or route.ranks_outnumber_cores:
            slots = replace(slots, counters=[])
        self._publisher = Publisher(route.context, slots, links)
        return self._plan

    def _make_links(self, plan: TransferPlan) -> tuple[list[Outgoing], list[Bucket]]:
        """Return the links to all receivers, and the buckets of all links in the order of their
        numbers.

        Replicas that get the same bytes get them from one place.
        """
        route = self._route
        rank = route.sources.index(route.rank)
        links: list[Outgoing] = []
        buckets: list[Bucket] = []
        for part in range(route.destination.parts):
            start = aligned(buckets[-1].end) if buckets else 0
            carried = buckets_of(plan.regions(rank, part, start), route.bucket_bytes)
            if not carried:
                continue
            for replica in plan.feeds(rank):
                d = replica * route.destination.parts + part
                link = route.link_to(route.destinations[d])
                links.append(Outgoing(link, len(buckets), carried))
            buckets += carried
        return links, buckets

    def publish(
        self,
        version: int,
        *,
        must_differ: bool,
        must_load: bool = False,
        must_arrive: bool = False,
        evaluate: bool = False,
        canary: Callable[[], dict] = dict,
    ) -> float:
        """Stage this rank's shard as `version`; threads send it afterwards.

        must_differ: the optimizer had a gradient, so a payload equal to the last one ends the run
        with WeightsError. must_load: no newer version may take its place before the receivers have
        loaded it. evaluate: they evaluate it, and so must load it too. canary() runs after staging,
        while buckets travel: what the receivers are to check the version with.

        Returns the seconds that the caller was held for, without those of canary(). TimedOut if no
        slot comes free: the receivers have not taken the version before last. After a stop request
        generators take none, and once a rank is lost nothing can be sent: a version without a slot
        is then given up, with canary() called all the same, for what is collective in it.
        must_arrive: a stop is no reason to give it up, for the receivers still take what was sent.
        """
        began = time.monotonic()
        # Collective, and so not left to whether this rank has a slot to stage in.
        self._staging.quantize()
        queued = self._bound.enqueue(
            version,
            must_load=must_load or evaluate,
            must_arrive=must_arrive,
            evaluate=evaluate,
            must_differ=must_differ,
        )
        if queued is None:
            stall_s = time.monotonic() - began
            canary()  # the other trainer ranks take part in it, and may not know yet
            return stall_s
        self._staging.fill(queued.data, queued.progress)
        queued.staged.set()
        stall_s = time.monotonic() - began
        queued.seal(canary())
        return stall_s

    @property
    def _bound(self) -> Publisher:
        assert self._publisher is not None, "`bind` comes first, and `close` last"
        return self._publisher

    def has_room(self) -> bool:
        """Whether `publish` can go on without waiting for a receiver that only this rank's loop
        moves on.
        """
        route = self._route
        return route.rank not in route.destinations or self._bound.has_room()

    @property
    def receivers(self) -> tuple[int, ...]:
        """The ranks that load what is published."""
        return self._route.destinations

    @property
    def bytes_per_sync(self) -> int:
        """The bytes of one version over all links of all ranks."""
        return self._plan.num_bytes

    def close(self) -> None:
        """Close once: the executor does so at its end, and the controller whatever happens."""
        publisher = self._publisher
        self._publisher = None
        if publisher is not None:
            publisher.close()


class Publisher:
    """Sends queued versions, one after another, in a thread of its own.

    links share `slots`. Where these have counters, a version is on its way while it is staged; else
    it waits for that, where both would share a core.
    """

    def __init__(self, context: LinkContext, slots: Slots, links: list[Outgoing]):
        self.committed_version = -1
        self._newest = -1  # version that was queued
        self._context = context
        self._control = context.control
        self._slots = slots
        self._links = links
        self._while_staging = bool(slots.counters)
        counters: Sequence[Tensor | None] = slots.counters or [None] * NUM_SLOTS
        self._progress = [BucketProgress(counter) for counter in counters]
        self._free: queue.Queue[int] = queue.Queue()
        for slot in range(NUM_SLOTS):
            self._free.put(slot)
        self._queued: queue.Queue[QueuedVersion | None] = queue.Queue()
        self._peers = {out.link.peer for out in links}
        self._last_digests: dict[int, int] = {}
        self._closing = False
        self._thread = self._control.thread(f"publish-{context.name}", self._run)

    def enqueue(
        self,
        version: int,
        *,
        must_load: bool,
        must_arrive: bool = False,
        evaluate: bool,
        must_differ: bool,
    ) -> QueuedVersion | None:
        """Queue a version and return it, with a slot of its own that the caller is to fill.

        None if no slot will come free, and TimedOut if none does (see WeightsSender.publish).
        """
        slot = self._free_slot(version, must_arrive=must_arrive)
        if slot is None:
            return None
        queued = QueuedVersion(
            version=version,
            must_load=must_load,
            evaluate=evaluate,
            slot=slot,
            data=self._slots.tensors[slot],
            progress=self._progress[slot],
            must_differ=must_differ,
        )
        queued.progress.reset()
        self._queued.put(queued)
        feeds_others = any(out.link.peer is not None for out in self._links)
        if not feeds_others or self.committed_version == self._newest:
            for out in self._links:
                out.link.leaving = version
        self._newest = version
        return queued

    def has_room(self) -> bool:
        """Whether a slot is free: `enqueue` then does not wait."""
        return not self._free.empty()

    def _free_slot(self, version: int, *, must_arrive: bool) -> int | None:
        """Return a slot that no version is in.

        None if none will come free: a stop was asked for, unless it must arrive, or a rank is lost
        without which no version is delivered.
        """
        until = time.monotonic() + self._context.timeout_s
        while time.monotonic() < until:
            self._control.check()
            try:
                return self._free.get(timeout=LOOK_S)
            except queue.Empty:
                loss = self._control.loss
                lost = loss.ranks if isinstance(loss, PeerDied) else frozenset()
                is_cut_off = loss is not None and not self._thread.is_alive()
                is_stopped = self._control.stopping and not must_arrive
                if is_stopped or is_cut_off or lost & self._peers:
                    return None
        raise TimedOut(
            f"trainer on rank {self._control.rank}, step {version}: the receivers of "
            f"{self._context} have not taken earlier ones for {self._context.timeout_s:.0f} s "
            f"(committed: version {self.committed_version}); one of them hangs, or an evaluation "
            "outlasts timeout_s"
        )

    def _run(self) -> None:
        where = f"{self._context} from rank {self._control.rank}"
        version = -1
        try:
            work_behind_the_model(self._slots.tensors[0].device)
            try:
                for out in self._links:
                    out.link.offer(self._slots, out.buckets[0].start)
            finally:
                self._slots.close_files()
            while True:
                queued = self._queued.get()
                if queued is None:
                    break
                version = queued.version
                self._deliver(queued)
                self._control.wake()
            self._closing = True
            for out in self._links:
                out.link.send(Header(HeaderKind.CLOSE))
        except WeightsError as error:
            raise WeightsError(f"{where}: {error}") from error
        except PeerDied as error:
            if self._closing:
                return  # that generator has ended already
            text = f"{where}, version {version}: {self._control.gone(error)}"
            raise PeerDied(text, error.ranks) from error

    def _deliver(self, queued: QueuedVersion) -> None:
        if not self._while_staging:
            queued.staged.wait()
        digests = send_version(
            self._links, queued, self._context.copier, while_staging=self._while_staging
        )
        if queued.must_differ and digests and digests == self._last_digests:
            raise WeightsError(
                f"weights of version {queued.version} equal those of the version before, after an "
                "optimizer step: the step changed nothing the generator can see (learning rate too "
                "small for its dtype?)"
            )
        self._last_digests = digests
        self.committed_version = queued.version
        self._free.put(queued.slot)

    def close(self) -> None:
        """Deliver what is queued, then tell the receivers that no more comes.

        Waits a little, not for a peer that is gone.
        """
        self._queued.put(None)
        self._control.join(self._thread)


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
            on_gpu = self._device.type == "cuda"
            torch._foreach_copy_(targets, sources, non_blocking=on_gpu)
            event = None
            if on_gpu:
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
