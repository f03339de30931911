"""A machine whose products have other last bits every time, as if each were summed in an order of
its own.

    PYTHONPATH=tests/machines/noisy LLAMARL_NOISE_SEED=1 python ...     every process started so

What is true in one order of summation alone is false here, so a test that asks for it is red on
whatever CPU it runs, and not only on the one that sums otherwise.

    a product a b         + a number from [-1/2, 1/2] eps (|a| |b|), elementwise
    a sum inside a kernel + a number from [-1/2, 1/2] eps times its size

|a| |b| is the sum of the sizes of a product's terms: rounding errors grow with the terms, however
much these cancel out. Summing in another order changes as much: of 512 random terms, which add up
to about 23 of their size, the noise has a standard deviation of 0.19 eps * 512 of it, and the
error of a sum one by one has 0.15. A sum of one term has but one order, and a sum of numbers with
few bits (integers, or quarters) is exact in any: these have no noise.

A product in bfloat16 is summed in float32, has its noise there and is rounded at the end, so as few
results change as would in another order. What a kernel of llamarl rounds to bfloat16 stays.

Which numbers are drawn follows from LLAMARL_NOISE_SEED. A process that runs tests draws the same
ones for a test every time, whatever ran before it. All processes that it starts or forks, and all
programs alone, also draw by their process ids, so that no two of them agree by accident.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import threading
import warnings
from types import ModuleType

import torch
from torch import Tensor

EPS = torch.finfo(torch.float32).eps
SEED = "LLAMARL_NOISE_SEED"
_NARROW = (torch.bfloat16, torch.float16)
# Operators by the place of their first factor. A variant ends in "_" (in place) or ".out".
_PLAIN = ("mm", "mm.out", "bmm", "bmm.out", "dot", "vdot")
_ADDS = ("addmm", "addmv", "baddbmm", "addbmm")
_ADDING = tuple(map("".join, itertools.product(_ADDS, ("", "_", ".out"))))
_FRACTIONS = (1, 256)  # numbers that are whole times one of these have few bits
_MANTISSA = 2**24
# Of a kernel in train.c, which arguments it writes that depend on an order of summation, or on
# whether a product and a sum are one instruction.
_WRITTEN = {
    "rms_norm": (0,),
    "rms_norm_backward": (0, 1),
    "swiglu": (0,),
    "swiglu_backward": (0, 1),
    "rotate": (0,),
    "causal_softmax": (0,),
    "causal_softmax_backward": (0,),
    "log_softmax": (0, 1, 3),
    "log_softmax_backward": (0,),
}
_CANCEL = ("rms_norm_backward", "causal_softmax_backward")  # differences of a row's numbers
_NATS = "log_softmax"  # its results are logarithms: a relative error of what they are taken of

_library = torch.library.Library("aten", "IMPL")  # the kernels live as long as this does
_inside = threading.local()  # a product that is made by means of others has their noise once


class _Draws:
    """Uniform numbers from [-1/2, 1/2]."""

    def __init__(self):
        seed = os.environ.get(SEED)
        if not seed:
            raise ValueError(f"{SEED} is not set: any word, which says what noise is drawn")
        self._seed = seed
        # What runs in a test's own process begins anew with each test.
        self._runs_tests = "PYTEST_CURRENT_TEST" not in os.environ
        self._generator = torch.Generator()
        self._key: str | None = None
        os.register_at_fork(after_in_child=self._is_forked)

    def _is_forked(self) -> None:
        self._runs_tests = False
        self._generator = torch.Generator()  # another thread may have held the parent's
        self._key = None

    def of_shape(self, shape: torch.Size) -> Tensor:
        test = os.environ.get("PYTEST_CURRENT_TEST")
        key = test if test and self._runs_tests else f"process {os.getpid()}"
        if key != self._key:
            digest = hashlib.sha256(f"{self._seed} {key}".encode()).digest()
            self._generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            self._key = key
        return torch.rand(shape, generator=self._generator).sub_(0.5)


_draws = _Draws()


def add_noise(result: Tensor, sizes: Tensor) -> None:
    """Change the last bits of float32 sums in place. sizes: of the terms of each, added up."""
    noise = _draws.of_shape(result.shape).mul_(sizes).mul_(EPS)
    noise.nan_to_num_(0.0, 0.0, 0.0)  # where sizes overflow nothing is left to change
    result.add_(noise)


# --- PyTorch's products ---


def make_products_noisy(_torch: ModuleType) -> None:
    """Replace the CPU's kernels of this process, which forward and backward passes call alike."""
    # Its products are inside one kernel; the other way of attention is made of those below.
    torch.backends.cuda.enable_flash_sdp(False)
    with warnings.catch_warnings():
        # That kernels are replaced, which is what is meant.
        warnings.simplefilter("ignore", UserWarning)
        for names, first_factor in ((_PLAIN, 0), (_ADDING, 1)):
            for name in names:
                original = torch.library.get_kernel(f"aten::{name}", "CPU")
                kernel = functools.partial(_product, original, name, first_factor)
                _library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)


