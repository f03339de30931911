"""A Hugging Face config.json becomes a decoder made of torchtune's layers.

    decoder = build_decoder(read_config(DIR))            # on the meta device unless told otherwise
    logits_TV = decoder(tokens_T, positions_T, PackedAttention(cu_seqlens))

To add a family whose blocks are Llama's, add its architecture name to FAMILIES in config.py with
what differs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# It warns, at import, of kernels that nothing here uses.
logging.getLogger("torchao").setLevel(logging.ERROR)

# isort: split
from torchtune.modules import TransformerDecoder

from llamarl.models.attention import Attention, AttentionContext, Rotary
from llamarl.models.config import ModelConfig, read_config
from llamarl.models.fused import add_rms_norm, projections, rms_norm, swiglu
from llamarl.models.masters import Masters
from llamarl.models.sharding import span
from llamarl.models.tp import SplitEmbedding, TensorParallel, copied, gathered, summed

__all__ = ["Decoder", "ModelConfig", "RMSNorm", "build_decoder", "random_weights", "read_config"]


class RMSNorm(nn.Module):
    """x / rms(x) in float32, then in x's dtype times `scale`: Hugging Face's order of rounding."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.scale, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.scale, self.eps)


class FeedForward(nn.Module):
    """w2(silu(w1 x) * w3 x): torchtune's, under its names."""

    def __init__(self, *, gate_proj: nn.Linear, down_proj: nn.Linear, up_proj: nn.Linear):
        super().__init__()
        self.w1, self.w2, self.w3 = gate_proj, down_proj, up_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(swiglu(*projections(x, self.w1, self.w3)))


class SplitFeedForward(FeedForward):
    """A tensor-parallel rank's share of the hidden units."""

    def __init__(self, tp: TensorParallel, **projections: nn.Linear):
        super().__init__(**projections)
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        return summed(super().forward(copied(x, self.tp)), self.tp)


class Layer(nn.Module):
    """h = x + attn(norm(x)), h + mlp(norm(h)): torchtune's TransformerSelfAttentionLayer, under its
    names.
    """

    def __init__(self, *, attn: Attention, mlp: FeedForward, sa_norm: RMSNorm, mlp_norm: RMSNorm):
        super().__init__()
        self.attn, self.mlp, self.sa_norm, self.mlp_norm = attn, mlp, sa_norm, mlp_norm

    def forward(
        self, x_TD: Tensor, *, mask: AttentionContext, input_pos: tuple[Tensor, Tensor]
    ) -> Tensor:
        x_TD, normed_TD = add_rms_norm(x_TD, None, self.sa_norm.scale, self.sa_norm.eps)
        attended_TD = self.attn(normed_TD, mask=mask, input_pos=input_pos)
        h_TD, normed_TD = add_rms_norm(x_TD, attended_TD, self.mlp_norm.scale, self.mlp_norm.eps)
        return h_TD + self.mlp(normed_TD)


