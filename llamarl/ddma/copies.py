"""Copies of pieces, and 64-bit digests of their bytes: what the two ends of a link compare.

    lanes    CPU, where both ends have the kernel of native/copy.c: copied and digested in one pass over memory
    xxh3     CPU without it: PyTorch copies, XXH3 reads each block again while it is in the cache
    device   GPU, which no byte should leave for this: sums of the words in each of 512 columns, weighted; parts in another
             order show, whole 4 KiB rows exchanged inside one do not

A bucket's digest is folded from those of its moves, in their order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Literal

import torch
import xxhash
from torch import Tensor

from llamarl.native.copying import Move, copy_kernels

Method = Literal["lanes", "xxh3", "device"]
BLOCK_BYTES = 4 << 20  # copied and hashed while in cache
_FOLD, _WORD = 1000003, 1 << 64


class Parts:
    """Where the parts of a run of bytes go: (first byte of the part, target).

    A target is contiguous, or has two dimensions and dense rows; else ValueError.
    """

    def __init__(self, parts: list[tuple[int, Tensor]]):
        for start, target in parts:
            of_rows = target.dim() == 1 or (target.dim() == 2 and target.stride(1) == 1)
            if start < 0 or not (of_rows or target.is_contiguous()):
                raise ValueError(
                    f"byte {start} to shape {list(target.shape)} with strides {target.stride()}: "
                    "need a byte from 0 on, and rows whose elements lie end to end"
                )
        self.targets = parts
        self.on_device = any(target.is_cuda for _, target in parts)
        # Bytes that a run must have.
        self.end = max((start + target.nbytes for start, target in parts), default=0)
        self.moves = (Move * len(parts))()
        for move, (start, target) in zip(self.moves, parts):
            rows = 1 if target.is_contiguous() else len(target)
            width = target.nbytes // rows
            stride = width if rows == 1 else target.stride(0) * target.itemsize
            move.target, move.start, move.stride, move.width, move.rows = (
                target.data_ptr(),
                start,
                stride,
                width,
                rows,
            )


class Copier:
    """Copies and digests by one method."""

    def __init__(self, method: Method):
        self.method = method

    @property
    def one_pass(self) -> bool:
        """Whether the digest of a copy comes with it."""
        return self.method == "lanes"

    def copy(self, target: Tensor, source: Tensor) -> int | Tensor:
        """Copy source to target; the digest of the target's bytes, row after row.

        One of them is contiguous; dtypes may differ. ValueError if shapes do.
        """
        if target.shape != source.shape:
            raise ValueError(f"a copy of shape {list(source.shape)} to {list(target.shape)}")
        if self.method == "lanes" and (digest := _copy_in_lanes(target, source)) is not None:
            return digest
        if (
            self.method == "xxh3"
            and target.is_contiguous()
            and source.is_contiguous()
            and target.dtype == source.dtype
        ):
            state = xxhash.xxh3_64()
            for block, new in zip(
                _bytes(target).split(BLOCK_BYTES), _bytes(source).split(BLOCK_BYTES)
            ):
                block.copy_(new)
                state.update(block.numpy())
            return state.intdigest()
        target.copy_(source)
        return self.digest(target.contiguous())

    def copy_rows(self, targets: list[Tensor], sources: list[Tensor]) -> list[int | Tensor]:
        """`copy` of several. Sources that are columns of the same rows are read together, in the
        order in which they lie in memory.
        """
        shapes = [[list(tensor.shape) for tensor in tensors] for tensors in (sources, targets)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"copies of shapes {shapes[0]} to {shapes[1]}")
        if (
            self.method == "lanes"
            and len(targets) > 1
            and (digests := _pack_in_lanes(targets, sources)) is not None
        ):
            return digests
        return list(map(self.copy, targets, sources))

    def copy_parts(self, source: Tensor, parts: Parts) -> int:
        """Copy the parts of `source` [bytes] uint8 to their places, and fold their digests.

        A part that lies where it goes already is only digested. ValueError for a source
        that is no run of bytes, or too short for a part.
        """
        if source.dtype != torch.uint8 or source.dim() != 1 or not source.is_contiguous():
            shape = list(source.shape)
            raise ValueError(f"a source {shape} {source.dtype}; need [bytes] uint8, contiguous")
        if source.numel() < parts.end:
            raise ValueError(f"a source of {source.numel()} bytes for parts up to byte {parts.end}")
        if self.method == "lanes" and not (source.is_cuda or parts.on_device):
            digests = (ctypes.c_uint64 * len(parts.targets))()
            copy_kernels().copy_moves(len(parts.targets), parts.moves, source.data_ptr(), digests)
            return fold(digests)
        found = []
        for start, target in parts.targets:
            part = source[start : start + target.nbytes].view(target.dtype).view(target.shape)
            there = part.data_ptr() == target.data_ptr()
            found.append(self.digest(part) if there else self.copy(target, part))
        return fold(found)

    def digest(self, of: Tensor) -> int | Tensor:
        """The digest of a contiguous tensor's bytes: an int, or for `device` a tensor [] int64 that
        is not waited for.
        """
        flat = _bytes(of)
        if self.method == "device":
            return _device_digest(flat)
        if self.method == "lanes":
            if flat.is_cuda:
                raise ValueError(f"the method lanes reads memory of the CPU, not of {flat.device}")
            return copy_kernels().digest_of(flat.data_ptr(), flat.numel())
        state = xxhash.xxh3_64()
        for block in flat.split(BLOCK_BYTES):
            state.update(block.numpy())
        return state.intdigest()


def fold(digests: Iterable[int | Tensor]) -> int:
    """One digest of several, in order; signed, so that it fits an int64. Waits for the device."""
    total: int | Tensor = 0
    for digest in digests:
        total = total * _FOLD + digest
        total = total % _WORD if isinstance(total, int) else total
    total = int(total)
    return total - _WORD if total >> 63 > 0 else total


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _copy_in_lanes(target: Tensor, source: Tensor) -> int | None:
    """By a kernel; None if there is none for these dtypes or strides."""
    if target.is_cuda or source.is_cuda:
        return None
    kernels, size = copy_kernels(), target.dtype.itemsize
    if target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous():
        return kernels.copy_run(target.data_ptr(), source.data_ptr(), target.numel() * size)
    if target.dim() > 2 or target.stride(-1) != 1 or source.stride(-1) != 1:
        return None
    rows, width = (1, target.numel()) if target.dim() == 1 else target.shape
    if target.dtype == source.dtype and (target.is_contiguous() or source.is_contiguous()):
        strides = target.stride(0) * size, source.stride(0) * size
        return kernels.copy_rows(
            target.data_ptr(), strides[0], source.data_ptr(), strides[1], width * size, rows
        )
    packed = _pack_in_lanes([target], [source])
    return packed and packed[0]


def _pack_in_lanes(targets: list[Tensor], sources: list[Tensor]) -> list[int] | None:
    """Rows to contiguous targets, by a kernel that goes through all sources row by row; None if it
    cannot.
    """
    first, count = sources[0], len(sources)
    casts = first.dtype != targets[0].dtype
    if first.is_cuda or (
        casts and (first.dtype, targets[0].dtype) != (torch.float32, torch.bfloat16)
    ):
        return None
    rows, stride = (1, 0) if first.dim() == 1 else (len(first), first.stride(0))
    for target, source in zip(targets, sources):
        alike = (
            source.dim() == first.dim() <= 2
            and source.dtype == first.dtype
            and target.dtype == targets[0].dtype
        )
        same_rows = rows == 1 or (len(source) == rows and source.stride(0) == stride)
        if not (alike and same_rows and source.stride(-1) == 1 and target.is_contiguous()):
            return None
    size, address = first.element_size(), ctypes.c_void_p * count
    given = [address(*(t.data_ptr() for t in tensors)) for tensors in (targets, sources)]
    widths, digests = (
        (ctypes.c_uint64 * count)(*(s.shape[-1] * size for s in sources)),
        (ctypes.c_uint64 * count)(),
    )
    copy_kernels().pack_rows(count, *given, widths, stride * size, rows, casts, digests)
    return list(digests)


def _device_digest(flat: Tensor) -> Tensor:
    """[] int64, wrapping."""
    flat = flat.clone() if flat.storage_offset() % 8 else flat  # words must lie on words
    whole = flat.numel() // 4096 * 4096
    columns = torch.arange(512, device=flat.device) * 2 + 1
    total = (flat[:whole].view(torch.int64).view(-1, 512).sum(0) * columns).sum()
    tail = flat[whole:].long()
    return (
        total * 1000003
        + (tail * (torch.arange(tail.numel(), device=flat.device) * 2 + 257)).sum()
        + flat.numel()
    )
