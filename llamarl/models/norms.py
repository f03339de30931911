"""The norms of a decoder's layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llamarl.models.fused import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) in float32, then in x's dtype times `scale`: Hugging Face's order of rounding."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.scale, self.eps)

    def of_sum(self, x: Tensor, change: Tensor | None) -> tuple[Tensor, Tensor]:
        """(h, norm(h)) with h = x + change (None: x)."""
        return add_rms_norm(x, change, self.scale, self.eps)
