"""Attention over flat tokens. What a token may look at is a context object's business.

The same module trains (PackedAttention: whole sequences end to end) and generates (the engine's
slot cache): both give `attend(layer, q, k, v)`. Shapes: T tokens, H query heads, J key/value heads,
K head dim, D model, N sequences, L longest, M keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarl.models.config import ModelConfig
from llamarl.models.fused import (
    AttentionBlock,
    PackedProducts,
    RMSNorm,
    add_rms_norm,
    kernels,
    projections,
    rotate,
)
from llamarl.models.sharding import heads_of
from llamarl.models.tp import KeyValueSharing, TensorParallel, copied, place_of, summed

# Up to this many keys the CPU's fused kernel, made for long sequences, takes up to 15 times as long
# as plain products.
SHORT = {torch.bfloat16: 512, torch.float32: 256, torch.float64: 256}
# Pairs of query and key whose cost is that of a kernel call more: segments of unlike lengths are
# padded no further.
CALL = {"cpu": 1 << 13, "cuda": 1 << 20}
# Sizes between a power of two and the next that a CPU computes: of all tokens, for the products
# with weights, and of segments and their lengths, for attention's. See llamarl.models.attention.
TOKEN_STEPS = 16
SEGMENT_STEPS = 8


Angles = tuple[Tensor, Tensor]  # cos and sin [T, 1, K] of every token's positions


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer makes scores of queries and keys, and the attention's weights of scores.

    s = q k^T scale,   s = softcap tanh(s / softcap)          (Gemma 2)
    weights = softmax([s, sink]), without the sink's own      (gpt-oss)
    """

    scale: float | None = None  # None: 1 / sqrt(K)
    window: int | None = None  # tokens that a query sees, itself included; None: all before it
    softcap: float | None = None
    sinks_H: Tensor | None = None

    @property
    def are_products(self) -> bool:
        """Whether they are nothing but scaled products, as PyTorch's kernels compute them."""
        return self.softcap is None and self.sinks_H is None

    def scaled(self, q_THK: Tensor) -> Tensor:
        """Return queries whose products, divided by sqrt(K), are scaled as here."""
        factor = 1.0 if self.scale is None else self.scale * q_THK.shape[-1] ** 0.5
        return q_THK if abs(factor - 1.0) < 1e-12 else q_THK * factor

    def window_within(self, longest: int) -> int | None:
        """Return the window; None if queries at places below `longest` see all before them."""
        return None if self.window is None or self.window >= longest else self.window


PRODUCTS = Scores()


