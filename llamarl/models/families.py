"""The layers that each family of models is made of. Needs no torch.

A family is what stands before ForCausalLM in an architecture's name. What its config.json may
choose is in `ModelConfig`; what all of its models have in common is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

CAUSAL = "ForCausalLM"  # behind a family's name: a language model


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Differences of a family's layers and directories from Llama's, which are all defaults."""

    causal: str = CAUSAL  # what its language models are called behind the family's name

    # How layers differ.
    norm: Literal["rms", "layer"] = "rms"  # LayerNorm has a bias
    gated: bool = True  # down(act(gate x) * up x); else down(act(up x))
    activations: tuple[str, ...] = ("silu",)  # that config.json may name; the first is its default
    qkv_bias: bool = False  # the projections to queries, keys and values carry one
    biases: bool = False  # the projections back and the MLP's carry one too
    qk_norm: bool = False  # every head of queries and keys is normed before its rotary turn
    rotary_fraction: float = 1.0  # of a head, unless config.json says; 0: no rotary positions
    learned_positions: bool = False  # added to the embedding, max_position_embeddings of them
    parallel_residual: bool = False  # x + attn(norm(x)) + mlp(norm(x)), unless config.json says

    # Defaults of fields that config.json lacks.
    norm_eps: float = 1e-6
    head_dim: int | None = None  # None: the model's width shared out among its heads
    widening: int | None = None  # units of the MLP to a feature of the model
    tied: bool = False

    # How directories differ. names: a part of one of Llama's names -> what stands there instead.
    names: tuple[tuple[str, str], ...] = ()
    base: str = ""  # how names begin, which some directories leave out
    fused: Literal["", "heads", "kinds"] = ""  # queries, keys and values are one tensor
    turned: bool = False  # matrices of the layers are [in, out]
    fields: Mapping[str, str] = field(default_factory=dict)  # Llama's in config.json -> its own
    # Values of config.json that are computed; others are refused.
    fixed: Mapping[str, object] = field(default_factory=dict)


FAMILIES = {
    "Llama": Family(fixed={"attention_bias": False, "mlp_bias": False}),
    "Mistral": Family(),
    "Qwen2": Family(qkv_bias=True),
    "Qwen3": Family(qk_norm=True, head_dim=128, fixed={"attention_bias": False}),
    "GPTNeoX": Family(
        norm="layer",
        gated=False,
        activations=("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
        qkv_bias=True,
        biases=True,
        rotary_fraction=0.25,
        parallel_residual=True,
        norm_eps=1e-5,
        base="gpt_neox.",
        names=(
            ("model.embed_tokens.", "gpt_neox.embed_in."),
            ("model.norm.", "gpt_neox.final_layer_norm."),
            ("lm_head.", "embed_out."),
            ("model.layers.", "gpt_neox.layers."),
            ("self_attn.q_proj.", "attention.query_key_value."),
            ("self_attn.k_proj.", "attention.query_key_value."),
            ("self_attn.v_proj.", "attention.query_key_value."),
            ("self_attn.o_proj.", "attention.dense."),
            ("mlp.up_proj.", "mlp.dense_h_to_4h."),
            ("mlp.down_proj.", "mlp.dense_4h_to_h."),
        ),
        fused="heads",
        fields={
            "rms_norm_eps": "layer_norm_eps",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
        },
        fixed={"attention_bias": True},
    ),
    "GPT2": Family(
        causal="LMHeadModel",
        norm="layer",
        gated=False,
        activations=("gelu_new", "gelu", "gelu_fast", "gelu_pytorch_tanh"),
        qkv_bias=True,
        biases=True,
        rotary_fraction=0.0,
        learned_positions=True,
        norm_eps=1e-5,
        widening=4,
        tied=True,
        base="transformer.",
        names=(
            ("model.embed_tokens.", "transformer.wte."),
            ("model.embed_positions.", "transformer.wpe."),
            ("model.norm.", "transformer.ln_f."),
            ("model.layers.", "transformer.h."),
            ("input_layernorm.", "ln_1."),
            ("post_attention_layernorm.", "ln_2."),
            ("self_attn.q_proj.", "attn.c_attn."),
            ("self_attn.k_proj.", "attn.c_attn."),
            ("self_attn.v_proj.", "attn.c_attn."),
            ("self_attn.o_proj.", "attn.c_proj."),
            ("mlp.up_proj.", "mlp.c_fc."),
            ("mlp.down_proj.", "mlp.c_proj."),
        ),
        fused="kinds",
        turned=True,
        fields={
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
        fixed={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    ),
}
