"""The kernels of copy.c as Python calls them: rows are copied and digested in one pass over memory.

llamarl.ddma.copies is their only user and has their equal in PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from pathlib import Path

from llamarl.machine.kernels import library


class Move(ctypes.Structure):
    """copy.c's Move: `rows` runs of `width` bytes, from byte `start` of a source, to `target`."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("target", "start", "stride", "width", "rows")]


@functools.cache
def copy_kernels() -> ctypes.CDLL | None:
    """Return the kernels, or None where this process has none (see kernels.library)."""
    kernels = library("copy", structs=(Move,))
    if kernels is None:
        return None
    address, count = ctypes.c_void_p, ctypes.c_uint64
    kernels.digest_of.argtypes = [address, count]
    kernels.digest_of.restype = count
    kernels.pack_rows.argtypes = [address, address, count, count, count, ctypes.c_int]
    kernels.pack_rows.restype = count
    runs = [address, address, address]
    kernels.pack_columns.argtypes = [count, *runs, count, count, ctypes.c_int, address]
    kernels.pack_columns.restype = None
    kernels.copy_moves.argtypes = [count, address, address, address]
    kernels.copy_moves.restype = None
    return kernels


@functools.cache
def copy_kernels_version() -> str:
    """Return the version of this process's kernels, "" without them. Equal versions digest
    alike.
    """
    if copy_kernels() is None:
        return ""
    source = Path(__file__).with_name("copy.c")
    return hashlib.sha256(source.read_bytes()).hexdigest()[:16]
