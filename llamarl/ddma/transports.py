"""Which transport joins two ranks, from what every rank says of its host and GPU. Pure."""

from __future__ import annotations

from llamarl.comm.groups import RankInfo
from llamarl.errors import WeightsError
from llamarl.words.choices import TRANSPORTS

_ON_DEVICE = ("cuda_ipc", "nccl")  # the nearest first, as in _ON_HOST
_ON_HOST = ("shm", "gloo")

Pairs = list[tuple[RankInfo, RankInfo]]  # (sender, receiver)


def choose_transports(asked: str, pairs: Pairs) -> dict[tuple[int, int], str]:
    """(sender rank, receiver rank) -> transport. `asked`: one of TRANSPORTS.

    GPUs on one host use cuda_ipc, on several nccl; without GPUs on both sides shm on one host, gloo
    between two. WeightsError with the reason and what can be done instead, if the one asked for
    cannot join a pair.
    """
    everyone: dict[int, RankInfo] = {}
    for a, b in pairs:
        everyone[a.rank] = a
        everyone[b.rank] = b
    nccl_joins_all = _nccl_joins(list(everyone.values()))
    on_one_host = len({info.host for info in everyone.values()}) == 1
    have_gpus = all(info.gpu is not None for info in everyone.values())
    nearest_first = _ON_DEVICE if have_gpus and (nccl_joins_all or on_one_host) else _ON_HOST
    between = [(a, b) for a, b in pairs if a.rank != b.rank]
    if asked != "auto":
        _check(asked, between, nccl_joins_all)
    chosen = {(a.rank, b.rank): "local" for a, b in pairs}
    for a, b in between:
        can = [t for t in nearest_first if _refusal(t, a, b, nccl_joins_all) is None]
        chosen[a.rank, b.rank] = can[0] if asked == "auto" else asked
    return chosen


def _check(asked: str, between: Pairs, nccl_joins_all: bool) -> None:
    """WeightsError for the first pair that this transport cannot join, with those that can."""
    for a, b in between:
        reason = _refusal(asked, a, b, nccl_joins_all)
        if reason is None:
            continue
        others = [t for t in TRANSPORTS[1:] if _can_join_all(t, between, nccl_joins_all)]
        raise WeightsError(
            f"weights.transport={asked}: ranks {a.rank} and {b.rank} {reason}; "
            f"use {' or '.join(others)}, or auto"
        )


def _can_join_all(transport: str, between: Pairs, nccl_joins_all: bool) -> bool:
    return all(_refusal(transport, a, b, nccl_joins_all) is None for a, b in between)


def _nccl_joins(everyone: list[RankInfo]) -> bool:
    """Whether NCCL can. Its group spans all ranks: two on one GPU keep the others from it too."""
    gpus = {info.gpu for info in everyone}
    return len(gpus) == len(everyone) and all(info.nccl for info in everyone)


def _refusal(transport: str, a: RankInfo, b: RankInfo, nccl_joins_all: bool) -> str | None:
    """Why a transport cannot join two ranks; None if it can."""
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
