"""The operations of a layer between its products: on a CPU each is one pass over memory.

A layer's additions, multiplications and roundings one by one cost a CPU more than its products do,
forward and backward. Each function here states its equation and holds it in plain PyTorch; on a CPU
in float32 or bfloat16 a kernel of llamarl/machine/train.c computes the same, with float32 inside,
and rounds where the plain one does or less often. On a GPU an engine has kernels in Triton
(llamarl/machine/triton_kernels.py). In float64, without a compiler and where a GPU trains the plain
one is used.

Shapes: T tokens, D features, H query heads, J key/value heads, R = H / J query heads of one of
those, K head dim, N segments, L queries, M keys, B = N J batches of products.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from llamarl.machine.kernels import library

Gradients = tuple[Tensor | None, ...]  # from backward: one for each input of forward

# Without errno and traps a compiler can vectorise the loops.
_MATH = ("-fopenmp", "-fno-math-errno", "-fno-trapping-math")
_FLAGS = {torch.float32: _MATH, torch.bfloat16: (*_MATH, "-DBF16")}
# Rows of a gradient that are turned at a time. For some hundred tokens they stay in the cache until
# the product.
_TURNED_ROWS = 4096
_KINDS = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
    "n": ctypes.c_int,
}
_ARGUMENTS = {
    "add_up": "ppin",
    "transpose": "ppiiin",
    "rms_norm": "ppppppiidn",
    "rms_norm_backward": "pppppppiin",
    "swiglu": "pppin",
    "swiglu_backward": "pppppin",
    "rotate": "ppppiiifn",
    "gather": "ppppiiiin",
    "scatter": "ppppiiiin",
    "scatter_add": "pppiiiin",
    "causal_softmax": "pppiiiiifn",
    "causal_softmax_backward": "ppiiiifn",
    "log_softmax": "ppppppiidn",
    "log_softmax_backward": "pppppppiidn",
}


def kernels(x: Tensor) -> ctypes.CDLL | None:
    """Return the kernels for tensors like x, or None where plain operations are to be used."""
    if x.device.type != "cpu" or x.dtype not in _FLAGS:
        return None
    lib = library("train", *_FLAGS[x.dtype])
    if lib is not None and lib.add_up.argtypes is None:
        for name, kinds in _ARGUMENTS.items():
            function = getattr(lib, name)
            function.argtypes = [_KINDS[kind] for kind in kinds]
            function.restype = None
    return lib


def gpu_kernels(x: Tensor) -> ModuleType | None:
    """Return llamarl.machine.triton_kernels for tensors like x, or None where plain operations are
    to be used. They are an engine's, which samples in inference mode: a trainer's passes without
    gradients compute as its others do.
    """
    if not x.is_cuda or not torch.is_inference_mode_enabled() or type(x) is not Tensor:
        return None
    # Triton launches on the current device.
    if x.dtype not in _FLAGS or x.device.index != torch.cuda.current_device():
        return None
    return _triton_kernels(x.dtype)


@cache
def _triton_kernels(dtype: torch.dtype) -> ModuleType | None:
    """Return the kernels, of which a GPU has just run those that all models need in this dtype.
    None where LLAMARL_NATIVE=0, on AMD's GPUs, on which nobody has tried them, and, with a warning,
    where they do not run.
    """
    if os.environ.get("LLAMARL_NATIVE", "1") == "0" or torch.version.hip:
        return None
    try:
        from llamarl.machine import triton_kernels

        triton_kernels.try_all(dtype)
        return triton_kernels
    except ImportError as error:
        reason = str(error)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        reason = f"{type(error).__name__}: {str(error)[-300:]}"
    warnings.warn(
        f"Triton: going on with PyTorch's operations, which are slower; {reason}", stacklevel=2
    )
    return None


def call_kernel(name: str, like: Tensor, *arguments: object) -> None:
    """Run one of the `kernels` for tensors like that one on the threads that PyTorch has. Tensors
    are given by their address, None as a null pointer.
    """
    values = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    getattr(kernels(like), name)(*values, torch.get_num_threads())


def _by_kernel(own: type[Function], name: str, x: Tensor, *given: Any) -> Any:
    """Return what a function makes of these, in contiguous memory: by its class for the CPU's
    kernels, or by name among the GPU's. None where plain operations are to be used.
    """
    on_cpu = kernels(x) is not None
    make = own.apply if on_cpu else getattr(gpu_kernels(x), name, None)
    if make is None:
        return None
    return make(*[t.contiguous() if isinstance(t, Tensor) else t for t in (x, *given)])


def is_altered(module: nn.Module) -> bool:
    """Return whether calling the module does more than its class's forward, by a hook or by a
    forward of its own: code that takes its weights instead would leave that out.
    """
    of_all = torch.nn.modules.module
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
        of_all._global_forward_hooks,
        of_all._global_forward_pre_hooks,
    )
    return any(hooks) or "forward" in vars(module)


def add_up(total: Tensor, part: Tensor) -> None:
    """Add `part` to `total`, in total's float32; part is of any dtype and the same shape."""
    lib = kernels(part)
    if lib is None or not (total.is_contiguous() and part.is_contiguous()):
        total.add_(part)
    else:
        call_kernel("add_up", part, total, part, part.numel())


