"""Keys and values of the running rows, and the attentions that read them.

Row i of the batch is slot i of the cache. The engine keeps running rows dense in [0, num_rows), so
decoding reads the cache as a view and gathers nothing. When a row ends, the last row moves into its
slot.

Shapes: T tokens, N rows, S slots, H query heads, J key/value heads, R = H/J, K head dim, L places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.inference.schedule import Room, whole_blocks
from llamarl.machine.device import has_float64
from llamarl.models.attention import PRODUCTS, PackedAttention, Scores, fused, masked_products
from llamarl.models.decoder import Decoder
from llamarl.models.fused import gpu_kernels

_FAST_PRODUCTS = (torch.float32, torch.bfloat16)  # on a CPU


class SlotCache:
    """K/V of at most `max_slots` rows of at most `max_len` tokens: keys and values of each layer as
    one [2, S, J, L, K], S L about `budget` at most. J and K are the layer's. dtype: that the
    decoder computes in; None: that of its weights.

    On a GPU S and L are fixed from the start. On a CPU they grow with what is asked of them,
    because rows that lie close together are read twice as fast. Their sizes are `room`'s.
    """

    def __init__(
        self,
        decoder: Decoder,
        max_slots: int,
        max_len: int,
        budget: int,
        dtype: torch.dtype | None = None,
    ):
        # Of a layer whose K/V were not seen yet nothing is held.
        self._shapes = decoder.cached_shapes or [(0, 0)] * len(decoder.layers)
        if decoder.config.is_read_alone:
            self._shapes = [(1, 1)]  # of token ids, in the place of keys and of values
        self.device = decoder.tok_embeddings.weight.device
        self.dtype = dtype or decoder.tok_embeddings.weight.dtype
        if decoder.config.is_read_alone:
            # float32 holds ids below 2^24, which all are, where a device has no float64.
            self.dtype = torch.float64 if has_float64(self.device) else torch.float32
        self.room = Room(
            max_slots=max_slots,
            max_len=max_len,
            budget=budget,
            is_fixed=self.device.type != "cpu",
        )
        self.max_len = self.room.max_len
        self.rows = self.room.rows
        self.capacity = self.room.capacity  # places of a row
        self.layers = [self._empty(shape) for shape in self._shapes]
        self._has_routes = False  # the last of `layers`, [1, S, M, L, K], are routes

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` <= max_len tokens; what these held stays.

        IndexError for a longer length, and for more than a cache of fixed size has.
        """
        self.room.reserve(rows, length)
        self.fit()

    def fit(self) -> None:
        """Make the tensors as large as `room` has become. Contents within that size stay."""
        if (self.rows, self.capacity) == (self.room.rows, self.room.capacity):
            return
        self.rows = self.room.rows
        self.capacity = self.room.capacity
        for i, old in enumerate(self.layers):
            size, _, heads, _, dim = old.shape
            new = old.new_zeros(size, self.rows, heads, self.capacity, dim)
            kept = old[:, : self.rows, :, : self.capacity]
            _, num_rows, _, num_places, _ = kept.shape
            new[:, :num_rows, :, :num_places] = kept
            self.layers[i] = new

    def _empty(self, of_layer: tuple[int, int]) -> Tensor:
        """[2, S, J, L, K] of zeros: places beyond a row's end are read too, and masked, which a NaN
        would survive.
        """
        kv_heads, head_dim = of_layer
        shape = (2, self.rows, kv_heads, self.capacity, head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def write(
        self, layer: int, slots_T: Tensor, positions_T: Tensor, k_TJK: Tensor, v_TJK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keep the K/V of tokens at their slots and positions. Returns all keys and all values of
        the layer, [S, J, L, K] each.
        """
        if not self._shapes[layer][0]:
            self._shapes[layer] = (k_TJK.shape[1], k_TJK.shape[2])
            self.layers[layer] = self._empty(self._shapes[layer])
        held = self.layers[layer]
        keys, values = held
        on_gpu = gpu_kernels(k_TJK)
        if on_gpu and k_TJK.dtype == held.dtype:
            on_gpu.keep(held, slots_T, positions_T, k_TJK.contiguous(), v_TJK.contiguous())
            return keys, values
        keys[slots_T, :, positions_T] = k_TJK
        values[slots_T, :, positions_T] = v_TJK
        return keys, values

    def write_routes(
        self, slots_T: Tensor, positions_T: Tensor, routes_TMK: Tensor, is_kept_T: Tensor
    ) -> None:
        """Keep the routes (llamarl.models.routing) of tokens at their slots and positions, where
        is_kept_T.
        """
        if not self._has_routes:
            _, routers, experts = routes_TMK.shape
            size = (1, self.rows, routers, self.capacity, experts)
            self.layers.append(routes_TMK.new_zeros(size))
            self._has_routes = True
        held = self.layers[-1][0]
        old_TMK = held[slots_T, :, positions_T]
        held[slots_T, :, positions_T] = torch.where(is_kept_T[:, None, None], routes_TMK, old_TMK)

    def routes(self, slot: int, length: int) -> Tensor:
        """Return the routes [n, M, K] of the first `length` tokens of a slot, on the CPU."""
        return self.layers[-1][0, slot, :, :length].transpose(0, 1).cpu()

    def write_tokens(self, slots_T: Tensor, positions_T: Tensor, tokens_T: Tensor) -> None:
        """Keep token ids at their slots and positions, for a decoder that reads them again."""
        ids_T11 = tokens_T[:, None, None].to(self.dtype)
        self.write(0, slots_T, positions_T, ids_T11, ids_T11)

    def tokens(self, slot: int, length: int) -> Tensor:
        """Return the first `length` token ids [n] of a slot."""
        return self.layers[0][0, slot, 0, :length, 0].long()

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` places of slots `source` to slots `target`, none of which is a
        source.
        """
        end = whole_blocks(length)
        if self.device.type == "cpu":
            # Run by run, without a tensor in between, which is several times faster there.
            runs = _runs(source.tolist(), target.tolist())
            for layer in self.layers:
                places = layer[:, :, :, :end]
                for one, first, behind in runs:
                    places[:, first:behind] = places[:, one : one + 1]
            return
        for layer in self.layers:
            places = layer[:, :, :, :end]
            moved = places.index_select(1, source)
            places.index_copy_(1, target, moved)


def _runs(source: list[int], target: list[int]) -> list[tuple[int, int, int]]:
    """Return which slots [first, behind) get the contents of which slot `one`, as (one, first,
    behind). A prompt's copies lie side by side, and such neighbours are one run.
    """
    runs: list[tuple[int, int, int]] = []
    for one, other in zip(source, target):
        if runs and runs[-1][0] == one and runs[-1][2] == other:
            runs[-1] = (one, runs[-1][1], other + 1)
        else:
            runs.append((one, other, other + 1))
    return runs


class Prefill:
    """Attention of whole prompts end to end, whose K/V are kept in slots_T at positions_T."""

    def __init__(self, cache: SlotCache, cu_seqlens: Tensor, slots_T: Tensor, positions_T: Tensor):
        self._cache = cache
        self._slots = slots_T
        self._positions = positions_T
        self._packed = PackedAttention(cu_seqlens)
        self.longest = self._packed.longest
        self.padding = self._packed.padding

    def attend(
        self, layer: int, q_THK: Tensor, k_TJK: Tensor, v_TJK: Tensor, scores: Scores = PRODUCTS
    ) -> Tensor:
        """Keep the K/V, and return what each token reads of its own prompt, [T, H, K]."""
        kept = slice(len(self._slots))
        self._cache.write(layer, self._slots, self._positions, k_TJK[kept], v_TJK[kept])
        return self._packed.attend(layer, q_THK, k_TJK, v_TJK, scores)

    def sequences(self, tokens_T: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Keep the prompts' tokens, and yield each prompt."""
        self._cache.write_tokens(self._slots, self._positions, tokens_T)
        return self._packed.sequences(tokens_T)


class Pieces:
    """Attention of the next tokens of N sequences end to end, each over what its slot holds and
    over its own. Sequences are padded to the longest for the kernel alone.

    slots_N: of each, where its K/V are kept; starts_N: tokens that are there; lengths_N >= 1: its
    new ones, T in all. A slot may be of several that follow each other.
    """

    padding = 0

    def __init__(self, cache: SlotCache, slots_N: Tensor, starts_N: Tensor, lengths_N: Tensor):
        device = cache.device
        self._cache = cache
        self._slots_N = slots_N.to(device)
        self._begun = list(zip(slots_N.tolist(), starts_N.tolist(), lengths_N.tolist()))
        self.longest = int((starts_N + lengths_N).max())
        ends_N = lengths_N.cumsum(0)
        firsts_N = ends_N - lengths_N
        offsets_T = (firsts_N - starts_N).repeat_interleave(lengths_N)
        num_tokens = int(ends_N[-1])
        positions_T = torch.arange(num_tokens) - offsets_T
        steps_L = torch.arange(int(lengths_N.max()))
        # Padding asks the sequence's last token again, and its answer is dropped.
        steps_NL = torch.minimum(steps_L, lengths_N[:, None] - 1)
        is_token_NL = steps_L < lengths_N[:, None]
        queries_NL = firsts_N[:, None] + steps_NL
        places_NL = starts_N[:, None] + steps_NL
        distances_NLM = places_NL[..., None] - torch.arange(self.longest)
        self.positions_T = positions_T.to(device)
        self._slots_T = slots_N.repeat_interleave(lengths_N).to(device)
        self._queries_NL = queries_NL.to(device)
        self._distances_N1LM = distances_NLM[:, None].to(device)
        self._places_T = is_token_NL.flatten().nonzero()[:, 0].to(device)

    def attend(
        self, layer: int, q_THK: Tensor, k_TJK: Tensor, v_TJK: Tensor, scores: Scores = PRODUCTS
    ) -> Tensor:
        """Keep the K/V, and return what each token reads of its slot up to itself, [T, H, K]."""
        keys, values = self._cache.write(layer, self._slots_T, self.positions_T, k_TJK, v_TJK)
        k_NJMK = keys[self._slots_N, :, : self.longest]
        v_NJMK = values[self._slots_N, :, : self.longest]
        seen_N1LM = self._distances_N1LM >= 0
        window = scores.window_within(self.longest)
        if window is not None:
            seen_N1LM = seen_N1LM & (self._distances_N1LM < window)
        q_NHLK = q_THK[self._queries_NL].transpose(1, 2)
        if scores.are_products:
            q_NHLK = scores.scaled(q_NHLK)
            out_NHLK = fused(q_NHLK, k_NJMK, v_NJMK, seen_N1LM)
        else:
            out_NHLK = masked_products(q_NHLK, k_NJMK, v_NJMK, seen_N1LM, scores)
        out_NLHK = out_NHLK.transpose(1, 2)
        return out_NLHK.flatten(0, 1)[self._places_T]

    def sequences(self, tokens_T: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Keep the new tokens, and yield each sequence up to them, and where they start."""
        self._cache.write_tokens(self._slots_T, self.positions_T, tokens_T)
        for slot, start, length in self._begun:
            yield self._cache.tokens(slot, start + length), start


class Decode:
    """Attention of one new token a row, at positions_N < longest, for the rows in slots first_slot
    onwards.

    The query heads that share a K/V head are that head's query rows, so nothing is repeated.
    """

    padding = 0

    def __init__(self, cache: SlotCache, positions_N: Tensor, longest: int, first_slot: int = 0):
        end = first_slot + positions_N.numel()
        device = positions_N.device
        if longest > cache.capacity or end > cache.rows or first_slot < 0:
            raise IndexError(
                f"place {longest - 1} of slots {first_slot}..{end - 1}: "
                f"the cache has {cache.rows} slots of {cache.capacity} places"
            )
        self._cache = cache
        self._positions = positions_N
        self.longest = longest
        self._rows = slice(first_slot, end)
        self._slots = torch.arange(first_slot, end, device=device)
        self._length = whole_blocks(longest)
        self._by_products = device.type == "cpu" and cache.dtype in _FAST_PRODUCTS
        places_L = torch.arange(self._length, device=device)
        self._distances_NL = positions_N[:, None] - places_L
        self._biases: dict[int | None, Tensor] = {}  # of each window that layers have

    def attend(
        self, layer: int, q_NHK: Tensor, k_NJK: Tensor, v_NJK: Tensor, scores: Scores = PRODUCTS
    ) -> Tensor:
        """Keep the K/V, and return what each row's token reads of its row, [N, H, K]."""
        keys, values = self._cache.write(layer, self._slots, self._positions, k_NJK, v_NJK)
        k_NJLK = keys[self._rows, :, : self._length]
        v_NJLK = values[self._rows, :, : self._length]
        bias_N11L = self._bias(scores)
        if not scores.are_products:
            out_NH1K = masked_products(q_NHK[:, :, None], k_NJLK, v_NJLK, bias_N11L == 0, scores)
            return out_NH1K[:, :, 0]
        kv_heads = k_NJK.shape[1]
        q_NJRK = scores.scaled(q_NHK).unflatten(1, (kv_heads, -1))
        if self._by_products:
            seen = self._read_by_products(q_NJRK, k_NJLK, v_NJLK, bias_N11L)
        else:
            seen = F.scaled_dot_product_attention(q_NJRK, k_NJLK, v_NJLK, attn_mask=bias_N11L)
        return seen.reshape(q_NHK.shape)

    def sequences(self, tokens_N: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Keep the rows' tokens, and yield each row whole, and where its new token is."""
        self._cache.write_tokens(self._slots, self._positions, tokens_N)
        for slot, position in zip(self._slots.tolist(), self._positions.tolist()):
            yield self._cache.tokens(slot, position + 1), position

    def _bias(self, scores: Scores) -> Tensor:
        """Return what is added to scores [N, 1, 1, L]: -inf where a place is not seen, else 0."""
        window = scores.window_within(self.longest)
        if window not in self._biases:
            unseen_NL = self._distances_NL < 0
            if window is not None:
                unseen_NL |= self._distances_NL >= window
            bias_NL = torch.where(unseen_NL, -torch.inf, 0.0)
            if not self._by_products:
                bias_NL = bias_NL.to(self._cache.dtype)
            self._biases[window] = bias_NL[:, None, None]
        return self._biases[window]

    def _read_by_products(
        self, q_NJRK: Tensor, k_NJLK: Tensor, v_NJLK: Tensor, bias_N11L: Tensor
    ) -> Tensor:
        """Compute attention as two batched products, with a softmax in float32. PyTorch's own
        kernel takes 25 times as long for one query per row on a CPU.
        """
        keys = k_NJLK.flatten(0, 1)
        queries = q_NJRK.flatten(0, 1)
        # The keys stand on the left, because row by row they are read twice as fast there.
        products = torch.bmm(keys, queries.mT).mT
        scores = products.unflatten(0, q_NJRK.shape[:2])
        scale = q_NJRK.shape[-1] ** -0.5
        biased = bias_N11L + scores * scale
        weights = biased.softmax(-1).to(keys.dtype)
        values = v_NJLK.flatten(0, 1)
        return torch.bmm(weights.flatten(0, 1), values)


Key = tuple[int, int, int]  # stream, ticket and sample_index


@dataclass(slots=True, eq=False)
class Kept:
    """The first places of a completion, prompt included. Whoever holds it sees when it is
    dropped.
    """

    layers: list[Tensor] = field(default_factory=list)  # of each layer [2, J, places, K]

    @property
    def places(self) -> int:
        """How many tokens it holds; 0 once it is dropped."""
        return self.layers[0].shape[2] if self.layers else 0

    def drop(self) -> None:
        """Let go of the keys and values."""
        self.layers = []


class KeptRows:
    """Keeps at most `most_places` places, the newest rows first."""

    def __init__(self, cache: SlotCache, most_places: int):
        self._cache = cache
        self._most = most_places
        self._rows: dict[Key, Kept] = {}  # the oldest first
        self.places = 0  # that are kept

    @property
    def keeps_any(self) -> bool:
        """Whether there is room for any place."""
        return self._most > 0

    def keep(self, key: Key, slot: int, places: int) -> None:
        """Copy the first places of a slot, in the place of what was kept under this key. Drops the
        oldest if there are too many.
        """
        self.forget(key)
        if not 0 < places <= self._most:
            return
        layers = [layer[:, slot, :, :places].clone() for layer in self._cache.layers]
        self._rows[key] = Kept(layers)
        self.places += places
        while self.places > self._most:
            self.forget(next(iter(self._rows)))

    def of(self, key: Key) -> Kept:
        """Return what is kept under a key; an empty one if nothing is."""
        return self._rows.get(key) or Kept()

    def restore(self, kept: Kept, slot: int) -> None:
        """Copy what is kept to the first places of a slot."""
        for layer, own in zip(self._cache.layers, kept.layers, strict=True):
            layer[:, slot, :, : kept.places] = own

    def forget(self, key: Key) -> None:
        """Drop what is kept under a key, if anything is."""
        kept = self._rows.pop(key, None)
        if kept is not None:
            self.places -= kept.places
            kept.drop()

    def forget_all(self, ticket: int | None = None, stream: int | None = None) -> None:
        """Drop what is kept of a ticket and a stream; None: of any."""
        for key in list(self._rows):
            if stream in (None, key[0]) and ticket in (None, key[1]):
                self.forget(key)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that it holds."""
        for kept in self._rows.values():
            yield from kept.layers
