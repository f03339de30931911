"""A model directory with rows of the vocabulary that its tokenizer has no token for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from llamarl.models.config import tiny_directory

TOKENS = 52  # of the tiny tokenizer
ROWS = 64
ABSENT = list(range(TOKENS, ROWS))


def padded_directory(path: Path) -> Path:
    """Write the tiny model with 12 rows more, which are copies of digits' rows: as likely as
    these.
    """
    shutil.copytree(tiny_directory(), path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": ROWS}))
    weights = load_file(path / "model.safetensors")
    name = "model.embed_tokens.weight"
    embedding = weights[name]
    weights[name] = torch.cat([embedding, embedding[4 : 4 + len(ABSENT)]])
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