def weight_gradient(grad_TN: Tensor, x_TD: Tensor) -> Tensor:
    """g^T x [N, D]: with g the gradient of y = x W^T, that of W.

    For tile instructions (AMX, bfloat16) oneDNN turns the left operand itself, which takes it as
    long as half of the product; here a kernel does.
    """
    lib = kernels(grad_TN)
    if lib is None or not lib.has_tiles() or not grad_TN.is_contiguous():
        return grad_TN.T @ x_TD
    num_tokens, num_outputs = grad_TN.shape
    out_ND = grad_TN.new_empty(num_outputs, x_TD.shape[1])
    turned = grad_TN.new_empty(min(num_outputs, _TURNED_ROWS), num_tokens)
    for first in range(0, num_outputs, _TURNED_ROWS):
        piece = grad_TN[:, first : first + _TURNED_ROWS]
        rows = turned[: piece.shape[1]]
        call_kernel("transpose", rows, rows, piece, *piece.shape, num_outputs)
        torch.mm(rows, x_TD, out=out_ND[first : first + _TURNED_ROWS])
    return out_ND


# --- RMS norm ---


def add_rms_norm(
    x: Tensor, change: Tensor | None, scale_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (h, its norm) with h = x + change (None: x) [..., D]: the residual stream and what the
    next block reads of it, together.

    The norm is h / sqrt(mean(h^2) + eps) in float32, then in h's dtype times scale: Hugging Face's
    order of rounding.
    """
    if x.dtype == scale_D.dtype:
        made = _by_kernel(_AddRmsNorm, "add_rms_norm", x, change, scale_D, eps)
        if made is not None:
            return made
    h = x if change is None else x + change
    if h.dtype == torch.float32 == scale_D.dtype:
        return h, F.rms_norm(h, scale_D.shape, scale_D, eps)
    normed = F.rms_norm(h.float(), scale_D.shape, eps=eps)
    return h, normed.to(h.dtype) * scale_D


class _AddRmsNorm(Function):
    """n = h / rms(h), s = g scale:   dh = (s - n mean(s n)) / rms(h) + the stream's own,
    dscale = sum over rows of g n.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, change: Tensor | None, scale_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        dim = scale_D.numel()
        rows = x.numel() // dim
        h = x.view_as(x) if change is None else torch.empty_like(x)
        y = torch.empty_like(x)
        inverse_T = x.new_empty(rows, dtype=torch.float32)
        call_kernel("rms_norm", x, y, inverse_T, h, x, change, scale_D, rows, dim, eps)
        ctx.save_for_backward(h, scale_D, inverse_T)
        ctx.set_materialize_grads(False)
        return h, y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_h: Tensor | None, grad_y: Tensor | None) -> Gradients:
        h, scale_D, inverse_T = ctx.saved_tensors
        if grad_y is None:
            grad_y = torch.zeros_like(h)
        grad_y = grad_y.contiguous()
        if grad_h is not None:
            grad_h = grad_h.contiguous()
        _, needs_change, needs_scale, _ = ctx.needs_input_grad
        grad_x = torch.empty_like(h)
        sums_D = None
        if needs_scale:  # not where adapters alone are trained
            sums_D = torch.empty_like(scale_D, dtype=torch.float32)
        tensors = (grad_x, sums_D, grad_h, grad_y, h, inverse_T, scale_D)
        call_kernel("rms_norm_backward", h, *tensors, inverse_T.numel(), scale_D.numel())
        grad_change = grad_x if needs_change else None
        grad_scale = None if sums_D is None else sums_D.to(scale_D.dtype)
        return grad_x, grad_change, grad_scale, None


