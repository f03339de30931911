"""The channel of the weights, as a recipe declares it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import cast

import torch

from llamarl.comm.channel import Channel, ConnectContext
from llamarl.comm.groups import device_link_group
from llamarl.ddma.layout import Destination, Source
from llamarl.ddma.protocol import lower_priority
from llamarl.ddma.receiver import WeightsReceiver
from llamarl.ddma.route import WeightsRoute
from llamarl.ddma.sender import WeightsSender
from llamarl.models.sharding import HEAD

REFERENCE_WEIGHTS = "reference_policy"  # the channel of the weights that the reference is reset to


# the leader's word that a version was sent there; in order with its word of checkpoints
RESET = "reset"


def receiver_of(ends: Mapping[str, object], name: str) -> WeightsReceiver:
    """Return the receiving end of the weights channel `name` among an executor's inputs."""
    # A channel of weights gives an executor ends of its own kind, and a test gives it others.
    return cast(WeightsReceiver, ends[name])


def sender_of(ends: Mapping[str, object], name: str) -> WeightsSender:
    """Return the sending end of the weights channel `name` among an executor's outputs."""
    return cast(WeightsSender, ends[name])


@dataclass(frozen=True)
class Weights(Channel):
    """Carries policy weights shard to shard, from a trainer to the executor that computes with
    them. Each rank of that executor has an end of its own, for its part of a copy.

    dtype: the one that they travel in, which is the destination's. quantize: "none", or the form in
    which projections travel, "fp8" or "int8"; exclude: fragments of the names of those that stay in
    dtype. transport: "auto", or one of ddma.transports.TRANSPORTS.
    """

    _: KW_ONLY
    dtype: str = "float32"
    quantize: str = "none"
    exclude: tuple[str, ...] = (HEAD,)
    transport: str = "auto"

    def connect(
        self, context: ConnectContext
    ) -> tuple[WeightsSender | None, WeightsReceiver | None]:
        """Make this rank's ends; see Channel.connect. WeightsError if the transport asked for
        cannot join two ranks.
        """
        sources = context.placement[self.source.name]
        destinations = context.placement[self.destination.name]
        replicate = self.source.replicate
        source_tp = self.source.tensor_parallel
        tp = self.destination.tensor_parallel
        copies = len(destinations) // tp
        if self.destination.first_takes:  # its ranks act as one, and share what they hold
            copies = self.destination.replicate
        route = WeightsRoute(
            self.name,
            sources=sources,
            destinations=destinations,
            source=Source(len(sources) // (replicate * source_tp), replicate, source_tp),
            destination=Destination(
                tp=tp,
                replicas=copies,
                fsdp=len(destinations) // (tp * copies),
                split_vocabulary=self.destination.split_vocabulary,
            ),
            on_host=context.on_host,
            dtype=getattr(torch, self.dtype),
            quantize=self.quantize,
            exclude=self.exclude,
            transport=self.transport,
            ranks=context.ranks,
            group=self.link_group(context, behind=lower_priority),
            device_group=device_link_group(sources, destinations, context.ranks),
            control=context.control,
            timeout_s=context.timeout_s,
        )
        rank = context.control.rank
        sender = WeightsSender(route) if rank in sources else None
        receiver = WeightsReceiver(route) if rank in destinations else None
        return sender, receiver
