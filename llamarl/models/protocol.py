"""LanguageModel: what trainer, engine and weight transfer need of a model. `build.Decoder` gives
it.

    parameters   by Hugging Face name, each with its shape and its part for a tensor-parallel rank
    layers       one module a block: FSDP shards each, and the cache keeps keys and values of each
    forward      flat tokens, their positions, an attention context, and the head to apply

A model is no subclass of anything here. It has these attributes, and three tables name its
parameters: `_NAMES` in hf.py, `parameter_shapes` and `tensor_parallel_box` in sharding.py. A
Hugging Face name is here the one of Llama's directories, in every family; hf.py knows where those
of other families keep the same.
docs/models.md adds a family step by step.

Shapes: T tokens, D model, V vocabulary, K head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar, overload

import torch
from torch import Tensor, nn

from llamarl.models.attention import Angles, AttentionContext
from llamarl.models.config import ModelConfig
from llamarl.models.masters import Masters
from llamarl.models.tp import TensorParallel

Head = Callable[[Tensor, Tensor], object]  # (hidden [T, D], output weight [V, D]) -> anything

Made = TypeVar("Made")  # by a head
Model = TypeVar("Model", bound="LanguageModel")  # what is given, and returned


class LanguageModel(Protocol):
    """A decoder over flat tokens. It is an nn.Module besides; those of its methods that are called
    here stand at the end.

    isinstance cannot tell whether a module is one: since Python 3.12 it does not see submodules,
    which a module has by __getattr__. tests/parity/test_models.py looks at each member.
    """

    # Everyone.
    config: ModelConfig
    tensor_parallel: TensorParallel | None  # whose part of each parameter this is; None: the whole
    layers: nn.ModuleList
    # [A] int64: rows of the vocabulary that the tokenizer has no token for, left out of every
    # softmax; None: there are none (llamarl.models.hf).
    absent_rows: Tensor | None
    logit_cap: float | None  # logits are cap tanh(h W^T / cap); None: h W^T

    @overload
    def __call__(
        self, tokens_T: Tensor, positions_T: Tensor, attention: AttentionContext, head: None = None
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: AttentionContext,
        head: Callable[[Tensor, Tensor], Made],
    ) -> Made:
        """Return logits [T, V] in the model's dtype, or what `head` makes of the normed hidden
        states and the output weight. A head applies `logit_cap` itself.

        Layer i must hand its queries, keys and values to `attention.attend(i, q, k, v)`, which says
        what each token sees: that is all it may know of sequences, caches and packing.
        """
        ...

    # The trainer sets these.
    activation_checkpointing: bool  # recompute each layer in backward
    whole_on_each_rank: bool  # FSDP holds replicas and shards nothing
    masters: Masters | None  # one rank's float32 weights, where it computes in a lower precision

    # The engine asks these.
    @property
    def tok_embeddings(self) -> nn.Embedding:
        """The embedding. Its weight [V, D] has the model's dtype and device."""
        ...

    @property
    def output_weight(self) -> Tensor:
        """The output weight [V, D], or this rank's rows of a split vocabulary."""
        ...

    @property
    def cached_shapes(self) -> list[tuple[int, int]] | None:
        """The key/value heads that each layer hands to the attention context, and their features.
        None: a cache sees them in the first pass.
        """
        ...

    def project(self, h_TD: Tensor, weight_VD: Tensor) -> Tensor:
        """Return logits [T, V] of hidden states: the head of generation."""
        ...

    def rotary(self, positions_T: Tensor, longest: int) -> Angles:
        """Return cos and sin [T, 1, K] of positions below `longest`. The first call builds the
        tables.
        """
        ...

    # nn.Module's.
    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...

    def set_submodule(self, target: str, module: nn.Module) -> None: ...

    def requires_grad_(self, requires_grad: bool = True) -> object: ...

    def to_empty(self, *, device: str | torch.device | int | None) -> object: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...
