"""Decoder: the module that trainer and engine hold, whoever computes its layers."""

from __future__ import annotations

from torch import Tensor, nn

from llamarl.models.attention import Angles
from llamarl.models.config import ModelConfig
from llamarl.models.masters import Masters
from llamarl.models.tp import TensorParallel


class Decoder(nn.Module):
    """A LanguageModel, which says what each of these is: our own modules', or transformers'.

    forward takes the head, because training never wants all [T, V] logits at once: `head(hidden [T,
    D], weight [V, D])` runs inside forward, where FSDP has gathered the weight.
    """

    config: ModelConfig
    tensor_parallel: TensorParallel | None = None
    layers: nn.ModuleList
    activation_checkpointing = False
    whole_on_each_rank = False
    masters: Masters | None = None
    absent_rows: Tensor | None = None
    logit_cap: float | None = None
    tok_embeddings: nn.Embedding

    @property
    def output_weight(self) -> Tensor:
        """The output weight [V, D]."""
        raise NotImplementedError

    @property
    def cached_shapes(self) -> list[tuple[int, int]] | None:
        """The K/V heads of each layer and their features; None: seen in the first pass."""
        return None

    def project(self, h_TD: Tensor, weight_VD: Tensor) -> Tensor:
        """Return logits [T, V] of hidden states."""
        raise NotImplementedError

    def rotary(self, positions_T: Tensor, longest: int) -> Angles:
        """Return cos and sin [T, 1, K] of positions below `longest`."""
        raise NotImplementedError
