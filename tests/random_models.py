"""Small models of transformers' whose every weight shows in what they compute."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

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


def save_drawn(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """Draw the model's weights, large enough that each of them shows, and save it."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise * 0.2 + (parameter.dim() == 1)
    model.save_pretrained(path)
    return model.eval()
