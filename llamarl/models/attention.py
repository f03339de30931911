"""Attention over flat tokens. What a token may look at is a context object's business, not the
module's.

The same module trains (PackedAttention: whole sequences end to end) and generates (the engine's
slot cache): both give `attend(layer, q, k, v)`. Shapes: T tokens, H query heads, G key/value heads,
K head dim, D model, N sequences, L longest.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarl.models.config import ModelConfig
from llamarl.models.fused import (
    Part,
    kernels,
    masked_products,
    packed_products,
    projections,
    rotate,
)
from llamarl.models.sharding import heads_of
from llamarl.models.tp import KeyValueSharing, TensorParallel, copied, summed

# Up to this many keys the CPU's fused kernel, made for long sequences, takes up to 15 times as long
# as plain products.
SHORT = {torch.bfloat16: 512, torch.float32: 256, torch.float64: 256}
# Pairs of query and key whose cost is that of a kernel call more: segments of unlike lengths are
# padded no further.
CALL = {"cpu": 1 << 13, "cuda": 1 << 20}


class AttentionContext(Protocol):
    """Says which keys each query sees."""

    def attend(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        """Softmax attention of every token over what it may see. Returns [T, H, K]."""
        ...


class PackedAttention:
    """Causal attention inside each of S segments that lie end to end, where a segment may continue
    another.

    cu_seqlens [S+1]: where each segment starts, and the total. parents [S]: the segment that this
    one continues and sees whole, or -1; None: all -1. The completions of a group are children of
    its prompt, which is computed once. Segments of like length are padded to the longest of them
    for the kernel alone. Parents have no parents themselves.
    """

    def __init__(self, cu_seqlens: Tensor, parents: Tensor | None = None):
        lengths, starts = cu_seqlens.diff(), cu_seqlens[:-1]
        if parents is None:
            parents = torch.full_like(lengths, -1)
        is_child = parents >= 0
        prefixes = torch.where(
            is_child, lengths[parents], 0
        )  # -1 reads the last segment's, which is not taken
        self.longest, self._parts = int((lengths + prefixes).max()), []
        for kind in (~is_child, is_child):
            for places in _alike(kind.nonzero().squeeze(1), lengths, prefixes):
                behind = (
                    (starts[parents[places]], prefixes[places])
                    if kind is is_child
                    else (None, None)
                )
                self._parts.append(_Part(starts[places], lengths[places], *behind))
        self.padded_tokens = sum(
            part.queries.numel() for part in self._parts
        )  # places that the kernel computes
        self._num_tokens = int(cu_seqlens[-1])
        if cu_seqlens.device.type == "cpu":
            self._check_places()
        self.whole = len(self._parts) == 1 and self._parts[0].dense
        if not self.whole:
            order = torch.cat([part.tokens for part in self._parts])
            self._back_T = torch.empty_like(order).index_put_(
                (order,), torch.arange(order.numel(), device=order.device)
            )

    def attend(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        if q_THK.shape[0] != self._num_tokens:
            raise ValueError(f"{q_THK.shape[0]} tokens for segments of {self._num_tokens} in all")
        limit = SHORT.get(q_THK.dtype, 256)
        if kernels(q_THK) is not None and all(part.num_keys <= limit for part in self._parts):
            return packed_products(q_THK, k_TGK, v_TGK, [part.part for part in self._parts])
        parts = [part.attend(q_THK, k_TGK, v_TGK, self.whole) for part in self._parts]
        return parts[0] if self.whole else torch.cat(parts).index_select(0, self._back_T)

    def _check_places(self) -> None:
        """IndexError where a segment reaches outside the tokens: kernels on a CPU trust the places
        that they are given.
        """
        for part in self._parts:
            least, most = torch.aminmax(part.keys) if part.keys.numel() else (0, 0)
            if least < 0 or most >= max(1, self._num_tokens):
                raise IndexError(
                    f"segments reach over tokens {int(least)}..{int(most)} of {self._num_tokens}"
                )


def _alike(places: Tensor, lengths: Tensor, prefixes: Tensor) -> list[Tensor]:
    """The segments at these places, longest first, cut into classes: one ends where its padding
    would cost as much as a call.
    """
    if not places.numel():
        return []
    places = places[lengths[places].argsort(descending=True, stable=True)]
    queries, behind, limit = (
        lengths[places].tolist(),
        prefixes[places].tolist(),
        CALL["cpu" if lengths.device.type == "cpu" else "cuda"],
    )
    cuts, waste, most = [0], 0, 0
    for i, (n, p) in enumerate(zip(queries, behind)):
        longest, most = queries[cuts[-1]], max(most, p)
        waste += longest * (longest + most) - n * (n + p)
        if waste > limit:
            cuts.append(i)
            waste, most = 0, p
    return list(places.tensor_split(cuts[1:]))


class _Part:
    """N segments of one kind: roots, or children with the tokens of their parents before their own
    keys. L longest, P prefix.
    """

    def __init__(
        self,
        starts: Tensor,
        lengths: Tensor,
        prefix_starts: Tensor | None,
        prefix_lengths: Tensor | None,
    ):
        device, self.count, self.longest = starts.device, lengths.numel(), int(lengths.max())
        self.dense = prefix_starts is None and bool((lengths == self.longest).all())
        places = torch.arange(self.longest, device=device)
        valid = (places < lengths[:, None]).flatten()
        # Padding reads its segment's last token: a real place, whose output is dropped and gradient
        # is zero.
        queries = starts[:, None] + torch.minimum(places, lengths[:, None] - 1)
        self.valid = valid.nonzero().squeeze(1)
        self.queries, self.tokens = queries.flatten(), queries.flatten()[self.valid]
        keys, most = queries, 0
        if prefix_starts is not None:
            most = int(prefix_lengths.max())
            behind = torch.arange(most, device=device)
            prefix = prefix_starts[:, None] + torch.minimum(behind, prefix_lengths[:, None] - 1)
            keys = torch.cat([prefix, queries], dim=1)
        self.part = Part(queries.contiguous(), keys.contiguous(), lengths, prefix_lengths, most)
        self.keys, self.num_keys = keys.flatten(), most + self.longest

    @cached_property
    def mask(self) -> Tensor | None:
        return self.part.mask()

    def attend(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, whole: bool) -> Tensor:
        def padded(x: Tensor, index: Tensor) -> Tensor:
            x = x if whole else x.index_select(0, index)
            return x.view(self.count, -1, *x.shape[1:]).transpose(1, 2)

        q, k, v = padded(q_THK, self.queries), padded(k_TGK, self.keys), padded(v_TGK, self.keys)
        if q.device.type == "cpu" and self.num_keys <= SHORT.get(q.dtype, 256):
            out = masked_products(q, k, v, self.mask)
        else:
            out = fused(q, k, v, self.mask)
        out = out.transpose(1, 2).flatten(0, 1)
        return out if whole else out.index_select(0, self.valid)


def fused(q_NHLK: Tensor, k_NGMK: Tensor, v_NGMK: Tensor, mask: Tensor | None) -> Tensor:
    """Attention [N, H, L, K] by PyTorch's kernels; mask: bool, broadcast to [N, 1, L, M], true
    where a key is seen; None: causal.
    """
    shared = q_NHLK.shape[1] // k_NGMK.shape[1]
    if mask is not None and shared > 1 and q_NHLK.is_cuda:
        # No GPU's kernel takes a mask and fewer key heads; all weights at once would be held
        # instead.
        k_NGMK, v_NGMK, shared = (
            k_NGMK.repeat_interleave(shared, 1),
            v_NGMK.repeat_interleave(shared, 1),
            1,
        )
    return F.scaled_dot_product_attention(
        q_NHLK, k_NGMK, v_NGMK, attn_mask=mask, is_causal=mask is None, enable_gqa=shared > 1
    )


class Rotary:
    """Rotary position embedding in Hugging Face's half-split layout, so that weights need no
    permutation.

    scaling: the HF config's rope_scaling (None; type default, linear, llama3 or yarn). Tables are
    float32 and grow on demand.
    """

    def __init__(self, head_dim: int, theta: float, scaling: dict | None):
        steps = torch.arange(
            0, head_dim, 2, dtype=torch.float32, device="cpu"
        )  # real numbers even while parameters are meta
        inv_freq = 1.0 / theta ** (steps / head_dim)
        self.inv_freq, self.factor = _scale_frequencies(inv_freq, theta, scaling or {})
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
            table = self._tables[device] = tuple(
                (table * self.factor).to(device) for table in (angles.cos(), angles.sin())
            )
        return table


def _scale_frequencies(inv_freq: Tensor, theta: float, scaling: dict) -> tuple[Tensor, float]:
    """The frequencies [K/2] of a context that was stretched after training, and what cos and sin
    are multiplied by.
    """
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    try:
        if kind == "default":
            return inv_freq, 1.0
        if kind == "linear":
            return inv_freq / scaling["factor"], 1.0
        if kind == "llama3":
            old = scaling["original_max_position_embeddings"]
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            turns = old * inv_freq / (2 * math.pi)
            smooth = ((turns - low) / (high - low)).clamp(0, 1)
            return inv_freq * (smooth + (1 - smooth) / scaling["factor"]), 1.0
        if kind == "yarn":
            return _yarn(inv_freq, theta, scaling)
    except KeyError as error:
        raise ValueError(f"rope_scaling of type {kind!r} lacks {error.args[0]}") from error
    raise ValueError(
        f"rope_scaling type {kind!r} is not supported; supported: default, linear, llama3, yarn"
    )


def _yarn(inv_freq: Tensor, theta: float, scaling: dict) -> tuple[Tensor, float]:
    """Dims that turn more than beta_fast times in the original context stay, those below beta_slow
    are stretched by `factor`,
    a ramp between; cos and sin are multiplied by 0.1 ln(factor) + 1          (Peng et al. 2023, YaRN, 3.2 to 3.4)
    """
    half, factor, old = (
        inv_freq.numel(),
        scaling["factor"],
        scaling["original_max_position_embeddings"],
    )
    # The (real) dim that makes so many turns: old / (2 pi theta^(d / half)) = turns.
    fast, slow = (
        scaling.get(key) or default for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    low, high = (
        half * math.log(old / (2 * math.pi * turns)) / math.log(theta) for turns in (fast, slow)
    )
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    stretched = ((torch.arange(half, device=inv_freq.device) - low) / max(high - low, 0.001)).clamp(
        0, 1
    )

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    weights = [scaling.get(key) for key in ("mscale", "mscale_all_dim")]
    both = magnitude(weights[0]) / magnitude(weights[1]) if all(weights) else magnitude(1.0)
    return inv_freq * (1 - stretched) + inv_freq / factor * stretched, scaling.get(
        "attention_factor"
    ) or both


def repeated(x_TGK: Tensor, repeats: list[int]) -> Tensor:
    """[T, H, K]: K/V head g repeats[g] times, for the query heads that read it."""
    return torch.cat([x_TGK[:, g : g + 1].expand(-1, n, -1) for g, n in enumerate(repeats)], dim=1)


class Attention(nn.Module):
    """Grouped-query attention whose kernel comes with the call.

    `mask` is an AttentionContext and `input_pos` the rotary (cos, sin) that all layers share. With
    tensor parallelism it holds the rank's heads, and every rank returns the sum of what all make of
    theirs.
    """

    kv_cache, cache_enabled = None, False  # torchtune asks for these

    def __init__(self, layer: int, config: ModelConfig, tp: TensorParallel | None = None):
        super().__init__()
        c, bias = config, config.attention_bias
        heads = heads_of(c, tp.rank, tp.size) if tp else heads_of(c, 0, 1)
        self.layer, self.head_dim, self.tp = layer, c.head_dim, tp
        # A kernel takes equally many query heads for every K/V head; where they are not, each query
        # head gets its own.
        self.repeats = (
            None if heads.uniform else [heads.kv_of_query.count(g) for g in range(heads.num_kv)]
        )
        self.num_cached_kv_heads = heads.num_kv if heads.uniform else heads.num_query
        self.sharing = KeyValueSharing(c, tp) if tp else None
        self.q_proj = nn.Linear(c.hidden_size, heads.num_query * c.head_dim, bias=bias)
        self.k_proj = nn.Linear(c.hidden_size, heads.num_kv * c.head_dim, bias=bias)
        self.v_proj = nn.Linear(c.hidden_size, heads.num_kv * c.head_dim, bias=bias)
        self.output_proj = nn.Linear(heads.num_query * c.head_dim, c.hidden_size, bias=False)

    def forward(
        self, x_TD: Tensor, *, mask: AttentionContext, input_pos: tuple[Tensor, Tensor]
    ) -> Tensor:
        tokens = x_TD.shape[0]
        if self.tp:
            x_TD = copied(x_TD, self.tp)
        q, k, v = (part.view(tokens, -1, self.head_dim) for part in self._projected(x_TD))
        q, k = rotate(q, *input_pos), rotate(k, *input_pos)
        if self.repeats:
            k, v = repeated(k, self.repeats), repeated(v, self.repeats)
        out_TD = self.output_proj(mask.attend(self.layer, q, k, v).reshape(tokens, -1))
        return summed(out_TD, self.tp) if self.tp else out_TD

    def _projected(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        if self.sharing is None:
            return projections(x_TD, self.q_proj, self.k_proj, self.v_proj)
        return self.q_proj(x_TD), self.sharing(self.k_proj, x_TD), self.sharing(self.v_proj, x_TD)
