"""Copies of pieces, and 64-bit digests of their bytes: what sender and receiver of a link compare.

    lanes    CPU, where both have the kernel of native/copy.c: copied and digested in one pass
    xxh3     CPU without it: PyTorch copies, XXH3 reads each block again while it is in the cache
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

from llamarl.native.copying import Move, copy_kernels

Method = Literal["lanes", "xxh3", "device"]
BLOCK_BYTES = 4 << 20  # copied and hashed while in cache
_FOLD = 1000003
_WORD = 1 << 64


class Parts:
    """Where the parts of a run of bytes go: (first byte of the part, target).

    A target is contiguous, or has two dimensions and dense rows; else ValueError.
    """

    def __init__(self, parts: list[tuple[int, Tensor]]):
        self.targets = parts
        self.on_device = any(target.is_cuda for _, target in parts)
        # Bytes that a run must have.
        self.end = max((start + target.nbytes for start, target in parts), default=0)
        self.moves = (Move * len(parts))()
        for index, (start, target) in enumerate(parts):
            _check_target(start, target)
            rows = 1 if target.is_contiguous() else len(target)
            width = target.nbytes // rows
            move = self.moves[index]
            move.target = target.data_ptr()
            move.start = start
            move.stride = width if rows == 1 else target.stride(0) * target.itemsize
            move.width = width
            move.rows = rows


def _check_target(start: int, target: Tensor) -> None:
    has_rows = target.dim() == 1 or (target.dim() == 2 and target.stride(1) == 1)
    if start < 0 or not (has_rows or target.is_contiguous()):
        raise ValueError(
            f"byte {start} to shape {list(target.shape)} with strides {target.stride()}: "
            "need a byte from 0 on, and rows whose elements lie end to end"
        )


class Copier:
    """Copies and digests by one method. A digest is an int, or on a device a tensor [] int64."""

    def __init__(self, method: Method):
        self.method = method

    @property
    def one_pass(self) -> bool:
        """Whether the digest of a copy comes with it."""
        return self.method == "lanes"

    def copy(self, target: Tensor, source: Tensor) -> int | Tensor:
        """Copy source to target. Returns the digest of the target's bytes, row after row.

        One of them is contiguous; dtypes may differ. ValueError if shapes do.
        """
        if target.shape != source.shape:
            raise ValueError(f"a copy of shape {list(source.shape)} to {list(target.shape)}")
        if self.method == "lanes":
            digest = _copy_in_lanes(target, source)
            if digest is not None:
                return digest
        are_runs = target.is_contiguous() and source.is_contiguous()
        if self.method == "xxh3" and are_runs and target.dtype == source.dtype:
            return _copy_in_blocks(target, source)
        target.copy_(source)
        return self.digest(target.contiguous())

    def copy_rows(self, targets: list[Tensor], sources: list[Tensor]) -> list[int | Tensor]:
        """`copy` of several.

        Sources that are columns of the same rows are read together, in the order in which they lie
        in memory.
        """
        held = [list(source.shape) for source in sources]
        wanted = [list(target.shape) for target in targets]
        if held != wanted:
            raise ValueError(f"copies of shapes {held} to {wanted}")
        if self.method == "lanes" and len(targets) > 1:
            digests = _pack_in_lanes(targets, sources)
            if digests is not None:
                return digests
        return [self.copy(target, source) for target, source in zip(targets, sources)]

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
            count = len(parts.targets)
            digests = (ctypes.c_uint64 * count)()
            copy_kernels().copy_moves(count, parts.moves, source.data_ptr(), digests)
            return fold(digests)
        found = []
        for start, target in parts.targets:
            part = source[start : start + target.nbytes].view(target.dtype).view(target.shape)
            is_there = part.data_ptr() == target.data_ptr()
            found.append(self.digest(part) if is_there else self.copy(target, part))
        return fold(found)

    def digest(self, of: Tensor) -> int | Tensor:
        """The digest of a contiguous tensor's bytes. One on a device is not waited for."""
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
        if isinstance(total, int):
            total = total % _WORD
    total = int(total)
    return total - _WORD if total >> 63 > 0 else total


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _copy_in_blocks(target: Tensor, source: Tensor) -> int:
    """Copy contiguous tensors, and hash each block as it lies in the target."""
    state = xxhash.xxh3_64()
    blocks = zip(_bytes(target).split(BLOCK_BYTES), _bytes(source).split(BLOCK_BYTES))
    for block, new in blocks:
        block.copy_(new)
        state.update(block.numpy())
    return state.intdigest()


