"""Freed memory is kept, in one heap; measured in a process of its own."""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
import threading
from pathlib import Path

import pytest

from tests.build.job import run_python

LARGE = 128 << 20  # more than malloc ever takes from its heap by itself

pytestmark = pytest.mark.skipif(
    not (sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt")),
    reason="malloc is not glibc's",
)


def resident() -> int:
    """Bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def kept_of_large() -> float:
    """The share of a large piece of memory that stays once it was written to and freed."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    before = resident()
    start = libc.malloc(LARGE)
    ctypes.memset(start, 1, LARGE)
    libc.free(start)
    return (resident() - before) / LARGE


def is_in_heap_of_all() -> bool:
    """Whether what another thread allocates lies in the heap that the process began with."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(libc.malloc(1 << 20)))
    thread.start()
    thread.join()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            if start <= found[0] < end:
                return True
    return False


def measured() -> dict[str, object]:
    """What a process keeps of freed memory before and after its malloc was told to."""
    from llamarl.machine.allocator import keep_freed_memory

    found: dict[str, object] = {"kept before": kept_of_large()}
    keep_freed_memory()
    found["in heap of all"] = is_in_heap_of_all()
    found["kept"] = kept_of_large()
    found["more at the second time"] = kept_of_large()
    return found


def measured_apart() -> dict[str, object]:
    code = "import json, tests.unit.test_allocator as own; print(json.dumps(own.measured()))"
    return json.loads(run_python("-c", code))


def test_freed_memory_is_kept_and_used_again_in_one_heap():
    found = measured_apart()
    assert found["kept before"] < 0.1
    assert found["kept"] > 0.9
    assert found["more at the second time"] < 0.1
    assert found["in heap of all"]
