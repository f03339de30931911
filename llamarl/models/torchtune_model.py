"""A builder of torchtune as a decoder: its modules compute, and our contexts attend.

    config = config_of(DIR, builder="torchtune.models.llama3_2.llama3_2_1b")
    decoder = load_weights(build_decoder(config), DIR)

torchtune's layers hand the mask of a pass on to their attention call, whose place `_attend` takes:
the mask is our AttentionContext.

Every parameter holds the numbers of the directory, row by row. torchtune turns neighbouring
features of a head together, Hugging Face features that are half a head apart. So torchtune's own
conversion of weights reorders the rows of q_proj and k_proj. Here `Reordered` reorders the features
of queries and keys instead, and weights need no conversion on any way in or out. Scores do not
depend on the order of features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchtune.models.convert_weights import hf_to_tune
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    RMSNorm,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)

from llamarl.models.attention import AttentionContext, rotary_of
from llamarl.models.decoder import Decoder
from llamarl.models.fused import rotate
from llamarl.models.hf import named_parameters_hf
from llamarl.models.shape import ModelConfig
from llamarl.models.sharding import parameter_shapes
from llamarl.models.transformers_config import without_memory
from llamarl.words.names import import_function

_KNOWN = (
    TransformerDecoder,
    nn.ModuleList,
    TransformerSelfAttentionLayer,
    MultiHeadAttention,
    FeedForward,
    nn.SiLU,
    nn.Linear,
    nn.Embedding,
    nn.Identity,
    RMSNorm,
)
_SHOWN = 4  # parameters that differ
# float32 rounds an angle by a share of it, and a turned feature besides.
_ANGLE_ERROR = 4e-6
_ERROR = 1e-5


class Reordered(nn.Module):
    """torchtune's positions, for heads whose features are in Hugging Face's order. order_K: the
    place of each of torchtune's features there.
    """

    order_K: Tensor

    def __init__(self, positions: nn.Module, order_K: Tensor):
        super().__init__()
        self.positions = positions
        self.register_buffer("order_K", order_K, persistent=False)

    def forward(self, x: Tensor, *, input_pos: Tensor) -> Tensor:
        """Turn x [1, T, heads, K]; its features leave in torchtune's order."""
        return self.positions(x[..., self.order_K], input_pos=input_pos)


def _attend(
    index: int, query: Tensor, key: Tensor, value: Tensor, *, mask: AttentionContext, **_: object
) -> Tensor:
    """Attend in the context of the pass, as layer `index`. query [1, H, T, K], key and value [1, J,
    T, K]; returns [1, H, T, K].
    """
    q_THK, k_TJK, v_TJK = (x[0].transpose(0, 1) for x in (query, key, value))
    return mask.attend(index, q_THK, k_TJK, v_TJK).transpose(0, 1)[None]


