"""Sampling: a counter-based uniform a token, the processed distribution, its inverse CDF.

A token is a pure function of (seed, stream, ticket, sample_index, position) and the logits: not of
the slot, the batch or the worker. Shapes: N rows, V vocabulary, S stop tokens, B blocks.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.machine.kernels import library

_BELOW_ONE = 1 - 2.0**-52
_BLOCK = 256  # of the vocabulary; the CDF is summed by blocks, then inside one
_LIKELIEST = 256  # where top-k and top-p look first
# Constants of splitmix64 (Steele, Lea, Flood 2014), as int64, which wraps.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX2 = 0x94D049BB133111EB - 2**64
# Arguments of the C function: logits, uniforms, greedy, tokens, logprobs; rows, vocabulary,
# threads.
_ARGUMENTS = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 3
# The stream of keys of temperatures; the engine's own streams count up from 0.
_TEMPERATURES = 1 << 32


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample the n completions of a prompt. ValueError for a value out of range."""

    max_new_tokens: int
    temperature: float = 1.0  # 0: greedy, whose logprobs are those of temperature 1
    top_k: int = 0  # keep the k likeliest (and what ties with the last of them); 0: all
    top_p: float = 1.0  # then the fewest likeliest that hold this mass; 1: all
    min_p: float = 0.0  # before both: those of at least this share of the likeliest's; 0: all
    min_new_tokens: int = 0  # no stop token, and no end of a stop string, before
    stop_token_ids: tuple[int, ...] = ()
    # A completion also ends with the token that completes one of these in its text.
    stop_strings: tuple[str, ...] = ()
    n: int = 1
    seed: int = 0

    def __post_init__(self):
        most = self.max_new_tokens
        smallest_stop = min(self.stop_token_ids, default=0)
        wanted = {
            "max_new_tokens": (most >= 1, "need at least 1"),
            "temperature": (0 <= self.temperature < math.inf, "need 0 (greedy) or more"),
            "top_k": (self.top_k >= 0, "need 0 (all) or more"),
            "top_p": (0 < self.top_p <= 1, "need more than 0, at most 1 (all)"),
            "min_p": (0 <= self.min_p <= 1, "need 0 (all) to 1"),
            "min_new_tokens": (
                0 <= self.min_new_tokens <= most,
                f"need 0 to max_new_tokens={most}",
            ),
            "stop_token_ids": (smallest_stop >= 0, "token ids are not negative"),
            "stop_strings": ("" not in self.stop_strings, "an empty string is in every text"),
            "n": (self.n >= 1, "need at least 1"),
        }
        problems = []
        for name, (is_good, need) in wanted.items():
            if not is_good:
                problems.append(f"{name}={getattr(self, name)}: {need}")
        if problems:
            raise ValueError("bad sampling parameters: " + "; ".join(problems))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))


def sample_keys(places_N4: Tensor) -> Tensor:
    """Return the key of each sample, [N] int64. places_N4: its seed, stream, ticket and
    sample_index.
    """
    seeds, streams, tickets, indices = places_N4.unbind(1)
    keys = _splitmix64(seeds, 0)
    keys = _splitmix64(keys ^ streams, 0)
    keys = _splitmix64(keys ^ tickets, 0)
    return _splitmix64(keys, indices)


@dataclass(frozen=True, slots=True)
class TemperatureRange:
    """Temperatures of tickets: uniform from low to high, a function of (seed, ticket) alone.

    Source: temperature sampling of Lee et al. 2024, TBA's (arXiv 2503.18929, B.3).
    """

    low: float
    high: float
    seed: int

    def of(self, ticket: int) -> float:
        """Return the temperature of all completions of a ticket."""
        key_1 = sample_keys(torch.tensor([[self.seed, _TEMPERATURES, ticket, 0]]))
        share = float(uniforms(key_1, torch.zeros_like(key_1)))
        return self.low + share * (self.high - self.low)


def uniforms(keys_N: Tensor, counters_N: Tensor) -> Tensor:
    """[N] float64 in [0, 1): one number of each key's generator. Both int64."""
    words = _splitmix64(keys_N, counters_N)
    high_bits = _logical_shift(words, 11)
    return high_bits.double() * 2.0**-53


def _splitmix64(keys_N: Tensor, counters: Tensor | int) -> Tensor:
    """[N] int64: output `counter` (from 0) of the generator that starts at `key`."""
    z = keys_N + (counters + 1) * _GOLDEN
    z = _MIX1 * (z ^ _logical_shift(z, 30))
    z = _MIX2 * (z ^ _logical_shift(z, 27))
    return z ^ _logical_shift(z, 31)


