"""Keys and values of the running rows, and the two attentions that read them.

Row i of the batch is slot i of the cache: the engine keeps its running rows dense in [0, num_rows),
so decoding reads the cache as a view and nothing is gathered. A row that ends leaves a hole, which
the last row is moved into once.

Shapes: T tokens, N rows, S slots, H query heads, G key/value heads, R = H/G, K head dim, L places.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.models.attention import PackedAttention, fused
from llamarl.models.build import Decoder

_BLOCK = (
    16  # places are read in whole blocks: the CPU's softmax and products are slow on a ragged tail
)


class SlotCache:
    """K/V of at most `max_slots` rows of at most `max_len` tokens: [S, G, L, K] a layer, S L about
    `budget` at most.

    On a GPU S and L are fixed from the start. On a CPU they grow with what is asked of them,
    because rows that lie close together are read twice as fast.
    """

    def __init__(self, decoder: Decoder, max_slots: int, max_len: int, budget: int):
        self.max_len, self.budget = _whole_blocks(max_len), budget
        self.num_kv_heads, self.head_dim = decoder.num_cached_kv_heads, decoder.config.head_dim
        self.dtype, self.device = (
            decoder.tok_embeddings.weight.dtype,
            decoder.tok_embeddings.weight.device,
        )
        self._fixed = self.device.type != "cpu"
        # On a GPU the last two rows are for `score` and for the prompt that is prefilled in pieces.
        self.rows, self.capacity = (
            (min(max_slots, self.rows_of(max_len)) + 2, self.max_len)
            if self._fixed
            else (0, _BLOCK)
        )
        self.keys, self.values = ([self._empty() for _ in decoder.layers] for _ in range(2))

    def rows_of(self, length: int) -> int:
        """How many rows of `length` tokens the budget holds, and one in any case."""
        return max(1, self.budget // (self.max_len if self._fixed else _whole_blocks(length)))

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` <= max_len tokens; what is held stays.

        IndexError for a longer length, and for more than a cache of fixed size has.
        """
        if rows <= self.rows and length <= self.capacity:
            return
        if self._fixed or length > self.max_len:
            most = (
                f"{self.rows} rows of {self.capacity}" if self._fixed else f"rows of {self.max_len}"
            )
            raise IndexError(f"{rows} rows of {length} tokens in a cache of {most}")
        kept_rows, kept_length = self.rows, self.capacity
        # Doubling, so that growing costs little; within the budget, where longer rows may mean
        # fewer.
        if length > self.capacity:
            self.capacity = min(max(_whole_blocks(length), 2 * self.capacity), self.max_len)
        if rows * self.capacity > self.budget:
            self.capacity = _whole_blocks(length)
        self.rows = max(rows, min(self.rows, self.budget // self.capacity))
        kept_rows, kept_length = min(kept_rows, self.rows), min(kept_length, self.capacity)
        for layers in (self.keys, self.values):
            for i, kept in enumerate(layers):
                layers[i] = self._empty()
                layers[i][:kept_rows, :, :kept_length] = kept[:kept_rows, :, :kept_length]

    def _empty(self) -> Tensor:
        """[S, G, L, K] of zeros: places beyond a row's end are read too, and masked, which a NaN
        would survive.
        """
        return torch.zeros(
            self.rows,
            self.num_kv_heads,
            self.capacity,
            self.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def write(
        self, layer: int, slots_T: Tensor, positions_T: Tensor, k_TGK: Tensor, v_TGK: Tensor
    ) -> None:
        """Keep the K/V of tokens at their slots and positions."""
        self.keys[layer][slots_T, :, positions_T] = k_TGK
        self.values[layer][slots_T, :, positions_T] = v_TGK

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` places of slots `source` to slots `target`."""
        length = _whole_blocks(length)
        one = source.numel() == 1 and source.device.type == "cpu"
        for cached in (*self.keys, *self.values):
            cached = cached[:, :, :length]
            if one:
                cached[int(target)] = cached[int(source)]
            else:
                cached.index_copy_(0, target, cached.index_select(0, source))


class Prefill:
    """Attention of whole prompts end to end, whose K/V are kept in slots_T at positions_T."""

    def __init__(self, cache: SlotCache, cu_seqlens: Tensor, slots_T: Tensor, positions_T: Tensor):
        self._cache, self._slots, self._positions = cache, slots_T, positions_T
        self._packed = PackedAttention(cu_seqlens)
        self.longest = self._packed.longest

    def attend(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        self._cache.write(layer, self._slots, self._positions, k_TGK, v_TGK)
        return self._packed.attend(layer, q_THK, k_TGK, v_TGK)


class Extend:
    """Attention of the next tokens of one slot, from place `start` on, over what the slot holds and
    themselves.
    """

    def __init__(self, cache: SlotCache, slot: int, start: int, count: int):
        self._cache, self._slot, self.longest = cache, slot, start + count
        self._slots = torch.full((count,), slot, device=cache.device)
        self.positions = torch.arange(start, self.longest, device=cache.device)
        self._seen = torch.arange(self.longest, device=cache.device) <= self.positions[:, None]

    def attend(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        cache = self._cache
        cache.write(layer, self._slots, self.positions, k_TGK, v_TGK)
        k, v = (
            kept[layer][self._slot, :, : self.longest].contiguous()[None]
            for kept in (cache.keys, cache.values)
        )
        return fused(q_THK.transpose(0, 1)[None], k, v, self._seen)[0].transpose(0, 1)


class Decode:
    """Attention of one new token a row, at positions_N < longest, for the rows in slots first_slot
    onwards.

    The query heads that share a K/V head are that head's query rows, so nothing is repeated.
    """

    def __init__(self, cache: SlotCache, positions_N: Tensor, longest: int, first_slot: int = 0):
        end, device = first_slot + positions_N.numel(), positions_N.device
        if longest > cache.capacity or end > cache.rows or first_slot < 0:
            raise IndexError(
                f"place {longest - 1} of slots {first_slot}..{end - 1}: "
                f"the cache has {cache.rows} slots of {cache.capacity} places"
            )
        self._cache, self._positions, self.longest = cache, positions_N, longest
        self._rows, self._slots = (
            slice(first_slot, end),
            torch.arange(first_slot, end, device=device),
        )
        self._length = _whole_blocks(longest)
        unseen_NL = torch.arange(self._length, device=device) > positions_N[:, None]
        self._by_products = device.type == "cpu" and cache.dtype in (torch.float32, torch.bfloat16)
        dtype = torch.float32 if self._by_products else cache.dtype
        bias_NL = torch.zeros(unseen_NL.shape, dtype=dtype, device=device).masked_fill_(
            unseen_NL, -torch.inf
        )
        self._bias_N11L = bias_NL[:, None, None, :]

    def attend(self, layer: int, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        cache = self._cache
        cache.write(layer, self._slots, self._positions, k_NGK, v_NGK)
        k_NGLK, v_NGLK = (
            cached[layer][self._rows, :, : self._length] for cached in (cache.keys, cache.values)
        )
        q_NGRK = q_NHK.reshape(q_NHK.shape[0], cache.num_kv_heads, -1, cache.head_dim)
        if self._by_products:
            seen = _attend_by_products(q_NGRK, k_NGLK, v_NGLK, self._bias_N11L)
        else:
            seen = F.scaled_dot_product_attention(q_NGRK, k_NGLK, v_NGLK, attn_mask=self._bias_N11L)
        return seen.reshape(q_NHK.shape)


def _attend_by_products(
    q_NGRK: Tensor, k_NGLK: Tensor, v_NGLK: Tensor, bias_N11L: Tensor
) -> Tensor:
    """[N G, R, K]; the softmax in float32. On a CPU the attention kernel takes 25 times as long for
    one query a row.
    """
    q, k, v = (x.flatten(0, 1) for x in (q_NGRK, k_NGLK, v_NGLK))
    # The keys from the left: row by row they are read twice as fast there.
    scores = torch.bmm(k, q.transpose(1, 2)).transpose(1, 2).view(*q_NGRK.shape[:3], -1)
    weights = (bias_N11L + scores * q.shape[-1] ** -0.5).softmax(-1)
    return torch.bmm(weights.to(v.dtype).flatten(0, 1), v)


def _whole_blocks(length: int) -> int:
    return -(-length // _BLOCK) * _BLOCK
