"""How bytes cross from a sender's memory to a receiver's: one interface, five transports.

    local     one process: the receiver reads the sender's slots
    shm       one host: the slots lie in shared memory, which the receiver maps
    gloo      p2p over TCP between any two ranks
    cuda_ipc  one host, GPUs: the receiver opens the sender's device memory
    nccl      p2p between GPUs

Headers always travel by gloo (or a queue). A transport carries only the bytes of buckets.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.disk.shared_memory import map_shared, path_of, shared_file
from llamarl.errors import LinkTimeout, PeerDied, WeightsError, cause_of

NUM_SLOTS = 2
POLL_S = 0.0002
# A link may be silent between two versions, as long as a step or an evaluation takes. Its threads
# wait for that; who waits for them has a deadline (`publish`, for a slot that comes free).
FOREVER_S = 7 * 24 * 3600.0
_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
# The first message of a header: one that fits into it needs no second one, which would come later
# by the time in which the two ends' threads are woken.
FRAME_BYTES = 16 << 10
_SIZE_BYTES = 8  # at the beginning of a frame: the header's length
_COUNTER_BYTES = 64  # the last cache line of a slot's memory holds its counter


class _Tag(IntEnum):
    """Numbers that keep the messages between two ranks apart."""

    TO_RECEIVER = 0
    TO_SENDER = 1
    PAYLOAD = 2


class HeaderKind(IntEnum):
    """The kinds of headers."""

    OFFER = 0  # where the slots are
    BEGIN = 1  # a version, or again what was wrong of it: its slot and buckets, what it is for
    END = 2  # these were all; their digests
    VERDICT = 3  # which of them are wrong
    CLOSE = 4  # no more versions come


@dataclass(frozen=True, slots=True)
class Header:
    """A message on a link. `more` is JSON on the wire."""

    kind: HeaderKind
    version: int = -1
    more: dict = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Slots:
    """Memory that a sender stages into, and the means by which a receiver elsewhere reaches it."""

    tensors: list[Tensor]  # [bytes] uint8 each
    # [1] int64 each: how many buckets are staged. None where receivers begin when all are, and on a
    # GPU, whose copies nobody sees end.
    counters: list[Tensor] = field(default_factory=list)
    files: tuple[int, ...] = ()  # descriptors of shared ones, until all receivers have mapped them

    def close_files(self) -> None:
        """Close the descriptors: all receivers have mapped the memory behind them."""
        for file in self.files:
            os.close(file)


def make_slots(
    num_bytes: int, device: torch.device, *, shared: bool, pinned: bool = False
) -> Slots:
    """Allocate slots on a device, or on the CPU: there in shared memory, or pinned for a GPU.

    WeightsError, with the alternative, if there is no room.
    """
    if device.type == "cuda":
        zeros = partial(torch.zeros, num_bytes, dtype=torch.uint8, device=device)
        return Slots([zeros() for _ in range(NUM_SLOTS)])
    num_bytes += _COUNTER_BYTES
    if shared:
        return _shared_slots(num_bytes)
    zeros = partial(torch.zeros, num_bytes, dtype=torch.uint8, pin_memory=pinned)
    return _with_counters([zeros() for _ in range(NUM_SLOTS)])


def _shared_slots(num_bytes: int) -> Slots:
    tensors: list[Tensor] = []
    files: list[int] = []
    for _ in range(NUM_SLOTS):
        try:
            files.append(shared_file(num_bytes))
            tensors.append(map_shared(files[-1], num_bytes))
        except OSError as error:
            for made in files:
                os.close(made)
            raise WeightsError(
                f"no shared memory for {num_bytes - _COUNTER_BYTES:,} bytes of weights ({error}); "
                "set weights.transport=gloo"
            ) from error
    return _with_counters(tensors, tuple(files))


def _with_counters(whole: list[Tensor], files: tuple[int, ...] = ()) -> Slots:
    """Return slots in memory that has room for a counter at its end."""
    tensors = []
    counters = []
    for memory in whole:
        flat, end = memory.split([len(memory) - _COUNTER_BYTES, _COUNTER_BYTES])
        tensors.append(flat)
        counters.append(end.view(torch.int64)[:1])
    return Slots(tensors, counters, files)


def _map_path(path: str, num_bytes: int) -> Tensor:
    """Map another process's memory. WeightsError, with the alternative, if it is out of reach."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError as error:
        raise WeightsError(
            f"the sender's memory cannot be opened ({error}); set weights.transport=gloo"
        ) from error
    try:
        return map_shared(file, num_bytes)
    finally:
        os.close(file)


