"""Rows of a model's vocabulary that its tokenizer has no token for.

Vocabularies are padded to round sizes: Qwen3 has 151,936 rows for 151,669 tokens. Such a row is no
text, so it is left out of the distribution that is sampled and of every softmax over it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from llamarl.models.hf import load_tokenizer


def absent_ids(tokenizer, vocab_size: int) -> list[int]:
    """Return the ids below vocab_size that a tokenizer of transformers has no token for."""
    return sorted(set(range(vocab_size)).difference(tokenizer.get_vocab().values()))


def absent_rows(path: str | Path, vocab_size: int, device: str | torch.device) -> Tensor | None:
    """Return the absent ids [A] int64 of a model directory. None if its tokenizer has a token for
    each row, or if there is no tokenizer, so that nobody reads ids as text.
    """
    if not (Path(path) / "tokenizer_config.json").is_file():
        return None
    absent = absent_ids(load_tokenizer(path), vocab_size)
    return torch.tensor(absent, device=device) if absent else None