def _logical_shift(z: Tensor, shift: int) -> Tensor:
    kept = (1 << (64 - shift)) - 1
    return (z >> shift) & kept


def process(
    logits_NV: Tensor,
    *,
    temperature_N: Tensor | None = None,
    top_k_N: Tensor | None = None,
    top_p_N: Tensor | None = None,
    min_p_N: Tensor | None = None,
    banned_NS: Tensor | None = None,
) -> Tensor:
    """Float32 logits of the distribution to sample from. None: no row asks for it.

    In this order: banned_NS (token ids, -1 for none) out; divided by the temperature (0 counts as
    1); min-p (0 for all), as in vLLM; top-k (0 for all); top-p of what these left. What ties with
    the last kept token is kept, so the result depends on no sorting order.
    """
    logits = logits_NV.float()
    if banned_NS is not None:
        # Adding, because a padding entry may name the same token as a real one.
        penalty = torch.zeros_like(banned_NS, dtype=torch.float32)
        penalty.masked_fill_(banned_NS >= 0, -math.inf)
        logits = logits.scatter_add(1, banned_NS.clamp(min=0), penalty)
    if temperature_N is not None:
        divisor = temperature_N.masked_fill(temperature_N == 0, 1.0)
        logits = logits / divisor[:, None]
    if min_p_N is not None:
        # p >= min_p p_max, in logits
        least_N = logits.amax(1) + min_p_N.log()
        logits = logits.masked_fill(logits < least_N[:, None], -math.inf)
    if top_k_N is not None or top_p_N is not None:
        smallest_kept = _cut(logits, top_k_N, top_p_N)
        logits = logits.masked_fill(logits < smallest_kept, -math.inf)
    return logits


def _cut(
    logits_NV: Tensor, top_k_N: Tensor | None, top_p_N: Tensor | None, width: int | None = None
) -> Tensor:
    """[N, 1]: the smallest logit that top-k and then top-p keep, found among the `width` largest if
    it is there.
    """
    vocab = logits_NV.shape[1]
    if width is None:
        # On a CPU sorting 32 x 49,152 logits takes 110 ms. A GPU sorts fast, and must not be waited
        # for.
        width = min(vocab, _LIKELIEST) if logits_NV.device.type == "cpu" else vocab
    likeliest_NW = logits_NV.topk(width, dim=1).values
    last = torch.full_like(likeliest_NW[:, :1], -math.inf)
    is_found = torch.ones_like(last, dtype=torch.bool)
    if top_k_N is not None:
        top_k_N1 = top_k_N.clamp(max=vocab)[:, None]
        place = (top_k_N1 - 1).clamp(min=0, max=width - 1)
        kth = likeliest_NW.gather(1, place)
        last = torch.where(top_k_N1 > 0, kth, last)
        is_found &= top_k_N1 <= width
    if top_p_N is not None:
        top_p_N1 = top_p_N[:, None]
        num_needed = _num_needed(logits_NV, likeliest_NW, last, top_p_N1)
        last_needed = likeliest_NW.gather(1, num_needed.clamp(min=1) - 1)
        is_asked = top_p_N1 < 1
        last_kept = torch.maximum(last_needed, last)
        last = torch.where(is_asked, last_kept, last)
        is_found &= ~is_asked | (num_needed < width)
    if width < vocab and not is_found.all():
        return _cut(logits_NV, top_k_N, top_p_N, vocab)
    return last


def _num_needed(
    logits_NV: Tensor, likeliest_NW: Tensor, last_N1: Tensor, top_p_N1: Tensor
) -> Tensor:
    """[N, 1]: how many of the likeliest tokens hold top_p of the mass of what is not below last."""
    top_N1 = likeliest_NW[:, :1]
    weights_NV = (logits_NV - top_N1).exp_()
    weights_NV.masked_fill_(logits_NV < last_N1, 0)
    total_N1 = weights_NV.sum(1, keepdim=True, dtype=torch.float64)
    mass_NW = (likeliest_NW - top_N1).exp_().double() / total_N1
    likelier_NW = mass_NW.cumsum(1) - mass_NW
    # A token is needed while the likelier ones hold less than p; the first always is.
    return (likelier_NW < top_p_N1).sum(1, keepdim=True)


