"""How much memory is free for a job: on its GPU, on this machine, and within what a container or a
batch system lets its processes have.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

MEMINFO = Path("/proc/meminfo")  # Linux
MEMBERSHIPS = Path("/proc/self/cgroup")  # the control groups of this process
GROUPS = Path("/sys/fs/cgroup")

log = logging.getLogger("llamarl")


class _Files(NamedTuple):
    """What a control group's files of memory are called, and the pages that it can drop."""

    limit: str
    used: str
    droppable: str


_FIRST = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _Files("memory.max", "memory.current", "inactive_file")


def memory_of(device: torch.device) -> int | None:
    """Return the bytes that are free for a job, on the GPU or on this machine; None if the machine
    does not tell.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    if not MEMINFO.exists():
        return None
    for line in MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return min([int(value.split()[0]) * 1024, *_left_in_groups()])
    return None


def _left_in_groups() -> Iterator[int]:
    """Yield the bytes that this process's control groups may still take, for each that has a
    limit.
    """
    if not MEMBERSHIPS.exists():
        return
    for line in MEMBERSHIPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, files = GROUPS, _SECOND
        elif "memory" in controllers.split(","):
            root, files = GROUPS / "memory", _FIRST
        else:
            continue
        # A container may see its own group as the root, whatever it is called outside.
        folder = root / path.lstrip("/")
        for one in (folder, *folder.parents):
            if one.is_relative_to(root) and (one / files.limit).exists():
                yield from _left_in(one, files)


def _left_in(folder: Path, files: _Files) -> Iterator[int]:
    """Yield what is left in a control group, if it has a limit and all of its files can be read."""
    try:
        limit = (folder / files.limit).read_text().strip()
        used = (folder / files.used).read_text()
        stat = (folder / "memory.stat").read_text()
    except OSError as error:
        log.info("the memory that %s may take is not known: %s", folder, error)
        return
    if limit == "max":
        return
    counts = dict(line.split() for line in stat.splitlines())
    yield max(0, int(limit) - int(used) + int(counts.get(files.droppable, 0)))
