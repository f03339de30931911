"""Which of PyTorch's settings gives float32 products on this CPU, and the fastest of those that do.

    products = use_float32_products(reproducible=False)
    products.setting      # "medium", given to torch.set_float32_matmul_precision
    str(products)         # "medium: error 4e-07, 157 GFLOP/s (not high 150)"

`torch.set_float32_matmul_precision` names what a product may lose, and what is lost differs between
machines. Under "medium" oneDNN computes in float32 on an x86 CPU without bfloat16 products, on
AMD's more than twice as fast as under "highest"; with AMX or on some Arm it multiplies in bfloat16,
with an error ten thousand times float32's. So each setting is tried on a few small products whose
true values are known. This file alone sets the precision.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# The one that was seen to be much the fastest on some CPUs comes first.
SETTINGS = ("medium", "highest", "high")
# Times the error of "highest": sums in another order stay below, a shorter mantissa is far above
EXACT = 4.0
CLEARLY_FASTER = 1.25  # times as fast, before a clock decides against the order of SETTINGS
# [rows, inputs, outputs]; the last one is timed.
_SHAPES = ((4, 128, 128), (64, 512, 256), (256, 512, 512))
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """What one setting gave here."""

    setting: str
    # norm of the error over the norm of the true product; the largest of the shapes tried
    error: float
    gflops: float  # of the largest shape, on the threads that PyTorch has at the time


@dataclass(frozen=True, slots=True)
class Float32Products:
    """The setting in force, and all that were tried. On a GPU nothing is tried."""

    setting: str
    tried: tuple[Measured, ...] = ()

    def __str__(self) -> str:
        if not self.tried:
            return self.setting
        parts = []
        for measured in sorted(self.tried, key=lambda m: m.setting != self.setting):
            parts.append(
                f"{measured.setting} (error {measured.error:.0e}, {measured.gflops:.0f} GFLOP/s)"
            )
        return ", not ".join(parts)


def use_float32_products(*, reproducible: bool) -> Float32Products:
    """Set the fastest precision whose float32 products are float32's, for this process, and say
    which.

    reproducible: decide by the errors alone, in the order of SETTINGS, so that every run on one
    machine decides alike. Else a setting that is clearly faster goes before. A GPU's TF32 is never
    taken: the trainer's and the generator's kernels would differ by more than a float32 run may.
    """
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("highest")
        return Float32Products("highest")
    tried = tuple(measure(setting) for setting in SETTINGS)
    setting = choose(tried, reproducible=reproducible)
    torch.set_float32_matmul_precision(setting)
    return Float32Products(setting, tried)


def choose(tried: tuple[Measured, ...], *, reproducible: bool) -> str:
    """The setting to take of those in `tried`, which are in the order of preference and hold
    "highest".
    """
    error_of = {measured.setting: measured.error for measured in tried}
    limit = EXACT * error_of["highest"]
    exact = [measured for measured in tried if measured.error <= limit]
    best = exact[0]
    if not reproducible:
        for measured in exact[1:]:
            if measured.gflops > CLEARLY_FASTER * best.gflops:
                best = measured
    return best.setting


def measure(setting: str) -> Measured:
    """Error and speed of float32 products under one setting, in a few ms. Leaves the precision as
    it was.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        errors = []
        for rows, inputs, outputs in _SHAPES:
            x = _values(rows, inputs)
            weight = _values(outputs, inputs)
            product = F.linear(x, weight)
            true = x.double() @ weight.double().T
            error = (product - true).norm() / true.norm()
            errors.append(float(error))
        times = []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            F.linear(x, weight)
            times.append(time.perf_counter() - began)
    finally:
        torch.set_float32_matmul_precision(before)
    operations = 2 * rows * inputs * outputs
    gflops = operations / min(times) / 1e9
    return Measured(setting=setting, error=max(errors), gflops=gflops)


def _values(rows: int, columns: int) -> Tensor:
    """Values in [-1, 1) that are all there in float32 and in no shorter format."""
    numbers = torch.arange(rows * columns, dtype=torch.int64)
    scrambled = (numbers * 2654435761 + 12345) % (1 << 23)
    values = scrambled.double() / (1 << 22) - 1
    return values.float().view(rows, columns)