class LocalLink:
    """A link within one process: the receiver reads the sender's slots."""

    transport = "local"
    peer: int | None = None  # the other rank, where there is one
    # Whether bytes are sent, and received into memory of the receiver's. Where they are not, it
    # reads the sender's.
    streams = False
    # For a receiver in the same process: the version that its sender published last, unless that
    # waits behind another one, which a receiver elsewhere has not taken yet.
    leaving = -1

    def __init__(self):
        self._to_sender: queue.Queue[Header] = queue.Queue()
        self._to_receiver: queue.Queue[Header] = queue.Queue()
        self.slots: list[Tensor] = []
        self.counters: list[Tensor] = []
        self.base = 0

    def offer(self, slots: Slots, base: int = 0) -> None:
        """Sender: say where the slots are, of which this link's bytes begin at `base`.

        Returns when the receiver has mapped them.
        """
        self.slots = slots.tensors
        self.counters = slots.counters
        self.base = base

    def accept(self) -> None:
        """Receiver: map what the sender offers."""

    def send(self, header: Header, to_receiver: bool = True) -> None:
        """Either side: send this header to the other one."""
        waiting = self._to_receiver if to_receiver else self._to_sender
        waiting.put(header)

    def recv(self, at_receiver: bool = True, timeout_s: float = FOREVER_S) -> Header:
        """Either side: wait for the other one's next header. LinkTimeout after timeout_s."""
        waiting = self._to_receiver if at_receiver else self._to_sender
        try:
            return waiting.get(timeout=timeout_s)
        except queue.Empty:
            raise LinkTimeout(f"nothing came for {timeout_s:.0f} s") from None

    def fetch(
        self, slot: int, start: int, size: int, scratch: Tensor | None = None, staged: int = 0
    ) -> Callable[[float], Tensor]:
        """Receiver: begin to get a bucket's bytes. Call the result, with seconds, to wait for them.

        They are [size] uint8: a view of the sender's slot once `staged` of its buckets are, or on a
        link that streams received into `scratch`. LinkTimeout after these seconds.
        """
        first = self.base + start
        flat = self.slots[slot][first : first + size]

        def arrived(timeout_s: float) -> Tensor:
            until = time.monotonic() + timeout_s
            while staged and int(self.counters[slot]) < staged:
                if time.monotonic() > until:
                    raise LinkTimeout(f"nothing was staged for {timeout_s:.0f} s")
                time.sleep(POLL_S)
            return flat

        return arrived

    def send_bytes(self, flat: Tensor) -> Callable[[], None]:
        """Sender: begin to send a bucket's bytes. Call the result to wait until they may change."""
        raise AssertionError(f"a {self.transport} link sends no bytes: they are read in place")


