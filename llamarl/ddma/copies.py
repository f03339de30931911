"""Copies of regions, and 64-bit digests of their bytes: what sender and receiver of a link compare.

    lanes    CPU, where both have the kernel of machine/copy.c: copied and digested in one pass
    xxh3     CPU without it: PyTorch copies, XXH3 reads what is there again
    device   GPU, which no byte should leave for this: sums of the words in each of 512 columns,
             weighted; parts in another order show, whole 4 KiB rows exchanged inside one do not

A bucket's digest is folded from those of its moves, in their order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Literal

import torch
import xxhash
from torch import Tensor

from llamarl.machine.copying import Move, copy_kernels

Method = Literal["lanes", "xxh3", "device"]
_FOLD = 1000003
_WORD = 1 << 64
# What the digest on a device sums: the words of rows, by their column.
_ROW_BYTES = 4096
_COLUMNS = _ROW_BYTES // 8


class Parts:
    """Places to which the parts of a run of bytes go: (first byte of the part, target).

    A target is contiguous, or has two dimensions and dense rows; else ValueError.
    """

    def __init__(self, parts: list[tuple[int, Tensor]]):
        self.targets = parts
        self.on_device = False
        self.end = 0  # bytes that a run must have
        self.moves = (Move * len(parts))()
        for move, (start, target) in zip(self.moves, parts):
            is_run = target.is_contiguous()
            has_dense_rows = target.dim() == 2 and target.stride(1) == 1
            if start < 0 or not (is_run or has_dense_rows or target.dim() == 1):
                raise ValueError(
                    f"byte {start} to shape {list(target.shape)} with strides {target.stride()}: "
                    "need a byte from 0 on, and rows whose elements lie end to end"
                )
            self.on_device |= target.is_cuda
            self.end = max(self.end, start + target.nbytes)
            move.target = target.data_ptr()
            move.start = start
            move.rows = 1 if is_run else len(target)
            move.width = target.nbytes // move.rows
            move.stride = move.width if is_run else target.stride(0) * target.itemsize


class Copier:
    """Copies and digests by one method."""

    def __init__(self, method: Method):
        self.method = method

    def copy(self, target: Tensor, source: Tensor) -> int:
        """Copy source to target. Returns the digest of the target's bytes, row after row.

        Dtypes may differ. ValueError if shapes do.
        """
        if target.shape != source.shape:
            raise ValueError(f"a copy of shape {list(source.shape)} to {list(target.shape)}")
        if self.method == "lanes" and _can_pack(target, source):
            # A contiguous source is one row.
            rows = 1 if source.is_contiguous() else len(source)
            return _present_kernels().pack_rows(
                target.data_ptr(),
                source.data_ptr(),
                source.nbytes // rows,
                source.stride(0) * source.itemsize,
                rows,
                target.dtype != source.dtype,
            )
        target.copy_(source)
        return self.digest(target.contiguous())

    def copy_columns(self, targets: list[Tensor], sources: list[Tensor]) -> list[int]:
        """Do `copy` for several sources, and return the digest of each.

        Columns of the same rows are copied row by row, so that what lies side by side is read in
        one run.
        """
        each_alone = self.method != "lanes" or len(sources) == 1
        if each_alone or not _can_pack_columns(targets, sources):
            return list(map(self.copy, targets, sources))
        count = len(sources)
        first = sources[0]
        addresses = ctypes.c_void_p * count
        numbers = ctypes.c_uint64 * count
        digests = numbers()
        _present_kernels().pack_columns(
            count,
            addresses(*(target.data_ptr() for target in targets)),
            addresses(*(source.data_ptr() for source in sources)),
            numbers(*(source.shape[1] * source.itemsize for source in sources)),
            first.stride(0) * first.itemsize,
            len(first),
            first.dtype != targets[0].dtype,
            digests,
        )
        return list(digests)

    def copy_parts(self, source: Tensor, parts: Parts) -> int:
        """Copy the parts of `source` [bytes] uint8 to their places, and fold their digests.

        A part that lies where it goes already is only digested. ValueError for a source
        that is no run of bytes, or too short for a part.
        """
        size = source.numel()
        is_run = source.dim() == 1 and source.is_contiguous()
        if source.dtype != torch.uint8 or not is_run:
            shape = list(source.shape)
            raise ValueError(f"a source {shape} {source.dtype}; need [bytes] uint8, contiguous")
        if size < parts.end:
            raise ValueError(f"a source of {size} bytes for parts up to byte {parts.end}")
        on_device = source.is_cuda or parts.on_device
        if self.method == "lanes" and not on_device:
            count = len(parts.targets)
            digests = (ctypes.c_uint64 * count)()
            _present_kernels().copy_moves(count, parts.moves, source.data_ptr(), digests)
            return fold(digests)
        places: list[Tensor] = []
        sources: list[Tensor] = []
        for start, target in parts.targets:
            run = source[start : start + target.nbytes]
            part = run.view(target.dtype).view(target.shape)
            if part.data_ptr() != target.data_ptr():
                places.append(target)
                sources.append(part)
        if places:
            torch._foreach_copy_(places, sources)
        return self.digest_all(target.contiguous() for _, target in parts.targets)

    def digest(self, of: Tensor) -> int:
        """Return the digest of a contiguous tensor's bytes."""
        flat = of.reshape(-1).view(torch.uint8)
        if self.method == "device":
            return _device_digests([flat])[0]
        if self.method == "lanes":
            if flat.is_cuda:
                raise ValueError(f"the method lanes reads memory of the CPU, not of {flat.device}")
            return _present_kernels().digest_of(flat.data_ptr(), flat.numel())
        return xxhash.xxh3_64_intdigest(flat.numpy().data)

    def digest_all(self, tensors: Iterable[Tensor]) -> int:
        """Return the folded digests of contiguous tensors, which lie on one device.

        A GPU takes them together: one alone costs it a dozen kernels, and a wait.
        """
        if self.method != "device":
            return fold(map(self.digest, tensors))
        flats = [of.reshape(-1).view(torch.uint8) for of in tensors]
        return fold(_device_digests(flats))


