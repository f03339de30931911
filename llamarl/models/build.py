"""A Hugging Face config.json becomes a decoder.

    decoder = build_decoder(read_config(DIR))            # on the meta device unless told otherwise
    logits_TV = decoder(tokens_T, positions_T, PackedAttention(cu_seqlens))

What the layers of a family are made of is an entry of FAMILIES in families.py; docs/models.md says
how to add one.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from llamarl.models.attention import Angles, Attention, AttentionContext, rotary_of
from llamarl.models.config import ModelConfig, read_config
from llamarl.models.decoder import Decoder
from llamarl.models.fused import RMSNorm, projections, swiglu
from llamarl.models.lora import add_lora
from llamarl.models.shape import AUTO, IMPLEMENTATIONS
from llamarl.models.sharding import span
from llamarl.models.tp import SplitEmbedding, TensorParallel, copied, place_of, summed


class FeedForward(nn.Module):
    """Computes w2(silu(w1 x) * w3 x). w1 is the gate, w2 goes down, w3 up.

    With tensor parallelism it holds the rank's share of the hidden units, and every rank returns
    the sum of what all make of theirs.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel | None):
        super().__init__()
        self.tp = tp
        dim = config.hidden_size
        _, hidden_dim = span(config.intermediate_size, *place_of(tp))
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = projections(copied(x, self.tp), self.w1, self.w3)
        (y,) = projections(swiglu(gate, up), self.w2)
        return summed(y, self.tp)


class Layer(nn.Module):
    """Computes h = x + attn(norm(x)) and returns h + mlp(norm(h))."""

    def __init__(self, index: int, config: ModelConfig, tp: TensorParallel | None):
        super().__init__()
        self.attn = Attention(index, config, tp)
        self.mlp = FeedForward(config, tp)
        self.sa_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x_TD: Tensor, *, mask: AttentionContext, input_pos: Angles) -> Tensor:
        """Return the residual stream [T, D] behind this layer."""
        x_TD, normed_TD = self.sa_norm.of_sum(x_TD, None)
        attended_TD = self.attn(normed_TD, mask=mask, input_pos=input_pos)
        h_TD, normed_TD = self.mlp_norm.of_sum(x_TD, attended_TD)
        return h_TD + self.mlp(normed_TD)


def _embedding(rows: int, dim: int) -> nn.Embedding:
    """Return an embedding with uninitialised weights. What nn.Embedding draws is overwritten, and
    drawing it on the meta device loads PyTorch's compiler.
    """
    return nn.Embedding(rows, dim, _weight=torch.empty(rows, dim))


class NativeDecoder(Decoder):
    """A decoder of our own modules, which the C and CUDA kernels know."""

    def __init__(self, config: ModelConfig, tp: TensorParallel | None):
        super().__init__()
        dim = config.hidden_size
        if tp and tp.split_vocabulary:
            self.tok_embeddings = SplitEmbedding(config.vocab_size, dim, tp)
        else:
            self.tok_embeddings = _embedding(config.vocab_size, dim)
        self.layers = nn.ModuleList(Layer(i, config, tp) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(dim, eps=config.rms_norm_eps)
        self.output = nn.Identity()
        if config.labels:
            self.score = nn.Linear(dim, len(config.labels), bias=False)
        elif not config.tie_word_embeddings:
            self.output = nn.Linear(dim, self.tok_embeddings.num_embeddings, bias=False)
        self.config = config
        self.tensor_parallel = tp
        self._rotary = rotary_of(config)

    def rotary(self, positions_T: Tensor, longest: int) -> Angles:
        """Return cos and sin [T, 1, K] of positions below `longest`. The first call builds the
        tables.
        """
        return self._rotary(positions_T, longest)

    def project(self, h_TD: Tensor, weight_VD: Tensor) -> Tensor:
        """Return logits [T, V] of hidden states, by the output weight; if that is quantised, by its
        module.
        """
        if hasattr(self.output, "weight_scale"):
            return self.output(h_TD)
        return super().project(h_TD, weight_VD)

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, attention: AttentionContext) -> Tensor:
        """Return the normed hidden states [T, D] of tokens, padding included."""
        h = self.tok_embeddings(tokens_T)
        rotary = self.rotary(positions_T, attention.longest)
        h = self.through_layers(h, mask=attention, input_pos=rotary)
        return self.norm(h)


def config_of(path: str | Path, made_by: str = AUTO) -> ModelConfig:
    """Read the config of a directory. made_by: of read_config, or the import path of a builder of
    torchtune, which makes its decoder. Errors: read_config's, and ValueError for a builder of
    another model, naming both.
    """
    if made_by in IMPLEMENTATIONS:
        return read_config(path, made_by)
    from llamarl.models.torchtune_model import torchtune_config

    try:
        return torchtune_config(read_config(path), made_by)
    except ValueError as error:
        raise ValueError(f"builder {made_by} for {path}: {error}") from error


def build_decoder(
    config: ModelConfig,
    *,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.float32,
    tensor_parallel: TensorParallel | None = None,
) -> Decoder:
    """Build the decoder with uninitialised weights (`llamarl.models.hf.load_weights` fills them).

    tensor_parallel: of every parameter only the rank's part, as llamarl.models.sharding says, under
    the same name. ValueError if there are fewer query heads than ranks, if they cannot share
    transformers' modules, or if no projection has a name that adapters are asked for.
    """
    decoder = _on_meta(config, dtype, tensor_parallel)
    if config.lora is not None:
        with torch.device("meta"):
            add_lora(decoder)
    if config.implementation == "transformers" and tensor_parallel is not None:
        from llamarl.models.tp_plan import compute_together

        compute_together(decoder)
    return decoder.to_empty(device=device)


def _on_meta(config: ModelConfig, dtype: torch.dtype, tp: TensorParallel | None) -> Decoder:
    """Return the decoder of a config on the meta device, without adapters."""
    if config.implementation == "transformers":
        # Here, because a native model does without transformers' modules, which take seconds.
        from llamarl.models.transformers_model import transformers_decoder

        return transformers_decoder(config, dtype=dtype, tensor_parallel=tp)
    if config.implementation == "torchtune":
        from llamarl.models.torchtune_model import torchtune_decoder

        assert tp is None, "config lets no tensor-parallel builder through"
        return torchtune_decoder(config, dtype=dtype)
    with torch.device("meta"):
        return NativeDecoder(config, tp).to(dtype)
