"""The norms of a decoder's layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarl.models.config import ModelConfig
from llamarl.models.fused import add_rms_norm, is_altered


class RMSNorm(nn.Module):
    """x / rms(x) in float32, then in x's dtype times `scale`: Hugging Face's order of rounding."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        _, normed = add_rms_norm(x, None, self.scale, self.eps)
        return normed

    def of_sum(self, x: Tensor, change: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (h, norm(h)) with h = x + change (None: x), in one kernel unless a subclass or a
        hook must be called.
        """
        if type(self) is not RMSNorm or is_altered(self):
            h = x if change is None else x + change
            return h, self(h)
        return add_rms_norm(x, change, self.scale, self.eps)


class LayerNorm(nn.Module):
    """(x - mean(x)) / std(x) in float32, times `scale`, plus `bias`          (Ba et al. 2016)"""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.scale.shape, self.scale, self.bias, self.eps)

    def of_sum(self, x: Tensor, change: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (h, norm(h)) with h = x + change (None: x)."""
        h = x
        if change is not None:
            h = x + change
        return h, self(h)


def norm_of(config: ModelConfig) -> RMSNorm | LayerNorm:
    """Return a norm of the residual stream."""
    kind = LayerNorm if config.traits.norm == "layer" else RMSNorm
    return kind(config.hidden_size, eps=config.rms_norm_eps)
