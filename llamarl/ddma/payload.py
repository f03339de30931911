"""The content of links: regions in buckets, laid out by the sender and put in place by the
receiver, and how they are copied and digested. Starts no threads.

Sender and receiver of a link compare digests of the bytes of regions:

    xxh3     CPU: XXH3 of the bytes
    device   GPU, so that no byte leaves it: weighted sums of the words in each of 512 columns.
             Exchanged words change it; exchanged rows of 4 KiB do not

A bucket's digest is folded from those of its regions, in their order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import xxhash
from torch import Tensor

from llamarl.ddma.layout import Buffer, Region

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

    def digest_all(self, tensors: Iterable[Tensor]) -> int:
        """Return the folded digests of contiguous tensors, which lie on one device.

        A GPU takes them together: one alone costs it a dozen kernels, and a wait.
        """
        flats = (of.reshape(-1).view(torch.uint8) for of in tensors)
        if self.method == "device":
            return fold(_device_digests(list(flats)))
        return fold(xxhash.xxh3_64_intdigest(flat.numpy().data) for flat in flats)


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


# On a CPU a bucket stays in the cache between its arrival and its place.
BUCKET_BYTES = {"cpu": 4 << 20, "cuda": 16 << 20}


@dataclass(frozen=True, slots=True)
class Bucket:
    """Regions that are sent, digested and acknowledged together: bytes [start, end) of a slot or
    buffer.
    """

    regions: tuple[Region, ...]

    @property
    def start(self) -> int:
        """The first byte."""
        return self.regions[0].start

    @property
    def end(self) -> int:
        """The byte behind the last one."""
        return self.regions[-1].end

    def digest(self, flat: Tensor, copier: Copier) -> int:
        """Return the digest of the regions where they lie in flat [bytes] uint8."""
        return copier.digest_all(flat[region.start : region.end] for region in self.regions)


def buckets_of(regions: Iterable[Region], limit: int) -> tuple[Bucket, ...]:
    """Group regions, in the order in which they lie, into buckets that span no more than `limit`
    bytes.

    A region that is larger than that is cut by rows; one row is not cut.
    """
    buckets: list[Bucket] = []
    together: list[Region] = []
    for region in regions:
        for part in _cut(region, limit):
            if together and part.end - together[0].start > limit:
                buckets.append(Bucket(tuple(together)))
                together = []
            together.append(part)
    if together:
        buckets.append(Bucket(tuple(together)))
    return tuple(buckets)


def _cut(region: Region, limit: int) -> list[Region]:
    """Cut a region by rows into parts of no more than `limit` bytes, or of one row."""
    rows = region.box.lengths[0]
    in_limit = rows * limit // max(region.num_bytes, 1)
    each = max(1, in_limit)
    start = region.start
    parts = []
    for first in range(0, rows, each):
        count = min(each, rows - first)
        box = region.box.cut(0, first, count)
        part = replace(region, box=box, start=start)
        parts.append(part)
        start = part.end
    return parts


class BucketProgress:
    """Counts how many buckets of a slot (or of a buffer) are whole, from the first one on.

    counter: [1] int64 of the same, which other processes may read.
    """

    def __init__(self, counter: Tensor | None = None):
        self._changed = threading.Condition()
        self._counter = counter
        self._closed = False
        self.reset()

    def reset(self) -> None:
        """Set the count back to zero."""
        self._events: list[torch.cuda.Event | None] = []
        if self._counter is not None:
            self._counter.zero_()

    def mark(self, event: torch.cuda.Event | None = None) -> None:
        """Note that the next bucket is whole, or will be after this event on the device."""
        with self._changed:
            self._events.append(event)
            if self._counter is not None:
                self._counter.add_(1)
            self._changed.notify_all()

    def wait(self, index: int) -> bool:
        """Wait until a bucket is whole. Returns False if this was closed before."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._events) > index)
            if len(self._events) <= index:
                return False
        event = self._events[index]
        if event is not None:
            event.synchronize()
        return True

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Target:
    """Places of a bucket's regions in one of the receiver's buffers, flat [bytes] uint8.

    in_place: the whole bucket as one range of the buffer, into which it can be received; None if
    there it is no one range.
    """

    def __init__(self, bucket: Bucket, of: Buffer, flat: Tensor):
        parts: list[tuple[int, Tensor]] = []
        size = 0
        lie_alike = True
        for region in bucket.regions:
            held = of.held[region.name]
            place = held.view_in(flat)[region.box.within(held.box)]
            start = region.start - bucket.start
            parts.append((start, place))
            size += place.nbytes
            distance = place.data_ptr() - parts[0][1].data_ptr()
            lie_alike &= place.is_contiguous() and distance == start
        self.parts = parts
        self.in_place: Tensor | None = None
        # No gaps: in the buffer they may be another sender's.
        if lie_alike and size == bucket.end - bucket.start:
            first = parts[0][1].data_ptr() - flat.data_ptr()
            self.in_place = flat[first : first + size]