def sample(
    logits_NV: Tensor, uniforms_N: Tensor, greedy_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(tokens [N] int64, their logprobs [N] float32) by the inverse CDF of the logits; the (first)
    likeliest where greedy_N.

    On a CPU in one call (llamarl/machine/decode.c); the two ways differ where rounding puts a
    uniform on the other side of a token's edge. uniforms_N: float64 in [0, 1). ValueError for other
    shapes or dtypes, or V = 0.
    """
    if logits_NV.dim() != 2 or not logits_NV.shape[1]:
        raise ValueError(f"logits of shape {list(logits_NV.shape)}; need [N, V], V at least 1")
    num_rows = len(logits_NV)
    device = logits_NV.device
    check_vector("uniforms", uniforms_N, num_rows, torch.float64, device)
    if greedy_N is not None:
        check_vector("greedy", greedy_N, num_rows, torch.bool, device)
    kernels = library("decode", "-fopenmp") if device.type == "cpu" else None
    if kernels:
        logits_NV = logits_NV.float().contiguous()
        tokens = torch.empty(num_rows, dtype=torch.int64)
        logprobs = torch.empty(num_rows)
        kernels.sample.argtypes = _ARGUMENTS
        kernels.sample(
            logits_NV.data_ptr(),
            uniforms_N.data_ptr(),
            None if greedy_N is None else greedy_N.data_ptr(),
            tokens.data_ptr(),
            logprobs.data_ptr(),
            num_rows,
            logits_NV.shape[1],
            torch.get_num_threads(),
        )
        return tokens, logprobs
    # One pass over V; sums to one up to rounding.
    weights_NV = logits_NV.softmax(1, dtype=torch.float32)
    tokens, total = _sample_by_blocks(weights_NV, uniforms_N[:, None])
    if greedy_N is not None:
        likeliest = logits_NV.argmax(1, keepdim=True)
        tokens = torch.where(greedy_N[:, None], likeliest, tokens)
    probabilities = weights_NV.gather(1, tokens).double() / total
    logprobs = probabilities.log_().float()
    return tokens.squeeze(1), logprobs.squeeze(1)


def check_vector(
    what: str, given: Tensor, length: int, dtype: torch.dtype, device: torch.device
) -> None:
    """ValueError for another length, dtype or device, or gaps: native code would take it as it
    is.
    """
    is_right = given.shape == (length,) and given.is_contiguous()
    if not is_right or given.dtype != dtype or given.device != device:
        found = f"{list(given.shape)} by {given.stride()} {given.dtype} on {given.device}"
        raise ValueError(f"{what}: {found}; need [{length}] by 1 {dtype} on {device}")


def _sample_by_blocks(weights_NV: Tensor, uniforms_N1: Tensor) -> tuple[Tensor, Tensor]:
    """Sample by blocks: the CDF of block sums finds the block, the CDF inside it the token. That is
    V adds a row, but no CDF over V.
    """
    rows, vocab = weights_NV.shape
    missing = -vocab % _BLOCK
    if missing:
        weights_NV = F.pad(weights_NV, (0, missing))
    weights_NBW = weights_NV.view(rows, -1, _BLOCK)
    cdf_NB = weights_NBW.sum(2).cumsum(1, dtype=torch.float64)
    total = cdf_NB[:, -1:]
    target = uniforms_N1 * total
    block = _first_above(cdf_NB, target)
    before = F.pad(cdf_NB, (1, 0)).gather(1, block)
    inside_N1W = weights_NBW.take_along_dim(block[:, :, None], dim=1)
    inside_cdf_NW = inside_N1W.squeeze(1).cumsum(1, dtype=torch.float64)
    place = _first_above(inside_cdf_NW, target - before)
    tokens = block * _BLOCK + place
    # NaN logits would be past the end; the caller sees them in the logprobs.
    return tokens.clamp_(max=vocab - 1), total


def _first_above(cdf_NV: Tensor, target_N1: Tensor) -> Tensor:
    """[N, 1]: the first entry whose cumulative weight exceeds the target, so never one of weight
    zero.
    """
    # Rounding (of block sums in float32) may carry a target to the very end, where only zero
    # weights follow.
    end_N1 = cdf_NV[:, -1:] * _BELOW_ONE
    target = torch.minimum(target_N1, end_N1)
    place = torch.searchsorted(cdf_NV, target, right=True)
    return place.clamp_(max=cdf_NV.shape[1] - 1)
