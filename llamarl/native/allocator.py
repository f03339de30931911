"""glibc's malloc, told to keep freed memory, in huge pages: address space that is in use at the
peak anyway.
"""

from __future__ import annotations

import ctypes
import functools

_M_TRIM_THRESHOLD = -1  # malloc.h
_M_MMAP_MAX = -4
_NEVER = -1
_MADV_HUGEPAGE = 14  # bits/mman-linux.h
_HUGE_PAGE = 2 << 20
_HEAP_BYTES = 4 << 30  # of addresses; memory is what is written to


@functools.cache
def keep_freed_memory() -> None:
    """Let this process reuse freed CPU tensors instead of returning their pages, where malloc is
    glibc's.

    As it comes, glibc hands megabyte tensors back at every free, and the kernel zeroes their pages
    again at the next allocation: about 4,000 page faults and a quarter of the time of a decode step
    of the tiny model with 512 rows. What is larger than 32 MiB, as the gradient of a large
    vocabulary's head, would come from mmap and go back whatever its thresholds say; so none does.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    _use_huge_pages(libc)


def _use_huge_pages(libc: ctypes.CDLL) -> None:
    """Ask the kernel for huge pages in the heap's first _HEAP_BYTES, which grows to that for it.

    A training step reads and writes all weights, gradients and moments: with small pages a
    twentieth of it goes into looking their addresses up. Where the kernel gives no such addresses
    or pages, memory is as it was.
    """
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = libc.malloc(_HEAP_BYTES)
    if start is None:
        return
    libc.free(start)
    first = -(-start // _HUGE_PAGE) * _HUGE_PAGE
    end = (start + _HEAP_BYTES) // _HUGE_PAGE * _HUGE_PAGE
    libc.madvise(first, end - first, _MADV_HUGEPAGE)
