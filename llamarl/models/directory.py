"""The files of a model directory, which may be a stranger's: what is refused, its safetensors, and
digests that tell it from others. Needs no torch.

The digests are of the small files and of a few rows of each tensor, wherever the directory lies and
whatever its size. Of a directory of 100 GB less than 100 MB are read. So a model that was trained
on, merged, scaled or replaced has another digest; one in which a few single numbers were edited may
not.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open

from llamarl.errors import NoWeights
from llamarl.models.shape import Shape

NAMED_TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja
# Where there is no tokenizer.json: what a tokenizer is made of.
_VOCABULARIES = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "added_tokens.json")
# The JSON files that transformers may read a tokenizer from.
TOKENIZER_JSON = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.json",
)
TOKENIZER_FILES = (*TOKENIZER_JSON, *_VOCABULARIES, "chat_template.jinja")
# Dtypes, as safetensors calls them. Integers would be taken for the numbers themselves, without the
# scales that they are multiples of.
FLOATING = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_OF_ITS_LAST_USE = ("padding", "truncation")  # what transformers notes in tokenizer.json
_MOST_BYTES = 1 << 15  # of a row


def check_files(directory: Path) -> None:
    """Raise ValueError for a file that lies elsewhere, or that is no regular file.

    A link may lead to another file of the directory. In the cache of the Hugging Face Hub it may
    lead to the model's own blobs:

        models--org--name/snapshots/REVISION/config.json -> ../../blobs/HASH

    Any other link is refused: it would have files of this machine read as the model's, and copied
    into every model that is exported.
    """
    own = directory.resolve()
    root = own
    in_hub_cache = own.parent.name == "snapshots" and own.parents[1].name.startswith("models--")
    if in_hub_cache:
        root = own.parents[1]
    templates = own / NAMED_TEMPLATES
    more = sorted(templates.iterdir()) if templates.is_dir() else []
    for file in (*sorted(own.iterdir()), *more):
        if file.is_dir() and (file != templates or not file.is_symlink()):
            continue  # a folder is not read, except this one
        if not file.exists() and not file.is_dir():  # a link to nothing
            continue
        shown = directory / file.relative_to(own)
        if not file.is_file():
            raise ValueError(f"{shown}: no regular file; fetch the directory again")
        if file.is_symlink() and not file.resolve().is_relative_to(root):
            raise ValueError(
                f"{shown}: a link to {file.resolve()}, outside of the directory; if it is to be "
                f"used, make a copy without links: cp -rL {directory} COPY"
            )


def read_json(file: Path) -> dict:
    """Return the JSON object that a file holds. ValueError naming it if it holds none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ValueError(f"{file}: not JSON: {error}; fetch it again") from error
    except RecursionError as error:
        raise ValueError(
            f"{file}: its JSON is nested too deep to be read; fetch it again"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{file}: need a JSON object, this is {type(value).__name__}; fetch it again"
        )
    return value


def architecture_in(raw: dict) -> str:
    """Return the first of the architectures that a config.json names; "(none)" if it names none.
    ValueError if they are no names.
    """
    named = raw.get("architectures") or ["(none)"]
    if not (isinstance(named, list) and isinstance(named[0], str)):
        raise ValueError(
            f"architectures={named!r:.80}: need a list of names, such as "
            '["LlamaForCausalLM"]; fetch it again'
        )
    return named[0]


def refuse_unfit(path: Path, problems: Collection[str], whose: str = "config.json") -> None:
    """Raise ValueError naming what is wrong with single tensors of a directory, if anything is."""
    if problems:
        listed = "\n  ".join(sorted(problems)[:20])
        raise ValueError(f"{path}: weights do not fit {whose}:\n  {listed}")


class SafetensorsDir:
    """Reads the tensors of a model directory, one at a time or by slice; sharded (index.json) or
    single. stem: of the files' names.

    NoWeights (which is a FileNotFoundError) or ValueError naming the file when one is missing,
    truncated, not safetensors, or outside of the directory.
    """

    def __init__(self, path: str | Path, stem: str = "model"):
        self.path = Path(path)
        if self.path.is_dir():
            check_files(self.path)
        index = self.path / f"{stem}.safetensors.index.json"
        single = self.path / f"{stem}.safetensors"
        if index.is_file():
            files = sorted(set(_weight_map(index).values()))
            if single.is_file() and single.name not in files:
                # transformers reads the single file, others the shards.
                raise ValueError(
                    f"{index} names {files[0]}, but {single.name} is there too, and they may hold "
                    "other weights; remove the one that is out of date"
                )
        elif single.is_file():
            files = [single.name]
        else:
            raise NoWeights(f"{single}: no such file; weights are loaded from safetensors only")
        self.files = [self.path / name for name in files]
        self.file_of = {}  # name of a tensor -> the opened file
        for name in files:
            file = self.path / name
            if not file.is_file():
                raise NoWeights(f"{file}: no such file, but the index names it")
            try:
                opened = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{file}: not a whole safetensors file ({error}); fetch it again"
                ) from error
            self.file_of.update(dict.fromkeys(opened.keys(), opened))

    def get_slice(self, name: str):
        """Return a tensor that is read only where it is sliced."""
        return self.file_of[name].get_slice(name)

    def problems_of(self, name: str, shape: Shape | None = None) -> list[str]:
        """Say that a tensor has another shape, or numbers that are no floating-point numbers."""
        tensor = self.get_slice(name)
        found = tuple(tensor.get_shape())
        if shape is not None and found != shape:
            return [f"{name}: shape {found}, the config says {shape}"]
        if tensor.get_dtype() not in FLOATING:
            return [f"{name}: {tensor.get_dtype()}, need one of {', '.join(FLOATING)}"]
        return []


def _weight_map(index: Path) -> dict[str, str]:
    """Return tensor -> file of an index. ValueError naming the index if it says no such thing."""
    named = read_json(index).get("weight_map")
    files = named.values() if isinstance(named, dict) else ()
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in files) or not files:
        raise ValueError(f"{index}: no weight_map from tensors to files; fetch it again")
    for tensor, file in named.items():
        # A path, or "..", which Path calls the name of itself: it may lead anywhere.
        if Path(file).name != file or file == ".." or "\0" in file:
            raise ValueError(
                f"{index}: {tensor} in {file!r}, which is no file of the directory; fetch it again"
            )
    return named


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
