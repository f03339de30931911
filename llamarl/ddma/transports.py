"""Which transport joins two ranks, from what every rank says of its host and GPU. Pure."""

from __future__ import annotations

from itertools import chain

from llamarl.comm.groups import RankInfo
from llamarl.errors import WeightsError
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
    everyone = {info.rank: info for info in chain.from_iterable(pairs)}.values()
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
