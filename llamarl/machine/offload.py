"""Executors that share one device: each keeps its tensors in host memory while another works.

    sharing = DeviceSharing(["trainer", "generator"])    # one a rank
    sharing.join("generator", generator.offloadable)     # after its setup: out of the way at once
    sharing.claim("generator")                           # before it computes

A claim moves the holder's tensors to host memory and the claimant's back. Storages are emptied and
filled in place, so every view, parameter and captured pointer's owner stays what it was. A claim
waits for its copies: host memory is pinned, and a copy runs at the bus's speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, UntypedStorage

Tensors = Callable[[], Iterable[Tensor]]


class DeviceSharing:
    """Knows who holds the device. Not thread-safe: one loop a rank steps all executors."""

    def __init__(self, names: Iterable[str]):
        self.names = tuple(names)
        self.holder: str | None = None
        self._tensors: dict[str, Tensors] = {}
        # executor -> its storages, emptied, each with its bytes in host memory
        self._away: dict[str, list[tuple[UntypedStorage, UntypedStorage]]] = {}

    def join(self, name: str, tensors: Tensors) -> None:
        """Add an executor: `tensors()` names what may leave the device, and is asked anew at each
        turn. What `name` holds now leaves at once.
        """
        self._tensors[name] = tensors
        self._leave(name)

    def claim(self, name: str) -> bool:
        """Give the device to `name`. True if anything had to move."""
        if self.holder == name or name not in self._tensors:
            return False
        if self.holder is not None:
            self._leave(self.holder)
        moved: set[str] = set()  # types of devices
        for storage, kept in self._away.pop(name, []):
            storage.resize_(kept.nbytes())
            storage.copy_(kept, non_blocking=True)
            moved.add(storage.device.type)
        _settle(moved)
        self.holder = name
        return True

    def _leave(self, name: str) -> None:
        storages = {}
        for tensor in self._tensors[name]():
            storage = tensor.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage
        away = []
        for storage in storages.values():
            # PyTorch keeps pinned memory that is freed, for the next to leave.
            pin_memory = storage.device.type == "cuda"
            room = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin_memory)
            kept = room.untyped_storage()
            kept.copy_(storage, non_blocking=True)
            away.append((storage, kept))
        _settle({storage.device.type for storage, _ in away})
        for storage, _ in away:
            storage.resize_(0)
        self._away[name] = away
        if self.holder == name:
            self.holder = None


def _settle(device_types: set[str]) -> None:
    """Wait for the copies from or to devices of these types."""
    if "cuda" in device_types:
        torch.cuda.synchronize()
