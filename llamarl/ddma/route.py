"""WeightsRoute: which rank sends which regions to which rank, and by which transport. Built once,
from both sides.
"""

from __future__ import annotations

import itertools
from dataclasses import KW_ONLY, dataclass, replace

import torch
import torch.distributed as dist

from llamarl.comm.control import Control
from llamarl.comm.groups import RankInfo
from llamarl.ddma.layout import Destination, Source, parameters_to_send
from llamarl.ddma.links import LocalLink, RankLink
from llamarl.ddma.payload import BUCKET_BYTES, Copier
from llamarl.ddma.plan import TransferPlan, make_plan
from llamarl.ddma.protocol import LinkContext
from llamarl.errors import WeightsError
from llamarl.models.config import ModelConfig
from llamarl.models.quantize import QUANTIZED
from llamarl.words.choices import TRANSPORTS

_ON_DEVICE = ("cuda_ipc", "nccl")  # the nearest first, as in _ON_HOST
_ON_HOST = ("shm", "gloo")

Pairs = list[tuple[RankInfo, RankInfo]]  # (sender, receiver)


def choose_transports(asked: str, pairs: Pairs) -> dict[tuple[int, int], str]:
    """Return (sender rank, receiver rank) -> transport. `asked`: one of TRANSPORTS.

    GPUs on one host use cuda_ipc, on several nccl; without GPUs on both sides shm on one host, gloo
    between two. WeightsError with the reason and what can be done instead, if the one asked for
    cannot join a pair.
    """
    # By rank: to hash what a rank says of itself takes long, and there are many pairs.
    everyone = {info.rank: info for info in itertools.chain.from_iterable(pairs)}.values()
    gpus = {info.gpu for info in everyone}
    # NCCL's group spans all ranks: two on one GPU keep the others from it too.
    all_have_nccl = all(info.nccl for info in everyone)
    nccl_joins_all = all_have_nccl and len(gpus) == len(everyone)
    on_one_host = len({info.host for info in everyone}) == 1
    on_device = None not in gpus and (nccl_joins_all or on_one_host)
    if asked != "auto":
        between = [(a, b) for a, b in pairs if a.rank != b.rank]
        _check(asked, between, nccl_joins_all)
    nearest, other = _ON_DEVICE if on_device else _ON_HOST
    chosen = {}
    for a, b in pairs:
        transport = asked
        if a.rank == b.rank:
            transport = "local"
        elif asked == "auto":
            cannot = _refusal(nearest, a, b, nccl_joins_all)
            transport = nearest if cannot is None else other
        chosen[a.rank, b.rank] = transport
    return chosen


def _check(asked: str, between: Pairs, nccl_joins_all: bool) -> None:
    """Raise WeightsError for the first pair that this transport cannot join, with those that
    can.
    """
    for a, b in between:
        reason = _refusal(asked, a, b, nccl_joins_all)
        if reason is None:
            continue
        others = []
        for other in TRANSPORTS[1:]:
            if all(_refusal(other, *pair, nccl_joins_all) is None for pair in between):
                others.append(other)
        raise WeightsError(
            f"weights.transport={asked}: ranks {a.rank} and {b.rank} {reason}; "
            f"use {' or '.join(others)}, or auto"
        )


def _refusal(transport: str, a: RankInfo, b: RankInfo, nccl_joins_all: bool) -> str | None:
    """Say why a transport cannot join two ranks; None if it can."""
    if transport in ("shm", "cuda_ipc") and a.host != b.host:
        return "are on different hosts"
    if transport in _ON_DEVICE and not (a.gpu and b.gpu):
        return "do not both have a GPU"
    if transport != "nccl":
        return None
    if not (a.nccl and b.nccl):
        return "run a torch without NCCL"
    if a.gpu == b.gpu:
        return "share one GPU, which NCCL refuses"
    if not nccl_joins_all:
        return (
            "would be in one NCCL group with others, of which two share a GPU "
            "or run a torch without NCCL"
        )
    return None


