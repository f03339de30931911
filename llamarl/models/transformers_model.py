"""Any decoder that transformers knows, as a Decoder: its modules compute, and our contexts attend.

transformers calls an attention function by its name, with the queries, keys and values of a layer.
Ours hands them to the AttentionContext of the pass, so that packing, the cache and shared prompts
work as they do for `build.Decoder`. What a layer says of its scores (scale, window, soft cap,
sinks) goes along. `agreement` says whether a model is computed right so, by comparing it with
transformers' own attention.

Parameters have transformers' names, by which a directory's files, adapters and weight transfer
call them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llamarl.models.attention import AttentionContext, PackedAttention, Scores
from llamarl.models.decoder import Decoder
from llamarl.models.routing import Routing
from llamarl.models.shape import ModelConfig
from llamarl.models.tp import TensorParallel
from llamarl.models.tp_plan import keep_part
from llamarl.models.transformers_config import base_of, layers_of, transformers_model

OURS = "llamarl"  # the name of our attention function in transformers' table


@dataclass(slots=True)
class Seat:
    """Where the attention context of the pass sits, for all layers of one decoder."""

    attention: AttentionContext | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """What transformers' layers get in the place of a mask where they see the last `tokens`
    alone.
    """

    tokens: int


def _mask(*, local_size: int | None = None, **_: object) -> Window | None:
    """Return what says which keys a layer sees: contexts make the mask itself."""
    return None if local_size is None else Window(local_size)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Window | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend in the context of the pass. query, key, value [1, heads, T, K]; returns [1, T, H,
    K].
    """
    seat: Seat = module.llamarl_seat  # type: ignore[assignment]
    assert seat.attention is not None, "only within a decoder's forward"
    scores = Scores(
        scale=scaling,
        window=None if attention_mask is None else attention_mask.tokens,
        softcap=softcap,
        sinks_H=s_aux,
    )
    q_THK = query[0].transpose(0, 1)
    k_TJK = key[0].transpose(0, 1)
    v_TJK = value[0].transpose(0, 1)
    head_dim = v_TJK.shape[-1]
    if head_dim < k_TJK.shape[-1]:  # a cache has keys and values of one size
        v_TJK = F.pad(v_TJK, (0, k_TJK.shape[-1] - head_dim))
    out_THK = seat.attention.attend(module.layer_idx, q_THK, k_TJK, v_TJK, scores)  # type: ignore[arg-type]
    return out_THK[None, ..., :head_dim], None