def _product(original, name: str, first_factor: int, keys, *given, **named) -> Tensor:
    """What the original kernel computes, with noise."""
    a, b = given[first_factor : first_factor + 2]
    is_narrow = a.dtype in _NARROW
    is_inner = getattr(_inside, "product", False)
    if is_inner or not (is_narrow or a.dtype == torch.float32) or a.shape[-1] < 2:
        return original.call_boxed(keys, *given, **named)
    _inside.product = True
    try:
        sizes = _sizes(a.detach(), b.detach())
        if _is_exact(a, b, sizes):
            return original.call_boxed(keys, *given, **named)
        if name.startswith("addbmm"):
            sizes = sizes.sum(0)
        sizes = sizes * abs(named.get("alpha", 1))
        if is_narrow:
            return _rounded_at_the_end(name, sizes, given, named)
        result = original.call_boxed(keys, *given, **named)
        add_noise(result.detach(), sizes)
        return result
    finally:
        _inside.product = False


def _sizes(a: Tensor, b: Tensor) -> Tensor:
    """|a| |b|, in float32."""
    return a.float().abs() @ b.float().abs()


def _is_exact(a: Tensor, b: Tensor, sizes: Tensor) -> bool:
    """Whether no order of summation rounds, because no partial sum has more bits than float32."""
    if not sizes.numel():
        return True
    for fraction in _FRACTIONS:
        if sizes.max() * fraction**2 < _MANTISSA:
            if all(not (x.float() * fraction).frac().any() for x in (a, b)):
                return True
    return False


def _rounded_at_the_end(name: str, sizes: Tensor, given: tuple, named: dict) -> Tensor:
    """The product of tensors in a narrower dtype, as a float32 sum that has noise before it is
    rounded.
    """
    base = name.removesuffix(".out").removesuffix("_")
    scales = {key: value for key, value in named.items() if key != "out"}
    wide = getattr(torch, base)(*(x.float() for x in given), **scales)
    add_noise(wide, sizes)
    if name.endswith(".out"):
        out = named["out"]
        out.resize_(wide.shape)
        return out.copy_(wide)
    if name.endswith("_"):
        return given[0].copy_(wide)
    return wide.to(given[0].dtype)


# --- llamarl's kernels ---


def make_training_kernels_noisy(fused: ModuleType) -> None:
    """Replace call_kernel, by which all functions of train.c are called."""
    call_kernel = fused.call_kernel

    @functools.wraps(call_kernel)
    def and_add_noise(kernel: str, like: Tensor, *arguments: object) -> None:
        call_kernel(kernel, like, *arguments)
        for place in _WRITTEN.get(kernel, ()):
            written = arguments[place]
            if written is None or not written.numel() or written.dtype != torch.float32:
                continue
            passed_on = None
            if kernel == "rms_norm_backward" and place == 0:
                passed_on = arguments[2]
            add_noise(written, _sizes_of_result(written, kernel, passed_on))

    fused.call_kernel = and_add_noise


def _sizes_of_result(written: Tensor, kernel: str, passed_on: Tensor | None) -> Tensor:
    """About what was added up to it. passed_on: added at the end, and no part of a sum.

    Zeros stay zeros, for they are masked.
    """
    if kernel == _NATS:
        return written.abs() + 1
    if passed_on is not None:
        written = written - passed_on
    sizes = written.abs()
    if kernel in _CANCEL:
        sizes = sizes + sizes.mean(-1, keepdim=True) * (sizes != 0)
    return sizes


def make_decoding_noisy(decode: ModuleType) -> None:
    """Replace the call of decode.c: its results have the noise of all the products before them."""
    run = decode.NativeDecode._run

    def add_noise_to_pass(self, model, cache, of_rows, x, logits):
        slots = of_rows["slots"]
        positions = of_rows["positions"]
        # Errors of products that follow each other add up as the square root of their number.
        width = model.hidden
        for number, held in enumerate(cache.layers):
            depth = 2 * number + 1
            if held.dtype != torch.float32:
                break
            for kept in held:
                rows = kept[slots, :, positions]
                add_noise(rows, _sizes_of_row(rows, width) * depth**0.5)
                kept[slots, :, positions] = rows
        depth = 2 * model.layers + 1
        hidden = x.flatten()[: len(logits) * width].unflatten(0, (-1, width))
        if model.vocab:
            _inside.product = True
            try:
                sizes = _sizes(hidden, self._decoder.output_weight.detach().T)
            finally:
                _inside.product = False
            add_noise(logits, sizes * depth**0.5)
        elif hidden.dtype == torch.float32:
            add_noise(hidden, _sizes_of_row(hidden, width) * depth**0.5)

    @functools.wraps(run)
    def and_add_noise(self, model, cache, of_rows, last, logits):
        with torch.inference_mode(logits.is_inference()):
            x = run(self, model, cache, of_rows, last, logits)
            add_noise_to_pass(self, model, cache, of_rows, x, logits)
        return x

    decode.NativeDecode._run = and_add_noise


def _sizes_of_row(rows: Tensor, terms: int) -> Tensor:
    """Of the terms of sums whose results, a row, are as large as random terms make them."""
    typical = rows.float().square().mean(-1, keepdim=True).sqrt()
    return typical.expand(rows.shape) * terms**0.5
