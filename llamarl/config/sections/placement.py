"""The sections `placement` and `weights`: which executor has which ranks, how weights travel
between them, and what cannot be asked for.

Where null is given, llamarl/config/placement.py finds ranks, and what these cannot host.
"""

from __future__ import annotations

import dataclasses

from llamarl.words.choices import Transport
from llamarl.words.fields import AnyText, RankList, Texts, settings_dataclass
from llamarl.words.findings import Findings, show

# Executors with a model on the device.
COLOCATED = ("trainer", "generator", "victim", "reward", "reference")


@settings_dataclass
class PlacementSettings:
    trainer: RankList | None
    """Ranks of the trainer; null: the first half."""
    generator: RankList | None
    """Ranks of the generators; null: the rest."""
    reward: RankList | None
    """Ranks of the reward; null: a free rank, or the generators' last."""
    reference: RankList | None
    """Ranks of the reference; null: as of the reward."""
    victim: RankList | None
    """Ranks of the victim, each of which holds all of it; null: as of the reward."""
    colocate: Texts | None
    """Executors that share the same ranks, such as [trainer,generator]; null: none."""
    sheet: AnyText | None
    """A hardware profile, by file or name (h100), from which the planner chooses the ranks of
    trainer and generator; null: none.
    """


def find_asked(
    placement: PlacementSettings, found: Findings, *, offload: bool, max_lag: int | None
) -> None:
    """Find an offload without executors to move, ranks that are given beside a hardware profile,
    and a profile for a synchronous run.
    """
    if offload and not placement.colocate:
        found.add(
            "offload moves executors that share a device out of each other's way, and none share "
            "one; placement.colocate=[trainer,generator]",
            "offload",
            "placement.colocate",
        )
    if placement.sheet is None:
        return
    for name in ("trainer", "generator", "colocate"):
        if getattr(placement, name) is not None:
            what = "set placement.sheet or explicit ranks, not both"
            found.add(what, "placement.sheet", f"placement.{name}")
    if max_lag == 0:
        what = "a synchronous run gains nothing from a split; leave placement.sheet out"
        found.add(what, "placement.sheet", "max_lag")


def find_given_ranks(placement: PlacementSettings, found: Findings, *, world_size: int) -> bool:
    """Find ranks that do not exist, or that contradict placement.colocate. Return whether all are
    possible.
    """
    num_before = len(found.problems)
    given = dataclasses.asdict(placement)
    del given["sheet"]
    together = given.pop("colocate")
    if together is not None and (len(together) < 2 or not set(together) <= set(COLOCATED)):
        what = f"need two or more of {', '.join(COLOCATED)}; or null"
        found.add(what, "placement.colocate")
    elif together is not None:
        keys = [f"placement.{name}" for name in together if given[name]]
        if len({tuple(given[name]) for name in together if given[name]}) > 1:
            names = " and ".join(keys)
            found.add(
                f"{names} are colocated, so they must name the same ranks; or give the ranks of "
                "one of them alone",
                *keys,
            )
    for name, ranks in given.items():
        if ranks is not None:
            _find_ranks(f"placement.{name}", ranks, found, world_size=world_size)
    return len(found.problems) == num_before


def _find_ranks(key: str, ranks: list[int], found: Findings, *, world_size: int) -> None:
    """Find an empty list, a rank that is named twice, or one that does not exist."""
    if not ranks or len(set(ranks)) < len(ranks):
        found.add("need at least one rank, each once; or null", key)
    outside = [rank for rank in ranks if not 0 <= rank < world_size]
    if outside:
        there_are = "rank 0 is the only one"
        if world_size > 1:
            there_are = f"ranks are 0 to {world_size - 1}"
        found.add(f"no rank {show(outside)}: {there_are} (torchrun --nproc-per-node)", key)


@settings_dataclass
class WeightsSettings:
    transport: Transport
    """How weights travel. shm, cuda_ipc: between ranks of one host; gloo, nccl: over a network;
    auto: the best that connects the ranks.
    """


def find_weights(
    weights: WeightsSettings, found: Findings, *, cpu_offload: bool, num_hosts: int
) -> None:
    """Find transports that cannot connect the ranks. cpu_offload: the trainer's."""
    transport = weights.transport
    if transport in ("nccl", "cuda_ipc") and cpu_offload:
        found.add(
            "with cpu_offload weights leave from host memory, which only shm and gloo can read; "
            "weights.transport=auto",
            "weights.transport",
            "trainer.cpu_offload",
        )
    if transport in ("shm", "cuda_ipc") and num_hosts > 1:
        found.add(
            f"ranks on {num_hosts} hosts share no memory; weights.transport=gloo or nccl, or auto",
            "weights.transport",
        )