class AttentionContext(Protocol):
    """Says which keys each query sees."""

    longest: int  # above every position
    padding: int  # tokens behind the last that a decoder computes in vain

    def attend(
        self, layer: int, q_THK: Tensor, k_TJK: Tensor, v_TJK: Tensor, scores: Scores = PRODUCTS
    ) -> Tensor:
        """Return softmax attention of every token over what it may see, [T, H, K of values].

        Padding gets 0.
        """
        ...

    def sequences(self, tokens_T: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Yield each sequence of a pass whole [n], and how many of its tokens come before those of
        this pass, for a decoder that must read every sequence by itself.
        """
        ...


class PackedAttention:
    """Attends causally inside each of S segments that lie end to end; a segment may continue
    another.

    cu_seqlens [S+1]: where each segment starts, and the total. parents [S]: the segment that this
    one continues and sees whole, or -1; None: all -1. The completions of a group are children of
    its prompt, which is computed once. Segments of like length are padded to the longest of them
    for the kernel alone. Parents have no parents themselves. On a CPU tokens, segments and lengths
    are padded further, to sizes that come again.
    """

    def __init__(self, cu_seqlens: Tensor, parents: Tensor | None = None):
        lengths = cu_seqlens.diff()
        starts = cu_seqlens[:-1]
        if parents is None:
            parents = torch.full_like(lengths, -1)
        self._lengths = lengths.tolist()
        self._parents = parents.tolist()
        is_child = parents >= 0
        # A root's parent, -1, reads the last segment's place and length, which are not taken.
        prefix_starts = starts[parents]
        prefixes = torch.where(is_child, lengths[parents], 0)
        self._parts = []
        on_cpu = cu_seqlens.device.type == "cpu"
        self._added_masks: dict[tuple[int, torch.dtype, int | None], Tensor] = {}
        for of_kind in (~is_child, is_child):
            numbers = of_kind.nonzero().squeeze(1)
            for n in _of_like_length(numbers, lengths, prefixes):
                part = _part(starts[n], lengths[n], prefix_starts[n], prefixes[n], few_sizes=on_cpu)
                self._parts.append(part)
        seen = lengths + prefixes
        self.longest = int(seen.max())
        self._num_tokens = int(cu_seqlens[-1])
        self.padding = 0
        self.routes: Tensor | None = None  # [T, M, K], to replay (llamarl.models.routing)
        if on_cpu:
            self._check_places()
            self.padding = rounded_up(self._num_tokens, steps=TOKEN_STEPS) - self._num_tokens
        # Where each token is among the parts' places.
        queries = torch.cat([part.queries_NL.flatten() for part in self._parts])
        self.padded_tokens = queries.numel()  # places that the kernel computes
        is_token = []
        for part in self._parts:
            places = torch.arange(part.queries_NL.shape[1], device=queries.device)
            is_token.append((places < part.lengths_N[:, None]).flatten())
        places_T = torch.cat(is_token).nonzero().squeeze(1)
        tokens_T = queries[places_T]
        self._places_T = torch.empty_like(places_T)
        self._places_T[tokens_T] = places_T

    def attend(
        self, layer: int, q_THK: Tensor, k_TJK: Tensor, v_TJK: Tensor, scores: Scores = PRODUCTS
    ) -> Tensor:
        """Return the attention of every token over its segment and that segment's parent, [T, H,
        K]; 0 for padding, if that is there. ValueError for another number of tokens.
        """
        padding = q_THK.shape[0] - self._num_tokens
        if padding not in (0, self.padding):
            raise ValueError(
                f"{q_THK.shape[0]} tokens for segments of {self._num_tokens} in all, with or "
                f"without {self.padding} of padding"
            )
        limit = SHORT.get(q_THK.dtype, 256)
        longest = max(part.keys_NM.shape[1] for part in self._parts)
        window = scores.window_within(self.longest)
        if scores.are_products and window is None and longest <= limit:
            is_square = v_TJK.shape == k_TJK.shape  # the kernel knows no values of another size
            if is_square and kernels(q_THK) is not None:
                scaled = scores.scaled(q_THK)
                return PackedProducts.apply(scaled, k_TJK, v_TJK, self._parts, self._num_tokens)
        attended = []
        for number, part in enumerate(self._parts):
            q_NHLK = _padded(q_THK, part.queries_NL)
            k_NJMK = _padded(k_TJK, part.keys_NM)
            v_NJMK = _padded(v_TJK, part.keys_NM)
            is_short = k_NJMK.shape[2] <= limit and q_THK.device.type == "cpu"
            if is_short or not scores.are_products:
                out_NHLK = masked_products(q_NHLK, k_NJMK, v_NJMK, part.mask(window), scores)
            else:
                mask = self._added_mask(number, q_THK.dtype, window)
                out_NHLK = fused(scores.scaled(q_NHLK), k_NJMK, v_NJMK, mask)
            out_NLHK = out_NHLK.transpose(1, 2)
            attended.append(out_NLHK.flatten(0, 1))
        padded = torch.cat(attended)
        out_THK = padded.index_select(0, self._places_T)
        if not padding:
            return out_THK
        return F.pad(out_THK, (0, 0, 0, 0, 0, padding))

    def sequences(self, tokens_T: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Yield each segment behind its parent's tokens, and how many these are."""
        segments = tokens_T[: self._num_tokens].split(self._lengths)
        for segment, parent in zip(segments, self._parents):
            before = segments[parent] if parent >= 0 else segment[:0]
            yield torch.cat([before, segment]), len(before)

    def _added_mask(self, number: int, dtype: torch.dtype, window: int | None) -> Tensor | None:
        """Return what is added to the scores of part `number`: 0 or -inf, [N, 1, L, M]; None:
        causal.

        It is made once for all layers. Given a mask of bools, PyTorch would make one in every
        layer, and hold each of them for backward.
        """
        mask = self._parts[number].mask(window)
        if mask is None:
            return None
        key = (number, dtype, window)
        if key not in self._added_masks:
            added = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            self._added_masks[key] = added.masked_fill_(~mask, -torch.inf)
        return self._added_masks[key]

    def _check_places(self) -> None:
        """Raise IndexError where a segment reaches outside the tokens: kernels on a CPU trust the
        places that they are given.
        """
        keys = torch.cat([part.keys_NM.flatten() for part in self._parts])
        if not keys.numel():
            return
        least, most = keys.aminmax()
        if least < 0 or most >= self._num_tokens:
            raise IndexError(
                f"segments reach over tokens {int(least)}..{int(most)} of {self._num_tokens}"
            )


