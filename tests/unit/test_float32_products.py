"""float32 means float32: the setting that is chosen multiplies as exactly as the most exact one,
whatever this CPU does.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from llamarl.machine import precision
from llamarl.machine.precision import EXACT, Measured, choose, measure, use_float32_products
from llamarl.models.config import tiny_directory
from llamarl.models.loading import training_decoder
from tests.house import ROOT, python_files

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("threads_of_machine")]

EXACT_ERROR, BFLOAT16_ERROR = 2e-7, 2e-3


def test_what_is_chosen_here_is_as_exact_as_the_most_exact_setting():
    use_float32_products(reproducible=True)
    generator = torch.Generator().manual_seed(0)
    for rows, inputs, outputs in [(1, 576, 1536), (33, 576, 192), (512, 1024, 512)]:
        x = torch.randn(rows, inputs, generator=generator)
        weight = torch.randn(outputs, inputs, generator=generator)
        true = x.double() @ weight.double().T
        error = (F.linear(x, weight) - true).norm() / true.norm()
        assert error < 2**-23 * inputs**0.5, "a float32 sum of so many products is nearer than that"


@pytest.mark.parametrize(
    "medium, highest, high, reproducible, chosen",
    [
        # A machine that multiplies float32 in bfloat16 under "medium" is noticed,
        ((BFLOAT16_ERROR, 560), (EXACT_ERROR, 134), (EXACT_ERROR, 134), True, "highest"),
        ((BFLOAT16_ERROR, 560), (EXACT_ERROR, 134), (EXACT_ERROR, 134), False, "highest"),
        # and one with products of TF32 under "high".
        ((BFLOAT16_ERROR, 560), (EXACT_ERROR, 134), (3e-4, 280), False, "highest"),
        # The order decides between equals, and a clock only where it may.
        ((2 * EXACT_ERROR, 100), (EXACT_ERROR, 110), (EXACT_ERROR, 200), True, "medium"),
        ((2 * EXACT_ERROR, 100), (EXACT_ERROR, 110), (EXACT_ERROR, 200), False, "high"),
        ((EXACT_ERROR, 100), (EXACT_ERROR, 110), (EXACT_ERROR, 110), False, "medium"),
    ],
)
def test_the_setting_that_is_chosen(medium, highest, high, reproducible, chosen):
    measured = {"medium": medium, "highest": highest, "high": high}
    tried = [Measured(setting, *found) for setting, found in measured.items()]
    assert choose(tuple(tried), reproducible=reproducible).setting == chosen


def reduced(x, weight, bias=None):
    """F.linear of a machine whose products are bfloat16's under all settings but "highest"."""
    if torch.get_float32_matmul_precision() != "highest":
        x, weight = x.bfloat16().float(), weight.bfloat16().float()
    return torch.addmm(torch.zeros(()), x, weight.T)


def test_reduced_products_are_noticed_by_measuring_them_which_leaves_the_setting(monkeypatch):
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(precision.F, "linear", reduced)
    assert measure("highest").error * EXACT < measure("medium").error
    assert torch.get_float32_matmul_precision() == "highest"
    products = use_float32_products(reproducible=False)
    assert torch.get_float32_matmul_precision() == "highest"
    said = r"highest \(error \de-0\d, \d+ GFLOP/s\), not medium \(error \de-0[345], "
    assert re.match(said, products)


def test_one_place_alone_sets_the_precision():
    setters = []
    for file in python_files("llamarl", "executors", "recipes", "benchmarks"):
        if "set_float32_matmul_precision" in file.read_text():
            setters.append(file.relative_to(ROOT).as_posix())
    assert setters == ["llamarl/machine/precision.py"]


# --- bfloat16 ---


@pytest.mark.parametrize("times, is_said", [(29.4, True), (precision.SLOW - 0.1, False)])
def test_a_cpu_that_is_slow_in_bfloat16_is_warned_of(monkeypatch, caplog, times, is_said):
    monkeypatch.setattr(precision, "bfloat16_takes", lambda: times)
    precision.warn_of_slow_bfloat16()
    said = "29 times as long as in float32. trainer.compute_dtype=float32 is faster" in caplog.text
    assert said == is_said and bool(caplog.records) == is_said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_asked_where_a_decoder_is_made_to_train_in_bfloat16(monkeypatch, caplog, dtype):
    monkeypatch.setattr(precision, "bfloat16_takes", lambda: 29.4)
    training_decoder(tiny_directory(), mesh=None, device=torch.device("cpu"), compute_dtype=dtype)
    assert bool(caplog.records) == (dtype == torch.bfloat16)


def test_how_long_bfloat16_takes_is_measured():
    assert 0 < precision.bfloat16_takes() < float("inf")