# The receiver reads the sender's memory, so many receivers cost the sender nothing.
_READ_IN_PLACE = ("local", "shm", "cuda_ipc")


@dataclass(eq=False)
class WeightsRoute:
    """The route of a channel: what sender and receiver agree on before any model exists.

    Ranks are global. WeightsError if the transport asked for cannot join two of them.
    """

    name: str
    _: KW_ONLY
    sources: tuple[int, ...]  # trainer ranks, in the order of Source
    destinations: tuple[int, ...]  # generator ranks, in the order of Destination
    source: Source
    destination: Destination
    dtype: torch.dtype  # the generator's, in which weights travel
    quantize: str  # none, fp8 or int8
    exclude: tuple[str, ...]  # fragments of names of projections that stay in dtype
    transport: str  # auto, or one of TRANSPORTS
    ranks: list[RankInfo]  # of the whole world
    group: dist.ProcessGroup | None  # gloo, over both sides
    device_group: dist.ProcessGroup | None  # NCCL, over both sides
    control: Control
    timeout_s: float
    on_host: bool = False  # staging memory is kept off the GPU even where both sides have one

    def __post_init__(self):
        feeding = list(itertools.product(self.sources, self.destinations))
        # A rank may forward to the same part of any later replica.
        parts = self.destination.parts
        forwarding: list[tuple[int, int]] = []
        for index, rank in enumerate(self.destinations):
            forwarding += [(rank, later) for later in self.destinations[index + parts :: parts]]
        ranks = self.ranks
        if self.on_host:
            ranks = [replace(info, gpu=None) for info in ranks]
        pairs = [(ranks[a], ranks[b]) for a, b in feeding + forwarding]
        self._transports = choose_transports(self.transport, pairs)
        self._local_link = LocalLink()
        self._involved = [self.ranks[rank] for rank in {*self.sources, *self.destinations}]
        # Sender and receiver of every link digest in the same memory.
        on_cpu = {"shm", "gloo"} & set(self._transports.values())
        have_gpus = all(info.gpu for info in self._involved)
        self.on_device = have_gpus and not self.on_host and not on_cpu
        self.bucket_bytes = BUCKET_BYTES["cuda" if self.on_device else "cpu"]
        self.copier = Copier("device" if self.on_device else "xxh3")
        self._feed = "direct"
        if any(self._transports[pair] not in _READ_IN_PLACE for pair in feeding):
            self._feed = "auto"
            # What is forwarded lies in a receiver's own memory, which no other process has mapped.
            for pair in forwarding:
                if self._transports[pair] == "shm":
                    self._transports[pair] = "gloo"

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.control.rank

    @property
    def context(self) -> LinkContext:
        """The context that all links of the channel share."""
        return LinkContext(self.name, self.control, self.timeout_s, self.copier)

    def link_to(self, peer: int) -> LocalLink:
        """Return this rank's link to a rank that it sends to."""
        return self._link(peer, self._transports[self.rank, peer])

    def link_from(self, peer: int) -> LocalLink:
        """Return this rank's link from a rank that sends to it."""
        return self._link(peer, self._transports[peer, self.rank])

    def plan(self, config: ModelConfig) -> TransferPlan:
        """Return the plan for a model: which box of which parameter goes from which rank to
        which.
        """
        quantized = QUANTIZED.get(self.quantize)
        parameters = parameters_to_send(config, self.dtype, quantized, self.exclude)
        return make_plan(config, parameters, self.source, self.destination, feed=self._feed)

    @property
    def ranks_outnumber_cores(self) -> bool:
        """Whether the ranks at work on this host have less than a core each.

        Running things at once then only makes each of them slower.
        """
        mine = self.ranks[self.rank]
        here = [info for info in self._involved if info.host == mine.host]
        return len(here) > mine.num_cores

    def _link(self, peer: int, transport: str) -> LocalLink:
        if peer == self.rank:
            return self._local_link
        payload_group = self.device_group if transport == "nccl" else None
        return RankLink(peer, self.group, transport, payload_group)
