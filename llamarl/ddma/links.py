"""How bytes cross from a sender's memory to a receiver's: one interface, five transports.

    local     one process: the receiver reads the sender's slots
    shm       one host: the slots lie in shared memory, which the receiver maps
    gloo      p2p over TCP between any two ranks
    cuda_ipc  one host, GPUs: the receiver opens the sender's device memory
    nccl      p2p between GPUs

Headers and what they carry always go by gloo (or a queue); a transport only answers for the bytes of a bucket.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import queue
import socket
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

NUM_SLOTS = 2
BLOCK_BYTES = 1 << 20  # copied and hashed while in cache
SHM_DIR = Path("/dev/shm")
TRANSPORTS = ("auto", "shm", "gloo", "nccl", "cuda_ipc")
_ON_DEVICE = ("nccl", "cuda_ipc")
_FORWARD, _BACK, _PAYLOAD = 1, 2, 3  # tags: to the receiver, to the sender, bytes


class WeightsError(RuntimeError):
    """A version could not be delivered, or is not what it should be; the old one still serves."""


class LinkTimeout(WeightsError):
    """The other end said nothing for the whole deadline."""


class Kind(IntEnum):
    OFFER = 0  # where the slots are
    BEGIN = 1  # a version: slot, whether it is to be evaluated
    BUCKET = 2  # bytes, and their digest
    END = 3  # all were sent
    VERDICT = 4  # which of them are wrong
    CLOSE = 5


@dataclass(frozen=True, slots=True)
class Header:
    """What is said on a link. `more` is JSON on the wire."""

    kind: Kind
    version: int = -1
    index: int = -1  # of the bucket, or of the slot
    digest: int = 0
    more: dict | None = None


# -- memory ------------------------------------------------------------------------------------------------------------


class Digest:
    """64-bit digest of bytes that come in parts: XXH3 on a CPU, where only the bytes matter; on a GPU, which no byte should
    leave for this, sums of the words in each of 512 columns, weighted: parts in another order show, whole 4 KiB rows inside one do not."""

    def __init__(self):
        self._state, self._on_device = xxhash.xxh3_64(), None

    def update(self, flat: Tensor) -> None:
        """A contiguous uint8 tensor."""
        if flat.is_cuda:
            d = _device_digest(flat)
            self._on_device = d if self._on_device is None else self._on_device * 1000003 + d
            return
        for block in flat.split(BLOCK_BYTES):
            self._state.update(block.numpy())

    def value(self) -> int:
        """Signed, so that it fits an int64. Waits for the device."""
        if self._on_device is not None:
            return int(self._on_device)
        word = self._state.intdigest()
        return word - (1 << 64) if word >> 63 else word


def _device_digest(flat: Tensor) -> Tensor:
    """[] int64, wrapping."""
    whole = flat.numel() // 4096 * 4096
    columns = torch.arange(512, device=flat.device) * 2 + 1
    total = (flat[:whole].view(torch.int64).view(-1, 512).sum(0) * columns).sum()
    tail = flat[whole:].long()
    return total * 1000003 + (tail * (torch.arange(tail.numel(), device=flat.device) * 2 + 257)).sum() + flat.numel()


@dataclass(frozen=True, slots=True)
class Slots:
    """Memory that a sender stages into, and what lets a receiver elsewhere reach it."""

    tensors: list[Tensor]
    paths: tuple[str, ...] = ()

    def forget_names(self) -> None:
        """All receivers have mapped the files, so no crash can leave them behind."""
        for path in self.paths:
            os.unlink(path)


def make_slots(num_bytes: int, device: torch.device, *, shared: bool) -> Slots:
    """Slots on a device; on the CPU pinned if there is a GPU, or in shared memory. WeightsError, with the alternative, if there is no room."""
    if not shared:
        pinned = device.type == "cpu" and torch.cuda.is_available()
        return Slots([torch.zeros(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned) for _ in range(NUM_SLOTS)])
    tensors, paths = [], []
    for _ in range(NUM_SLOTS):
        path = tempfile.mktemp(prefix=f"llamarl-{os.getpid()}-", dir=SHM_DIR)
        try:
            tensors.append(map_shared(path, num_bytes, create=True))
        except OSError as error:
            for made in paths:
                os.unlink(made)
            raise WeightsError(
                f"no shared memory for {num_bytes:,} bytes of weights ({error}); set weights.transport=gloo"
            ) from error
        paths.append(path)
    return Slots(tensors, tuple(paths))


def map_shared(path: str, num_bytes: int, create: bool) -> Tensor:
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
    fd = os.open(path, flags, 0o600)
    try:
        if create:
            os.posix_fallocate(fd, 0, max(num_bytes, 1))  # fails here, not with a bus error later
        # Mapped whole at once: the first versions should not pay for page faults.
        mapped = mmap.mmap(fd, max(num_bytes, 1), flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    finally:
        os.close(fd)
    return torch.frombuffer(mapped, dtype=torch.uint8)[:num_bytes]


# -- links -------------------------------------------------------------------------------------------------------------


class LocalLink:
    """Both ends in one process."""

    transport = "local"

    def __init__(self):
        self._queues = (queue.Queue(), queue.Queue())  # to the sender, to the receiver
        self.slots: list[Tensor] = []
        self.base = 0

    def offer(self, slots: Slots, base: int = 0) -> None:
        """Sender: say where the slots are, of which this link's bytes begin at `base`. Returns when the receiver has mapped them."""
        self.slots, self.base = slots.tensors, base

    def accept(self) -> None:
        """Receiver: map them."""

    def send(self, header: Header, to_receiver: bool = True) -> None:
        self._queues[to_receiver].put(header)

    def recv(self, at_receiver: bool = True, timeout_s: float | None = None) -> Header:
        """LinkTimeout after timeout_s."""
        try:
            return self._queues[at_receiver].get(timeout=timeout_s)
        except queue.Empty:
            raise LinkTimeout(f"nothing came for {timeout_s:.0f} s") from None

    def send_bytes(self, flat: Tensor) -> None:
        """Send a bucket's bytes, where they cross by themselves."""

    def bytes_of(self, slot: int, start: int, size: int, scratch: Tensor | None = None) -> Tensor:
        """The bucket's bytes [size]: a view of the sender's slot, or received into `scratch`."""
        return self.slots[slot][self.base + start : self.base + start + size]

    @property
    def receives(self) -> bool:
        """Whether bytes_of needs a place to receive into."""
        return False


