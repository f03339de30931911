"""Decoder: the module that trainer and engine hold, whoever computes its layers."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llamarl.models.attention import Angles
from llamarl.models.fsdp import is_dtensor
from llamarl.models.masters import Masters
from llamarl.models.routing import Routing
from llamarl.models.shape import ModelConfig
from llamarl.models.tp import TensorParallel


class Decoder(nn.Module):
    """A LanguageModel, which says what each of these is: our own modules', transformers' or
    torchtune's.

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
    routing: Routing | None = None  # of a mixture of experts
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
        """Return cos and sin [T, 1, K] of positions below `longest`; of no features where the
        modules turn queries and keys themselves.
        """
        nothing = positions_T.new_empty(len(positions_T), 1, 0, dtype=torch.float32)
        return nothing, nothing

    def through_layers(self, h: Tensor, **options: Any) -> Tensor:
        """Return the residual stream behind all layers, each of which gets these options."""
        for layer in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                h = checkpoint(layer, h, **options, use_reentrant=False)
            else:
                h = layer(h, **options)
        return h

    def to_empty(self, *, device: str | torch.device | int | None, recurse: bool = True) -> Self:
        """Give every parameter uninitialised memory on `device`. Buffers, such as rotary tables,
        move there with their numbers. On the meta device they stay where they are.
        """
        if device is not None and torch.device(device).type == "meta":
            return self

        def memory_like(tensor: Tensor) -> Tensor:
            if is_dtensor(tensor):
                return torch.empty_like(tensor, device=device)
            if tensor.is_meta:
                return torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
                )
            return tensor.to(device)

        return self._apply(memory_like, recurse=recurse)
