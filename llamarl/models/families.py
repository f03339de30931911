"""What the layers of a family of models are made of. Needs no torch.

A family is what stands before ForCausalLM in an architecture's name. What its config.json may
choose is in `ModelConfig`; what all of its models have in common is here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family's layers differ from Llama's, which are all defaults."""

    qkv_bias: bool = False  # the projections to queries, keys and values carry one
    qk_norm: bool = False  # every head of queries and keys is normed before its rotary turn


FAMILIES = {
    "Llama": Family(),
    "Mistral": Family(),
    "Qwen2": Family(qkv_bias=True),
    "Qwen3": Family(qk_norm=True),
}
