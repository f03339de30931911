"""Small models of transformers' whose every weight shows in what they compute, and directories of
models as others have them.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tests.build.model_directory import change_json

SIZES = {
    "vocab_size": 53,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


def save_drawn(model: PreTrainedModel, path: Path, *, seed: int = 0) -> PreTrainedModel:
    """Draw the model's weights, large enough that each of them shows, and save it."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise * 0.2 + (parameter.dim() == 1)
    model.save_pretrained(path)
    return model.eval()


def swap_tokens(directory: Path) -> None:
    """Give 7 and 8 of a copy of the tiny model's tokenizer each other's ids."""
    file = directory / "tokenizer.json"
    model = json.loads(file.read_text())["model"]
    vocabulary = model["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    change_json(file, model=model)
