"""The ModelConfig of a small decoder."""

from __future__ import annotations

import dataclasses

from llamarl.models.config import ModelConfig

SMALL_MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=23,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    attention_bias=False,
)


def model_config(**changes) -> ModelConfig:
    """SMALL_MODEL with other sizes or switches.

    model_config(vocab_size=48, hidden_size=32, head_dim=8)
    """
    return dataclasses.replace(SMALL_MODEL, **changes)
