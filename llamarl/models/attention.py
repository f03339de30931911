"""Attention over flat tokens. What a token may look at is a context object's business, not the module's.

The same module trains (PackedAttention: whole sequences end to end) and generates (the engine's slot cache): both give
`attend(layer, q, k, v)`. Shapes: T tokens, H query heads, G key/value heads, K head dim, D model, N sequences, L longest.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


# Up to this length the CPU's fused kernel, made for long sequences, takes 2 to 15 times as long as plain products.
SHORT = 256


class AttentionContext(Protocol):
    """Says which keys each query sees."""

    def attend(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        """Softmax attention of every token over what it may see. Returns [T, H, K]."""
        ...


class PackedAttention:
    """Causal attention inside each of N sequences that lie end to end.

    cu_seqlens [N+1]: where each sequence starts, and the total. Sequences are padded to the longest for the kernel
    alone, so collate sequences of like length into one microbatch (learning/packing.py does).
    """

    def __init__(self, cu_seqlens: Tensor):
        lengths = cu_seqlens.diff()
        self.num_sequences, self.longest = lengths.numel(), int(lengths.max())
        self.dense = bool((lengths == self.longest).all())
        if not self.dense:
            places = torch.arange(self.longest, device=cu_seqlens.device)
            valid = places < lengths[:, None]
            # Padding reads its sequence's last token: a real place, whose output is dropped and gradient is zero.
            self.gather_NL = (cu_seqlens[:-1, None] + torch.minimum(places, lengths[:, None] - 1)).flatten()
            self.scatter_T = valid.flatten().nonzero().squeeze(1)

    def attend(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        def padded(x):
            x = x if self.dense else x.index_select(0, self.gather_NL)
            return x.view(self.num_sequences, self.longest, *x.shape[1:]).transpose(1, 2)

        q, k, v = padded(q_THK), padded(k_TGK), padded(v_TGK)
        if q.device.type == "cpu" and self.longest <= SHORT:
            out = causal_products(q, k, v)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        out = out.transpose(1, 2).flatten(0, 1)
        return out if self.dense else out.index_select(0, self.scatter_T)


def causal_products(q_NHLK: Tensor, k_NGLK: Tensor, v_NGLK: Tensor) -> Tensor:
    """Causal attention [N, H, L, K] by plain batched products, in float32 or wider; holds all N H L^2 weights."""
    n, heads, longest, head_dim = q_NHLK.shape
    groups = k_NGLK.shape[1]
    wide = torch.promote_types(q_NHLK.dtype, torch.float32)
    q = q_NHLK.to(wide).reshape(n, groups, -1, head_dim) * head_dim**-0.5  # the query heads of one key head as more rows
    scores = (q @ k_NGLK.to(wide).transpose(-1, -2)).view(n, heads, longest, longest)
    future = torch.ones(longest, longest, dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1).view(n, groups, -1, longest)
    return (weights @ v_NGLK.to(wide)).view(n, heads, longest, head_dim).to(q_NHLK.dtype)


class Rotary:
    """Rotary position embedding in Hugging Face's half-split layout, so that weights need no permutation.

    scaling: the HF config's rope_scaling (None; type default, linear or llama3). Tables are float32 and grow on demand.
    """

    def __init__(self, head_dim: int, theta: float, scaling: dict | None):
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")  # real numbers even while parameters are meta
        inv_freq = 1.0 / theta ** (steps / head_dim)
        self.inv_freq = _scale_frequencies(inv_freq, scaling or {})
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, positions_T: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """cos and sin, [T, 1, K] each, for positions below `longest`."""
        cos, sin = self._table(positions_T.device, longest)
        return cos[positions_T], sin[positions_T]

    def _table(self, device: torch.device, longest: int) -> tuple[Tensor, Tensor]:
        table = self._tables.get(device)
        if table is None or table[0].shape[0] < longest:
            size = max(256, 1 << (longest - 1).bit_length())
            angles = torch.outer(torch.arange(size, dtype=torch.float32), self.inv_freq)
            angles = torch.cat([angles, angles], dim=-1)[:, None, :]
            table = self._tables[device] = (angles.cos().to(device), angles.sin().to(device))
        return table


def _scale_frequencies(inv_freq: Tensor, scaling: dict) -> Tensor:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return inv_freq
    if kind == "linear":
        return inv_freq / scaling["factor"]
    if kind == "llama3":
        old = scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = old * inv_freq / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return inv_freq * (smooth + (1 - smooth) / scaling["factor"])
    raise ValueError(f"rope_scaling type {kind!r} is not supported; supported: default, linear, llama3")


def rotate(x_THK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x_THK.shape[-1] // 2
    swapped = torch.cat([-x_THK[..., half:], x_THK[..., :half]], dim=-1)
    return x_THK * cos.to(x_THK.dtype) + swapped * sin.to(x_THK.dtype)


class Attention(nn.Module):
    """Grouped-query attention whose kernel comes with the call.

    It stands where torchtune's TransformerSelfAttentionLayer calls `attn(h, h, mask=..., input_pos=...)`: `mask` is an
    AttentionContext and `input_pos` the rotary (cos, sin) that all layers share.
    """

    kv_cache, cache_enabled = None, False  # torchtune asks for these

    def __init__(self, layer: int, dim: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool):
        super().__init__()
        self.layer, self.num_heads, self.num_kv_heads, self.head_dim = layer, num_heads, num_kv_heads, head_dim
        self.q_proj = nn.Linear(dim, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(dim, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(dim, num_kv_heads * head_dim, bias=bias)
        self.output_proj = nn.Linear(num_heads * head_dim, dim, bias=False)

    def forward(self, x_TD: Tensor, _same: Tensor, *, mask: AttentionContext, input_pos: tuple[Tensor, Tensor]) -> Tensor:
        tokens = x_TD.shape[0]
        q = rotate(self.q_proj(x_TD).view(tokens, -1, self.head_dim), *input_pos)
        k = rotate(self.k_proj(x_TD).view(tokens, -1, self.head_dim), *input_pos)
        v = self.v_proj(x_TD).view(tokens, -1, self.head_dim)
        return self.output_proj(mask.attend(self.layer, q, k, v).reshape(tokens, -1))
