"""Memory that several processes of one host map: made here, opened there by a path under /proc."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor


def shared_file(num_bytes: int) -> int:
    """Returns a descriptor of new memory, zeroed, which other processes can map (path_of).

    It has no name, so no death can leave it behind. OSError where there is no room.
    """
    file = os.memfd_create("llamarl")
    try:
        os.posix_fallocate(file, 0, max(num_bytes, 1))  # fails here, not with a bus error later
    except OSError:
        os.close(file)
        raise
    return file


def path_of(file: int) -> str:
    """Where other processes of this host, user and pid namespace can open one of this process's
    descriptors.
    """
    return f"/proc/{os.getpid()}/fd/{file}"


def map_shared(file: int, num_bytes: int) -> Tensor:
    """[num_bytes] uint8: the memory behind a descriptor. Who writes to it writes for all."""
    # Mapped whole at once: the first versions should not pay for page faults.
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    mapped = mmap.mmap(file, max(num_bytes, 1), flags=flags)
    return torch.frombuffer(mapped, dtype=torch.uint8)[:num_bytes]