def _present_kernels() -> ctypes.CDLL:
    """Return the kernels, which are there where the method "lanes" was taken."""
    kernels = copy_kernels()
    assert kernels is not None, "the method lanes was chosen without kernels"
    return kernels


def fold(digests: Iterable[int]) -> int:
    """Return one digest of several, in order; signed, so that it fits an int64."""
    total = 0
    for digest in digests:
        total = (total * _FOLD + digest) % _WORD
    return total - _WORD if total >> 63 else total


def _can_pack(target: Tensor, source: Tensor) -> bool:
    """Whether the kernel can copy this: rows on the CPU to a contiguous target, in dtypes that it
    has.
    """
    if target.is_cuda or source.is_cuda or source.dim() > 2:
        return False
    if source.stride(-1) != 1 or not target.is_contiguous():
        return False
    dtypes = (source.dtype, target.dtype)
    return dtypes == (torch.float32, torch.bfloat16) or source.dtype == target.dtype


def _can_pack_columns(targets: list[Tensor], sources: list[Tensor]) -> bool:
    """Whether the kernel can copy these in one call: columns of the same rows, in the same
    dtypes.
    """
    kinds = set()
    for target, source in zip(targets, sources, strict=True):
        if source.dim() != 2 or target.shape != source.shape or not _can_pack(target, source):
            return False
        kinds.add((len(source), source.stride(), source.dtype, target.dtype))
    return len(kinds) == 1


def _device_digests(flats: list[Tensor]) -> list[int]:
    """Return the digests of several runs of bytes on one device, which is waited for once; its sums
    wrap around.
    """
    device = flats[0].device
    columns_NC = torch.zeros(len(flats), _COLUMNS, dtype=torch.int64, device=device)
    tails_NB = torch.zeros(len(flats), _ROW_BYTES, dtype=torch.uint8, device=device)
    places: list[Tensor] = []
    ends: list[Tensor] = []
    for columns_C, tail_B, flat in zip(columns_NC, tails_NB, flats):
        in_rows = flat.numel() // _ROW_BYTES * _ROW_BYTES
        if in_rows:
            rows = flat[:in_rows]
            if rows.storage_offset() % 8:
                rows = rows.clone()  # words must lie on words
            torch.sum(rows.view(torch.int64).view(-1, _COLUMNS), 0, out=columns_C)
        if in_rows < flat.numel():
            ends.append(flat[in_rows:])
            places.append(tail_B[: flat.numel() - in_rows])
    if places:
        torch._foreach_copy_(places, ends)
    odd_B = torch.arange(_ROW_BYTES, device=device) * 2 + 1
    of_rows_N = (columns_NC * odd_B[:_COLUMNS]).sum(1)
    of_tails_N = (tails_NB * (odd_B + 256)).sum(1)
    sums = (of_rows_N * 1000003 + of_tails_N).tolist()
    return [of_bytes + flat.numel() for of_bytes, flat in zip(sums, flats)]
