"""SavedPart: the state that one rank of an executor saved in a checkpoint.

JSON values are read at once, tensors and boxes of them on demand: a rank of a large model reads
only the boxes that overlap its own. The file of tensors is opened at the first tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from llamarl.checkpoint.manifest import Files, read_manifest
from llamarl.errors import CheckpointError


class SavedPart(Mapping[str, Any]):
    """Maps names to the values that a rank saved.

    tensors: a safetensors file, None without tensors. CheckpointError names the file if a lookup
    needs it and it cannot be read.
    """

    def __init__(self, values: Mapping[str, object], tensors: Path | None):
        self._values = values
        self._path = tensors

    @cached_property
    def _file(self) -> safe_open | None:
        if self._path is None:
            return None
        try:
            return safe_open(self._path, "pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._path}: cannot be read: {error}") from error

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self._file.keys()) if self._file is not None else frozenset()

    def __getitem__(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        if name in self._names:
            return self._tensors().get_tensor(name)
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return name in self._values or name in self._names

    def __iter__(self) -> Iterator[str]:
        yield from self._values
        yield from self._names

    def __len__(self) -> int:
        return len(self._values) + len(self._names)

    def box(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Read tensor[index] alone."""
        file = self._tensors()
        return file.get_slice(name)[index] if index else file.get_tensor(name)

    def _tensors(self) -> safe_open:
        """Return the file of tensors. KeyError where there is none."""
        if self._file is None:
            raise KeyError("this part was saved without tensors")
        return self._file


# --- Reading a checkpoint ---


def stem_of(name: str, rank: int) -> str:
    """Return the name of a part's files without the suffix."""
    return f"{name}.rank{rank}"


def ranks_of(path: Path, name: str, *, may_be_absent: bool = False) -> list[int]:
    """Return the ranks (places within the executor) that saved a part of `name`.

    [] if its state was lost in a run that could do without it. CheckpointError if the checkpoint
    has no such executor, unless it may be absent.
    """
    parts = read_manifest(path)["parts"]
    if may_be_absent and name not in parts:
        return []
    if name not in parts:
        raise CheckpointError(
            f"{path}: holds no state of {name}, only of {', '.join(parts)}; it was made by another "
            "recipe"
        )
    return parts[name]


def load_part(path: Path, name: str, rank: int) -> SavedPart:
    """Load the state that `save_part` wrote, on the CPU. CheckpointError names a file that is
    absent or cannot be read.
    """
    return _load_part(path, name, rank, read_manifest(path)["files"])


def load_parts(path: Path, name: str, *, may_be_absent: bool = False) -> list[SavedPart]:
    """Load the parts of all ranks of an executor; see ranks_of and load_part."""
    files = read_manifest(path)["files"]
    ranks = ranks_of(path, name, may_be_absent=may_be_absent)
    return [_load_part(path, name, rank, files) for rank in ranks]


def _load_part(path: Path, name: str, rank: int, files: Files) -> SavedPart:
    """Load a part. files: the manifest's. A manifest grows with the ranks: read it once for all."""
    stem = stem_of(name, rank)
    tensors = f"{stem}.safetensors"
    try:
        values = json.loads((path / f"{stem}.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / stem}: cannot be read: {error}") from error
    return SavedPart(values, path / tensors if tensors in files else None)


def in_work(path: Path) -> set[int]:
    """Return the tickets whose unfinished completions an executor saved as `in_work`."""
    tickets = set()
    manifest = read_manifest(path)
    for name, ranks in manifest["parts"].items():
        for rank in ranks:
            part = _load_part(path, name, rank, manifest["files"])
            tickets.update(part.get("in_work", []))
    return tickets
