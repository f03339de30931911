"""The generator in one byte a weight: fp8 (e4m3) or int8, symmetric, with a float32 scale for each
output channel.

    trainer:    q, scale = quantize_rows(shard, "fp8")  # of its own rows, before they travel
    generator:  quantize_decoder(decoder, "fp8")        # projections: `weight`, `weight_scale`

A weight is q * scale[:, None]. Embeddings, norms and biases stay as they are, and lm_head unless it
is asked for. Shapes: T tokens, I in, O out.
"""

from __future__ import annotations

import functools
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarl.models.fused import gpu_kernels
from llamarl.models.hf import hf_name
from llamarl.models.lora import LoraLinear, low_of
from llamarl.models.sharding import HEAD, Shape, is_quantized

QUANTIZED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_LARGEST = {"fp8": 448.0, "int8": 127.0}  # -128 is not used: the numbers are symmetric
_BLOCK = 1 << 20  # elements quantised at once: 4 MiB in float32
_PADDED = 32  # tokens; cuBLAS's int8 product takes no fewer than 17
# The compute capability of an NVIDIA GPU that has it, and what it needs a weight's dimensions to be
# multiples of.
_NEEDS = {"scaled_mm": ((8, 9), 16), "int_mm": ((7, 5), 8)}


def quantized_dtype(kind: str) -> torch.dtype:
    """Return the dtype of `kind`. ValueError naming the choices if it is none of them."""
    if kind not in QUANTIZED:
        raise ValueError(f"quantize={kind!r}: need one of {', '.join(QUANTIZED)}")
    return QUANTIZED[kind]


