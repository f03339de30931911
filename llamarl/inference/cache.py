"""Keys and values of the running rows, and the two attentions that read them.

Row i of the batch is slot i of the cache: the engine keeps its running rows dense in [0, num_rows), so decoding reads
the cache as a view and nothing is gathered. A row that ends leaves a hole, which the last row is moved into once.

Shapes: T tokens, N rows, S slots, H query heads, G key/value heads, R = H/G, K head dim, L places; P tokens kept.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.models.attention import PackedAttention

_BLOCK = 16  # places are read in whole blocks: the CPU's softmax and products are slow on a ragged tail


class SlotCache:
    """K/V of `max_slots` rows of at most `max_len` tokens, allocated once: [S, G, L, K] a layer.

    In float32 on a CPU the keys lie in memory as [S, G, K, L], the right-hand side of a batched product: for one query a row
    plain products beat the attention kernel there (1.0 against 25 ms for 512 rows of 64 places, 2 K/V heads of 48).
    """

    def __init__(self, *, num_layers: int, max_slots: int, max_len: int, num_kv_heads: int, head_dim: int,
                 dtype: torch.dtype, device: torch.device):
        self.max_slots, self.max_len = max_slots, _whole_blocks(max_len)
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.by_products = device.type == "cpu" and dtype == torch.float32
        shape = (num_layers, max_slots, num_kv_heads, self.max_len, head_dim)
        # Zeros: places beyond a row's end are read too, and masked, which a NaN would survive.
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        if self.by_products:
            keys = keys.view(*shape[:3], head_dim, self.max_len).transpose(3, 4)
        self.keys, self.values = keys.unbind(0), values.unbind(0)

    def write(self, layer: int, slots_P: Tensor, positions_P: Tensor, k_PGK: Tensor, v_PGK: Tensor) -> None:
        """Keep the K/V of tokens at their slots and positions."""
        self.keys[layer][slots_P, :, positions_P] = k_PGK
        self.values[layer][slots_P, :, positions_P] = v_PGK

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` places of slots `source` to slots `target`."""
        for cached in (*self.keys, *self.values):
            cached = cached[:, :, :length]
            cached.index_copy_(0, target, cached.index_select(0, source))


class Prefill:
    """Attention of whole prompts end to end. The K/V of token source_P[i] are kept at (slots_P[i], positions_P[i])."""

    def __init__(self, cache: SlotCache, cu_seqlens: Tensor, source_P: Tensor, slots_P: Tensor, positions_P: Tensor):
        self._cache, self._source, self._slots, self._positions = cache, source_P, slots_P, positions_P
        self._packed = PackedAttention(cu_seqlens)
        self.longest = self._packed.longest

    def attend(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        k, v = k_TGK.index_select(0, self._source), v_TGK.index_select(0, self._source)
        self._cache.write(layer, self._slots, self._positions, k, v)
        return self._packed.attend(layer, q_THK, k_TGK, v_TGK)


class Decode:
    """Attention of one new token a row, at positions_N < longest, for the rows in slots first_slot onwards.

    The query heads that share a K/V head are that head's query rows, so nothing is repeated.
    """

    def __init__(self, cache: SlotCache, positions_N: Tensor, longest: int, first_slot: int = 0):
        assert longest <= cache.max_len, f"place {longest} of a cache of {cache.max_len}"
        self._cache, self._positions, self.longest = cache, positions_N, longest
        end, device = first_slot + positions_N.numel(), positions_N.device
        self._rows, self._slots = slice(first_slot, end), torch.arange(first_slot, end, device=device)
        self._length = _whole_blocks(longest)
        unseen_NL = torch.arange(self._length, device=device) > positions_N[:, None]
        bias_NL = torch.zeros(unseen_NL.shape, dtype=cache.keys[0].dtype, device=device).masked_fill_(unseen_NL, -torch.inf)
        self._bias_N11L = bias_NL[:, None, None, :]

    def attend(self, layer: int, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        cache = self._cache
        cache.write(layer, self._slots, self._positions, k_NGK, v_NGK)
        k_NGLK, v_NGLK = (cached[layer][self._rows, :, :self._length] for cached in (cache.keys, cache.values))
        q_NGRK = q_NHK.view(q_NHK.shape[0], cache.num_kv_heads, -1, cache.head_dim)
        if cache.by_products:
            return _attend_by_products(q_NGRK, k_NGLK, v_NGLK, self._bias_N11L).view_as(q_NHK)
        return F.scaled_dot_product_attention(q_NGRK, k_NGLK, v_NGLK, attn_mask=self._bias_N11L).view_as(q_NHK)


def _attend_by_products(q_NGRK: Tensor, k_NGLK: Tensor, v_NGLK: Tensor, bias_N11L: Tensor) -> Tensor:
    n, groups, rows, head_dim = q_NGRK.shape
    scores = torch.bmm(q_NGRK.flatten(0, 1) * head_dim**-0.5, k_NGLK.flatten(0, 1).transpose(1, 2))
    scores = scores.view(n, groups, rows, -1).add_(bias_N11L)
    return torch.bmm(scores.softmax(-1).flatten(0, 1), v_NGLK.flatten(0, 1))


def _whole_blocks(length: int) -> int:
    return -(-length // _BLOCK) * _BLOCK