# --- The MLP's gate ---


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate sigmoid(gate) up, of equal shapes          (Shazeer 2020)"""
    made = _by_kernel(_SwiGlu, "swiglu", gate, up) if gate.dtype == up.dtype else None
    return F.silu(gate) * up if made is None else made


class _SwiGlu(Function):
    """s = sigmoid(gate):   dgate = g up s (1 + gate (1 - s)),   dup = g gate s."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty_like(gate)
        call_kernel("swiglu", gate, out, gate, up, gate.numel())
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Gradients:
        gate, up = ctx.saved_tensors
        grad = grad.contiguous()
        grad_gate = torch.empty_like(gate)
        grad_up = torch.empty_like(up)
        tensors = (grad_gate, grad_up, grad, gate, up)
        call_kernel("swiglu_backward", gate, *tensors, gate.numel())
        return grad_gate, grad_up


# --- Rotary positions ---


def rotate(x_THK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + K/2) of every head by its token's angle; cos, sin [T, 1, K] float32,
    their halves equal.

    The CPU's kernel multiplies in float32 and rounds once; plain operations, and the GPU's kernel,
    round cos, sin and each product to x's dtype.
    """
    if cos.dtype == torch.float32:
        made = _by_kernel(_Rotate, "rotate", x_THK, cos, sin)
        if made is not None:
            return made
    half = x_THK.shape[-1] // 2
    first = x_THK[..., :half]
    second = x_THK[..., half:]
    swapped = torch.cat([-second, first], dim=-1)
    cos = cos.to(x_THK.dtype)
    sin = sin.to(x_THK.dtype)
    return x_THK * cos + swapped * sin


class _Rotate(Function):
    """Turns by the angles times `direction`, 1 or -1; a rotation's gradient is turned back."""

    @staticmethod
    def forward(ctx, x_THK: Tensor, cos: Tensor, sin: Tensor, direction: float = 1.0) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.direction = direction
        out = torch.empty_like(x_THK)
        call_kernel("rotate", x_THK, out, x_THK, cos, sin, *x_THK.shape, direction)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Gradients:
        turned = _Rotate.apply(grad.contiguous(), *ctx.saved_tensors, -ctx.direction)
        return turned, None, None, None


# --- Projections of the same input ---


def projections(x_TD: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
    """Return linear(x) for each of `linears`. If all are plain and without hooks, the input's
    gradient adds up inside the products of backward.
    """
    are_plain = all(type(linear) is nn.Linear and not is_altered(linear) for linear in linears)
    if not are_plain or not torch.is_grad_enabled():
        return tuple(linear(x_TD) for linear in linears)
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears]
    return _Projections.apply(x_TD, len(linears), *weights, *biases)


