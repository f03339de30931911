"""The content of links: regions in buckets, laid out by the sender and put in place by the
receiver. Starts no threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llamarl.ddma.copies import Copier
from llamarl.ddma.layout import Buffer, Region

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
