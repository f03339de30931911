"""Which transport joins two ranks, from what every rank says of its host and GPU. Pure."""

from __future__ import annotations

from llamarl.comm.groups import RankInfo
from llamarl.errors import WeightsError

TRANSPORTS = ("auto", "shm", "gloo", "nccl", "cuda_ipc")
_ON_DEVICE = ("nccl", "cuda_ipc")


def choose_transports(
    asked: str, pairs: list[tuple[RankInfo, RankInfo]]
) -> dict[tuple[int, int], str]:
    """(sender rank, receiver rank) -> transport. `asked`: one of TRANSPORTS.

    GPUs on one host use cuda_ipc, on several nccl; without GPUs on both sides shm on one host, gloo
    between two. WeightsError with the reason and what can be done instead, if the one asked for
    cannot join a pair.
    """
    chosen = {}
    everyone = {end.rank: end for pair in pairs for end in pair}
    hosts, gpus = ({getattr(end, what) for end in everyone.values()} for what in ("host", "gpu"))
    # NCCL's group spans all ranks, so two on one GPU keep the others from it too.
    nccl = len(gpus) == len(everyone) and all(end.nccl for end in everyone.values())
    on_device = None not in gpus and (nccl or len(hosts) == 1)
    for a, b in pairs:
        if a.rank == b.rank:
            chosen[a.rank, b.rank] = "local"
            continue
        order = ("cuda_ipc", "nccl") if on_device else ("shm", "gloo")
        if asked == "auto":
            chosen[a.rank, b.rank] = next(t for t in order if _refusal(t, a, b) is None)
            continue
        reason = _refusal(asked, a, b)
        if asked == "nccl" and reason is None and not nccl:
            reason = "would be in one NCCL group with others, of which two share a GPU or run a torch without NCCL"
        if reason:
            others = [
                t
                for t in TRANSPORTS[1:]
                if t != asked
                and (nccl or t != "nccl")
                and all(_refusal(t, x, y) is None for x, y in pairs if x.rank != y.rank)
            ]
            raise WeightsError(
                f"weights.transport={asked}: ranks {a.rank} and {b.rank} {reason}; use {' or '.join(others)}, or auto"
            )
        chosen[a.rank, b.rank] = asked
    return chosen


def _refusal(transport: str, a: RankInfo, b: RankInfo) -> str | None:
    """Why a transport cannot join two ranks; None if it can."""
    if transport == "gloo":
        return None
    if transport in ("shm", "cuda_ipc") and a.host != b.host:
        return "are on different hosts"
    if transport in _ON_DEVICE and not (a.gpu and b.gpu):
        return "do not both have a GPU"
    if transport == "nccl":
        if not (a.nccl and b.nccl):
            return "run a torch without NCCL"
        if a.gpu == b.gpu:
            return "share one GPU, which NCCL refuses"
    return None