class _Projections(Function):
    """y_i = x W_i^T + b_i:   dx = sum_i g_i W_i,   dW_i = g_i^T x,   db_i = sum over tokens of g_i.

    `parameters` are `count` weights and as many biases, which may be None.
    """

    @staticmethod
    def forward(ctx, x_TD: Tensor, count: int, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights = parameters[:count]
        biases = parameters[count:]
        ctx.save_for_backward(x_TD, *weights)
        made = []
        for weight, bias in zip(weights, biases):
            assert weight is not None, "every projection has a weight"
            made.append(F.linear(x_TD, weight, bias))
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> Gradients:
        x_TD, *weights = ctx.saved_tensors
        needs_x, _, *needs = ctx.needs_input_grad
        needs_bias = needs[len(grads) :]
        grad_x = None
        if needs_x:
            grad_x = grads[0] @ weights[0]
            for grad, weight in zip(grads[1:], weights[1:]):
                grad_x.addmm_(grad, weight)
        of_weights = [
            weight_gradient(grad.contiguous(), x_TD) if need else None
            for grad, need in zip(grads, needs)
        ]
        of_biases = [grad.sum(0) if need else None for grad, need in zip(grads, needs_bias)]
        return grad_x, None, *of_weights, *of_biases


# --- Attention over few keys ---


@dataclass(frozen=True)
class AttentionBlock:
    """N segments of a packed batch, padded to L queries and M = P + L keys each; P: places before a
    segment's own tokens.

    Query i of segment n sees the first seen_N[n] of its P places (None: P = 0), and its own tokens
    up to i.
    """

    queries_NL: Tensor  # int64: the token at each place; behind a segment's length any real one
    keys_NM: Tensor
    lengths_N: Tensor  # int64
    seen_N: Tensor | None  # int64

    _masks: dict[int | None, Tensor] = field(default_factory=dict)  # by window

    def mask(self, window: int | None = None) -> Tensor | None:
        """[N, 1, L, M] bool, true where a key is seen that is less than `window` tokens before its
        query; None: causal. window None: however far it is.
        """
        if window is None and self.seen_N is None:
            return None
        if window not in self._masks:
            self._masks[window] = self._made(window)
        return self._masks[window]

    def _made(self, window: int | None) -> Tensor:
        num_queries = self.queries_NL.shape[1]
        prefix = self.keys_NM.shape[1] - num_queries
        places_M = torch.arange(-prefix, num_queries, device=self.queries_NL.device)
        is_own_M = places_M >= 0
        # A segment's own tokens follow the last that it sees of its prefix.
        seen_N = self.lengths_N.new_zeros(1) if self.seen_N is None else self.seen_N
        before_N1 = seen_N[:, None]
        keys_NM = torch.where(is_own_M, places_M + before_N1, places_M + prefix)
        queries_NL1 = keys_NM[:, prefix:, None]
        is_there_NM = is_own_M | (keys_NM < before_N1)
        seen_NLM = is_there_NM[:, None] & (keys_NM[:, None] <= queries_NL1)
        if window is not None:
            seen_NLM &= keys_NM[:, None] > queries_NL1 - window
        return seen_NLM[:, None]


class PackedProducts(Function):
    """w = softmax(q k^T / sqrt(K)), o = w v [T, H, K] over the keys that each part says, by batched
    products. CPU, where `kernels` are; with g the gradient of o:

    dv = w^T g,   ds = w (g v^T - sum(w g v^T)) / sqrt(K),   dq = ds k,   dk = ds^T q.

    Each of the first num_tokens tokens is a query of one part; those behind are padding, whose
    attention and gradients are 0. Holds all weights, in the operands' dtype; the softmax is
    float32, and so is the sum of a key's gradients over the segments that see it. `masked_products`
    of each part is the same by plain operations.
    """

    @staticmethod
    def forward(
        ctx,
        q_THK: Tensor,
        k_TJK: Tensor,
        v_TJK: Tensor,
        parts: Sequence[AttentionBlock],
        num_tokens: int,
    ) -> Tensor:
        kv_heads, head_dim = k_TJK.shape[1:]
        q_THK = q_THK.contiguous()
        k_TJK = k_TJK.contiguous()
        v_TJK = v_TJK.contiguous()
        out_THK = torch.empty_like(q_THK)
        out_THK[num_tokens:] = 0
        kept = []
        for part in parts:
            q_BRK = _gathered(q_THK, part.queries_NL, kv_heads)
            k_BMK = _gathered(k_TJK, part.keys_NM, kv_heads)
            v_BMK = _gathered(v_TJK, part.keys_NM, kv_heads)
            weights_BRM = torch.bmm(q_BRK, k_BMK.transpose(1, 2))
            row_shape = (torch.get_num_threads(), weights_BRM.shape[-1])
            rows = weights_BRM.new_empty(row_shape, dtype=torch.float32)
            sizes = (*part.queries_NL.shape, *weights_BRM.shape)
            softmax = (weights_BRM, rows, part.seen_N, *sizes, head_dim**-0.5)
            call_kernel("causal_softmax", weights_BRM, *softmax)
            _scatter(torch.bmm(weights_BRM, v_BMK), part, out_THK)
            kept += [q_BRK, k_BMK, v_BMK, weights_BRM]
        ctx.save_for_backward(*kept)
        ctx.parts = parts
        ctx.num_tokens = num_tokens
        ctx.q_shape = q_THK.shape
        ctx.kv_shape = k_TJK.shape
        return out_THK

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_THK: Tensor) -> Gradients:
        kv_heads, head_dim = ctx.kv_shape[1:]
        grad_THK = grad_THK.contiguous()
        grad_q = grad_THK.new_empty(ctx.q_shape)
        grad_q[ctx.num_tokens :] = 0
        grad_k = grad_THK.new_zeros(ctx.kv_shape, dtype=torch.float32)
        grad_v = torch.zeros_like(grad_k)
        kept = iter(ctx.saved_tensors)
        for part, q_BRK, k_BMK, v_BMK, weights_BRM in zip(ctx.parts, kept, kept, kept, kept):
            # Padding has no gradient; then nothing that it saw has one through it.
            grad_BRK = _gathered(grad_THK, part.queries_NL, kv_heads, part.lengths_N)
            _scatter_add(torch.bmm(weights_BRM.transpose(1, 2), grad_BRK), part, grad_v)
            grad_BRM = torch.bmm(grad_BRK, v_BMK.transpose(1, 2))
            sizes = (part.queries_NL.shape[1], *grad_BRM.shape)
            softmax = (grad_BRM, weights_BRM, *sizes, head_dim**-0.5)
            call_kernel("causal_softmax_backward", grad_BRM, *softmax)
            _scatter(torch.bmm(grad_BRM, k_BMK), part, grad_q)
            _scatter_add(torch.bmm(grad_BRM.transpose(1, 2), q_BRK), part, grad_k)
        return grad_q, grad_k.to(grad_q.dtype), grad_v.to(grad_q.dtype), None, None


