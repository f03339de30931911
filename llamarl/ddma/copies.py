"""Digests of the bytes of regions, which the sender and the receiver of a link compare, and copies
of a bucket to its places.

    xxh3     CPU: XXH3 of the bytes
    device   GPU, so that no byte leaves it: weighted sums of the words in each of 512 columns.
             Exchanged words change it; exchanged rows of 4 KiB do not

A bucket's digest is folded from those of its regions, in their order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
import xxhash
from torch import Tensor

Method = Literal["xxh3", "device"]
_FOLD = 1000003
_WORD = 1 << 64
# What the digest on a device sums: the words of rows, by their column.
_ROW_BYTES = 4096
_COLUMNS = _ROW_BYTES // 8


class Copier:
    """Copies and digests by one method, "xxh3" or "device"."""

    def __init__(self, method: Method):
        self.method = method

    def copy_parts(self, source: Tensor, parts: list[tuple[int, Tensor]]) -> int:
        """Copy parts of `source` [bytes] uint8 to their places. Return their folded digests.

        parts: (first byte of the part, its place). A part that lies in its place already is only
        digested.
        """
        places: list[Tensor] = []
        sources: list[Tensor] = []
        for start, place in parts:
            run = source[start : start + place.nbytes]
            part = run.view(place.dtype).view(place.shape)
            if part.data_ptr() != place.data_ptr():
                places.append(place)
                sources.append(part)
        if places:
            torch._foreach_copy_(places, sources)
        # The digest is of what has arrived in its place.
        return self.digest_all(place.contiguous() for _, place in parts)

    def digest(self, of: Tensor) -> int:
        """Return the digest of a contiguous tensor's bytes."""
        flat = of.reshape(-1).view(torch.uint8)
        if self.method == "device":
            return _device_digests([flat])[0]
        return xxhash.xxh3_64_intdigest(flat.numpy().data)

    def digest_all(self, tensors: Iterable[Tensor]) -> int:
        """Return the folded digests of contiguous tensors, which lie on one device.

        A GPU takes them together: one alone costs it a dozen kernels, and a wait.
        """
        if self.method != "device":
            return fold(map(self.digest, tensors))
        flats = [of.reshape(-1).view(torch.uint8) for of in tensors]
        return fold(_device_digests(flats))


def fold(digests: Iterable[int]) -> int:
    """Return one digest of several, in order; signed, so that it fits an int64."""
    total = 0
    for digest in digests:
        total = (total * _FOLD + digest) % _WORD
    return total - _WORD if total >> 63 else total


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
