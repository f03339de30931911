"""Settings of glibc's malloc: keep freed memory, in one heap. The address space is in use at the
peak anyway.
"""

from __future__ import annotations

import ctypes
import functools
import logging

_M_TRIM_THRESHOLD = -1  # malloc.h
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_SETTINGS = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1))

log = logging.getLogger(__name__)


@functools.cache
def keep_freed_memory() -> None:
    """Let this process reuse freed CPU tensors instead of returning their pages, where malloc is
    glibc's.

    By default glibc returns megabyte tensors at every free, and the kernel zeroes their pages at
    the next allocation: about 4,000 page faults and a quarter of a decode step of the tiny model
    with 512 rows. Blocks above 32 MiB, such as the gradient of a large vocabulary's head, would
    come from mmap and be returned whatever the thresholds are, so mmap is switched off. Each thread
    would get its own arena, which is released when empty, so threads share the first. If malloc
    refuses a setting, the log says so.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    for setting, value in _SETTINGS:
        if not libc.mallopt(setting, value):
            log.info("freed memory goes back: malloc refuses setting %d", setting)
            return