class RankLink(LocalLink):
    """Ends on two ranks. Headers go by p2p on `group` (gloo); channel tells the links between the same two ranks apart."""

    def __init__(self, peer: int, group: dist.ProcessGroup, transport: str, *, channel: int = 0, payload_group=None):
        super().__init__()
        self.peer, self.transport, self._group = peer, transport, group
        self._payload_group = payload_group or group
        self._tags = [channel * 4 + tag for tag in (0, _FORWARD, _BACK, _PAYLOAD)]

    def offer(self, slots: Slots, base: int = 0) -> None:
        where: dict[str, object] = {"bytes": slots.tensors[0].numel(), "base": base}
        if self.transport == "shm":
            where["paths"] = list(slots.paths)
        elif self.transport == "cuda_ipc":
            where["handles"] = [_share_device_memory(t) for t in slots.tensors]
        self.send(Header(Kind.OFFER, more=where))
        self.recv(at_receiver=False)  # mapped

    def accept(self) -> None:
        where = self.recv().more
        self.base = where["base"]
        if self.transport == "shm":
            self.slots = [map_shared(path, where["bytes"], create=False) for path in where["paths"]]
        elif self.transport == "cuda_ipc":
            self.slots = [_open_device_memory(handle) for handle in where["handles"]]
        self.send(Header(Kind.OFFER), to_receiver=False)

    def send(self, header: Header, to_receiver: bool = True) -> None:
        tag = self._tags[_FORWARD if to_receiver else _BACK]
        more = json.dumps(header.more).encode() if header.more is not None else b""
        fixed = torch.tensor([header.kind, header.version, header.index, header.digest, len(more)])
        dist.send(fixed, self.peer, group=self._group, tag=tag)
        if more:
            dist.send(torch.frombuffer(bytearray(more), dtype=torch.uint8), self.peer, group=self._group, tag=tag)

    def recv(self, at_receiver: bool = True, timeout_s: float | None = None) -> Header:
        tag = self._tags[_FORWARD if at_receiver else _BACK]
        fixed = torch.zeros(5, dtype=torch.int64)
        self._receive(fixed, tag, timeout_s)
        kind, version, index, digest_, size = fixed.tolist()
        more = None
        if size:
            raw = torch.empty(size, dtype=torch.uint8)
            self._receive(raw, tag, timeout_s)
            more = json.loads(raw.numpy().tobytes())
        return Header(Kind(kind), version, index, digest_, more)

    def _receive(self, tensor: Tensor, tag: int, timeout_s: float | None) -> None:
        work = dist.irecv(tensor, self.peer, group=self._group, tag=tag)
        if timeout_s is None:
            work.wait()
            return
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if "imed out" in str(error) or "imeout" in str(error):
                raise LinkTimeout(f"nothing came for {timeout_s:.0f} s") from error
            raise

    def send_bytes(self, flat: Tensor) -> None:
        if self.receives:
            dist.send(flat, self.peer, group=self._payload_group, tag=self._tags[_PAYLOAD])

    def bytes_of(self, slot: int, start: int, size: int, scratch: Tensor | None = None) -> Tensor:
        if not self.receives:
            return super().bytes_of(slot, start, size)
        dist.recv(scratch, self.peer, group=self._payload_group, tag=self._tags[_PAYLOAD])
        return scratch

    @property
    def receives(self) -> bool:
        return self.transport in ("gloo", "nccl")


