"""One message between two ranks over a process group: its length, then its bytes. Blocking; call it
from a channel's own thread.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

_CLOSED = -1


def send_message(
    payload: bytes | bytearray, rank: int, group: dist.ProcessGroup, tag: int = 0
) -> None:
    """Returns once the peer has begun to take the payload."""
    dist.send(torch.tensor([len(payload)]), rank, group=group, tag=tag)
    if payload:
        dist.send(
            torch.frombuffer(bytearray(payload), dtype=torch.uint8), rank, group=group, tag=tag
        )


def recv_message(rank: int, group: dist.ProcessGroup, tag: int = 0) -> bytes | None:
    """The next message from `rank`, or None when it has closed its side."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, rank, group=group, tag=tag)
    if int(size) == _CLOSED:
        return None
    payload = torch.empty(int(size), dtype=torch.uint8)
    if size:
        dist.recv(payload, rank, group=group, tag=tag)
    return payload.numpy().tobytes()


def send_closed(rank: int, group: dist.ProcessGroup, tag: int = 0) -> None:
    dist.send(torch.tensor([_CLOSED]), rank, group=group, tag=tag)
