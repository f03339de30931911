"""Random weights, for benchmarks and tests whose model need not say anything."""

from __future__ import annotations

from llamarl.models.decoder import Decoder

# isort: split
import torch


@torch.no_grad()
def random_weights(decoder: Decoder, *, seed: int) -> Decoder:
    """Fill a decoder (on the CPU, or still on the meta device) and return it: norms are 1, biases
    0, the rest is drawn from normal(0, 0.02).
    """
    if any(parameter.is_meta for parameter in decoder.parameters()):
        decoder.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if name.endswith(".scale"):
            parameter.fill_(1)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return decoder
