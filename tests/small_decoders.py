"""A decoder of two layers with drawn weights, whose sizes suit the products of every device."""

from __future__ import annotations

import torch

from llamarl.models.build import Decoder, ModelConfig, build_decoder
from tests.build.model_config import model_config

CONFIG = model_config(vocab_size=48, hidden_size=32, intermediate_size=48, head_dim=8)
LOGITS = 5.0  # more than their standard deviation


def drawn_decoder(
    config: ModelConfig = CONFIG, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Decoder:
    """The decoder, on the CPU."""
    decoder = build_decoder(config, dtype=dtype, device="cpu")
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=random) * 0.3
            parameter.copy_(torch.ones_like(noise) if "norm" in name else noise)
    return decoder
