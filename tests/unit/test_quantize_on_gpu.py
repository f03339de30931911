"""Quantised products on a GPU that is not there: PyTorch's own checks of layouts, dtypes, scales
and sizes run on our calls.
"""

from functools import partial

import pytest
import torch

from llamarl.models.quantize import (
    QUANTIZED,
    QuantizedLinear,
    _scaled_product,
    _takes_row_scales,
    quantize_rows,
)
from tests.imagined_gpu import CPU, GPU, imagined_gpu
from tests.tolerances import rounding

OUT = 48
IN = 64
PRODUCTS = {"fp8": torch.ops.aten._scaled_mm.default, "int8": torch.ops.aten._int_mm.default}


@pytest.fixture
def gpu():
    with imagined_gpu() as made:
        _takes_row_scales.cache_clear()
        yield made
    _takes_row_scales.cache_clear()


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear_of(weight, kind, device):
    linear = QuantizedLinear(weight.shape[1], weight.shape[0], kind, device=device)
    quantize_rows(weight.to(device), kind, linear.weight, linear.weight_scale)
    return linear


def operands_of(gpu, product):
    """The arguments of each call of a product."""
    return [args for func, args in gpu.products if func is product]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 16, 17, 40])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_quantised_linear_takes_the_gpus_product_in_its_layout(gpu, kind, tokens, dtype):
    linear = linear_of(drawn(OUT, IN), kind, GPU)
    x = drawn(tokens, IN, seed=1).to(GPU, dtype)
    gpu.products.clear()
    y = linear(x)
    assert (y.device, y.dtype, tuple(y.shape)) == (GPU, dtype, (tokens, OUT))
    first, second, *more = operands_of(gpu, PRODUCTS[kind])[-1]  # a trial comes before
    assert first.dtype == second.dtype == QUANTIZED[kind]
    assert first.stride() == (IN, 1), "rows end to end"
    assert second.stride() == (1, IN), "columns end to end: the weight as it is held, not a copy"
    if kind == "int8":
        assert first.shape[0] > 16, "cuBLAS takes no fewer than 17 rows"
    else:
        scales = more[:2]
        assert [tuple(s.shape) for s in scales] == [(tokens, 1), (1, OUT)]
        assert {s.dtype for s in scales} == {torch.float32}
    seen, scale = quantize_rows(x, kind)
    exact = seen.cpu().double() * scale.cpu().double()[:, None]
    weight = linear.weight.cpu().double() * linear.weight_scale.cpu().double()[:, None]
    want = exact @ weight.T
    typical = float(exact.norm(dim=1).max() * weight.norm(dim=1).max()) / IN**0.5
    same = rounding(torch.bfloat16, terms=1, size=typical)
    assert torch.allclose(y.cpu().double(), want, atol=same)


def test_pytorch_refuses_other_layouts_of_fp8(gpu):
    """So that the test above can fail."""
    product = partial(_scaled_product, wide=False)
    q, scale = quantize_rows(drawn(32, IN).to(GPU), "fp8")
    weight, weight_scale = quantize_rows(drawn(OUT, IN, seed=1).to(GPU), "fp8")
    right = product(q, weight.t(), scale[:, None], weight_scale[None])
    assert tuple(right.shape) == (32, OUT)
    row_major = weight.cpu().t().contiguous().to(GPU)
    with pytest.raises(RuntimeError, match="col"):
        product(q, row_major, scale[:, None], weight_scale[None])
    with pytest.raises(RuntimeError, match="scal"):
        product(q, weight.t(), scale[:-1, None], weight_scale[None])
    with pytest.raises(RuntimeError, match="scal"):
        product(q, weight.t(), scale[:, None].double(), weight_scale[None].double())
    with pytest.raises(RuntimeError, match="divisible by 16"):
        product(q[:, :24].contiguous(), weight[:, :24].contiguous().t(), *_ones(32, OUT))
    with pytest.raises(RuntimeError, match="two devices"):
        product(q, weight.t(), scale[:, None].cpu(), weight_scale[None])


def _ones(rows, columns):
    return torch.ones(rows, 1, device=GPU), torch.ones(1, columns, device=GPU)


@pytest.mark.parametrize("kind, multiple", [("fp8", 16), ("int8", 8)])
def test_sizes_that_the_product_refuses_are_weight_only(gpu, kind, multiple):
    linear = linear_of(drawn(multiple + 1, 2 * multiple), kind, GPU)
    with pytest.warns(UserWarning, match="multiplied as weight_only"):
        y = linear(drawn(3, 2 * multiple).to(GPU))
    assert linear.arithmetic == "weight_only" and y.device == GPU


@pytest.mark.parametrize("kind, least", [("fp8", (8, 9)), ("int8", (7, 5))])
def test_an_old_gpu_multiplies_the_weights_alone(kind, least):
    with imagined_gpu(capability=(7, 0)):
        linear = linear_of(drawn(OUT, IN), kind, GPU)
        with pytest.warns(UserWarning, match=f"compute capability {least[0]}.{least[1]}"):
            y = linear(drawn(3, IN).to(GPU, torch.bfloat16))
    assert linear.arithmetic == "weight_only" and y.dtype == torch.bfloat16


def test_rows_are_quantised_on_a_gpu_as_on_a_cpu(gpu):
    for kind in QUANTIZED:
        weight = drawn(OUT, IN)
        q, scale = quantize_rows(weight, kind)
        there = quantize_rows(weight.to(GPU), kind)
        assert [x.device for x in there] == [GPU, GPU]
        assert torch.equal(there[0].cpu().float(), q.float())
        assert torch.equal(there[1].cpu(), scale) and scale.device == CPU
    assert not any("local_scalar" in sync for sync in gpu.streams.syncs)