class TorchtuneDecoder(Decoder):
    """A decoder of torchtune's modules, whose names are those of NativeDecoder's.

    model: it is changed, so that its layers attend in our contexts. orders: of Reordered, for each
    of its positions; None, or absent: these know Hugging Face's order.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: TransformerDecoder,
        orders: Mapping[nn.Module, Tensor | None],
    ):
        super().__init__()
        self.config = config
        self.tok_embeddings = model.tok_embeddings
        self.layers = model.layers
        self.norm = model.norm
        self.output: nn.Module = nn.Identity()  # torchtune's tied head is no module
        if isinstance(model.output, nn.Module):
            self.output = model.output
        # Layers share their positions.
        reordered = {
            one: Reordered(one, order) for one, order in orders.items() if order is not None
        }
        for index, layer in enumerate(self.layers):
            attn: Any = layer.attn
            attn._attention_call = partial(_attend, index)
            # A layer repeats its keys and values for all query heads. Contexts want each once.
            attn.num_kv_heads = attn.num_heads
            attn.attn_dropout = 0.0
            attn.pos_embeddings = reordered.get(attn.pos_embeddings, attn.pos_embeddings)

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, attention: AttentionContext) -> Tensor:
        """Return the normed hidden states [T, D] of tokens, padding included."""
        h_1TD = self.tok_embeddings(tokens_T[None])
        h_1TD = self.through_layers(h_1TD, mask=attention, input_pos=positions_T[None])
        return self.norm(h_1TD)[0]


def torchtune_decoder(config: ModelConfig, *, dtype: torch.dtype) -> TorchtuneDecoder:
    """Return the decoder of a config that `torchtune_config` made, on the meta device."""
    model = _built(config.builder, dtype)
    positions = {layer.attn.pos_embeddings for layer in model.layers}
    return TorchtuneDecoder(config, model, {one: _order_of(one, config) for one in positions})


# --- Builders ---


def torchtune_config(config: ModelConfig, builder: str) -> ModelConfig:
    """Return the config of a directory whose decoder a builder makes. config: what our own decoder
    would compute. builder: the import path of a function without arguments that returns a
    torchtune.modules.TransformerDecoder.

    ValueError if there is no such function, or if its model is not that of config.json.
    """
    if config.implementation != "native" or config.labels:
        raise ValueError(
            f"a builder of torchtune needs a language model of a family that docs/models.md lists, "
            f"because it is compared with our own decoder, and this is {config.architecture}; "
            "leave model.builder out: model=hf"
        )
    model = _built(builder, torch.float32)
    problem = _difference(model, config)
    if problem is not None:
        raise ValueError(
            f"{problem}. Take the builder of this very model, or write a function that calls one "
            "with the sizes of config.json, or leave model.builder out: model=hf"
        )
    places = min(layer.attn.max_seq_len for layer in model.layers)
    return dataclasses.replace(
        config,
        implementation="torchtune",
        builder=builder,
        max_position_embeddings=min(config.max_position_embeddings, places),
    )


def _built(builder: str, dtype: torch.dtype) -> TransformerDecoder:
    """Return the model that a builder makes, its parameters on the meta device. ValueError."""
    path = builder
    if ":" not in path:
        module, _, name = path.rpartition(".")
        path = f"{module}:{name}"
    function = import_function(path)
    try:
        with without_memory(dtype):
            model = function()
    except TypeError as error:
        raise ValueError(
            f"it cannot be called without arguments ({error}); write a function that calls it with "
            "the sizes of config.json, and give that one's import path"
        ) from error
    if not isinstance(model, TransformerDecoder):
        raise ValueError(
            f"it makes no torchtune.modules.TransformerDecoder, but {type(model).__name__}; need a "
            "builder such as torchtune.models.llama3_2.llama3_2_1b"
        )
    return model


def _difference(model: TransformerDecoder, config: ModelConfig) -> str | None:
    """Say how a builder's model is another than that of config.json; None if it is the same."""
    attns: list[Any] = [getattr(layer, "attn", None) for layer in model.layers]
    positions = {getattr(attn, "pos_embeddings", None) for attn in attns}
    others = {type(m).__name__ for m in model.modules() if type(m) not in _KNOWN}
    others -= {type(module).__name__ for module in positions}
    if others or None in positions or any(attn.q_norm for attn in attns):
        what = ", ".join(sorted(others)) or "attention without positions, or with norms inside"
        return f"its layers have {what}, which our own decoder does not compute"
    own = TorchtuneDecoder(config, model, {})
    try:
        shapes = {name: tuple(p.shape) for name, p in named_parameters_hf(own)}
    except KeyError as error:
        return f"{error.args[0]}, so its model is not that of config.json"
    wanted = parameter_shapes(config)
    differing = []
    for name in {**wanted, **shapes}:
        here, there = shapes.get(name, "absent"), wanted.get(name, "absent")
        if here != there:
            differing.append(f"{name} is {here} in it and {there} there")
    if differing:
        return f"its model is not that of config.json: {'; '.join(differing[:_SHOWN])}"
    heads = {(attn.num_heads, attn.head_dim) for attn in attns}
    if heads != {(config.num_attention_heads, config.head_dim)}:
        return f"its query heads and their features are {heads}, and others in config.json"
    eps = {module.eps for module in model.modules() if type(module) is RMSNorm}
    if eps != {config.rms_norm_eps}:
        return f"its norms have eps={eps}, and config.json says {config.rms_norm_eps}"
    try:
        for module in positions:
            _order_of(module, config)
    except ValueError as error:
        return str(error)
    return None


def _order_of(positions: Any, config: ModelConfig) -> Tensor | None:
    """Return the order [K] of features in which torchtune's positions turn a head as config.json
    says; None: Hugging Face's own. ValueError if they turn it by other angles.
    """
    rotary = rotary_of(config)
    longest = min(config.max_position_embeddings, positions.max_seq_len)
    places_P = torch.tensor(sorted({0, 1, 2, longest // 3, longest - 1}))
    head_P1K = torch.linspace(0.5, 1.5, config.head_dim).expand(len(places_P), 1, -1)
    wanted_P1K = rotate(head_P1K, *rotary(places_P, longest))
    angles_P1K = torch.outer(places_P.float(), rotary.inv_freq).repeat(1, 2)[:, None]
    error_P1K = _ERROR + _ANGLE_ERROR * angles_P1K
    # What torchtune's conversion of weights makes of the rows of one head.
    rows = {"model.layers.0.self_attn.q_proj.weight": torch.arange(config.head_dim)[:, None]}
    sizes = {"num_heads": 1, "num_kv_heads": 1, "dim": 1, "head_dim": config.head_dim}
    (converted,) = hf_to_tune(rows, **sizes).values()
    for order_K in (None, converted.flatten()):
        seen = slice(None) if order_K is None else order_K
        turned_P1K = positions(head_P1K[None][..., seen], input_pos=places_P[None])[0]
        if bool(((turned_P1K - wanted_P1K[..., seen]).abs() <= error_P1K[..., seen]).all()):
            return order_K
    raise ValueError("its positions turn heads by other angles than config.json says")