def _share_device_memory(tensor: Tensor) -> dict:
    """What another process on this host needs to open a CUDA tensor's memory. JSON."""
    device, handle, size, offset, ref_handle, ref_offset, event, sync = tensor.untyped_storage()._share_cuda_()
    coded = [base64.b64encode(part).decode() for part in (handle, ref_handle, event)]
    return {
        "device": device,
        "size": size,
        "offset": offset,
        "ref_offset": ref_offset,
        "sync": sync,
        "coded": coded,
        "bytes": tensor.numel(),
    }


def _open_device_memory(shared: dict) -> Tensor:
    handle, ref_handle, event = (base64.b64decode(part) for part in shared["coded"])
    storage = torch.UntypedStorage._new_shared_cuda(
        shared["device"], handle, shared["size"], shared["offset"], ref_handle, shared["ref_offset"], event, shared["sync"]
    )
    flat = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", shared["device"]))
    return flat.set_(storage, 0, (shared["bytes"],))


# -- which transport ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class End:
    """What a rank says of itself before any link is made."""

    rank: int
    host: str  # equal on ranks that share memory files
    gpu: str | None  # the GPU's uuid, None on a CPU
    nccl: bool = False


def this_end(rank: int, device: torch.device) -> End:
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"
    if device.type != "cuda":
        return End(rank, host, None)
    return End(rank, host, str(torch.cuda.get_device_properties(device).uuid), dist.is_nccl_available())


def choose_transports(asked: str, pairs: list[tuple[End, End]]) -> dict[tuple[int, int], str]:
    """(sender rank, receiver rank) -> transport. `asked`: one of TRANSPORTS.

    GPUs on one host use cuda_ipc, on several nccl; without GPUs on both sides shm on one host, gloo between two.
    WeightsError with the reason and what can be done instead, if the one asked for cannot join a pair.
    """
    chosen = {}
    everyone = {end.rank: end for pair in pairs for end in pair}
    hosts, gpus = ({getattr(end, what) for end in everyone.values()} for what in ("host", "gpu"))
    # NCCL's group spans all ranks, so two on one GPU keep the others from it too.
    nccl = len(gpus) == len(everyone) and all(end.nccl for end in everyone.values())
    on_device = None not in gpus and (nccl or len(hosts) == 1)
    for a, b in pairs:
        if a.rank == b.rank:
            chosen[a.rank, b.rank] = "local"
            continue
        order = ("cuda_ipc", "nccl") if on_device else ("shm", "gloo")
        if asked == "auto":
            chosen[a.rank, b.rank] = next(t for t in order if _refusal(t, a, b) is None)
            continue
        if reason := _refusal(asked, a, b):
            others = [
                t for t in TRANSPORTS[1:] if t != asked and all(_refusal(t, x, y) is None for x, y in pairs if x.rank != y.rank)
            ]
            raise WeightsError(
                f"weights.transport={asked}: ranks {a.rank} and {b.rank} {reason}; use {' or '.join(others)}, or auto"
            )
        chosen[a.rank, b.rank] = asked
    return chosen


def _refusal(transport: str, a: End, b: End) -> str | None:
    """Why a transport cannot join two ranks; None if it can."""
    if transport == "gloo":
        return None
    if transport in ("shm", "cuda_ipc") and a.host != b.host:
        return "are on different hosts"
    if transport in _ON_DEVICE and not (a.gpu and b.gpu):
        return "do not both have a GPU"
    if transport == "nccl":
        if not (a.nccl and b.nccl):
            return "run a torch without NCCL"
        if a.gpu == b.gpu:
            return "share one GPU, which NCCL refuses"
    return None