class Decoder(TransformerDecoder):
    """Torchtune's decoder over flat tokens.

    The head is handed in because training never wants all [T, V] logits at once: `head(hidden [T,
    D], weight [V, D])` runs inside forward, where FSDP has the weight whole.
    """

    activation_checkpointing = False  # recompute each layer in backward
    whole_on_each_rank = False  # wrapped by FSDP for its replicas, and not sharded
    masters: Masters | None = None  # a single rank's, where it computes in a lower precision

    def __init__(self, config: ModelConfig, tensor_parallel: TensorParallel | None = None, **parts):
        super().__init__(**parts)
        self.config, self.tensor_parallel = config, tensor_parallel
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling)

    @property
    def output_weight(self) -> Tensor:
        """[V, D], or the rank's rows of a split vocabulary: the embedding itself when tied."""
        return self.tok_embeddings.weight if self.config.tie_word_embeddings else self.output.weight

    def project(self, h_TD: Tensor, weight_VD: Tensor) -> Tensor:
        """Logits [T, V] of hidden states: by the output weight, or, where that is quantised, by its
        module.
        """
        return (
            self.output(h_TD) if hasattr(self.output, "weight_scale") else F.linear(h_TD, weight_VD)
        )

    @property
    def num_cached_kv_heads(self) -> int:
        """K/V heads a layer that this rank's attention hands to its context."""
        return self.layers[0].attn.num_cached_kv_heads

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: AttentionContext,
        head: Callable[[Tensor, Tensor], object] | None = None,
    ):
        """Logits [T, V] in the model's dtype, or what `head` (default: `project`) makes of the
        normed hidden states and the output weight.

        Collective over the ranks of a tensor-parallel decoder. Where these split the vocabulary,
        `head` must return the logits [..., V / ranks] of the rows that it is given, and every rank
        gets them all.
        """
        longest = getattr(attention, "longest", None) or int(positions_T.max()) + 1
        h = self.tok_embeddings(tokens_T)
        rotary = self.rotary(positions_T, longest)
        for layer in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                h = checkpoint(layer, h, mask=attention, input_pos=rotary, use_reentrant=False)
            else:
                h = layer(h, mask=attention, input_pos=rotary)
        h, tp, head = self.norm(h), self.tensor_parallel, head or self.project
        if tp is None or not tp.split_vocabulary:
            return head(h, self.output_weight)
        return gathered(head(copied(h, tp), self.output_weight), self.config.vocab_size, tp)


def build_decoder(
    config: ModelConfig,
    *,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.float32,
    tensor_parallel: TensorParallel | None = None,
) -> Decoder:
    """The decoder with uninitialised weights (`llamarl.models.hf.load_weights` fills them).

    tensor_parallel: of every parameter only the rank's part, as llamarl.models.sharding says, under
    the same name. ValueError if there are fewer query heads than ranks.
    """
    c, tp = config, tensor_parallel if tensor_parallel and tensor_parallel.size > 1 else None
    units = span(c.intermediate_size, tp.rank, tp.size)[1] if tp else c.intermediate_size
    splits = tp is not None and tp.split_vocabulary
    rows = span(c.vocab_size, tp.rank, tp.size)[1] if splits else c.vocab_size

    def layer(i: int) -> Layer:
        up, gate = (nn.Linear(c.hidden_size, units, bias=False) for _ in range(2))
        projections = {
            "gate_proj": gate,
            "down_proj": nn.Linear(units, c.hidden_size, bias=False),
            "up_proj": up,
        }
        return Layer(
            attn=Attention(i, c, tp),
            mlp=SplitFeedForward(tp, **projections) if tp else FeedForward(**projections),
            sa_norm=RMSNorm(c.hidden_size, eps=c.rms_norm_eps),
            mlp_norm=RMSNorm(c.hidden_size, eps=c.rms_norm_eps),
        )

    with torch.device("meta"):
        decoder = Decoder(
            config,
            tp,
            tok_embeddings=SplitEmbedding(c.vocab_size, c.hidden_size, tp)
            if splits
            else nn.Embedding(rows, c.hidden_size),
            layers=nn.ModuleList(layer(i) for i in range(c.num_hidden_layers)),
            max_seq_len=c.max_position_embeddings,
            num_heads=c.num_attention_heads,
            head_dim=c.head_dim,
            norm=RMSNorm(c.hidden_size, eps=c.rms_norm_eps),
            output=nn.Identity()
            if c.tie_word_embeddings
            else nn.Linear(c.hidden_size, rows, bias=False),
        )
    decoder = decoder.to(dtype)
    return decoder if str(device) == "meta" else decoder.to_empty(device=device)


@torch.no_grad()
def random_weights(decoder: Decoder, *, seed: int) -> Decoder:
    """Fill a decoder (on the CPU, or still on the meta device) and return it: norms are 1, biases 0,
    the rest is drawn from normal(0, 0.02).
    """
    if any(parameter.is_meta for parameter in decoder.parameters()):
        decoder.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if name.endswith(".scale"):
            parameter.fill_(1)
        elif name.endswith(".bias"):
            parameter.zero_()
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return decoder
