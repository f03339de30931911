"""Memory that processes of one host share: a file without a name, mapped by each of them."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor


def shared_file(num_bytes: int) -> int:
    """Return the descriptor of new memory that other processes can map (path_of). OSError without
    room.

    It has no name, so no death can leave it behind.
    """
    file = os.memfd_create("llamarl")
    try:
        os.posix_fallocate(file, 0, max(num_bytes, 1))  # fails here, not with a bus error later
    except OSError:
        os.close(file)
        raise
    return file


def path_of(file: int) -> str:
    """Return the path by which other processes open one of this process's descriptors.

    They must be of this host, this user and this pid namespace.
    """
    return f"/proc/{os.getpid()}/fd/{file}"


def map_shared(file: int, num_bytes: int) -> Tensor:
    """Map the memory behind a descriptor as a tensor [num_bytes] uint8. OSError."""
    # Mapped whole at once: the first versions should not pay for page faults.
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    mapped = mmap.mmap(file, max(num_bytes, 1), flags=flags)
    return torch.frombuffer(mapped, dtype=torch.uint8)[:num_bytes]
