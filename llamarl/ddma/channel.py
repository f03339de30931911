"""The channel of the weights, as a recipe declares it."""

from __future__ import annotations

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
from llamarl.executor import Inputs, Messages, Outputs
from llamarl.types import Policy

RESET = "reset"  # the leader's word that a version was sent to the reference


def receiver_of(inputs: Inputs, weights: type[Policy] = Policy) -> WeightsReceiver:
    """Return the one end that brings these weights to an executor."""
    # A channel of weights gives an executor ends of its own kind, and a test gives it others.
    return cast(WeightsReceiver, inputs.of(weights))


def senders_of(outputs: Outputs, weights: type[Policy] = Policy) -> list[WeightsSender]:
    """Return the ends by which an executor sends these weights."""
    return cast(list[WeightsSender], outputs.all_of(weights))


def sender_of(outputs: Outputs, weights: type[Policy] = Policy) -> WeightsSender:
    """Return the one end by which an executor sends these weights."""
    return cast(WeightsSender, outputs.of(weights))


def send_reset(sender: WeightsSender, version: int, messages: Messages) -> None:
    """Send the reference the weights that it takes over (TBA's reset), and have the leader announce
    them: by a message, so that they stay in order with its messages about checkpoints.

    The reference takes in what is announced before the next checkpoint, so no rank gives up its
    part of it for a stop.
    """
    sender.publish(version, must_load=True, must_arrive=True, must_differ=False)
    if messages.is_leader:
        for rank in sender.receivers:
            messages.post(rank, RESET, {"version": version})


@dataclass(frozen=True)
class Weights(Channel):
    """Carries policy weights shard to shard, from a trainer to the executor that computes with
    them. Each rank of that executor has an end of its own, for its part of a copy. The form in
    which they travel is the destination's `weights_form`.
    """

    _: KW_ONLY
    carries: type = Policy

    def connect(
        self, context: ConnectContext
    ) -> tuple[WeightsSender | None, WeightsReceiver | None]:
        """Make this rank's ends; see Channel.connect. WeightsError if the transport asked for
        cannot join two ranks.
        """
        sources = context.placement[self.source.name]
        destinations = context.placement[self.destination.name]
        form = self.destination.weights_form
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
            dtype=getattr(torch, form.dtype),
            quantize=form.quantize,
            exclude=form.exclude,
            transport=form.transport,
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
