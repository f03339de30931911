"""Routes of weights, for tests that have no process groups or that bring their own."""

from __future__ import annotations

import torch

from llamarl.comm.control import Control
from llamarl.comm.groups import RankInfo
from llamarl.ddma.layout import Destination, Source
from llamarl.ddma.route import WeightsRoute

PATIENCE_S = 20  # for what must come; a busy machine is slow


def control_of(rank: int = 0, world: int = 1) -> Control:
    """Return the control of a rank without a process group."""
    names = [f"executor {number}" for number in range(world)]
    return Control(None, rank=rank, world_size=world, leader=0, names=names)


def route_of(
    rank: int = 0,
    *,
    sources: tuple[int, ...] = (0,),
    destinations: tuple[int, ...] = (0,),
    ranks: list[RankInfo] | None = None,
    control: Control | None = None,
    **changes,
) -> WeightsRoute:
    """Return a rank's route in float32; by default a process's route to itself."""
    ranks = ranks or [RankInfo(number, "host a", None) for number in {*sources, *destinations}]
    defaults = {
        "source": Source(fsdp=len(sources)),
        "destination": Destination(replicas=len(destinations)),
        "dtype": torch.float32,
        "quantize": "none",
        "exclude": (),
        "transport": "auto",
        "group": None,
        "device_group": None,
        "timeout_s": PATIENCE_S,
    }
    return WeightsRoute(
        "policy",
        sources=sources,
        destinations=destinations,
        ranks=ranks,
        control=control or control_of(rank, len(ranks)),
        **defaults | changes,
    )
