"""A Hugging Face config.json becomes a decoder made of torchtune's layers.

    decoder = build_decoder(read_config(DIR))            # on the meta device unless told otherwise
    logits_TV = decoder(tokens_T, positions_T, PackedAttention(cu_seqlens))

To add a family whose blocks are Llama's, add its architecture name to FAMILIES with what differs.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns, at import, of kernels that nothing here uses

from torchtune.modules import FeedForward, TransformerDecoder, TransformerSelfAttentionLayer  # noqa: E402

from llamarl.models.attention import Attention, AttentionContext, Rotary

FAMILIES = {  # architecture -> whether q, k and v carry a bias where the config does not say
    "LlamaForCausalLM": False,
    "MistralForCausalLM": False,
    "Qwen2ForCausalLM": True,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the decoder's shape depends on. Names are Hugging Face's."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool

    @property
    def num_parameters(self) -> int:
        heads = self.head_dim * (2 * self.num_attention_heads + 2 * self.num_key_value_heads)
        layer = self.hidden_size * (heads + 3 * self.intermediate_size + 2)
        if self.attention_bias:
            layer += self.head_dim * (self.num_attention_heads + 2 * self.num_key_value_heads)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * layer + self.hidden_size


def read_config(path: str | Path) -> ModelConfig:
    """Read DIR/config.json (or the file itself).

    FileNotFoundError if it is absent; ValueError for an unsupported architecture, sliding-window attention in use, or
    a missing field, naming the file.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"{file}: no such file; a model directory holds config.json, model.safetensors and tokenizer.json"
        )
    try:
        raw = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not JSON: {error}") from error
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in FAMILIES:
        raise ValueError(
            f"{file}: architecture {architecture} is not supported; supported: {', '.join(FAMILIES)}. "
            "A family with Llama's blocks is one line in FAMILIES in llamarl/models/build.py"
        )
    if raw.get("sliding_window") and raw.get("use_sliding_window", architecture == "MistralForCausalLM"):
        if raw["sliding_window"] < raw.get("max_position_embeddings", 0):
            raise ValueError(
                f"{file}: sliding-window attention is not supported; set sliding_window to null to attend to everything"
            )
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{file}: hidden_act {raw['hidden_act']} is not supported; supported: silu")
    # transformers 5 writes rope_parameters; 4 wrote rope_theta and rope_scaling.
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or ({k: v for k, v in rope.items() if k != "rope_theta"} or None)
    try:
        heads = raw["num_attention_heads"]
        return ModelConfig(
            architecture=architecture,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=raw.get("rope_theta") or rope.get("rope_theta") or 10000.0,
            rope_scaling=scaling,
            max_position_embeddings=raw.get("max_position_embeddings", 2048),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            attention_bias=raw.get("attention_bias", FAMILIES[architecture]),
        )
    except KeyError as error:
        raise ValueError(f"{file}: missing field {error.args[0]}") from error


class RMSNorm(nn.Module):
    """x / rms(x) in float32, then in x's dtype times `scale`: Hugging Face's order of rounding."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.scale, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32 == self.scale.dtype:
            return F.rms_norm(x, self.scale.shape, self.scale, self.eps)
        return F.rms_norm(x.float(), self.scale.shape, eps=self.eps).to(x.dtype) * self.scale


class Decoder(TransformerDecoder):
    """Torchtune's decoder over flat tokens.

    The head is handed in because training never wants all [T, V] logits at once: `head(hidden [T, D], weight [V, D])`
    runs inside forward, where FSDP has the weight whole.
    """

    activation_checkpointing = False  # recompute each layer in backward

    def __init__(self, config: ModelConfig, **parts):
        super().__init__(**parts)
        self.config = config
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling)

    @property
    def output_weight(self) -> Tensor:
        """[V, D]: the embedding itself when tied."""
        return self.tok_embeddings.weight if self.config.tie_word_embeddings else self.output.weight

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: AttentionContext,
        head: Callable[[Tensor, Tensor], object] = F.linear,
    ):
        """Logits [T, V] in the model's dtype, or what `head` makes of the normed hidden states and the output weight."""
        longest = getattr(attention, "longest", None) or int(positions_T.max()) + 1
        h = self.tok_embeddings(tokens_T)
        rotary = self.rotary(positions_T, longest)
        for layer in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                h = checkpoint(layer, h, mask=attention, input_pos=rotary, use_reentrant=False)
            else:
                h = layer(h, mask=attention, input_pos=rotary)
        return head(self.norm(h), self.output_weight)


def build_decoder(config: ModelConfig, *, device: str | torch.device = "meta", dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder with uninitialised weights (`llamarl.models.hf.load_weights` fills them)."""
    c = config

    def layer(i: int) -> TransformerSelfAttentionLayer:
        up, gate = (nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in range(2))
        down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)
        return TransformerSelfAttentionLayer(
            attn=Attention(i, c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.attention_bias),
            mlp=FeedForward(gate_proj=gate, down_proj=down, up_proj=up),
            sa_norm=RMSNorm(c.hidden_size, eps=c.rms_norm_eps),
            mlp_norm=RMSNorm(c.hidden_size, eps=c.rms_norm_eps),
        )

    with torch.device("meta"):
        decoder = Decoder(
            config,
            tok_embeddings=nn.Embedding(c.vocab_size, c.hidden_size),
            layers=nn.ModuleList(layer(i) for i in range(c.num_hidden_layers)),
            max_seq_len=c.max_position_embeddings,
            num_heads=c.num_attention_heads,
            head_dim=c.head_dim,
            norm=RMSNorm(c.hidden_size, eps=c.rms_norm_eps),
            output=nn.Identity() if c.tie_word_embeddings else nn.Linear(c.hidden_size, c.vocab_size, bias=False),
        )
    decoder = decoder.to(dtype)
    return decoder if str(device) == "meta" else decoder.to_empty(device=device)
