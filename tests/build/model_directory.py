"""Model directories: a copy of the embedded model, and a random model from a config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from llamarl.models.config import read_config, tiny_directory
from llamarl.models.sharding import parameter_shapes


def change_json(file: Path, **values) -> None:
    """Give keys of a JSON file other values."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def same_tensors(file: Path, other: Path) -> bool:
    """Return True if two files of tensors have the same names and bits."""
    ours, theirs = load_file(file), load_file(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def copy_tiny(path: Path, **config) -> Path:
    """Copy the embedded model to `path`, which does not exist yet. config: keys of its config.json
    with other values.
    """
    shutil.copytree(tiny_directory(), path)
    change_json(path / "config.json", **config)
    return path


def write_model(path: Path, config: dict, *, seed: int = 0, scale: float = 0.4) -> Path:
    """Write a random model of this config.json. Norms are around 1 and other weights around 0, with
    the deviation `scale`: so large that every weight shows in the logits.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in parameter_shapes(read_config(path)).items():
        weights[name] = torch.randn(shape, generator=draw) * scale + (len(shape) == 1)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