def _of_like_length(places: Tensor, lengths: Tensor, prefixes: Tensor) -> list[Tensor]:
    """Cut the segments at these places, longest first, into classes of like length. A class ends
    where its padding would cost as much as one more kernel call.

    places [n]: numbers of segments; lengths, prefixes [S]: tokens of every segment, and of what it
    continues. Returns numbers of segments, n in all.
    """
    if not places.numel():
        return []
    longest_first = lengths[places].argsort(descending=True, stable=True)
    places = places[longest_first]
    limit = CALL.get(lengths.device.type, CALL["cuda"])
    longest = most = waste = 0
    cuts = []
    sizes = zip(lengths[places].tolist(), prefixes[places].tolist())
    for i, (length, prefix) in enumerate(sizes):
        longest = longest or length
        most = max(most, prefix)
        computed = longest * (longest + most)
        needed = length * (length + prefix)
        waste += computed - needed
        if waste > limit:
            cuts.append(i)
            longest = length
            most = prefix
            waste = 0
    return list(places.tensor_split(cuts))


def _part(
    starts: Tensor,
    lengths: Tensor,
    prefix_starts: Tensor,
    prefix_lengths: Tensor,
    *,
    few_sizes: bool,
) -> AttentionBlock:
    """Pad N segments to the longest, with the tokens of their parents before their own keys.

    starts, lengths [N]: each segment's first token and count; prefix_starts, prefix_lengths [N]:
    its parent's, of length 0 where it has none. few_sizes: where products may
    compute it, pad N and both lengths to sizes that come again; what is more than the given
    segments has no tokens.
    """
    longest = int(lengths.max())
    prefix = int(prefix_lengths.max())
    if few_sizes and longest + prefix <= max(SHORT.values()):
        longest = rounded_up(longest, steps=SEGMENT_STEPS)
        prefix = rounded_up(prefix, steps=SEGMENT_STEPS)
        more = (0, rounded_up(len(lengths), steps=SEGMENT_STEPS) - len(lengths))
        starts = F.pad(starts, more)
        lengths = F.pad(lengths, more)
        prefix_starts = F.pad(prefix_starts, more)
        prefix_lengths = F.pad(prefix_lengths, more)
    # Padding reads its segment's last token: a real place, whose output is dropped and gradient is
    # zero.
    queries_NL = _places(starts, lengths, longest)
    before_NP = _places(prefix_starts, prefix_lengths, prefix)
    return AttentionBlock(
        queries_NL=queries_NL,
        keys_NM=torch.cat([before_NP, queries_NL], dim=1),
        lengths_N=lengths,
        seen_N=prefix_lengths if prefix else None,
    )


def _places(starts_N: Tensor, lengths_N: Tensor, longest: int) -> Tensor:
    """Return [N, longest]: the places of each segment's tokens. After a segment's end its last
    token is repeated; a segment without tokens reads its start.
    """
    places = torch.arange(longest, device=starts_N.device)
    last_N1 = (lengths_N[:, None] - 1).clamp(min=0)
    return starts_N[:, None] + torch.minimum(places, last_N1)


def _padded(x_THK: Tensor, index_NL: Tensor) -> Tensor:
    """Return [N, H, L, K]: the tokens at each place."""
    x = x_THK.index_select(0, index_NL.flatten())
    return x.unflatten(0, index_NL.shape).transpose(1, 2)


def fused(q_NHLK: Tensor, k_NJMK: Tensor, v_NJMK: Tensor, mask: Tensor | None) -> Tensor:
    """Compute attention [N, H, L, K] by PyTorch's kernels. mask: broadcast to [N, 1, L, M]; a bool
    that is true where a key is seen, or a number that is added to each score; None: causal.
    """
    shared = q_NHLK.shape[1] // k_NJMK.shape[1]
    if mask is not None and shared > 1 and q_NHLK.is_cuda:
        # No GPU's kernel takes a mask and fewer key heads; all weights at once would be held
        # instead.
        k_NJMK = k_NJMK.repeat_interleave(shared, 1)
        v_NJMK = v_NJMK.repeat_interleave(shared, 1)
        shared = 1
    return F.scaled_dot_product_attention(
        q_NHLK, k_NJMK, v_NJMK, attn_mask=mask, is_causal=mask is None, enable_gqa=shared > 1
    )


