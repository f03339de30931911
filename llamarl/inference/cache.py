"""Keys and values of the running rows, and the two attentions that read them.

Row i of the batch is slot i of the cache: the engine keeps its running rows dense in [0, num_rows), so decoding reads
the cache as a view and nothing is gathered. A row that ends leaves a hole, which the last row is moved into once.

Shapes: T tokens, N rows, H query heads, G key/value heads, K head dim, L cached places that are read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.models.attention import PackedAttention

_BLOCK = 16  # places are read in whole blocks: the CPU kernel's softmax is slow on a ragged tail


class SlotCache:
    """K/V of `max_slots` rows of at most `max_len` tokens, allocated once. [max_slots, max_len, G, K] a layer."""

    def __init__(self, *, num_layers: int, max_slots: int, max_len: int, num_kv_heads: int, head_dim: int,
                 dtype: torch.dtype, device: torch.device):
        self.max_slots, self.max_len = max_slots, _whole_blocks(max_len)
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        shape = (num_layers, max_slots, self.max_len, num_kv_heads, head_dim)
        # Zeros: places beyond a row's end are read too, and masked, which a NaN would survive.
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device).unbind(0) for _ in range(2))

    def prefill(self, cu_seqlens: Tensor, source_S: Tensor, places_S: Tensor) -> "Prefill":
        """Attention of whole prompts end to end; token source_S[i] is kept at flat place places_S[i] (slot * max_len + position)."""
        return Prefill(self, cu_seqlens, source_S, places_S)

    def decode(self, positions_N: Tensor, longest: int, first_slot: int = 0) -> "Decode":
        """Attention of one new token a row, at positions_N < longest, for the rows in slots first_slot onwards."""
        return Decode(self, positions_N, longest, first_slot)

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` places of slots `source` to slots `target`."""
        for cached in (*self.keys, *self.values):
            cached = cached[:, :length]
            cached.index_copy_(0, target, cached.index_select(0, source))

    def _write(self, layer: int, places: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> None:
        for cached, new in ((self.keys[layer], k_TGK), (self.values[layer], v_TGK)):
            cached.view(-1, self.num_kv_heads, self.head_dim).index_copy_(0, places, new)


class Prefill:
    """Packed prompts; each token's K/V go to every slot that its prompt's samples will decode in."""

    def __init__(self, cache: SlotCache, cu_seqlens: Tensor, source_S: Tensor, places_S: Tensor):
        self._cache, self._source, self._places = cache, source_S, places_S
        self._packed = PackedAttention(cu_seqlens)
        self.longest = self._packed.longest

    def attend(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        self._cache._write(layer, self._places, k_TGK.index_select(0, self._source), v_TGK.index_select(0, self._source))
        return self._packed.attend(layer, q_THK, k_TGK, v_TGK)


class Decode:
    """One token a row, over its slot. Query heads that share a K/V head are that head's query rows, so nothing is repeated."""

    def __init__(self, cache: SlotCache, positions_N: Tensor, longest: int, first_slot: int):
        assert longest <= cache.max_len, f"place {longest} of a cache of {cache.max_len}"
        self._cache, self.longest = cache, longest
        rows, device = positions_N.numel(), positions_N.device
        self._slots = slice(first_slot, first_slot + rows)
        self._length = _whole_blocks(longest)
        self._places = torch.arange(first_slot, first_slot + rows, device=device) * cache.max_len + positions_N
        unseen_NL = torch.arange(self._length, device=device) > positions_N[:, None]
        bias_NL = torch.zeros(unseen_NL.shape, dtype=cache.keys[0].dtype, device=device).masked_fill_(unseen_NL, float("-inf"))
        self._bias = bias_NL[:, None, None, :]

    def attend(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        cache = self._cache
        cache._write(layer, self._places, k_TGK, v_TGK)
        k_NGLK = cache.keys[layer][self._slots, :self._length].transpose(1, 2)
        v_NGLK = cache.values[layer][self._slots, :self._length].transpose(1, 2)
        q_NGRK = q_THK.view(q_THK.shape[0], cache.num_kv_heads, -1, cache.head_dim)
        return F.scaled_dot_product_attention(q_NGRK, k_NGLK, v_NGLK, attn_mask=self._bias).view_as(q_THK)


def _whole_blocks(length: int) -> int:
    return -(-length // _BLOCK) * _BLOCK
