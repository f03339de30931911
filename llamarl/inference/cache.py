"""Keys and values of the running rows, and the two attentions that read them.

Row i of the batch is slot i of the cache: the engine keeps its running rows dense in [0, num_rows), so decoding reads
the cache as a view and nothing is gathered. A row that ends leaves a hole, which the last row is moved into once.

Shapes: T tokens, N rows, S slots, H query heads, G key/value heads, R = H/G, K head dim, L places.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.models.attention import PackedAttention

_BLOCK = 16  # places are read in whole blocks: the CPU's softmax and products are slow on a ragged tail


class SlotCache:
    """K/V of `max_slots` rows of at most `max_len` tokens: [S, G, L, K] a layer.

    On a GPU L is max_len from the start. On a CPU it grows with what is asked of it, because rows that lie close together are
    read twice as fast. For one query a row plain products beat the attention kernel there (in float32 1.0 against 25 ms for 512
    rows of 64 places). In float32 the keys lie in memory as [S, G, K, L], the right-hand side of such a product; in bfloat16
    they are its left-hand side as they come.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        max_slots: int,
        max_len: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.max_slots, self.max_len = max_slots, _whole_blocks(max_len)
        self.num_kv_heads, self.head_dim, self.dtype, self.device = num_kv_heads, head_dim, dtype, device
        self.by_products = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
        self.across = self.by_products and dtype == torch.float32
        self.capacity = _BLOCK if device.type == "cpu" else self.max_len
        self.keys = [self._empty(transposed=self.across) for _ in range(num_layers)]
        self.values = [self._empty() for _ in range(num_layers)]

    def reserve(self, length: int) -> None:
        """Make room for rows of `length` <= max_len tokens; what is kept stays."""
        if length <= self.capacity:
            return
        old, self.capacity = self.capacity, min(max(_whole_blocks(length), 2 * self.capacity), self.max_len)
        for layers, transposed in ((self.keys, self.across), (self.values, False)):
            for i, kept in enumerate(layers):
                layers[i] = self._empty(transposed)
                layers[i][:, :, :old] = kept

    def _empty(self, transposed: bool = False) -> Tensor:
        """[S, G, L, K] of zeros: places beyond a row's end are read too, and masked, which a NaN would survive."""
        rows = (self.max_slots, self.num_kv_heads)
        if transposed:
            return torch.zeros(*rows, self.head_dim, self.capacity, dtype=self.dtype, device=self.device).transpose(2, 3)
        return torch.zeros(*rows, self.capacity, self.head_dim, dtype=self.dtype, device=self.device)

    def write(self, layer: int, slots_T: Tensor, positions_T: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> None:
        """Keep the K/V of tokens at their slots and positions."""
        self.keys[layer][slots_T, :, positions_T] = k_TGK
        self.values[layer][slots_T, :, positions_T] = v_TGK

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` places of slots `source` to slots `target`."""
        for cached in (*self.keys, *self.values):
            cached = cached[:, :, : _whole_blocks(length)]
            cached.index_copy_(0, target, cached.index_select(0, source))

    def share(self, slots_N: Tensor, choice_R: Tensor, first_slot: int, length: int) -> None:
        """Slot first_slot + r gets the first `length` places of slot slots_N[choice_R[r]]."""
        for cached in (*self.keys, *self.values):
            cached = cached[:, :, : _whole_blocks(length)]
            torch.index_select(
                cached.index_select(0, slots_N), 0, choice_R, out=cached[first_slot : first_slot + choice_R.numel()]
            )


class Prefill:
    """Attention of whole prompts end to end, whose K/V are kept in slots_T at positions_T."""

    def __init__(self, cache: SlotCache, cu_seqlens: Tensor, slots_T: Tensor, positions_T: Tensor):
        self._cache, self._slots, self._positions = cache, slots_T, positions_T
        self._packed = PackedAttention(cu_seqlens)
        self.longest = self._packed.longest

    def attend(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        self._cache.write(layer, self._slots, self._positions, k_TGK, v_TGK)
        return self._packed.attend(layer, q_THK, k_TGK, v_TGK)


class Decode:
    """Attention of one new token a row, at positions_N < longest, for the rows in slots first_slot onwards.

    The query heads that share a K/V head are that head's query rows, so nothing is repeated.
    """

    def __init__(self, cache: SlotCache, positions_N: Tensor, longest: int, first_slot: int = 0):
        assert longest <= cache.capacity, f"place {longest} of a cache of {cache.capacity}"
        self._cache, self._positions, self.longest = cache, positions_N, longest
        end, device = first_slot + positions_N.numel(), positions_N.device
        self._rows, self._slots = slice(first_slot, end), torch.arange(first_slot, end, device=device)
        self._length = _whole_blocks(longest)
        unseen_NL = torch.arange(self._length, device=device) > positions_N[:, None]
        dtype = torch.float32 if cache.by_products else cache.dtype
        bias_NL = torch.zeros(unseen_NL.shape, dtype=dtype, device=device).masked_fill_(unseen_NL, -torch.inf)
        self._bias_N11L = bias_NL[:, None, None, :]

    def attend(self, layer: int, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        q_NGRK = q_NHK.reshape(q_NHK.shape[0], self._cache.num_kv_heads, -1, self._cache.head_dim)
        return self.attend_by_groups(layer, q_NGRK, k_NGK, v_NGK).view(q_NHK.shape)

    def attend_by_groups(self, layer: int, q_NGRK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        """`attend` of query heads that lie by key/value head. Returns [N, H K] in the order of the heads."""
        cache = self._cache
        cache.write(layer, self._slots, self._positions, k_NGK, v_NGK)
        k_NGLK, v_NGLK = (cached[layer][self._rows, :, : self._length] for cached in (cache.keys, cache.values))
        if cache.by_products:
            seen = _attend_by_products(q_NGRK, k_NGLK, v_NGLK, self._bias_N11L, cache.across)
        else:
            seen = F.scaled_dot_product_attention(q_NGRK, k_NGLK, v_NGLK, attn_mask=self._bias_N11L)
        return seen.reshape(q_NGRK.shape[0], -1)


def _attend_by_products(q_NGRK: Tensor, k_NGLK: Tensor, v_NGLK: Tensor, bias_N11L: Tensor, across: bool) -> Tensor:
    """[N G, R, K]. bias_N11L in float32, and so is the softmax."""
    q, k, v = (x.flatten(0, 1) for x in (q_NGRK, k_NGLK, v_NGLK))
    # oneDNN's bfloat16 product reads keys that lie row by row twice as fast from the left.
    scores = torch.bmm(q, k.transpose(1, 2)) if across else torch.bmm(k, q.transpose(1, 2)).transpose(1, 2)
    shape = (*q_NGRK.shape[:3], k.shape[1])
    biased = torch.empty(shape, dtype=torch.float32, device=q.device)  # contiguous, as the softmax wants it
    torch.add(bias_N11L, scores.view(shape), alpha=q.shape[-1] ** -0.5, out=biased)
    return torch.bmm(biased.softmax(-1).to(v.dtype).flatten(0, 1), v)


def _whole_blocks(length: int) -> int:
    return -(-length // _BLOCK) * _BLOCK
