"""Part: one executor's part of a checkpoint, as it is read.

Its JSON values come at once, its tensors, or boxes of them, when they are asked for: each rank of a
large model reads what its own boxes overlap, and not what all the others had saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor


class Part(Mapping[str, Any]):
    """Holds what one executor's rank had saved, by name.

    tensors: a safetensors file, None without tensors. OSError or SafetensorError if that cannot be
    read.
    """

    def __init__(self, values: Mapping[str, object], tensors: Path | None):
        self._values = values
        self._file: safe_open | None = None
        self._names: frozenset[str] = frozenset()
        if tensors is not None:
            self._file = safe_open(tensors, "pt")
            self._names = frozenset(self._file.keys())

    def __getitem__(self, name: str) -> Any:
        if name in self._names:
            return self._tensors().get_tensor(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names or name in self._values

    def __iter__(self) -> Iterator[str]:
        yield from self._values
        yield from self._names

    def __len__(self) -> int:
        return len(self._values) + len(self._names)

    def box(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Read tensor[index], and nothing else of the tensor."""
        file = self._tensors()
        return file.get_slice(name)[index] if index else file.get_tensor(name)

    def _tensors(self) -> safe_open:
        """Return the file of tensors. KeyError where there is none."""
        if self._file is None:
            raise KeyError("this part was saved without tensors")
        return self._file
