"""Finds which of PyTorch's settings give float32 products on this CPU, and the fastest of them.

    products = use_float32_products(reproducible=False)
    # "medium (error 4e-07, 157 GFLOP/s), not highest (error 4e-07, 64 GFLOP/s), ..."

The error under a setting of `torch.set_float32_matmul_precision` differs between machines. Under
"medium" oneDNN computes in float32 on an x86 CPU without bfloat16 products, and on AMD's more than
twice as fast as under "highest". With AMX, or on some Arm CPUs, it multiplies in bfloat16, with ten
thousand times the error of float32. So each setting is tried on a few small products whose true
values are known. Only this file sets the precision.

Products in bfloat16 are slow on a CPU without instructions for them: an AMD EPYC with AVX2 takes
thirty to fifty times as long as in float32 for those of backward. If a model trains in bfloat16,
the ratio is measured and a warning says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from llamarl.machine.device import choose_device

# The one that was seen to be much the fastest on some CPUs comes first.
SETTINGS = ("medium", "highest", "high")
# Times the error of "highest": sums in another order stay below, a shorter mantissa is far above
EXACT = 4.0
CLEARLY_FASTER = 1.25  # times as fast, before a clock decides against the order of SETTINGS
SLOW = 3.0  # times float32's seconds, from which on a warning says so
# [rows, inputs, outputs]; the last one is timed.
_SHAPES = ((4, 128, 128), (64, 512, 256), (256, 512, 512))
_REPEATS = 3

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of one setting on this machine."""

    setting: str
    # norm of the error over the norm of the true product; the largest of the shapes tried
    error: float
    gflops: float  # of the largest shape, on the threads that PyTorch has at the time

    def __str__(self) -> str:
        return f"{self.setting} (error {self.error:.0e}, {self.gflops:.0f} GFLOP/s)"


def use_float32_products(*, reproducible: bool, device: torch.device | None = None) -> str:
    """Set the fastest precision whose float32 products are float32's, for this process. Returns
    which that is, and what the others gave. device: what the process computes on; None:
    choose_device's. On a GPU nothing is tried.

    reproducible: decide by the errors alone, in the order of SETTINGS, so that every run on one
    machine decides alike. Else a setting that is clearly faster goes before. A GPU's TF32 is never
    taken: the trainer's and the generator's kernels would differ by more than a float32 run may.
    """
    device = device or choose_device()
    if device.type != "cpu":
        torch.set_float32_matmul_precision("highest")
        return "highest"
    tried = [measure(setting) for setting in SETTINGS]
    best = choose(tried, reproducible=reproducible)
    torch.set_float32_matmul_precision(best.setting)
    tried.sort(key=lambda measured: measured is not best)
    return ", not ".join(map(str, tried))


def choose(tried: Sequence[Measured], *, reproducible: bool) -> Measured:
    """Return the setting to take of `tried`, which are in the order of preference and hold
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
    return best


def measure(setting: str) -> Measured:
    """Measure error and speed of float32 products under one setting, in a few ms. Leaves the
    precision as it was.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        draw = torch.Generator().manual_seed(0)
        errors = []
        for rows, inputs, outputs in _SHAPES:
            x = torch.randn(rows, inputs, generator=draw)
            weight = torch.randn(outputs, inputs, generator=draw)
            product = F.linear(x, weight)
            true = x.double() @ weight.double().T
            error = (product - true).norm() / true.norm()
            errors.append(float(error))
        seconds = _shortest_s(lambda: F.linear(x, weight))
    finally:
        torch.set_float32_matmul_precision(before)
    operations = 2 * rows * inputs * outputs
    gflops = operations / seconds / 1e9
    return Measured(setting=setting, error=max(errors), gflops=gflops)


def warn_of_slow_bfloat16() -> None:
    """Warn if this CPU takes SLOW times as long to train in bfloat16 as in float32."""
    times = bfloat16_takes()
    if times >= SLOW:
        log.warning(
            "this CPU has no fast products in bfloat16: those of an update take %.0f times as long "
            "as in float32. trainer.compute_dtype=float32 is faster here",
            times,
        )


def bfloat16_takes() -> float:
    """Return how many times as long as in float32 a product of backward takes in bfloat16 on this
    CPU, with PyTorch's threads and precision of now.
    """
    rows, inputs, outputs = _SHAPES[1]
    grad = torch.ones(rows, outputs)
    weight = torch.ones(outputs, inputs)
    narrow_grad = grad.bfloat16()
    narrow_weight = weight.bfloat16()
    narrow_s = _shortest_s(lambda: narrow_grad @ narrow_weight)
    return narrow_s / _shortest_s(lambda: grad @ weight)


def _shortest_s(make: Callable[[], object]) -> float:
    """Return the seconds of the shortest of some calls."""
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        make()
        times.append(time.perf_counter() - began)
    return min(times)
