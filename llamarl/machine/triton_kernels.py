"""Triton kernels for inference. Each fuses the elementwise operations between two matrix products
into one launch.

Plain operations launch some thirty kernels per layer and token. Each runs for two microseconds,
which is less than its launch costs. These kernels launch seven times. Each has a plain equal in
llamarl/models/fused.py, llamarl/models/quantize.py or llamarl/inference/cache.py, and in bfloat16
it rounds where that one rounds. A row's result does not depend on the rows beside it.

Forward only: gradients need the plain operations. Triton comes with PyTorch for CUDA and needs a C
compiler. `llamarl.models.fused.gpu_kernels` imports this file where both exist.

Shapes: T tokens, D features, H heads, K head dim, J key/value heads, S slots, L places of a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

_ELEMENTS = 1024  # of a program of `swiglu`
_HEADS = 8  # of a program of `rotate`


def try_all(dtype: torch.dtype) -> None:
    """Run every kernel that all models need once, on the current GPU. RuntimeError or OSError where
    one does not compile or run.
    """
    x = torch.ones(2, 16, dtype=dtype, device="cuda")
    heads = x.view(2, 2, 8)
    angles = torch.zeros(2, 1, 8, device="cuda")
    places = torch.zeros(2, dtype=torch.int64, device="cuda")
    try:
        add_rms_norm(x, None, x[0], 1e-6)
        add_rms_norm(x, x, x[0], 1e-6)
        swiglu(x, x)
        rotate(heads, angles, angles)
        keep(x.new_zeros(2, 1, 2, 4, 8), places, places, heads, heads)
    except TritonError as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def add_rms_norm(
    x: Tensor, change: Tensor | None, scale_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (h, its norm) with h = x + change (None: x), contiguous, all of one dtype."""
    dim = scale_D.numel()
    y = torch.empty_like(x)
    h = x if change is None else torch.empty_like(x)
    block = triton.next_power_of_2(dim)
    warps = max(1, min(16, block // 256))
    _add_rms_norm[(x.numel() // dim,)](
        h,
        y,
        x,
        x if change is None else change,
        scale_D,
        eps,
        HAS_CHANGE=change is not None,
        DIM=dim,
        BLOCK=block,
        num_warps=warps,
    )
    return h, y


@triton.jit
def _add_rms_norm(
    h_ptr,
    y_ptr,
    x_ptr,
    change_ptr,
    scale_ptr,
    eps,
    HAS_CHANGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    features = tl.arange(0, BLOCK)
    is_feature = features < DIM
    places = tl.program_id(0).to(tl.int64) * DIM + features
    h = tl.load(x_ptr + places, mask=is_feature, other=0.0)
    if HAS_CHANGE:
        change = tl.load(change_ptr + places, mask=is_feature, other=0.0)
        h = (h.to(tl.float32) + change.to(tl.float32)).to(h.dtype)
        tl.store(h_ptr + places, h, mask=is_feature)
    wide = h.to(tl.float32)
    mean = tl.sum(wide * wide, axis=0) / DIM
    normed = (wide / tl.sqrt(mean + eps)).to(h.dtype)
    scale = tl.load(scale_ptr + features, mask=is_feature, other=0.0)
    y = (normed.to(tl.float32) * scale.to(tl.float32)).to(h.dtype)
    tl.store(y_ptr + places, y, mask=is_feature)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate sigmoid(gate) up, of equal shapes and one dtype, contiguous."""
    out = torch.empty_like(gate)
    count = gate.numel()
    _swiglu[(triton.cdiv(count, _ELEMENTS),)](out, gate, up, count, BLOCK=_ELEMENTS)
    return out


@triton.jit
def _swiglu(out_ptr, gate_ptr, up_ptr, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_place = places < count
    gate = tl.load(gate_ptr + places, mask=is_place, other=0.0)
    up = tl.load(up_ptr + places, mask=is_place, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    out = (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out_ptr + places, out, mask=is_place)


def rotate(x_THK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + K/2) of every head by its token's angle. x is contiguous; cos, sin
    [T, 1, K] float32, contiguous.
    """
    out = torch.empty_like(x_THK)
    num_tokens, heads, head_dim = x_THK.shape
    half = head_dim // 2
    block = min(_HEADS, triton.next_power_of_2(heads))
    _rotate[(num_tokens, triton.cdiv(heads, block))](
        out,
        x_THK,
        cos,
        sin,
        HEADS=heads,
        HALF=half,
        HEAD_BLOCK=block,
        HALF_BLOCK=triton.next_power_of_2(half),
    )
    return out


@triton.jit
def _rotate(
    out_ptr,
    x_ptr,
    cos_ptr,
    sin_ptr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    pairs = tl.arange(0, HALF_BLOCK)[None, :]
    is_pair = (heads < HEADS) & (pairs < HALF)
    places = (token * HEADS + heads) * (2 * HALF) + pairs
    first = tl.load(x_ptr + places, mask=is_pair, other=0.0)
    second = tl.load(x_ptr + places + HALF, mask=is_pair, other=0.0)
    kind = first.dtype
    angles = token * (2 * HALF) + pairs
    is_angle = pairs < HALF
    # As plain operations do: cos, sin, each product and their sum are rounded.
    cos_1 = tl.load(cos_ptr + angles, mask=is_angle, other=0.0).to(kind).to(tl.float32)
    cos_2 = tl.load(cos_ptr + angles + HALF, mask=is_angle, other=0.0).to(kind).to(tl.float32)
    sin_1 = tl.load(sin_ptr + angles, mask=is_angle, other=0.0).to(kind).to(tl.float32)
    sin_2 = tl.load(sin_ptr + angles + HALF, mask=is_angle, other=0.0).to(kind).to(tl.float32)
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    along_1 = (first * cos_1).to(kind).to(tl.float32)
    along_2 = (second * cos_2).to(kind).to(tl.float32)
    across_1 = (-second * sin_1).to(kind).to(tl.float32)
    across_2 = (first * sin_2).to(kind).to(tl.float32)
    tl.store(out_ptr + places, (along_1 + across_1).to(kind), mask=is_pair)
    tl.store(out_ptr + places + HALF, (along_2 + across_2).to(kind), mask=is_pair)


def keep(held: Tensor, slots_T: Tensor, places_T: Tensor, k_TJK: Tensor, v_TJK: Tensor) -> None:
    """Write keys and values of tokens into held [2, S, J, L, K], contiguous, at their slots and
    places, int64. These are trusted.
    """
    num_tokens, heads, head_dim = k_TJK.shape
    _, slots, _, length, _ = held.shape
    _keep[(num_tokens, heads)](
        held,
        slots_T,
        places_T,
        k_TJK,
        v_TJK,
        slots,
        length,
        HEADS=heads,
        DIM=head_dim,
        BLOCK=triton.next_power_of_2(head_dim),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_slots", "length"])
def _keep(
    held_ptr,
    slot_ptr,
    place_ptr,
    k_ptr,
    v_ptr,
    num_slots,
    length,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    features = tl.arange(0, BLOCK)
    is_feature = features < DIM
    source = (token * HEADS + head) * DIM + features
    row = tl.load(slot_ptr + token) * HEADS + head
    target = (row * length + tl.load(place_ptr + token)) * DIM + features
    values = held_ptr + num_slots.to(tl.int64) * HEADS * length * DIM
    tl.store(held_ptr + target, tl.load(k_ptr + source, mask=is_feature), mask=is_feature)
    tl.store(values + target, tl.load(v_ptr + source, mask=is_feature), mask=is_feature)


def quantize_rows(x_TI: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Return (q [T, I] float8_e4m3fn, scale [T] float32) of a contiguous x, as
    llamarl.models.quantize.quantize_rows has them. largest: that the type holds.
    """
    num_tokens, dim = x_TI.shape
    q = torch.empty(num_tokens, dim, dtype=torch.float8_e4m3fn, device=x_TI.device)
    scale = torch.empty(num_tokens, dtype=torch.float32, device=x_TI.device)
    block = triton.next_power_of_2(dim)
    warps = max(1, min(16, block // 256))
    smallest = torch.finfo(torch.float32).tiny
    _quantize_rows[(num_tokens,)](
        q, scale, x_TI, 1.0 / largest, smallest, DIM=dim, BLOCK=block, num_warps=warps
    )
    return q, scale


@triton.jit
def _quantize_rows(
    q_ptr,
    scale_ptr,
    x_ptr,
    inverse,
    smallest,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    features = tl.arange(0, BLOCK)
    is_feature = features < DIM
    x = tl.load(x_ptr + row * DIM + features, mask=is_feature, other=0.0).to(tl.float32)
    most = tl.max(tl.abs(x), axis=0)
    # A NaN makes the scale one, as by plain operations: `max` alone would leave it out.
    has_nan = tl.max((x != x).to(tl.int32), axis=0)
    # PyTorch divides by a number so on a GPU.
    scale = tl.maximum(most * inverse, smallest)
    scale = tl.where(most == 0.0, 1.0, scale)
    scale = tl.where(has_nan > 0, float("nan"), scale)
    tl.store(scale_ptr + row, scale)
    q = tl.div_rn(x, scale).to(tl.float8e4nv)
    tl.store(q_ptr + row * DIM + features, q, mask=is_feature)