def _copy_in_lanes(target: Tensor, source: Tensor) -> int | None:
    """Copy by a kernel. None if there is none for these dtypes or strides."""
    if target.is_cuda or source.is_cuda:
        return None
    size = target.dtype.itemsize
    is_same_dtype = target.dtype == source.dtype
    if is_same_dtype and target.is_contiguous() and source.is_contiguous():
        return copy_kernels().copy_run(target.data_ptr(), source.data_ptr(), target.numel() * size)
    if target.dim() > 2 or target.stride(-1) != 1 or source.stride(-1) != 1:
        return None
    if is_same_dtype and (target.is_contiguous() or source.is_contiguous()):
        rows = 1 if target.dim() == 1 else len(target)
        return copy_kernels().copy_rows(
            target.data_ptr(),
            target.stride(0) * size,
            source.data_ptr(),
            source.stride(0) * size,
            target.shape[-1] * size,
            rows,
        )
    packed = _pack_in_lanes([target], [source])
    return None if packed is None else packed[0]


def _pack_in_lanes(targets: list[Tensor], sources: list[Tensor]) -> list[int] | None:
    """Copy rows to contiguous targets, by a kernel that goes through all sources row by row.

    None if it cannot.
    """
    if not _can_pack(targets, sources):
        return None
    first = sources[0]
    count = len(sources)
    rows = 1 if first.dim() == 1 else len(first)
    stride = 0 if first.dim() == 1 else first.stride(0)
    size = first.element_size()
    addresses = ctypes.c_void_p * count
    numbers = ctypes.c_uint64 * count
    digests = numbers()
    copy_kernels().pack_rows(
        count,
        addresses(*(target.data_ptr() for target in targets)),
        addresses(*(source.data_ptr() for source in sources)),
        numbers(*(source.shape[-1] * size for source in sources)),
        stride * size,
        rows,
        first.dtype != targets[0].dtype,
        digests,
    )
    return list(digests)


def _can_pack(targets: list[Tensor], sources: list[Tensor]) -> bool:
    """Whether the sources are columns of the same rows on the CPU, in dtypes that a kernel has."""
    first = sources[0]
    dtypes = (first.dtype, targets[0].dtype)
    is_cast = dtypes == (torch.float32, torch.bfloat16)
    if first.is_cuda or first.dim() > 2 or not (is_cast or dtypes[0] == dtypes[1]):
        return False
    for target, source in zip(targets, sources):
        is_like_first = source.dim() == first.dim() and (source.dtype, target.dtype) == dtypes
        has_dense_rows = source.stride(-1) == 1 and target.is_contiguous()
        if not (is_like_first and has_dense_rows):
            return False
        if first.dim() == 2 and len(first) != 1:
            if len(source) != len(first) or source.stride(0) != first.stride(0):
                return False
    return True


def _device_digest(flat: Tensor) -> Tensor:
    """[] int64, wrapping."""
    if flat.storage_offset() % 8:
        flat = flat.clone()  # words must lie on words
    rows = flat.numel() // 4096
    words = flat[: rows * 4096].view(torch.int64).view(-1, 512)
    weights = torch.arange(512, device=flat.device) * 2 + 1
    of_rows = (words.sum(0) * weights).sum()
    tail = flat[rows * 4096 :].long()
    of_tail = (tail * (torch.arange(tail.numel(), device=flat.device) * 2 + 257)).sum()
    return of_rows * 1000003 + of_tail + flat.numel()
