"""How the layers of each family of models that our own decoder computes differ from Llama's. Needs
no torch.

A family is the part of an architecture's name before ForCausalLM. Its config.json chooses the
fields of `ModelConfig`; an entry here holds for all of its models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CAUSAL = "ForCausalLM"  # behind a family's name: a language model


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family differs from Llama. The defaults are Llama's."""

    qkv_bias: bool = False  # the projections to queries, keys and values carry one
    qk_norm: bool = False  # every head of queries and keys is normed before its rotary turn
    head_dim: int | None = None  # where config.json has none; None: hidden_size / heads
    # Values of config.json that our layers assume.
    fixed: Mapping[str, object] = field(default_factory=dict)


FAMILIES = {
    "Llama": Family(fixed={"attention_bias": False, "mlp_bias": False}),
    "Mistral": Family(),
    "Qwen2": Family(qkv_bias=True),
    "Qwen3": Family(qk_norm=True, head_dim=128, fixed={"attention_bias": False}),
}
