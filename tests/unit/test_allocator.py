"""Freed memory is kept, in huge pages where the kernel has them; each in a process of its own."""

from __future__ import annotations

import ctypes
import json
import mmap
import resource
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LARGE = 128 << 20  # more than malloc ever takes from its heap by itself
HEAP = 4 << 30  # addresses that are asked for

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


def bytes_in_huge_pages() -> int:
    """Addresses for which the kernel was asked for huge pages (proc(5): the flag hg)."""
    total = size = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if name == "Size:":
            size = int(values[0]) << 10
        elif name == "VmFlags:" and "hg" in values:
            total += size
    return total


def has_huge_pages() -> bool:
    """Whether this kernel takes the advice, and shows it."""
    with mmap.mmap(-1, 4 << 20) as memory:
        before = bytes_in_huge_pages()
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return False
        return bytes_in_huge_pages() > before


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


def measured(most_addresses: int | None) -> dict[str, object]:
    """What a process keeps of freed memory before and after its malloc was told to."""
    from llamarl.machine.allocator import keep_freed_memory

    if most_addresses is not None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + most_addresses,) * 2)
    found = {"has huge pages": has_huge_pages(), "kept before": kept_of_large()}
    in_huge_pages = bytes_in_huge_pages()
    keep_freed_memory()
    found["in huge pages"] = bytes_in_huge_pages() - in_huge_pages
    found["in heap of all"] = is_in_heap_of_all()
    found["kept"] = kept_of_large()
    found["more at the second time"] = kept_of_large()
    return found


@cache
def measured_apart(most_addresses: int | None) -> dict[str, object]:
    code = (
        "import json, logging, sys; from tests.unit.test_allocator import measured; "
        "logging.basicConfig(level=logging.INFO); "
        f"print(json.dumps(measured({most_addresses})))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"log": done.stderr}


def test_freed_memory_is_kept_and_used_again():
    found = measured_apart(None)
    assert found["kept before"] < 0.1
    assert found["kept"] > 0.9
    assert found["more at the second time"] < 0.1


def test_the_heap_is_in_huge_pages_where_the_kernel_has_them():
    found = measured_apart(None)
    if not found["has huge pages"] or "no huge pages" in found["log"]:
        pytest.skip("this kernel gives no huge pages, or too few addresses")
    assert found["in huge pages"] > 0.99 * HEAP


def test_all_threads_have_one_heap():
    assert measured_apart(None)["in heap of all"]


def test_too_few_addresses_leave_a_heap_that_works_and_keeps():
    found = measured_apart(1 << 30)
    assert "no huge pages: Cannot allocate memory" in found["log"]
    assert found["in huge pages"] == 0
    assert found["kept"] > 0.9