class RankLink(LocalLink):
    """A link between two ranks.

    Headers go by p2p on `group` (gloo), bytes on payload_group (NCCL) if it is given. What gloo or
    NCCL say when the peer is gone becomes a PeerDied with its rank.
    """

    def __init__(
        self,
        peer: int,
        group: dist.ProcessGroup | None,
        transport: str,
        payload_group: dist.ProcessGroup | None = None,
    ):
        super().__init__()
        self.peer = peer
        self._peer = peer
        self.transport = transport
        self.streams = transport in ("gloo", "nccl")
        self._group = group
        self._payload_group = payload_group or group

    def offer(self, slots: Slots, base: int = 0) -> None:
        """Sender: see LocalLink.offer."""
        where: dict[str, object] = {"bytes": slots.tensors[0].numel(), "base": base}
        if self.transport == "shm":
            where["paths"] = [path_of(file) for file in slots.files]
        elif self.transport == "cuda_ipc":
            where["handles"] = [_share_device_memory(tensor) for tensor in slots.tensors]
        self.send(Header(HeaderKind.OFFER, more=where))
        self.recv(at_receiver=False)  # mapped

    def accept(self) -> None:
        """Receiver: see LocalLink.accept."""
        where = self.recv().more
        self.base = where["base"]
        if self.transport == "shm":
            num_bytes = where["bytes"] + _COUNTER_BYTES
            mapped = _with_counters([_map_path(path, num_bytes) for path in where["paths"]])
            self.slots = mapped.tensors
            self.counters = mapped.counters
        elif self.transport == "cuda_ipc":
            handles = where["handles"]
            self.slots = [_open_device_memory(handle, where["bytes"]) for handle in handles]
        self.send(Header(HeaderKind.OFFER), to_receiver=False)

    def send(self, header: Header, to_receiver: bool = True) -> None:
        """Either side: see LocalLink.send."""
        tag = _Tag.TO_RECEIVER if to_receiver else _Tag.TO_SENDER
        message = json.dumps([header.kind, header.version, header.more]).encode()
        sized = len(message).to_bytes(_SIZE_BYTES, "little") + message
        self._send_raw(sized[:FRAME_BYTES].ljust(FRAME_BYTES, b"\0"), tag)
        if len(sized) > FRAME_BYTES:
            self._send_raw(sized[FRAME_BYTES:], tag)

    def _send_raw(self, message: bytes, tag: int) -> None:
        """Send a message, and return once the peer has begun to take it."""
        raw = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        with self._with_peer():
            dist.send(raw, self._peer, group=self._group, tag=tag)

    def recv(self, at_receiver: bool = True, timeout_s: float = FOREVER_S) -> Header:
        """Either side: see LocalLink.recv. PeerDied if the other one is gone."""
        tag = _Tag.TO_RECEIVER if at_receiver else _Tag.TO_SENDER
        sized = self._recv_raw(FRAME_BYTES, tag, timeout_s)
        end = _SIZE_BYTES + int.from_bytes(sized[:_SIZE_BYTES], "little")
        if end > FRAME_BYTES:
            sized += self._recv_raw(end - FRAME_BYTES, tag, timeout_s)
        kind, version, more = json.loads(sized[_SIZE_BYTES:end])
        return Header(HeaderKind(kind), version, more)

    def _recv_raw(self, num_bytes: int, tag: int, timeout_s: float) -> bytes:
        """Wait for the other one's next message, which has so many bytes."""
        raw = torch.empty(num_bytes, dtype=torch.uint8)
        self._begin_recv(raw, self._group, tag)(timeout_s)
        return raw.numpy().tobytes()

    def fetch(
        self, slot: int, start: int, size: int, scratch: Tensor | None = None, staged: int = 0
    ) -> Callable[[float], Tensor]:
        """Receiver: see LocalLink.fetch."""
        if not self.streams:
            return super().fetch(slot, start, size, staged=staged)
        assert scratch is not None, "what is sent is received into the receiver's memory"
        return self._begin_recv(scratch, self._payload_group, _Tag.PAYLOAD)

    def send_bytes(self, flat: Tensor) -> Callable[[], None]:
        """Sender: see LocalLink.send_bytes."""
        with self._with_peer():
            work = dist.isend(flat, self._peer, group=self._payload_group, tag=_Tag.PAYLOAD)
        assert work is not None, "both ranks of a link are in its group"

        def wait_until_gone(_kept: Tensor = flat) -> None:
            with self._with_peer():
                work.wait()

        return wait_until_gone

    def _begin_recv(
        self, tensor: Tensor, group: dist.ProcessGroup | None, tag: int
    ) -> Callable[[float], Tensor]:
        """Begin to receive into a tensor. Call the result, with seconds, to wait for it.

        LinkTimeout after these seconds.
        """
        with self._with_peer():
            work = dist.irecv(tensor, self._peer, group=group, tag=tag)
        assert work is not None, "both ranks of a link are in its group"

        def arrived(timeout_s: float) -> Tensor:
            with self._with_peer(timeout_s):
                work.wait(timedelta(seconds=timeout_s))
            return tensor

        return arrived

    @contextmanager
    def _with_peer(self, timeout_s: float = FOREVER_S) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            if timeout_s < FOREVER_S and _TIMED_OUT.search(text):
                raise LinkTimeout(f"nothing came for {timeout_s:.0f} s") from error
            raise PeerDied(cause_of(error), [self._peer]) from error


def _share_device_memory(tensor: Tensor) -> list:
    """Return what another process on this host needs to open a CUDA tensor's memory, as JSON
    values.
    """
    coded = []
    for part in tensor.untyped_storage()._share_cuda_():
        coded.append(base64.b64encode(part).decode() if isinstance(part, bytes) else part)
    return coded


def _open_device_memory(coded: list, num_bytes: int) -> Tensor:
    """Return the tensor [bytes] uint8 that another process shared."""
    shared = [base64.b64decode(part) if isinstance(part, str) else part for part in coded]
    storage = torch.UntypedStorage._new_shared_cuda(*shared)
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, torch.Size([num_bytes]), (1,))