def masked_products(
    q_NHLK: Tensor, k_NJMK: Tensor, v_NJMK: Tensor, seen: Tensor | None, scores: Scores = PRODUCTS
) -> Tensor:
    """Compute attention [N, H, L, K] by plain batched products, whose scores are made as `scores`
    says. All N H L M weights are held.

    Sums and the softmax are float32's or wider; in bfloat16 scores and weights are rounded to it
    between the products. seen: bool, broadcast to [N, 1, L, M], true where a key is seen; None:
    causal, L = M.
    """
    n, heads, longest, head_dim = q_NHLK.shape
    kv_heads, num_keys = k_NJMK.shape[1:3]
    # The query heads of one key head are more rows.
    q = q_NHLK.reshape(n, kv_heads, -1, head_dim)
    q = q * (head_dim**-0.5 if scores.scale is None else scores.scale)
    made = q @ k_NJMK.transpose(-1, -2)
    if scores.softcap is not None:
        made = torch.tanh(made / scores.softcap) * scores.softcap
    made = made.view(n, heads, longest, num_keys)
    if seen is None:
        seen = torch.ones(longest, longest, dtype=torch.bool, device=q.device).tril()
    made = made.masked_fill(~seen, -torch.inf)
    if scores.sinks_H is not None:
        sinks = scores.sinks_H.to(made.dtype).view(1, heads, 1, 1)
        made = torch.cat([made, sinks.expand(n, heads, longest, 1)], -1)
    weights = made.softmax(-1)[..., :num_keys]
    out = weights.reshape(n, kv_heads, -1, num_keys) @ v_NJMK
    return out.view(n, heads, longest, -1)


class Rotary:
    """Rotary position embedding in Hugging Face's half-split layout, so that weights need no
    permutation.

    head_dim: features that are turned. scaling: the HF config's rope_scaling (None; type default,
    linear, llama3 or yarn). Tables are float32 and grow on demand.
    """

    def __init__(self, head_dim: int, theta: float, scaling: dict | None):
        # On the CPU: real numbers even while parameters are meta.
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
        inv_freq = 1.0 / theta ** (steps / head_dim)
        self.inv_freq, self.factor = _scale_frequencies(inv_freq, theta, scaling or {})
        if not (self.inv_freq.isfinite().all() and math.isfinite(self.factor)):
            raise ValueError(
                f"rope_theta={theta} and rope_scaling={scaling} give angles that are no finite "
                "numbers; fetch it again"
            )
        self._table = torch.empty(2, 0, 1, head_dim)  # cos and sin of every position so far

    def __call__(self, positions_T: Tensor, longest: int) -> Angles:
        """cos and sin, [T, 1, K] each, for positions below `longest`."""
        device = positions_T.device
        if self._table.device != device or self._table.shape[1] < longest:
            size = max(256, 1 << (longest - 1).bit_length())
            positions = torch.arange(size, dtype=torch.float32)
            angles = torch.outer(positions, self.inv_freq)
            angles = torch.cat([angles, angles], dim=-1)
            angles = angles[:, None]
            waves = torch.stack([angles.cos(), angles.sin()])
            self._table = (waves * self.factor).to(device)
        cos, sin = self._table[:, positions_T]
        return cos, sin


def rotary_of(config: ModelConfig) -> Rotary:
    """Return the rotary embedding of a model."""
    return Rotary(config.head_dim, config.rope_theta, config.rope_scaling)


def _scale_frequencies(inv_freq: Tensor, theta: float, scaling: dict) -> tuple[Tensor, float]:
    """Return the frequencies [K/2] for a context that was extended after training, and the factor
    of cos and sin.
    """
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    try:
        if kind == "default":
            return inv_freq, 1.0
        if kind == "linear":
            return inv_freq / scaling["factor"], 1.0
        if kind == "llama3":
            old = scaling["original_max_position_embeddings"]
            low = scaling["low_freq_factor"]
            high = scaling["high_freq_factor"]
            turns = old * inv_freq / (2 * math.pi)
            smooth = (turns - low) / (high - low)
            smooth = smooth.clamp(0, 1)
            stretch = (1 - smooth) / scaling["factor"]
            return inv_freq * (smooth + stretch), 1.0
        if kind == "yarn":
            return _yarn(inv_freq, theta, scaling)
    except KeyError as error:
        raise ValueError(f"rope_scaling of type {kind!r} lacks {error.args[0]}") from error
    raise ValueError(
        f"rope_scaling type {kind!r} is not supported; supported: default, linear, llama3, yarn"
    )


