"""Builders of torchtune's with small sizes, those of tests/random_models.py."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from torchtune.models.llama3 import llama3
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.qwen2 import qwen2

from tests.random_models import SIZES

_SIZES = {
    "vocab_size": SIZES["vocab_size"],
    "num_layers": SIZES["num_hidden_layers"],
    "num_heads": SIZES["num_attention_heads"],
    "num_kv_heads": SIZES["num_key_value_heads"],
    "embed_dim": SIZES["hidden_size"],
    "max_seq_len": SIZES["max_position_embeddings"],
    "intermediate_dim": SIZES["intermediate_size"],
}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

untied = partial(llama3, **_SIZES, rope_base=10_000, norm_eps=1e-6, attn_dropout=0.3)
tied = partial(llama3_2, **_SIZES, norm_eps=1e-6)
qwen = partial(qwen2, **_SIZES, rope_base=10_000.0, norm_eps=1e-6, tie_word_embeddings=True)

# Each differs from `untied` in one value.
wider = partial(untied, intermediate_dim=84)
more_heads = partial(untied, num_heads=12, num_kv_heads=4)
other_angles = partial(untied, rope_base=11_000)
other_norms = partial(untied, norm_eps=1e-5)


def noted():
    """`untied`, whose every pass leaves a file with the process's number as its name."""

    def note(*_):
        Path(os.environ["TEST_NOTES"], str(os.getpid())).touch()

    model = untied()
    model.norm.register_forward_pre_hook(note)
    return model


def no_model():
    """No builder."""
    return 3