@torch.no_grad()
def quantize_rows(
    weight_OI: Tensor,
    kind: str,
    q_out: Tensor | None = None,
    scale_out: Tensor | None = None,
    largest_O: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise a float matrix: return (q [O, I] in one byte, scale [O] float32), written into q_out
    and scale_out if both are given.

    scale = absmax of the row / the largest number of `kind`, or 1 for a row of zeros; q = row /
    scale, to nearest even. A row depends on no other, so shards of whole rows are quantised as the
    whole is, bit for bit. NaN and infinity are not looked for, which would wait for the device:
    they make the row's scale NaN or infinite, which then shows in the logits. largest_O: absmax of
    the whole rows, where weight_OI holds only some of their columns.
    """
    dtype = quantized_dtype(kind)
    outs, ins = weight_OI.shape
    if q_out is None or scale_out is None:
        q = torch.empty(outs, ins, dtype=dtype, device=weight_OI.device)
        scale = torch.empty(outs, device=weight_OI.device)
    else:
        q, scale = q_out, scale_out
    assert (q.dtype, q.shape) == (dtype, weight_OI.shape), f"q_out is {q.dtype} {q.shape}"
    is_fit = (scale.dtype, scale.shape) == (torch.float32, (outs,))
    assert is_fit, f"scale_out is {scale.dtype} {scale.shape}"
    smallest = torch.finfo(torch.float32).tiny
    each = max(1, _BLOCK // max(1, ins))
    for first in range(0, outs, each):
        rows = slice(first, first + each)
        block = weight_OI[rows]
        if largest_O is None:
            largest = block.abs().amax(1).float()
        else:
            largest = largest_O[rows]
        # A subnormal scale has too few bits: the row would overflow. With the smallest normal one
        # it loses bits instead.
        s = (largest / _LARGEST[kind]).clamp_min_(smallest)
        s.masked_fill_(largest == 0, 1.0)
        scale[rows] = s
        block = block / s[:, None]
        if kind == "int8":
            block.round_()
        q[rows] = block
    return q, scale


class QuantizedLinear(nn.Module):
    """x [T, I] times a quantised weight: [T, O] in x's dtype (float32, bfloat16 or float16).

    weight [O, I] in one byte and weight_scale [O] float32 are parameters, uninitialised at first
    and read afresh by every call: put new ones in place by copying or by exchanging `.data`. Casts
    of the module leave their dtypes alone.

    arithmetic, settled by the first call after the module was made or moved; a warning says if it
    is not the device's usual:
        scaled_mm    (fp8 on a GPU) x is quantised too, with a scale a token; products are summed in
                     float32 and rounded to bfloat16
        int_mm       (int8) x is quantised too, with a scale a token; integer sums are exact
        weight_only  (fp8 on a CPU) x is multiplied as it is with the weight's numbers in x's dtype,
                     and the sums are scaled
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kind: str,
        *,
        bias: nn.Parameter | None = None,
        device=None,
    ):
        super().__init__()
        weight = torch.empty(out_features, in_features, dtype=quantized_dtype(kind), device=device)
        scale = torch.empty(out_features, dtype=torch.float32, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = bias
        self.kind = kind
        self.lora_a: nn.Parameter | None = None  # an adapter, which is not quantised
        self.lora_b: nn.Parameter | None = None
        self.scaling = 1.0
        self.arithmetic: str | None = None

    def forward(self, x_TI: Tensor) -> Tensor:
        if self.arithmetic is None:
            shape = self.weight.shape
            self.arithmetic, obstacle = arithmetic_of(self.kind, shape, x_TI.device)
            if obstacle:
                warnings.warn(
                    f"{self.kind} weights {list(self.weight.shape)} on {x_TI.device.type}: "
                    f"multiplied as {self.arithmetic}, which is slower, because {obstacle}",
                    stacklevel=2,
                )
        if self.arithmetic == "weight_only":
            # In float16 the unscaled sums would overflow.
            x = x_TI
            if x.dtype == torch.float16:
                x = x.float()
            weight = _widen(self.weight, x.dtype)
            y = F.linear(x, weight) * self.weight_scale
        else:
            q_TI, scale_T = _quantized_input(x_TI, self.kind)
            scale_T1 = scale_T[:, None]
            weight_IO = self.weight.t()
            if self.arithmetic == "scaled_mm":
                scale_1O = self.weight_scale[None]
                wide = self.lora_a is not None
                y = _scaled_product(q_TI, weight_IO, scale_T1, scale_1O, wide=wide)
            else:
                missing = _PADDED - len(q_TI)
                if q_TI.is_cuda and missing > 0:
                    q_TI = F.pad(q_TI, (0, 0, 0, missing))
                sums_TO = torch._int_mm(q_TI, weight_IO)[: len(x_TI)]
                y = sums_TO * scale_T1 * self.weight_scale
        if self.lora_a is not None and self.lora_b is not None:
            low_TR = low_of(x_TI, self.lora_a, self.scaling)
            y = torch.addmm(y.float(), low_TR.float(), self.lora_b.float().T)
        y = y.to(x_TI.dtype)
        if self.bias is not None:
            y = y + self.bias
        return y

    def _apply(self, fn, recurse=True):
        # Module.to(dtype) casts what is floating point, which fp8 and the scales are: they may only
        # change their device.
        def same_dtype(t: Tensor) -> Tensor:
            new = fn(t)
            if t is not self.weight and t is not self.weight_scale or new.dtype == t.dtype:
                return new
            return t.to(new.device)

        self.arithmetic = None
        return super()._apply(same_dtype, recurse)


def _quantized_input(x_TI: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return what `quantize_rows` does, on a GPU by one kernel."""
    on_gpu = gpu_kernels(x_TI)
    if on_gpu and kind == "fp8":
        return on_gpu.quantize_rows(x_TI.contiguous(), _LARGEST[kind])
    return quantize_rows(x_TI, kind)


def arithmetic_of(kind: str, shape: Shape, device: torch.device) -> tuple[str, str]:
    """Return QuantizedLinear's arithmetic for a weight of `shape` on a device, and what rules the
    usual one out ("" if nothing does).
    """
    # On a CPU, for 32 bfloat16 tokens and 576x576: fp8 scaled_mm, which widens the weight number by
    # number, takes 1.6 ms and weight_only 0.25; int_mm 0.14, weight_only 0.20, _weight_int8pack_mm
    # 0.27 (float32: 8.8), for errors of 1.1, 0.8, 0.8 %.
    if kind == "fp8" and device.type == "cpu":
        return "weight_only", ""
    usual = "scaled_mm" if kind == "fp8" else "int_mm"
    (major, minor), multiple = _NEEDS[usual]
    if device.type == "cpu":
        if _int_mm_is_exact():
            return usual, ""
        obstacle = "this CPU's int8 products saturate (it has no VNNI)"
    elif device.type != "cuda" or torch.version.hip:
        obstacle = f"{usual} is known on NVIDIA GPUs alone"
    elif torch.cuda.get_device_capability(device) < (major, minor):
        obstacle = f"{usual} needs compute capability {major}.{minor}"
    elif any(n % multiple for n in shape):
        obstacle = f"{usual} needs both dimensions in multiples of {multiple}"
    else:
        return usual, ""
    return "weight_only", obstacle


def _scaled_product(
    q_TI: Tensor, q_IO: Tensor, scale_T1: Tensor, scale_1O: Tensor, *, wide: bool
) -> Tensor:
    """Return [T, O] bfloat16, or float32 if `wide`: the product of fp8 numbers, summed in float32,
    times a scale for each row and each column. If _scaled_mm takes no such scales, or not for a
    wide result, it only sums, and the scales are multiplied in afterwards.
    """
    if not wide and _takes_row_scales(q_TI.device):
        return torch._scaled_mm(
            q_TI, q_IO, scale_a=scale_T1, scale_b=scale_1O, out_dtype=torch.bfloat16
        )
    one = torch.ones((), device=q_TI.device)
    sums_TO = torch._scaled_mm(q_TI, q_IO, scale_a=one, scale_b=one, out_dtype=torch.float32)
    product_TO = sums_TO * scale_T1 * scale_1O
    return product_TO if wide else product_TO.to(torch.bfloat16)


@functools.cache
def _takes_row_scales(device: torch.device) -> bool:
    """Whether this torch's _scaled_mm takes a scale for each row there, found by a trial.

    torch 2.11 takes one scale for the whole on a CPU.
    """
    q = torch.zeros(16, 16, dtype=torch.float8_e4m3fn, device=device)
    ones = torch.ones(16, 1, device=device)
    try:
        torch._scaled_mm(q, q.t(), scale_a=ones, scale_b=ones.t(), out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError):
        return False
    return True


@functools.cache
def _int_mm_is_exact() -> bool:
    """Whether integer products are exact here. Without VNNI a CPU sums pairs of products in 16
    bits, which overflow without a warning.
    """
    a = torch.full((16, 64), 127, dtype=torch.int8)
    sums = torch._int_mm(a, a.t())
    is_exact = sums == 64 * 127 * 127
    return bool(is_exact.all())


def _widen(q: Tensor, dtype: torch.dtype) -> Tensor:
    """Return q's numbers in bfloat16 or float32, exactly (except NaN, whose scale is no number
    either).
    """
    if q.dtype != torch.float8_e4m3fn or q.device.type != "cpu":
        return q.to(dtype)
    # A CPU converts e4m3 at 4 ns a number; this takes a tenth. Its exponent and mantissa, put where
    # the wider format's exponent ends and mantissa begins, read as the number times 2^-120: the
    # biases are 7 and 127.
    codes = q.view(torch.int8)
    if dtype == torch.bfloat16:
        shifted = codes.to(torch.int16)
        shifted <<= 4
        shifted &= -0x7810
    else:
        shifted = codes.to(torch.int32)
        shifted <<= 20
        shifted &= -0x78100000
    return shifted.view(dtype).mul_(2.0**120)


@torch.no_grad()
def quantize_decoder(decoder: nn.Module, kind: str, exclude: tuple[str, ...] = (HEAD,)) -> None:
    """Replace what is_quantized names by QuantizedLinear, in place, with its numbers.

    On the meta device there are none: shapes alone. ValueError for an unknown kind, or a fragment
    that is in no name.
    """
    paths = {}  # by Hugging Face name
    for path, module in decoder.named_modules():
        if isinstance(module, nn.Linear):
            paths[hf_name(f"{path}.weight")] = path
    known = "\n".join([f"{HEAD}.weight", *paths])  # a tied model has no head
    unknown = [fragment for fragment in exclude if fragment not in known]
    if unknown:
        raise ValueError(
            f"quantise all but {unknown}: no weight is named so; they are "
            f"{', '.join(paths)[:200]}..."
        )
    for name, path in paths.items():
        old = decoder.get_submodule(path)
        assert isinstance(old, nn.Linear), f"{path} was a projection"
        weight = old.weight
        if not is_quantized(name, weight.shape, exclude):
            continue
        new = QuantizedLinear(
            old.in_features, old.out_features, kind, bias=old.bias, device=weight.device
        )
        if not weight.is_meta:
            quantize_rows(weight, kind, new.weight, new.weight_scale)
        if isinstance(old, LoraLinear):
            new.lora_a = old.lora_a
            new.lora_b = old.lora_b
            new.scaling = old.scaling
        decoder.set_submodule(path, new)


def kl_from_top(ids_LK: Tensor, logprobs_LK: Tensor, other_logprobs_LV: Tensor) -> Tensor:
    """Return [L] float64, nats: a lower bound of KL(other || reference).

    The reference is known by the logprobs [L, K] of K distinct ids alone. The bound is the KL
    between the two over K + 1 bins, those ids and all the rest; merging bins cannot raise a KL.
    """
    q_LK = logprobs_LK.double()
    other_LV = other_logprobs_LV.double()
    # 1 - sum is known to a few roundings of the logprobs, which would be most of a tiny rest: a
    # larger one lowers the bound.
    roundings = 4 * torch.finfo(logprobs_LK.dtype).eps
    rest_q_L = 1 - q_LK.exp().sum(1)
    rest_q_L = rest_q_L.clamp_min(0) + roundings
    rest_q_L = rest_q_L.log()
    others_LV = other_LV.scatter(1, ids_LK, -torch.inf)
    rest_p_L = others_LV.logsumexp(1)
    p_LK = other_LV.gather(1, ids_LK)
    p_LB = torch.cat([p_LK, rest_p_L[:, None]], dim=1)
    q_LB = torch.cat([q_LK, rest_q_L[:, None]], dim=1)
    of_bins_LB = p_LB.exp() * (p_LB - q_LB)
    of_bins_LB.masked_fill_(p_LB == -torch.inf, 0.0)
    return of_bins_LB.sum(1).clamp_min(0.0)