def _yarn(inv_freq: Tensor, theta: float, scaling: dict) -> tuple[Tensor, float]:
    """Keep dims that turn more than beta_fast times in the original context, stretch those below
    beta_slow by `factor`, and use a ramp between. Multiply cos and sin by 0.1 ln(factor) + 1.

    Source: Peng et al. 2023, YaRN, 3.2 to 3.4.
    """
    half = inv_freq.numel()
    factor = scaling["factor"]
    old = scaling["original_max_position_embeddings"]

    def dim_of(turns: float) -> float:
        """Return the (real) dim d that makes so many turns: old / (2 pi theta^(d / half)) =
        turns.
        """
        angle = 2 * math.pi * turns
        return half * math.log(old / angle) / math.log(theta)

    low = dim_of(scaling.get("beta_fast") or 32.0)
    high = dim_of(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, 2 * half - 1)
    dims = torch.arange(half, device=inv_freq.device)
    ramp = max(high - low, 0.001)
    stretched = ((dims - low) / ramp).clamp(0, 1)
    frequencies = inv_freq * (1 - stretched)
    frequencies += inv_freq / factor * stretched
    magnitude = scaling.get("attention_factor")
    if not magnitude:
        scale = scaling.get("mscale")
        scale_all_dim = scaling.get("mscale_all_dim")
        if not (scale and scale_all_dim):
            scale = 1.0
            scale_all_dim = 0.0
        growth = math.log(max(factor, 1))
        magnitude = 0.1 * scale * growth + 1.0
        magnitude /= 0.1 * scale_all_dim * growth + 1.0
    return frequencies, magnitude


def repeated(x_TJK: Tensor, repeats: Sequence[int]) -> Tensor:
    """Return [T, H, K]: K/V head j repeats[j] times, once for each query head that reads it."""
    heads = []
    for head, count in zip(x_TJK.split(1, dim=1), repeats):
        heads.append(head.expand(-1, count, -1))
    return torch.cat(heads, dim=1)


class Attention(nn.Module):
    """Grouped-query attention. The caller hands in the kernel.

    `mask` is an AttentionContext and `input_pos` the rotary (cos, sin) that all layers share. With
    tensor parallelism it holds the rank's heads, and every rank returns the sum of what all make of
    theirs.
    """

    def __init__(self, layer: int, config: ModelConfig, tp: TensorParallel | None = None):
        super().__init__()
        heads = heads_of(config, *place_of(tp))
        self.sharing = KeyValueSharing(config, tp) if tp else None
        self.layer = layer
        self.head_dim = config.head_dim
        self.tp = tp
        self.repeats = () if heads.uniform else heads.readers
        width = config.hidden_size
        query_width = heads.num_query * config.head_dim
        kv_width = heads.num_kv * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(width, query_width, bias)
        self.k_proj = nn.Linear(width, kv_width, bias)
        self.v_proj = nn.Linear(width, kv_width, bias)
        self.output_proj = nn.Linear(query_width, width, bias=False)
        self.q_norm = None
        self.k_norm = None
        if config.traits.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, x_TD: Tensor, *, mask: AttentionContext, input_pos: Angles) -> Tensor:
        num_tokens = x_TD.shape[0]
        if self.sharing:
            x_TD = copied(x_TD, self.tp)
            q = self.q_proj(x_TD)
            k = self.sharing(self.k_proj, x_TD)
            v = self.sharing(self.v_proj, x_TD)
        else:
            q, k, v = projections(x_TD, self.q_proj, self.k_proj, self.v_proj)
        shape = (num_tokens, -1, self.head_dim)
        q = self._normed(q.view(shape), self.q_norm)
        k = self._normed(k.view(shape), self.k_norm)
        v = v.view(shape)
        q = rotate(q, *input_pos)
        k = rotate(k, *input_pos)
        if self.repeats:
            k = repeated(k, self.repeats)
            v = repeated(v, self.repeats)
        attended_THK = mask.attend(self.layer, q, k, v)
        (out_TD,) = projections(attended_THK.reshape(num_tokens, -1), self.output_proj)
        return summed(out_TD, self.tp)

    def _normed(self, x_THK: Tensor, norm: RMSNorm | None) -> Tensor:
        """Norm every head, if the family does that."""
        if norm is None:
            return x_THK
        # Whole on every rank, which sees its own heads alone: the gradient is the sum of all.
        scale_K = copied(norm.scale, self.tp)
        _, normed_THK = add_rms_norm(x_THK, None, scale_K, norm.eps)
        return normed_THK


# oneDNN compiles code for each new shape of a product: 0.2 ms and 400 kB each. Batches never have
# the same number of tokens twice, so we pad to few sizes, which are all compiled after some steps.
def rounded_up(size: int, *, steps: int) -> int:
    """Return the least size >= `size` of a grid with `steps` equal steps between powers of two. It
    is less than size (1 + 1 / steps). steps: a power of two; smaller sizes stay as they are.
    """
    unit = max(1, (1 << size.bit_length() - 1) // steps) if size > 0 else 1
    return -(-size // unit) * unit
