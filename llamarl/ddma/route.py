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
from llamarl.ddma.copies import Copier
from llamarl.ddma.layout import Destination, Source, parameters_to_send
from llamarl.ddma.links import LocalLink, RankLink
from llamarl.ddma.payload import BUCKET_BYTES
from llamarl.ddma.plan import TransferPlan, make_plan
from llamarl.ddma.protocol import LinkContext
from llamarl.ddma.transports import choose_transports
from llamarl.models.config import ModelConfig
from llamarl.models.quantize import QUANTIZED

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
