"""Decoder: what trainer, engine and weight transfer need of a model, whoever computes its layers.

    parameters   by Hugging Face name, each with its shape and its part for a tensor-parallel rank
    layers       one module a block: FSDP shards each, and the cache keeps keys and values of each
    forward      flat tokens, their positions, an attention context, and the head to apply

Three tables name the parameters: `_NAMES` in hf.py, `parameter_shapes` and `tensor_parallel_box` in
sharding.py. A Hugging Face name is here the one of Llama's directories, in every family; hf.py
knows where those of other families keep the same. docs/models.md adds a family step by step.

Shapes: T tokens, D model, V vocabulary, K head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llamarl.models.attention import Angles, AttentionContext
from llamarl.models.fsdp import is_dtensor
from llamarl.models.masters import Masters
from llamarl.models.routing import Routing
from llamarl.models.shape import ModelConfig
from llamarl.models.sharding import heads_of
from llamarl.models.tp import TensorParallel, copied, gathered, place_of

Head = Callable[[Tensor, Tensor], object]  # (hidden [T, D], output weight [V, D]) -> anything


class Decoder(nn.Module):
    """A decoder over flat tokens: our own modules', transformers' or torchtune's. Each of these
    says in `hidden` what its layers compute.

    Layer i must hand its queries, keys and values to `attention.attend(i, q, k, v)`, which says
    what each token sees: that is all it may know of sequences, caches and packing.
    """

    # Everyone reads these.
    config: ModelConfig
    tensor_parallel: TensorParallel | None = None  # whose part of each parameter this is
    layers: nn.ModuleList
    tok_embeddings: nn.Embedding  # its weight [V, D] has the model's dtype and device
    output: nn.Module  # the head of a language model that is not tied
    score: nn.Module  # a scorer's
    # [A] int64: rows of the vocabulary that the tokenizer has no token for, left out of every
    # softmax; None: there are none (llamarl.models.hf).
    absent_rows: Tensor | None = None
    logit_cap: float | None = None  # logits are cap tanh(h W^T / cap); None: h W^T
    routing: Routing | None = None  # of a mixture of experts
    # The trainer sets these.
    activation_checkpointing = False  # recompute each layer in backward
    whole_on_each_rank = False  # FSDP holds replicas and shards nothing
    masters: Masters | None = None  # one rank's float32 weights beside lower ones

    @property
    def output_weight(self) -> Tensor:
        """The output weight [V, D], or this rank's rows of a split vocabulary: the embedding itself
        when tied. A scorer's is [labels, D].
        """
        head = self.score if self.config.labels else self.output
        if self.config.tie_word_embeddings:
            head = self.tok_embeddings
        weight = head.weight
        assert isinstance(weight, Tensor), "a head has a weight"
        return weight

    @property
    def cached_shapes(self) -> list[tuple[int, int]] | None:
        """The key/value heads that each layer hands to the attention context, and their features.
        None: a cache sees them in the first pass.
        """
        heads = heads_of(self.config, *place_of(self.tensor_parallel))
        return [(heads.num_cached, self.config.head_dim)] * len(self.layers)

    def project(self, h_TD: Tensor, weight_VD: Tensor) -> Tensor:
        """Return logits [T, V] of hidden states: the head of generation."""
        logits = F.linear(h_TD, weight_VD)
        if self.logit_cap is None:
            return logits
        return torch.tanh(logits / self.logit_cap) * self.logit_cap

    def rotary(self, positions_T: Tensor, longest: int) -> Angles:
        """Return cos and sin [T, 1, K] of positions below `longest`; of no features where the
        modules turn queries and keys themselves. The first call builds the tables.
        """
        nothing = positions_T.new_empty(len(positions_T), 1, 0, dtype=torch.float32)
        return nothing, nothing

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, attention: AttentionContext) -> Tensor:
        """Return the normed hidden states [T, D] of tokens, padding included."""
        raise NotImplementedError

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: AttentionContext,
        head: Head | None = None,
    ) -> Any:
        """Logits [T, V] in the model's dtype, or what `head` (default: `project`) makes of the
        normed hidden states and the output weight. Training never wants all logits at once, and
        here FSDP has gathered the weight. A head applies `logit_cap` itself.

        Collective over the ranks of a tensor-parallel decoder. Where these split the vocabulary,
        `head` must return the logits [..., V / ranks] of the rows that it is given, and every rank
        gets them all.
        """
        num_tokens = len(tokens_T)
        if attention.padding:
            tokens_T = F.pad(tokens_T, (0, attention.padding))
            positions_T = F.pad(positions_T, (0, attention.padding))
        h_TD = self.hidden(tokens_T, positions_T, attention)[:num_tokens]
        head = head or self.project
        tp = self.tensor_parallel
        if tp is None or not tp.split_vocabulary or self.config.labels:
            return head(h_TD, self.output_weight)
        logits = head(copied(h_TD, tp), self.output_weight)
        assert isinstance(logits, Tensor), "a split vocabulary has a head that returns logits"
        return gathered(logits, self.config.vocab_size, tp)

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
            if tensor.is_meta:  # without PyTorch's decompositions, which load sympy
                return torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
                )
            return tensor.to(device)

        return self._apply(memory_like, recurse=recurse)
