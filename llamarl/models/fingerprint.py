"""Digests that tell a model directory from others, wherever it lies and whatever its size: of its
small files, and of a few rows of each tensor.

Of a directory of 100 GB less than 100 MB are read. So a model that was trained on, merged, scaled
or replaced has another digest; one in which a few single numbers were edited may not.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path

from llamarl.models.directory import read_json
from llamarl.models.hf import SafetensorsDir

# Where there is no tokenizer.json: what a tokenizer is made of.
_VOCABULARIES = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "added_tokens.json")
_OF_ITS_LAST_USE = ("padding", "truncation")  # what transformers notes in tokenizer.json
_MOST_BYTES = 1 << 15  # of a row


def weights_digest(path: str | Path) -> str:
    """Return a SHA-256 of a model directory's weights. It covers each tensor's name, type and
    shape, and the first bytes of its first, middle and last row.

    It does not depend on how the weights are split into files. FileNotFoundError or ValueError as
    from SafetensorsDir.
    """
    digests = {}
    for file in SafetensorsDir(path).files:
        digests.update(_tensor_digests(file))
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(name.encode())
        whole.update(digests[name])
    return whole.hexdigest()


def _tensor_digests(file: Path) -> dict[str, bytes]:
    """Return the digest of each tensor of a safetensors file, by the tensor's name.

    The rows are read one by one, because a mapped file would be read ahead around each of them.
    """
    digests = {}
    with file.open("rb", buffering=0) as stream:
        (header_bytes,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(os.pread(stream.fileno(), header_bytes, 8))
        data = 8 + header_bytes  # where the tensors begin
        if hasattr(os, "posix_fadvise"):  # macOS has none
            os.posix_fadvise(stream.fileno(), data, 0, os.POSIX_FADV_RANDOM)
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            begin, end = tensor["data_offsets"]
            shape = tensor["shape"]
            digest = hashlib.sha256(f"{tensor['dtype']} {shape}".encode())
            num_rows = shape[0] if len(shape) > 1 else 1
            row_bytes = (end - begin) // max(1, num_rows)
            for row in sorted({0, num_rows // 2, max(0, num_rows - 1)}):
                place = data + begin + row * row_bytes
                digest.update(os.pread(stream.fileno(), min(row_bytes, _MOST_BYTES), place))
            digests[name] = digest.digest()
    return digests


def tokenizer_digest(path: str | Path) -> str:
    """Return a SHA-256 of how a model directory's tokenizer cuts texts, without its chat template.
    It is unchanged if tokenizer.json was only written anew.
    """
    path = Path(path)
    digest = hashlib.sha256()
    file = path / "tokenizer.json"
    if file.is_file():
        values = read_json(file)
        kept = {key: value for key, value in values.items() if key not in _OF_ITS_LAST_USE}
        digest.update(json.dumps(kept, sort_keys=True).encode())
        return digest.hexdigest()
    for name in _VOCABULARIES:
        if (path / name).is_file():
            digest.update(name.encode())
            digest.update((path / name).read_bytes())
    return digest.hexdigest()


def model_digest(path: str | Path) -> str:
    """Return a SHA-256 over a model directory's config, tokenizer and weights."""
    digest = hashlib.sha256((Path(path) / "config.json").read_bytes())
    digest.update(tokenizer_digest(path).encode())
    digest.update(weights_digest(path).encode())
    return digest.hexdigest()
