"""Settings of glibc's malloc: keep freed memory, in huge pages, in one heap. The address space is
in use at the peak anyway.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os

_M_TRIM_THRESHOLD = -1  # malloc.h
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_SETTINGS = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1))
_MADV_HUGEPAGE = 14  # bits/mman-linux.h
_HUGE_PAGE = 2 << 20
_HEAP_BYTES = 4 << 30  # of addresses; memory is what is written to

log = logging.getLogger(__name__)


@functools.cache
def keep_freed_memory() -> None:
    """Let this process reuse freed CPU tensors instead of returning their pages, where malloc is
    glibc's.

    By default glibc returns megabyte tensors at every free, and the kernel zeroes their pages again
    at the next allocation: about 4,000 page faults and a quarter of the time of a decode step of
    the tiny model with 512 rows. Blocks above 32 MiB, such as the gradient of a large vocabulary's
    head, would come from mmap and be returned whatever the thresholds are; so mmap is not used at
    all. A second thread would have a heap of its own, of small pages, which goes back whenever it
    is empty: those that begin after this share the first. If malloc refuses these settings it stays
    as it is, and a line of the log says so.
    """
    libc = _glibc()
    if libc is None:
        return
    for setting, value in _SETTINGS:
        if not libc.mallopt(setting, value):
            log.info("freed memory goes back: malloc refuses setting %d", setting)
            return
    _use_huge_pages(libc)


def _use_huge_pages(libc: ctypes.CDLL) -> None:
    """Ask the kernel for huge pages in the heap's first _HEAP_BYTES, which grows to that for it.

    A training step reads and writes all weights, gradients and moments: with small pages a
    twentieth of it goes into looking their addresses up. Where the kernel gives no such addresses
    (a limit of `ulimit -v` or of memory that may be promised) or no such pages, the heap goes on as
    it was, and a line of the log says why. Where the kernel counts what is promised
    (vm.overcommit_memory=2), addresses that it does give count like memory.
    """
    start = libc.malloc(_HEAP_BYTES)
    if start is None:
        log.info("no huge pages: %s for a heap of %d bytes", _last_error(), _HEAP_BYTES)
        return
    libc.free(start)
    first = -(-start // _HUGE_PAGE) * _HUGE_PAGE
    end = (start + _HEAP_BYTES) // _HUGE_PAGE * _HUGE_PAGE
    if libc.madvise(first, end - first, _MADV_HUGEPAGE):
        log.info("no huge pages: %s", _last_error())


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """Return the C library, with the types of what is called here; None if it is not glibc."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mallopt"):
        return None
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _last_error() -> str:
    return os.strerror(ctypes.get_errno())
