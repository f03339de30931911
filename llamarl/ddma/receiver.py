"""WeightsReceiver: the generator rank's end of a Weights channel.

    receiver.bind(config, named_parameters)   # once
    staged = receiver.swap()                  # between two chunks: a new version, or None

llamarl.ddma.protocol says how a version travels.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from llamarl.ddma.forwarder import Forwarder
from llamarl.ddma.layout import FUSED, Buffer, Region, buffer_of
from llamarl.ddma.links import Header, HeaderKind, LocalLink
from llamarl.ddma.payload import Bucket, Target, buckets_of
from llamarl.ddma.plan import TransferPlan
from llamarl.ddma.protocol import MAX_RETRIES, LinkContext, Outgoing, work_behind_the_model
from llamarl.ddma.route import WeightsRoute
from llamarl.errors import LinkTimeout, PeerDied, TimedOut, WeightsError
from llamarl.models.config import ModelConfig
from llamarl.models.fsdp import is_dtensor, local
from llamarl.models.sharding import Box

# Buckets that may arrive before the thread of their link, which works behind the model, comes to
# look at them.
AHEAD = 8
LOOK_S = 0.2  # between two looks at whether a version can still be hoped for


@dataclass(frozen=True, slots=True)
class Staged:
    """A whole, verified version that waits for `swap`."""

    version: int
    must_load: bool = False  # no newer version may take its place
    evaluate: bool = False  # it is to be evaluated once it is loaded
    canary: dict = field(default_factory=dict)  # what the sender lets the receiver check it with


@dataclass(frozen=True, slots=True)
class Incoming:
    """A link as its receiver sees it, with the buckets that it carries and the rank that sends
    them.
    """

    link: LocalLink
    buckets: tuple[Bucket, ...]
    sender: str  # for errors: "trainer rank 0"


class WeightsReceiver:
    """The generator rank's end of a Weights channel."""

    def __init__(self, route: WeightsRoute):
        self._route = route
        self._subscriber: Subscriber | None = None

    def bind(self, config: ModelConfig, parameters: list[tuple[str, nn.Parameter]]) -> None:
        """Receive into these parameters from now on.

        They are this rank's parts, in the dtype that travels, or several of them in one
        (layout.FUSED); plain, or DTensors that FSDP2 has sharded. WeightsError if one has another
        shape or dtype than what will come, or if nothing will.
        """
        route = self._route
        plan = route.plan(config)
        me = route.destinations.index(route.rank)
        part = me % route.destination.parts
        if not plan.shard_bytes[part]:
            raise WeightsError(
                f"rank {route.rank}: none of the model's rows fall to it, among the "
                f"{route.destination.parts} ranks of {self._route.name}; place it on fewer"
            )
        names = " ".join(name for name, _ in parameters)
        fuse = any(group in names for group in FUSED)
        of = buffer_of(config, plan.parameters, route.destination, part, fuse=fuse)
        self._of = of
        self._named = parameters
        self._parameters = [parameter for _, parameter in parameters]
        buffers = self._make_buffers(of.num_bytes, parameters[0][1].device)
        self._views = {flat.data_ptr(): _views_of(flat, of, parameters) for flat in buffers}
        whole = buckets_of(of.held.values(), route.bucket_bytes)
        after = plan.follower(me)
        follower = None
        if after is not None:
            link = route.link_to(route.destinations[after])
            follower = Outgoing(link, first_bucket=0, buckets=whole)
        self._subscriber = Subscriber(
            route.context,
            of,
            buffers,
            self._incoming(plan, me, whole),
            follower=follower,
            in_order=route.destination.parts > 1,
        )

    def _make_buffers(self, num_bytes: int, device: torch.device) -> list[Tensor]:
        """Allocate two buffers that change places, or one. One is enough where others hold the
        parameters' addresses (graphs on a GPU, FSDP, adapters that lie beside their weight) and
        weights are copied over.
        """
        stay = any(is_dtensor(p) or not p.is_contiguous() for p in self._parameters)
        self._exchange = device.type == "cpu" and not stay
        if self._route.on_device:
            zeros = partial(torch.zeros, num_bytes, dtype=torch.uint8, device=device)
        else:
            is_pinned = device.type == "cuda"
            zeros = partial(torch.zeros, num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        count = 2 if self._exchange else 1
        return [zeros() for _ in range(count)]

    def _incoming(self, plan: TransferPlan, me: int, whole: tuple[Bucket, ...]) -> list[Incoming]:
        """Return the links from all that send to this rank: trainer ranks, or another generator
        rank.
        """
        route = self._route
        feeders, upstream = plan.feeders(me)
        if upstream is not None:
            peer = route.destinations[upstream]
            return [Incoming(route.link_from(peer), whole, f"generator rank {peer}")]
        links = []
        for source in feeders:
            peer = route.sources[source]
            regions = plan.regions(source, me % route.destination.parts)
            buckets = buckets_of(regions, route.bucket_bytes)
            links.append(Incoming(route.link_from(peer), buckets, f"trainer rank {peer}"))
        return links

    @property
    def _bound(self) -> Subscriber:
        assert self._subscriber is not None, "`bind` comes first"
        return self._subscriber

    def wait_for_local(self) -> None:
        """Wait until the version that this rank's own trainer published last is staged.

        Its bytes, which threads of this process copy behind the model, would else race with what
        the rank does next. Returns at once where no trainer is on this rank, where an older version
        is staged or still on its way to another rank, and where bytes are sent from elsewhere:
        those take longer than they are worth. TimedOut if it does not come.
        """
        self._bound.wait_for_local()

    @property
    def staged(self) -> Staged | None:
        """The version that `swap` would bring in, or None."""
        return self._bound.staged

    @property
    def overtakable(self) -> bool:
        """Whether a newer version waits for the place of the staged one, which may be skipped."""
        return self._bound.overtakable

    def skip(self, version: int) -> None:
        """Drop the staged version, if it is this one, so that a newer one can come."""
        self._bound.skip(version)

    @torch.no_grad()
    def swap(self) -> Staged | None:
        """Put the staged version in place, if there is one, and return it.

        On a CPU that is an exchange of pointers, on a GPU or into shards one copy.
        """
        with self._bound.handover() as (staged, buffer):
            if staged is None:
                return None
            views = self._views[buffer.data_ptr()]
            if self._exchange:
                for parameter, view in zip(self._parameters, views):
                    parameter.data = view
            else:
                targets = [local(parameter) for parameter in self._parameters]
                on_gpu = targets[0].is_cuda
                torch._foreach_copy_(targets, views, non_blocking=on_gpu)
                if on_gpu:
                    torch.cuda.current_stream().synchronize()  # the buffer may be written again
            return staged

    def held(self) -> dict[str, tuple[Box, Tensor]]:
        """Return name -> which box of that tensor this rank has, and what its parameters hold of
        it, for each tensor that travels.
        """
        held = {}
        for name, parameter in self._named:
            first = 0
            for region in _members(self._of, name):
                end = first + region.box.lengths[0]
                held[region.name] = region.box, local(parameter)[first:end]
                first = end
        return held

    def close(self) -> None:
        """Close once: the executor does so at its end, and the controller whatever happens."""
        subscriber = self._subscriber
        self._subscriber = None
        if subscriber is not None:
            subscriber.close()


def _members(of: Buffer, name: str) -> list[Region]:
    """Return the regions of a buffer that lie end to end in a parameter."""
    return [of.held[n] for n in of.fused.get(name, (name,)) if n in of.held]


def _views_of(flat: Tensor, of: Buffer, parameters: list[tuple[str, nn.Parameter]]) -> list[Tensor]:
    """Return the typed view of each parameter in a buffer [bytes] uint8. WeightsError (see
    bind).
    """
    views = []
    for name, parameter in parameters:
        members = _members(of, name)
        if not members:
            raise WeightsError(
                f"{name}: the generator's model has it, the trainer's weights do not"
            )
        first = members[0]
        dtype = first.parameter.dtype
        rows = sum(held.box.lengths[0] for held in members)
        shape = (rows, *first.box.lengths[1:])
        held = tuple(local(parameter).shape)
        if parameter.dtype != dtype or held != shape:
            raise WeightsError(
                f"{name}: the generator holds {held} {parameter.dtype}, {shape} {dtype} would come"
            )
        run = flat[first.start : members[-1].end]
        views.append(run.view(dtype).view(shape))
    return views


class Subscriber:
    """Receives into the idle buffer, with a thread a link, and hands it over at a swap.

    buffers: [bytes] uint8, two that change places at a swap, or one whose content the caller copies
    out. follower: the link to the replica that this one forwards its weights to. in_order: no
    version is overtaken by a newer one before `skip` says so; ranks that share a copy of the model
    need that, to take the same ones.
    """

    def __init__(
        self,
        context: LinkContext,
        of: Buffer,
        buffers: list[Tensor],
        links: list[Incoming],
        *,
        follower: Outgoing | None = None,
        in_order: bool = False,
    ):
        self.device = buffers[0].device
        self.idle = 0  # the number of the buffer that is not live
        self.is_closing = False  # a peer that is gone is no loss any more
        self._in_order = in_order
        self._buffers = buffers
        self._state = threading.Condition()
        self._staged: Staged | None = None
        self._receiving: int | None = None  # the version that the idle buffer is claimed for
        self._num_links = len(links)
        self._missing: set[int] = set()  # links that have not brought their part of it
        self._newest = -1  # version that began to come; the idle buffer may not be its yet
        self._is_forwarding = False  # the version in the idle buffer, or in what is live by now
        self.forwarder: Forwarder | None = None
        if follower is not None:
            arriving = [incoming.buckets for incoming in links]
            self.forwarder = Forwarder(
                context, follower, buffers, arriving=arriving, on_sent=self._forwarded
            )
        self._context = context
        self._control = context.control
        self._live = -1  # the version that was swapped in last
        # The link from this rank's own trainer, if a version that it brings waits for no other rank
        # but the trainer's, which publish it together.
        self._local: LocalLink | None = None
        if follower is None and not in_order:
            self._local = _local_of(links)
        self._threads = []
        for index, incoming in enumerate(links):
            targets = []
            for flat in buffers:
                targets.append([Target(bucket, of, flat) for bucket in incoming.buckets])
            reader = _LinkReader(context, self, index, incoming=incoming, targets=targets)
            thread = context.control.thread(f"subscribe-{context.name}-{index}", reader.run)
            self._threads.append(thread)

    @property
    def staged(self) -> Staged | None:
        """The version that waits for a swap, or None."""
        return self._staged

    @property
    def overtakable(self) -> bool:
        """Whether a newer version waits for the place of the staged one, which may be skipped."""
        staged = self._staged
        if staged is None or staged.must_load:
            return False
        return self._newest > staged.version

    def skip(self, version: int) -> None:
        """Drop the staged version, if it is this one, so that a newer one can come."""
        with self._state:
            if self._staged is not None and self._staged.version == version:
                self._staged = None
                self._state.notify_all()

    @contextmanager
    def handover(self) -> Iterator[tuple[Staged | None, Tensor]]:
        """Yield the staged version and its buffer, which is the live one afterwards; None if none
        waits.

        With two buffers it stays valid until the next swap; with one, it must be copied out inside.
        """
        with self._state:
            staged = self._staged
            yield staged, self._buffers[self.idle]
            if staged is not None:
                self.idle = (self.idle + 1) % len(self._buffers)
                self._staged = None
                self._live = staged.version
                self._state.notify_all()

    def wait_for_local(self) -> None:
        """Wait for the version of this rank's trainer (see WeightsReceiver.wait_for_local)."""
        until = time.monotonic() + self._context.timeout_s
        while self._is_local_coming() and time.monotonic() < until:
            self._control.check()
            if self._control.stopping or self._control.loss is not None:
                return  # a trainer's rank may have given it up
            with self._state:
                self._state.wait_for(lambda: not self._is_local_coming(), timeout=LOOK_S)
        if self._is_local_coming():
            assert self._local is not None
            raise TimedOut(
                f"generator on rank {self._control.rank}: version {self._local.leaving}, which "
                f"this rank's trainer has published, was not here after "
                f"{self._context.timeout_s:.0f} s (in use: version {self._live}); another trainer "
                "rank hangs, or timeout_s is too short for a copy of the weights"
            )

    def _is_local_coming(self) -> bool:
        if self._local is None or self._staged is not None or self.is_closing:
            return False
        return self._local.leaving > self._live

    def claim(self, version: int, *, must_load: bool, evaluate: bool) -> bool:
        """Wait until the idle buffer is this version's. Returns False when closing.

        A staged version is dropped for it, unless that must be loaded or this is in order.
        """
        with self._state:
            self._newest = max(self._newest, version)
            self._state.wait_for(lambda: self.is_closing or self._is_open_to(version))
            if self.is_closing:
                return False
            if self._receiving is None:
                self._staged = None
                self._receiving = version
                self._missing = set(range(self._num_links))
                if self.forwarder is not None:
                    self._is_forwarding = True
                    self.forwarder.begin(version, self.idle, must_load=must_load, evaluate=evaluate)
            return True

    def _is_open_to(self, version: int) -> bool:
        """Whether this version may be written into the idle buffer."""
        if self._receiving is not None or self._is_forwarding:
            return self._receiving == version
        staged = self._staged
        return staged is None or not (staged.must_load or self._in_order)

    def complete(self, link: int, whole: Staged) -> None:
        """Note that a link has brought its part of a version. The version is staged when all links
        have.
        """
        with self._state:
            self._missing.discard(link)
            if not self._missing:
                self._staged = whole
                self._receiving = None
                if self.forwarder is not None:
                    self.forwarder.seal(whole.canary)
                self._state.notify_all()

    def _forwarded(self) -> None:
        with self._state:
            self._is_forwarding = False
            self._state.notify_all()

    def close(self) -> None:
        """End the threads. Waits a little, but not for a peer that is gone."""
        with self._state:
            self.is_closing = True
            self._state.notify_all()
        if self.forwarder is not None:
            self.forwarder.close()
        for thread in self._threads:
            self._control.join(thread)


def _local_of(links: list[Incoming]) -> LocalLink | None:
    """Return the link from this process's sender; None without one, or if any link sends bytes."""
    if any(incoming.link.streams for incoming in links):
        return None
    for incoming in links:
        if incoming.link.peer is None:
            return incoming.link
    return None


class _LinkReader:
    """Receives one link's part of every version, in a thread of its own.

    targets: of each of the subscriber's buffers, where the link's buckets go in it.
    """

    def __init__(
        self,
        context: LinkContext,
        subscriber: Subscriber,
        index: int,
        *,
        incoming: Incoming,
        targets: list[list[Target]],
    ):
        self._context = context
        self._subscriber = subscriber
        self._index = index
        self._sender = incoming.sender
        self._targets = targets
        self._link = incoming.link
        self._buckets = incoming.buckets
        # Places for buckets that are scattered from there. They are kept: fresh memory is slow.
        self._scratches: list[Tensor] = []
        scatters = any(target.in_place is None for target in targets[0])
        if self._link.streams and scatters:
            largest = max(bucket.end - bucket.start for bucket in self._buckets)
            for _ in range(AHEAD):
                scratch = torch.empty(largest, dtype=torch.uint8, device=subscriber.device)
                self._scratches.append(scratch)

    def run(self) -> None:
        """Receive until the sender closes."""
        control = self._context.control
        where = f"{self._context} on rank {control.rank}, from {self._sender}"
        try:
            work_behind_the_model(self._subscriber.device)
            self._link.accept()
            while self._receive_version():
                control.wake()
            if self._subscriber.forwarder is not None and self._index == 0:
                self._subscriber.forwarder.end()
        except WeightsError as error:
            raise WeightsError(f"{where}: {error}; the version in use is unchanged") from error
        except PeerDied as error:
            if not self._subscriber.is_closing:
                raise PeerDied(f"{where}: {control.gone(error)}", error.ranks) from error

    def _receive_version(self) -> bool:
        """Receive this link's part of one version. Returns False when the sender or this end
        closes.
        """
        begin = self._link.recv()
        if begin.kind == HeaderKind.CLOSE:
            return False
        if begin.kind != HeaderKind.BEGIN:
            raise _unexpected(begin, "BEGIN or CLOSE")
        must_load = begin.more["must_load"]
        evaluate = begin.more["evaluate"]
        version = begin.version
        if not self._subscriber.claim(version, must_load=must_load, evaluate=evaluate):
            return False
        wrong: list[int] = []
        for attempt in range(MAX_RETRIES):
            if attempt > 0:
                begin = self._next(HeaderKind.BEGIN, version, wrong)
            found = self._receive_buckets(begin)
            end = self._next(HeaderKind.END, version, sorted(found))
            sent = zip(begin.more["buckets"], end.more["digests"])
            wrong = [i for i, digest in sent if found[i] != digest]
            if wrong and self._subscriber.forwarder is not None:
                self._subscriber.forwarder.repairs()
            verdict = Header(HeaderKind.VERDICT, version, {"wrong": wrong})
            self._link.send(verdict, to_receiver=False)
            if not wrong:
                canary = end.more["canary"]
                self._subscriber.complete(self._index, Staged(version, must_load, evaluate, canary))
                return True
        raise WeightsError(
            f"buckets {wrong} of version {version} were absent or damaged {MAX_RETRIES} times"
        )

    def _next(self, kind: HeaderKind, version: int, missing: list[int]) -> Header:
        """Return the next header. WeightsError if it is not of this kind and version."""
        try:
            header = self._link.recv(timeout_s=self._context.timeout_s)
        except LinkTimeout as error:
            raise self._stopped(version, missing, error) from error
        if (header.kind, header.version) != (kind, version):
            raise _unexpected(header, f"{kind.name} of version {version}")
        return header

    def _stopped(self, version: int, missing: list[int], error: LinkTimeout) -> WeightsError:
        return WeightsError(
            f"version {version} stopped on its way with buckets {missing} of "
            f"{len(self._buckets)} to come: {error}"
        )

    def _receive_buckets(self, begin: Header) -> dict[int, int]:
        """Copy or receive a delivery's buckets into the idle buffer.

        Returns the digest of each as it lies there.
        """
        order = begin.more["buckets"]
        targets = self._targets[self._subscriber.idle]
        found: dict[int, int] = {}
        coming: list[Callable[[float], Tensor]] = []
        for n, i in enumerate(order):
            last = min(n + AHEAD, len(order))
            for ahead in range(len(coming), last):
                coming.append(self._begin_bucket(begin, ahead, targets))
            try:
                data = coming[n](self._context.timeout_s)
            except LinkTimeout as error:
                raise self._stopped(begin.version, order[n:], error) from error
            found[i] = self._context.copier.copy_parts(data, targets[i].parts)
            if self._subscriber.forwarder is not None:
                self._subscriber.forwarder.arrived(self._index, i)
        return found

    def _begin_bucket(
        self, begin: Header, n: int, targets: list[Target]
    ) -> Callable[[float], Tensor]:
        """Begin to get the n-th bucket of a delivery."""
        i = begin.more["buckets"][n]
        bucket = self._buckets[i]
        num_bytes = bucket.end - bucket.start
        place = targets[i].in_place
        if place is None and self._link.streams:
            place = self._scratches[n % AHEAD][:num_bytes]
        return self._link.fetch(
            begin.more["slot"],
            bucket.start,
            num_bytes,
            scratch=place,
            staged=begin.more["first"] + i + 1 if begin.more["staging"] else 0,
        )


def _unexpected(header: Header, expected: str) -> WeightsError:
    came = f"{header.kind.name} of version {header.version}"
    return WeightsError(f"{came} came where {expected} was expected")
