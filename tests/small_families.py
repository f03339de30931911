"""Families of transformers: a class of layers, and the fields that make it small."""

from __future__ import annotations

import torch
from transformers import AutoConfig

from llamarl.models.attention import PackedAttention

SIZES = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
UNLIMITED = {"sliding_window": None}  # which transformers' cache would take for a window
FAMILIES = {
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": {},
    "deepseek_v3": ROUTED | LATENT,
    "ernie4_5": {},
    "exaone4": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "gemma4_text": {"vocab_size_per_layer_input": 53},
    "glm": {},
    "glm4": {},
    "glm4_moe": ROUTED,
    "gpt2": UNLIMITED,
    "gpt_neox": UNLIMITED | {"rotary_pct": 0.5},
    "gpt_oss": EXPERTS,
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.3},
    "granitemoe": EXPERTS,
    "helium": {},
    "hunyuan_v1_dense": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": EXPERTS,
    "minimax_m2": EXPERTS,
    "ministral3": {},
    "mistral": {},
    "mixtral": EXPERTS,
    "nemotron": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
    "phi3": {},
    "qwen3_5_text": {},
    "qwen3_moe": QWEN_EXPERTS,
    "qwen3_next": QWEN_EXPERTS,
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
}
LENGTHS = (13, 20, 7)


def config_of(family):
    """The config of a small model."""
    return AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))


def sequences():
    """Token ids of each length, the same at every call."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, 53, (n,), generator=draw) for n in LENGTHS]


def packed(decoder, ids, *head, routes=None):
    positions = torch.cat([torch.arange(len(one)) for one in ids])
    begins = torch.tensor([0, *(len(one) for one in ids)]).cumsum(0)
    attention = PackedAttention(begins)
    attention.routes = routes
    return decoder(torch.cat(ids), positions, attention, *head)