ALL_ATTENTION_FUNCTIONS.register(OURS, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(OURS, _mask)


class TransformersDecoder(Decoder):
    """A decoder of transformers' modules."""

    cached_shapes = None  # layers may differ: a cache sees them in the first pass

    def __init__(self, config: ModelConfig, model: nn.Module):
        super().__init__()
        self.config = config
        self.seat = Seat()
        self._recomputes = False
        self.transformers: Any = model
        self.routing = Routing.of(model, self.layers)
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                module.llamarl_seat = self.seat  # type: ignore[assignment]
        self._logit_scale = 1.0
        self._has_bias = False
        if config.labels:
            return
        self._has_bias = getattr(self.transformers.lm_head, "bias", None) is not None
        text = model.config.get_text_config()  # type: ignore[operator, union-attr]
        self.logit_cap = getattr(text, "final_logit_softcapping", None)
        multiple = getattr(text, "logit_scale", None) or 1.0  # Cohere's
        self._logit_scale = multiple / (getattr(text, "logits_scaling", None) or 1.0)  # Granite's

    @property
    def base(self) -> Any:
        """transformers' model without the head."""
        return base_of(self.transformers)

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        """The decoder's blocks."""
        return layers_of(self.transformers)

    @property
    def activation_checkpointing(self) -> bool:
        """Whether each layer is computed again in backward."""
        return self._recomputes

    @activation_checkpointing.setter
    def activation_checkpointing(self, wanted: bool) -> None:
        if wanted == self._recomputes:
            return
        self._recomputes = wanted
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the methods' names change in 6
            if wanted:
                self.transformers._set_gradient_checkpointing(True, self._recomputed)
            else:
                self.transformers.gradient_checkpointing_disable()

    def _recomputed(self, layer: Callable[..., Any], *args: Any) -> Any:
        """Run a layer, and run it again in backward. The second run takes the attention and the
        routes of the first: a decoder that reads each sequence by itself has several passes.
        """
        attention = self.seat.attention
        given = None if self.routing is None else self.routing.given

        def run(*args: Any) -> Any:
            self.seat.attention = attention
            if self.routing is not None:
                self.routing.given = given
            return layer(*args)

        return checkpoint(run, *args, use_reentrant=False)

    @property
    def tok_embeddings(self) -> nn.Embedding:  # type: ignore[override]
        """The embedding."""
        return self.transformers.get_input_embeddings()

    @property
    def output_weight(self) -> Tensor:
        """The output weight [V, D]: the embedding itself when tied. A scorer's is [labels, D]. Its
        last column is the head's bias, if it has one.
        """
        if self.config.labels:
            return self.transformers.score.weight
        head = self.transformers.lm_head
        tied = self.config.tie_word_embeddings
        weight_VD = self.tok_embeddings.weight if tied else head.weight
        if self._has_bias:
            weight_VD = torch.cat([weight_VD, head.bias[:, None]], 1)
        return weight_VD

    def train(self, mode: bool = True) -> Self:
        """Let the layers be computed again in backward. Nothing else is in training mode: the
        policy that is sampled has no dropout, and ratios compare with that policy.
        """
        super().train(False)
        self.training = mode
        for layer in self.layers:
            layer.training = mode
        return self

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, attention: AttentionContext) -> Tensor:
        """Return the normed hidden states [T, D] of tokens, padding included unless each sequence
        is read by itself. A head with a bias has one more feature, which is 1.
        """
        if self.routing is not None:
            self.routing.passes.clear()
        routes_TMK = getattr(attention, "routes", None)
        own = slice(len(tokens_T) - attention.padding)
        if self.config.is_read_alone:
            h_TD = self._each_alone(tokens_T[own], attention, routes_TMK)
        else:
            h_TD = self._read(tokens_T, positions_T, attention, routes_TMK, own)
        if self._logit_scale != 1.0:
            h_TD = h_TD * self._logit_scale
        return F.pad(h_TD, (0, 1), value=1.0) if self._has_bias else h_TD

    def _read(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: AttentionContext,
        routes_TMK: Tensor | None,
        own: slice,
    ) -> Tensor:
        """Return the normed hidden states of the `own` tokens, [.., D]. routes: to replay."""
        self.seat.attention = attention
        if self.routing is not None:
            self.routing.begin(routes_TMK, len(tokens_T))
        seen = self.base(input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False)
        if self.routing is not None:
            self.routing.end(own)
        return seen.last_hidden_state[0][own]

    def _each_alone(
        self, tokens_T: Tensor, attention: AttentionContext, routes_TMK: Tensor | None
    ) -> Tensor:
        """Return the normed hidden states [T, D], of one sequence after the other."""
        made = []
        all_routes: Iterable[tuple[Tensor | None, int]] = repeat((None, 0))
        if routes_TMK is not None:
            all_routes = attention.sequences(routes_TMK)
        for (ids_n, before), (routes_nMK, _) in zip(attention.sequences(tokens_T), all_routes):
            size = len(ids_n)
            with tokens_T.device:
                positions_n = torch.arange(size)
                alone = PackedAttention(torch.tensor([0, size]))
            alone.padding = 0
            ids_n = ids_n.to(tokens_T.device)
            made.append(self._read(ids_n, positions_n, alone, routes_nMK, slice(before, None)))
        return torch.cat(made)


@contextmanager
def attention_of_transformers(decoder: Decoder) -> Iterator[None]:
    """Let transformers attend by its own plain products within the block."""
    assert isinstance(decoder, TransformersDecoder), "a decoder of its modules"
    decoder.base.set_attn_implementation("eager")
    try:
        yield
    finally:
        decoder.base.set_attn_implementation(OURS)


def transformers_decoder(
    config: ModelConfig, *, dtype: torch.dtype, tensor_parallel: TensorParallel | None = None
) -> TransformersDecoder:
    """Return the decoder of a config that `transformers_config` made, on the meta device.

    tensor_parallel: only the rank's part, as keep_part has it; each rank has the whole embedding
    and head.
    """
    model = transformers_model(config.fields, dtype)
    base_of(model).set_attn_implementation(OURS)
    if tensor_parallel is not None:
        keep_part(model, config, tensor_parallel)
        tensor_parallel = replace(tensor_parallel, split_vocabulary=False)
    decoder = TransformersDecoder(config, model)
    decoder.tensor_parallel = tensor_parallel
    return decoder