def _gathered(
    x_THK: Tensor, index_NL: Tensor, kv_heads: int, lengths_N: Tensor | None = None
) -> Tensor:
    """Return [N J, R L, K]: the heads of the tokens at each place; zeros behind the lengths."""
    head_dim = x_THK.shape[-1]
    num_batches = len(index_NL) * kv_heads
    rows = index_NL.shape[1] * x_THK.shape[1] // kv_heads
    out = x_THK.new_empty(num_batches, rows, head_dim)
    sizes = (*index_NL.shape, *x_THK.shape[1:])
    call_kernel("gather", x_THK, out, x_THK, index_NL, lengths_N, *sizes)
    return out


def _scatter(x_BRK: Tensor, part: AttentionBlock, out_THK: Tensor) -> None:
    """Put the part's tokens in their places of out."""
    index_NL = part.queries_NL
    sizes = (*index_NL.shape, *out_THK.shape[1:])
    call_kernel("scatter", x_BRK, out_THK, x_BRK, index_NL, part.lengths_N, *sizes)


def _scatter_add(x_BMK: Tensor, part: AttentionBlock, out_TJK: Tensor) -> None:
    """Add what belongs to the part's keys to their tokens' float32 sums."""
    sizes = (*part.keys_NM.shape, *out_TJK.shape[1:])
    call_kernel("scatter_add", x_BMK, out_TJK, x_BMK, part.keys_NM, *sizes)


class RMSNorm(nn.Module):
    """x / rms(x) in float32, then in x's dtype times `scale`: Hugging Face's order of rounding."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        _, normed = add_rms_norm(x, None, self.scale, self.eps)
        return normed

    def of_sum(self, x: Tensor, change: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (h, norm(h)) with h = x + change (None: x), in one kernel unless a subclass or a
        hook must be called.
        """
        if type(self) is not RMSNorm or is_altered(self):
            h = x if change is None else x + change
            return h, self(h)
        return add_rms_norm(x, change, self.scale, self.eps)
