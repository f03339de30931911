"""A model directory with rows of the vocabulary that its tokenizer has no token for."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.build.model_directory import copy_tiny

TOKENS = 52  # of the tiny tokenizer
ROWS = 64
ABSENT = list(range(TOKENS, ROWS))


def padded_directory(path: Path) -> Path:
    """Write the tiny model with 12 rows more, which are copies of digits' rows: as likely as
    these.
    """
    copy_tiny(path, vocab_size=ROWS)
    weights = load_file(path / "model.safetensors")
    name = "model.embed_tokens.weight"
    embedding = weights[name]
    weights[name] = torch.cat([embedding, embedding[4 : 4 + len(ABSENT)]])
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
